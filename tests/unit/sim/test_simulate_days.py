# SPDX-License-Identifier: Apache-2.0
"""The benchmark of simulated days: what is there is not run again, what is counted is what happened."""

import pickle
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from tests.fixtures.script_module import script_module

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulate.py"


@pytest.fixture(scope="module")
def days() -> ModuleType:
    """The script as a module."""
    return script_module(SCRIPT)


def line_of(days: ModuleType, settings: object, **changes: object) -> object:
    """A line of a run that came to its end."""
    known = {
        "row": "all", "seed": 1, "ranks": 16, "faults_of": 0, "hours": 2.0, "reached": 2.0,
        "settings": days._text_of(settings), "effective": 0.9, "by_ledger": 0.9, "pace": 0.9, "faults": 4, "right": 3,
        "automatic": 3, "named": 5, "named_rightly": 4, "restarts": 3, "evictions": 1, "state": "running",
        "lost": {"start": 72.0}, "cpu_s": 1.0,
    }  # fmt: skip
    return days.Line(**known | changes)


def test_the_same_command_goes_on_where_it_was_ended(days: ModuleType, tmp_path: Path) -> None:
    """A line of a run that reached its hours is there; one that had no time left, or of other settings, is not."""
    settings = days.settings_of("all", 1, 16, 2.0, 1)
    results = tmp_path / "days.jsonl"

    def is_there(*lines: object) -> bool:
        results.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return bool(days._is_there(days.read(results), "all", 1, settings, 0))

    assert not days._is_there(days.read(results), "all", 1, settings, 0)
    assert not is_there(line_of(days, settings, reached=0.5))
    assert not is_there(line_of(days, days.settings_of("cold", 1, 16, 2.0, 1)))
    assert not is_there(line_of(days, settings, faults_of=100_000))
    assert is_there(line_of(days, settings, reached=0.5), line_of(days, settings))
    assert is_there(line_of(days, settings), line_of(days, settings, reached=0.5))
    assert is_there(line_of(days, settings, reached=0.5, state="failed"))


@pytest.mark.parametrize("row", ["all", "patience-60", "no-eviction", "assumed"])
def test_a_row_is_the_same_in_the_process_that_runs_it(days: ModuleType, row: str) -> None:
    """Its settings, sent there, read as they did: else its line would be another row's, and it would run again."""
    settings = days.settings_of(row, 1, 16, 2.0, 1)
    sent = pickle.loads(pickle.dumps(settings))  # noqa: S301  our own

    assert days._text_of(sent) == days._text_of(settings)
    assert days._text_of(settings) != days._text_of(days.settings_of("cold", 1, 16, 2.0, 1))


def test_the_table_counts_faults_over_all_seeds(days: ModuleType) -> None:
    """Means of what is a share of time, with the least and the most; sums of what is counted."""
    settings = days.settings_of("all", 1, 16, 2.0, 1)
    lines = [line_of(days, settings), line_of(days, settings, seed=2, effective=0.96, faults=0, right=0, automatic=0)]

    text = "\n".join(days.table(["all", "cold"], lines))

    assert "| everything on | 2 | 2 | 93.00% (90.00% to 96.00%) | 90.00% | 4 | 75.0% (3 of 4)" in text
    assert "80.0% (8 of 10)" in text
    assert "all: start 1.00%" in text
    assert "cold" not in text


def test_a_run_is_measured_against_steps_of_the_same_machines(days: ModuleType) -> None:
    """Three minutes without a fault: what is lost is the start; the pace of the steps is as much."""
    settings = msgspec.structs.replace(days.settings_of("all", 1, 16, 0.05, 1), faults=(), start_s=5.0)

    found = days.measure("all", 1, settings, 0, 0.0)

    assert (found.reached, found.faults, found.automatic, found.state) == (0.05, 0, 0, "running")
    assert 0.8 < found.effective < 0.98
    assert found.pace == pytest.approx(found.effective, abs=0.02)
    assert days.measure("all", 1, settings, 0, 1e-9) is None


def test_a_fault_that_ended_the_job_needs_a_person(days: ModuleType) -> None:
    """Named or not: where no step follows and the job is over, nobody but a person lets it go on."""
    fault = days.FaultLine(at_s=100.0, kind="segfault", cause="", rank=0, node="n", incident="i", is_right=True)
    report = msgspec.defstruct("Ended", [("state", str), ("progress", tuple)])

    assert days._is_automatic(fault, report("running", ((50.0, 7),)))
    assert days._is_automatic(fault, report("failed", ((50.0, 7), (150.0, 7))))
    assert not days._is_automatic(fault, report("failed", ((50.0, 7),)))
    assert not days._is_automatic(msgspec.structs.replace(fault, is_right=False), report("running", ((150.0, 7),)))
