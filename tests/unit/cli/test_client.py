# SPDX-License-Identifier: Apache-2.0
"""The Python API on a run that is over: incidents and steps as typed objects and as flat rows."""

from array import array
from pathlib import Path

import msgspec
import pytest

from megascale_ops.client import Client, rows, runs, step_rows
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.record.job_record import JobRecord
from megascale_ops.errors import ControllerUnreachableError, MegascaleError, UsageError
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import Bucket, Facts, History, encode, history_file


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that ended after one incident and some steps of two ranks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    folder = tmp_path / "megascale-ops" / "gpt"
    folder.mkdir(parents=True)
    verdict = Verdict("killed", "exit status -9", 0.9, culprits=(1,), nodes=("node-a",))
    incident = Incident("gpt-1", "gpt", 1, "recovered", marks=Marks(detected=5.0), verdict=verdict)
    record = msgspec.json.encode(JobRecord(job="gpt", state="finished", started_wall_s=1.0, since_wall_s=9.0))
    store = open_store(f"sqlite:///{folder / 'journal.db'}")
    store.submit(Batch(job="gpt", record=record, incidents=(incident,)))
    store.close()
    cells = tuple(array("f", pair) for pair in ((4, 0), (2.0, 0), (0.5, 0), (0, 0), (0.6, 0), (0.4, 0)))
    history_file(folder, "gpt").write_bytes(encode(History(Facts("gpt"), (Bucket(100.0, 1.0, 7, cells),))))
    return folder


@pytest.mark.usefixtures("state")
def test_a_run_that_is_over_is_read_from_what_it_left() -> None:
    """Incidents are typed, and flat as rows; the run is listed."""
    with Client() as ops:
        (incident,) = ops.incidents()
        whole = ops.incident("gpt-1")
        is_live = ops.is_live

    (row,) = rows([incident])
    assert not is_live
    assert whole.verdict is not None
    assert whole.verdict.culprits == (1,)
    assert (row["verdict.fault"], row["marks.detected"], row["verdict.culprits"]) == ("killed", 5.0, (1,))
    assert [run.job for run in runs()] == ["gpt"]


@pytest.mark.usefixtures("state")
def test_steps_are_a_row_for_each_rank_that_ended_one() -> None:
    """A rank without a step in a bucket has no row there."""
    with Client(job="gpt") as ops:
        found = step_rows(ops.steps())

    assert [(row["rank"], row["start_s"], row["step"], row["steps"], row["wall_s"]) for row in found] == [
        (0, 100.0, 7, 4.0, 2.0)
    ]


@pytest.mark.usefixtures("state")
def test_ranks_of_a_run_that_is_over_are_not_made_up() -> None:
    """They are known while it lives only, which one sentence says."""
    with Client(job="gpt") as ops, pytest.raises(MegascaleError, match="is over"):
        ops.ranks()


def test_without_its_history_steps_are_refused_in_one_sentence(state: Path) -> None:
    """The file is named."""
    history_file(state, "gpt").unlink()

    with Client(job="gpt") as ops, pytest.raises(MegascaleError, match=r"history-gpt\.bin can't be read"):
        ops.steps()


def test_no_run_at_all_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where was looked."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)

    with pytest.raises((ControllerUnreachableError, UsageError), match="start a run"):
        Client()
