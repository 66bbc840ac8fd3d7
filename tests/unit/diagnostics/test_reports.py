# SPDX-License-Identifier: Apache-2.0
"""From results to a node's report, its card, and what several reports say together."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from megascale_ops.cards import WIDTH, plain_rows
from megascale_ops.cli.main import main
from megascale_ops.diagnostics import examination, fleet
from megascale_ops.diagnostics.card import card, fleet_card
from megascale_ops.diagnostics.check import Check, Reading, Task
from megascale_ops.diagnostics.children import Planned
from megascale_ops.diagnostics.examination import in_time, lacking
from megascale_ops.diagnostics.figures import KINDS, shown
from megascale_ops.diagnostics.judgement import result_of, troubled, unmeasured
from megascale_ops.diagnostics.report import VERSION, CheckFinding, CheckResult, Fact, Figure, NodeReport
from megascale_ops.diagnostics.table import CHECKS, modules
from megascale_ops.errors import UsageError

H100 = "NVIDIA H100 80GB HBM3"


def report(
    node: str,
    rate: float = 700e12,
    *,
    slow: float = 0.0,
    vbios: str = "96.00.74",
    digest: str = "aa",
    depth: Literal["quick", "full"] = "quick",
) -> NodeReport:
    """Return the report of a node with four GPUs, the last of them slower by a share."""
    draw = random.Random(node)  # noqa: S311  nothing of it is a secret
    figures = []
    for at in range(4):
        samples = tuple(rate * (1 - slow * (at == 3)) * draw.gauss(1, 0.002) for _ in range(10))
        figures.append(Figure("gemm_bf16", f"GPU {at}", sorted(samples)[5], samples, H100))
    facts = (
        *(Fact("vbios", f"GPU {at}", vbios, "GPU") for at in range(4)),
        *(Fact("product_digest", f"GPU {at}", digest, H100) for at in range(4)),
    )
    check = modules()["gemm"][1]
    result = result_of(check.CHECK, Reading(tuple(figures), facts), check.judge, 2.0)
    return NodeReport(VERSION, "megascale-ops 0.1.0", node, depth, 1.0e9, 12.5, (result,))


def test_every_check_has_what_a_check_has() -> None:
    """A row, two functions, deadlines, names that are its own, and units for its figures; none loads torch."""
    assert len(modules()) == len(CHECKS)
    for name, (_, module) in modules().items():
        check = module.CHECK
        assert name == check.name
        assert 0 < check.quick_s <= 30
        assert check.quick_s <= check.full_s <= 150
        assert module.judge(Reading()) is not None if name not in ("swap", "clock") else True
        assert callable(module.measure)
    assert sum(module.CHECK.full_s for _, module in modules().values()) < 20 * 60


@pytest.mark.parametrize(("thorough", "most_s"), [(False, 110.0), (True, 600.0)])
@pytest.mark.parametrize("hang", [True, False])
def test_a_node_whose_checks_hang_is_told_in_time(*, thorough: bool, most_s: float, hang: bool) -> None:
    """Each takes its whole deadline: the last ones are not begun, none is cut short. At a healthy pace all are made."""
    planned = [
        Planned(place, module.CHECK, Task(thorough, (), module.CHECK.full_s if thorough else module.CHECK.quick_s))
        for place, module in modules().values()
        if module.CHECK.alone
    ]
    spent = [10.0]  # torch was loaded
    made = []
    for one, has_time in in_time(planned, lambda: sum(spent)):
        if has_time:
            made.append(one)
            spent.append(one.task.deadline_s * (1.0 if hang else 0.3))

    assert sum(spent) <= most_s
    assert (len(made) < len(planned)) == hang
    assert len(made) >= len(planned) // 2


def test_what_is_lacking_is_said_once() -> None:
    """No GPU, one GPU, no torch: a sentence; else nothing."""
    pair = Check("nvlink", "", ("gpus", "torch"))

    assert lacking(Check("cpu", ""), 0, "no driver", has_torch=False) == ""
    assert lacking(pair, 0, "no driver", has_torch=True) == "no driver"
    assert "one GPU" in lacking(pair, 1, "", has_torch=True)
    assert "torch is not installed" in lacking(pair, 2, "", has_torch=False)
    assert lacking(pair, 2, "", has_torch=True) == ""


def test_a_check_that_hung_is_its_own_finding() -> None:
    """As bad as its row says."""
    hung = troubled(Check("disk", "a disk"), "was killed at its deadline of 8 s", 8.0)
    slow = troubled(Check("swap", "swap", severity="warn"), "was killed at its deadline of 5 s", 5.0)

    assert (hung.status, slow.status) == ("bad", "warn")
    assert hung.findings[0].text == "the check of a disk was killed at its deadline of 8 s"


def test_values_are_shown_with_three_digits_and_a_unit() -> None:
    """Base units go up by thousands; shares are per cent, times have the unit of their size."""
    assert [shown("gemm_bf16", 702.4e12), shown("hbm_copy", 3.024e12), shown("disk_write", 389e6)] == [
        *("702 TFLOP/s", "3.02 TB/s", "389 MB/s"),
    ]
    assert [shown("disk_sync", 412e-6), shown("disk_sync", 2.0), shown("clock_offset", -3e-3)] == [
        "412 us",
        "2 s",
        "-3 ms",
    ]
    assert [shown("cpu_share", 0.123), shown("swap_used", 3 << 30), shown("products", 101)] == [
        "12.3 %",
        "3.0 GiB",
        "101",
    ]
    assert all(shown(name, 1.0) for name in KINDS)


def test_the_card_says_what_a_person_asks(golden: Callable[[str, str], None]) -> None:
    """The verdict, what was found with what to do, what was measured, what was not and why, what to type next."""
    good = report("node7")
    results = (
        *report("node7", slow=0.2).results,
        CheckResult(
            "clock", "warn", 0.1, (CheckFinding("warn", "node", "the clock is 0.200 s ahead", "chronyc sources"),)
        ),
        troubled(
            modules()["disk"][1].CHECK, "was killed at its deadline of 10 s while it measured (wrote to /mnt)", 10.0
        ),
        unmeasured(modules()["nvlink"][1].CHECK, "one GPU alone has no links to others"),
        unmeasured(modules()["nccl"][1].CHECK, "one GPU alone has no links to others"),
    )
    bad = msgspec.structs.replace(good, results=results)

    text = "\n\n".join(plain_rows(f"self-check {one.node}", card(one)) for one in (bad, good))

    assert max(map(len, text.splitlines())) <= WIDTH
    golden("diagnose_card", text)


def test_where_nothing_was_measured_nothing_is_good() -> None:
    """No GPU to be measured is no good GPU."""
    nothing = msgspec.structs.replace(report("n"), results=(unmeasured(modules()["gemm"][1].CHECK, "no driver"),))

    assert card(nothing)[0].lines == ("nothing could be measured on node n: that says neither good nor bad",)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare with the file that a person has read; MEGASCALE_UPDATE_GOLDEN=1 writes it anew."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parents[2] / "golden" / "cli" / f"{name}.txt"
        if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
            path.write_text(f"{text}\n", encoding="utf-8")
        assert f"{text}\n" == path.read_text(encoding="utf-8")

    return compare


def test_a_fleet_names_the_node_that_is_slow_as_a_whole() -> None:
    """Its own GPUs are equal, so alone it is good; among eight nodes all four are named, and no other."""
    reports = [report(f"node{at}") for at in range(7)] + [report("node7", rate=650e12)]
    assert not reports[7].results[0].findings

    found = fleet.compare(reports)

    assert sorted(one.of for one in found.findings) == [f"node7/GPU {at}" for at in range(4)]
    assert "node7 to be kept out" in fleet_card(found)[0].lines[0]
    assert (found.figures, found.kinds) == (32, 1)


def test_fifty_clean_fleets_name_none() -> None:
    """The control: eight nodes of four GPUs, drawn fifty times."""
    for draw in range(50):
        found = fleet.compare([report(f"fleet{draw}-node{at}") for at in range(8)])
        assert found.findings == ()


def test_versions_and_digests_are_held_against_the_majority() -> None:
    """Another VBIOS is a warning, with where; another product is bad; a GPU that is slow at home is named once."""
    reports = [report("a"), report("b"), report("c"), report("d", vbios="96.00.61"), report("e", digest="bb")]
    reports.append(report("f", slow=0.2))

    found = fleet.compare(reports)

    by_severity = [(one.severity, one.of.split("/")[0]) for one in found.findings]
    assert by_severity.count(("bad", "e")) == 4
    assert by_severity.count(("bad", "f")) == 1
    assert by_severity.count(("warn", "d")) == 1
    assert len(by_severity) == 6
    assert "vbios 96.00.61, where 20 of 24 have 96.00.74" in next(
        one.text for one in found.findings if one.of.startswith("d")
    )


def test_quick_and_full_figures_are_no_equals() -> None:
    """They are said not to be compared."""
    found = fleet.compare([report("a"), report("b", rate=500e12, depth="full")])

    assert not [one for one in found.findings if one.severity == "bad"]
    assert "1 reports are of quick checks and 1 of full ones" in found.incomparable[0]


def test_what_a_node_found_of_itself_is_told_of_the_fleet() -> None:
    """A disk that hung there is no matter of comparison."""
    hung = troubled(modules()["disk"][1].CHECK, "was killed at its deadline of 10 s", 10.0)
    sick = msgspec.structs.replace(report("b"), results=(*report("b").results, hung))

    found = fleet.compare([report("a"), sick])

    assert [one.text for one in found.findings] == ["b: the check of a disk was killed at its deadline of 10 s"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no report of a self-check"),
        (b"[1, 2]", "is no report of a self-check"),
        (b'{"version": 1}', "is no report of a self-check"),
        (b"\xff\xfe", "is no report of a self-check"),
        (b"[" * 100_000, "is no report of a self-check"),
        (b" " * (9 << 20), "can't be read"),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    """Whatever another program has written there."""
    path = tmp_path / "a.json"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=said) as refused:
        fleet.read_report(path)
    assert "\n" not in str(refused.value)


def test_reports_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """One alone, two of one node, another version."""
    with pytest.raises(UsageError, match="two nodes or more"):
        fleet.compare([report("a")])
    with pytest.raises(UsageError, match="2 reports are of node a"):
        fleet.compare([report("a"), report("a"), report("b")])
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(report("a"), version=VERSION + 1)))
    with pytest.raises(UsageError, match="has version 2"):
        fleet.read_report(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--quick", "--full"), "--quick and --full are two ways to do it: give one of them"),
        (("--full", "--quick", "--node", "n1"), "--quick and --full are two ways to do it: give one of them"),
        (("--full", "--full", "--check", "gem"), "unknown check 'gem'"),
        (("--check", "gem"), "unknown check 'gem': did you mean 'gemm'?"),
        (("--path", "/no/such"), "--path /no/such is not a folder"),
        (("a.json",), "a.json is no option"),
        (("--compare",), "needs the reports of two nodes"),
        (("--compare", "--quick", "a.json"), "leave --quick/--full out"),
        (("--compare", "--check", "cpu", "a.json"), "leave --check out"),
        (("--compare", "/no/a.json", "/no/b.json"), "/no/a.json can't be read"),
        (("--out", "/no/such/x.json"), "there is no folder /no/such"),
    ],
)
def test_a_wrong_line_is_one_sentence_and_measures_nothing(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before any process is started."""
    monkeypatch.setattr(examination, "Child", None)
    monkeypatch.setattr(examination, "look_at", lambda paths: dict.fromkeys(paths, ("not a folder", "")))

    assert main(["diagnose", *arguments]) == 2

    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


def test_exit_codes_and_files_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 where a node is bad, 0 where none is or there are warnings; the same as JSON and as a file."""
    for name, one in (("a", report("a")), ("b", report("b")), ("c", report("c", rate=500e12)),
                      ("d", report("d", vbios="96.00.61"))):  # fmt: skip
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(one))
    paths = {name: str(tmp_path / f"{name}.json") for name in "abcd"}

    assert main(["diagnose", "--compare", paths["a"], paths["b"]]) == 0
    assert "no node differs from the others" in capsys.readouterr().out
    assert main(["diagnose", "--compare", paths["a"], paths["b"], paths["d"]]) == 0
    assert "warning: d/GPU 0" in capsys.readouterr().out
    out = tmp_path / "fleet.json"
    assert main(["diagnose", "--compare", *paths.values(), "--json", "--out", str(out)]) == 1
    assert msgspec.json.decode(capsys.readouterr().out) == msgspec.json.decode(out.read_bytes()) | {"incomparable": []}
