# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops plan`` as a user meets it: tables, JSON, a job's own record, and mistakes."""

import json
from typing import Any

import pytest

from megascale_ops.cli.main import main
from megascale_ops.cli.plan.job import of_report
from megascale_ops.errors import UsageError
from megascale_ops.ledger import ROWS, Ledger
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import Facts, History, Place
from megascale_ops.trace.report_facts import Gathered, Report, Told

README_COMMANDS = (
    "megascale-ops plan --nodes 1536 --faults llama3",
    "megascale-ops plan --nodes 128 --stall 2 --write 90 --step 4.2 --restart 240 --repair 172800",
)


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logging as it is."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)


def run(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    """Run one command line; return exit code, stdout and stderr."""
    code = main(line.split()[1:])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("line", README_COMMANDS)
def test_every_number_is_shown_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Inputs, choices, what is lost, and on what it depends."""
    monkeypatch.setenv("COLUMNS", "160")

    code, out, err = run(capsys, line)

    assert (code, err) == (0, "")
    assert "given" in out
    assert "assumed" in out
    for words in (
        "checkpoint every",
        "--policy absent_patience_s=",
        "spares",
        "check of all nodes",
        "steps that count",
    ):
        assert words in out
    assert "kept: lost with the plan" in out


def test_programs_get_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The same as JSON: choices are plain numbers, and no checks are null."""
    _, out, _ = run(capsys, "megascale-ops plan --nodes 16 --hidden 0 --hang-share 0.2 --json")

    told = json.loads(out)
    assert told["inputs"]["nodes"] == {"value": 16.0, "source": "given", "is_bound": False}
    assert told["choices"]["check_every_s"] is None
    assert told["effective"] == pytest.approx(1.0 - told["lost"]["time"])
    assert {row["name"] for row in told["otherwise"]} >= {"nodes", "failures", "stall_s"}
    assert all(row["regret"] >= 0.0 for row in told["otherwise"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megascale-ops plan", "--nodes is not known: give it, or name a JOB"),
        ("megascale-ops plan --nodes 0", "--nodes 0 can't be planned with"),
        ("megascale-ops plan --nodes nan", "is no finite number"),
        ("megascale-ops plan --nodes 4 --faults llama4", "no law of faults 'llama4'"),
        ("megascale-ops plan --nodes 4 --faults fail-slow", "no faults that end a job"),
        ("megascale-ops plan --nodes 4 --hang-share 2", "--hang-share 2 can't be planned with: take 0 to 1"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    """Non-zero, and no traceback."""
    code, _, err = run(capsys, line)

    assert code == 2
    assert words in err
    assert "Traceback" not in err


def record(faults: list[str], nodes: int = 2) -> Report:
    """Return a job of 10,000 s that was stopped by these."""
    places = tuple(Place(rank, f"n{rank}") for rank in range(nodes))
    facts = Facts("gpt", began_wall_s=5000.0, places=places, step_s=0.5)
    told = tuple(
        Told(Incident(f"gpt-{n}", "gpt", 1, marks=Marks(stopped=5100.0 + n), verdict=Verdict(fault, "", 0.9)), ())
        for n, fault in enumerate(faults)
    )
    gathered: dict[str, Any] = {
        "job": "gpt", "state": "finished", "began_wall_s": 5000.0, "until_wall_s": 15_000.0, "history": History(facts),
        "told": told, "settings": (), "notes": (), "source": "", "version": "", "made_wall_s": 0.0, "zone": None,
    }  # fmt: skip
    rows = dict.fromkeys(ROWS, 0) | {"detect": 2_000_000, "restart": 48_000_000}
    return Report(Gathered(**gathered), Ledger(10_000_000_000, rows), None, None, (), (), 0.5, is_named=False)


def test_the_record_of_a_job_has_its_own_rates() -> None:
    """Five failures in 10,000 s on two nodes, two of them hangs, one of a machine."""
    found = of_report(record(["exception", "sleeping", "segfault", "not_joined", "exception"]))

    assert found["nodes"].value == 2
    assert found["failures"].value == pytest.approx(5 / 10_000 * 86_400 / 2)
    assert found["hang_share"].value == pytest.approx(0.4)
    assert found["machine_share"].value == pytest.approx(0.2)
    assert found["restart_s"].value == pytest.approx(10.0)
    assert found["step_s"].value == 0.5


def test_a_job_that_never_failed_bounds_the_rate_and_tells_no_shares() -> None:
    """At most three failures in the time that was watched, with 95 %."""
    found = of_report(record([]))

    assert found["failures"].is_bound
    assert found["failures"].value == pytest.approx(3.0 / 10_000 * 86_400 / 2, rel=0.01)
    assert "hang_share" not in found


def test_a_job_without_nodes_is_told_so() -> None:
    """It never began."""
    with pytest.raises(UsageError, match="has no nodes: the job never began"):
        of_report(record([], nodes=0))
