# SPDX-License-Identifier: Apache-2.0
"""The benchmark that draws faults, in small: all of a few are named, and it fails where the judgement does."""

import random
from pathlib import Path

import pytest

from benchmarks import diagnose_faults, host_faults
from benchmarks.diagnose_faults import DRAWN, Trial, judged, main
from megascale_ops.diagnostics import judgement


def test_drawn_faults_are_named_and_clean_fleets_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of each kind, five clean fleets, another seed than the table's."""
    code = main(["--kinds", "drawn", "--trials", "2", "--clean", "5", "--seed", "11"])

    out = capsys.readouterr().out
    assert code == 0
    assert out.count("| reading | 2 | 2 |") == len(DRAWN)
    assert "| fleets of 2 to 32 nodes with 8 GPUs | 5 | 0 |" in out


def test_a_judgement_that_names_nobody_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the comparison of equals slow GPUs are missed, and the table says which."""
    monkeypatch.setattr(judgement.equals, "compare", lambda _figures: [])

    code = main(["--kinds", "drawn", "--trials", "2", "--clean", "2", "--seed", "11"])

    assert code == 1
    assert "wrong: all GPUs of a node 6 to 30 % slow" in capsys.readouterr().out


def test_a_judgement_that_names_too_many_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A healthy clock that is called far off is something named in a clean run."""
    draw = random.Random(11)  # noqa: S311  no secret
    fleet = diagnose_faults.fleet
    monkeypatch.setattr(diagnose_faults, "fleet", lambda _draw: _with_a_bad_clock(fleet(draw)))

    assert judged(diagnose_faults.fleet(draw), "").named
    assert main(["--kinds", "drawn", "--trials", "1", "--clean", "1"]) == 1
    assert "named in a clean run" in capsys.readouterr().out
    assert not Trial("n00/GPU 1", ("n00/GPU 1", "n01/GPU 2")).is_right
    assert not Trial("n00/GPU 1", ()).is_right


def test_the_spread_of_clean_runs_is_that_of_each_gpu_by_itself() -> None:
    """Two GPUs that differ by a tenth and repeat themselves have none; one run of twenty that is off is in the last."""
    usual = {"GPU 0": 60e9, "GPU 1": 54e9}
    runs = [
        Trial("", (), (), tuple(diagnose_faults.Figure("pcie_to_gpu", of, value) for of, value in usual.items()))
        for _ in range(19)
    ]
    runs.append(Trial("", (), (), (diagnose_faults.Figure("pcie_to_gpu", "GPU 1", 54e9 * 0.9),)))

    rows = [row for row in diagnose_faults.spread({"the GPUs": runs}) if "GPU" in row]

    assert [row.split(" | ")[1:] for row in rows] == [
        ["GPU 0", "19", "60 GB/s", "0.00%", "0.00% |"],
        ["GPU 1", "20", "54 GB/s", "0.00%", "10.00% |"],
    ]


def _with_a_bad_clock(
    readings: "dict[str, dict[str, diagnose_faults.Reading]]",
) -> "dict[str, dict[str, diagnose_faults.Reading]]":
    clock = readings["n00"]["clock"]
    figures = tuple(
        diagnose_faults.Figure(one.name, one.of, 9.0) if one.name == "clock_offset" else one for one in clock.figures
    )
    readings["n00"]["clock"] = diagnose_faults.Reading(figures, clock.facts)
    return readings


def test_what_the_host_had_without_effect_is_in_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that did nothing, and one that can't be injected here, are told; the others are trials and clean runs."""
    seen = iter([True, False] * 2)

    def sick(_draw: random.Random) -> Trial:
        if next(seen):
            raise host_faults.NoFaultError("40.0 GB/s beside it, 40.1 without")
        return Trial("n1", ("n1",))

    def forbidden(_draw: random.Random) -> Trial:
        raise PermissionError("no right")

    rows = {
        "a": host_faults.Row("how", sick, lambda _draw: Trial("", ())),
        "b": host_faults.Row("how", forbidden, forbidden),
    }
    monkeypatch.setattr(host_faults, "ROWS", rows)
    found: diagnose_faults.Rows = {}
    clean: diagnose_faults.Clean = {}

    host_faults.of_the_host(random.Random(1), 4, 3, "", found, clean)  # noqa: S311  no secret

    said = capsys.readouterr().err
    assert len(found["a"][1]) == 2
    assert len(clean["without a"]) == 3
    assert "2 of 4 trials were without effect" in said
    assert "b: not injected: no right" in said


def test_nodes_meet_in_a_folder_as_in_torchs_store(tmp_path: Path) -> None:
    """What is set is there whole; a key that is not there is told as that."""
    store = host_faults.FolderStore(str(tmp_path))

    store.set("round/1", b"pairs")
    store.set("listen/1/0", "10.0.0.1 7000")

    assert (store.get("round/1"), store.get("listen/1/0")) == (b"pairs", b"10.0.0.1 7000")
    assert store.check(["round/1", "listen/1/0"])
    assert not store.check(["round/1", "round/2"])
