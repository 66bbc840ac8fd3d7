# SPDX-License-Identifier: Apache-2.0
"""The Python API on a job that lives: asked of a real controller, over HTTP, by another thread as a notebook would."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from megascale_ops.client import Client, rank_rows, rows, step_rows
from megascale_ops.errors import RefusedError
from megascale_ops.link import Link
from megascale_ops.schema.messages import Heartbeat, JobReport, Join, RankExit
from megascale_ops.schema.progress import Progress, RankReport, StepWork
from tests.fakes.served_controller import Served, serve_controller

T = TypeVar("T")
SCALARS = (str, int, float, bool, tuple, type(None))


def join(**more: object) -> Join:
    """Return what the runner of the only node asks."""
    fields: dict[str, object] = {"job": "gpt", "node": "a", "runner_id": "r1", "nproc": 2, "min_nodes": 1}
    fields |= {"max_nodes": 1, "addr": "127.0.0.1", "store_port": 29500, "mono_s": time.monotonic()}
    return Join(join_id=f"j{time.monotonic_ns()}", **{**fields, **more})  # type: ignore[arg-type]  # by name


def heartbeat(step: int) -> Heartbeat:
    """Return what the agent tells after a step: rank 0 has a black box, rank 1 has none."""
    now_s = time.monotonic()
    progress = Progress(state="running", step=step, steps_seen=step + 1, moved_mono_s=now_s, step_p50_s=0.5)
    work = (StepWork(step, 0.5, waiting_s=0.1),)
    ranks = (RankReport(0, 0, 100, 2, progress=progress, work=work), RankReport(1, 1, 101, 2))
    return Heartbeat("a", "agent", step + 1, now_s, time.time(), full=True, jobs=(JobReport("gpt", 2, ranks=ranks),))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Serve a job whose rank 1 was killed, and whose second round has made four steps."""
    async with serve_controller(tmp_path) as one, Link(one.url) as link:
        await link.join(join())
        exits = (RankExit(1, 1, 101, -9, time.monotonic(), step=3),)
        await link.join(join(previous_round=1, cause="failure", exits=exits))
        for step in range(4):
            await link.heartbeat(heartbeat(step))
        yield one


async def ask(served: Served, what: Callable[[Client], T]) -> T:
    """Ask in a thread: the client waits, and the controller answers on this loop."""

    def asked() -> T:
        with Client(served.url) as ops:
            assert ops.is_live
            return what(ops)

    return await asyncio.to_thread(asked)


async def test_jobs_and_ranks_are_objects_and_rows(served: Served) -> None:
    """Each rank has its job and all columns, also those of a black box that it has not."""
    jobs = await ask(served, lambda ops: ops.jobs())
    ranks = await ask(served, lambda ops: ops.ranks("gpt"))
    none = await ask(served, lambda ops: ops.ranks("other"))

    (job,), (with_box, without) = rows(jobs), rank_rows(jobs)
    assert (jobs[0].job, [rank.report.rank for rank in ranks], none) == ("gpt", [0, 1], ())
    assert (job["job"], job["round"], job["restarts"], job["ranks"], job["nodes"]) == ("gpt", 2, 1, 2, 1)
    assert (with_box["job"], with_box["report.rank"], with_box["report.progress.step"]) == ("gpt", 0, 3)
    assert (without["report.rank"], without["report.progress.step"]) == (1, None)
    assert list(with_box) == list(without)


async def test_verdicts_say_what_they_are_about(served: Served) -> None:
    """The incident, its state and the verdict, as an object and as a row."""
    (judged,) = await ask(served, lambda ops: ops.verdicts())
    (incident,) = await ask(served, lambda ops: ops.incidents("gpt"))
    whole = await ask(served, lambda ops: ops.incident(judged.incident))

    (row,) = rows([judged])
    assert (judged.incident, judged.job, judged.round) == ("gpt-1", "gpt", 1)
    assert (judged.verdict.fault, judged.verdict.culprits) == ("killed", (1,))
    assert (row["verdict.fault"], row["verdict.culprits"], row["detected_wall_s"]) == (
        "killed", (1,), incident.marks.detected,
    )  # fmt: skip
    assert rows([whole])[0]["events"] == len(whole.events) > 0


async def test_steps_are_typed_and_a_row_for_each_rank(served: Served) -> None:
    """Of the rank that told its steps; the sums are of the steps that ended."""
    history = await ask(served, lambda ops: ops.steps())

    found = step_rows(history)
    assert history.facts.job == "gpt"
    assert {row["rank"] for row in found} == {0}
    assert sum(row["steps"] for row in found) == 4
    assert sum(row["wall_s"] for row in found) == pytest.approx(2.0)


async def test_every_cell_of_a_row_is_something_that_a_table_holds(served: Served) -> None:
    """A number, a text, nothing, or a tuple of such: no object of ours."""
    jobs = await ask(served, lambda ops: ops.jobs())
    incidents = await ask(served, lambda ops: ops.incidents())
    history = await ask(served, lambda ops: ops.steps())

    cells = [
        cell for row in (*rows(jobs), *rank_rows(jobs), *rows(incidents), *step_rows(history)) for cell in row.values()
    ]
    assert cells
    assert all(isinstance(cell, SCALARS) for cell in cells)
    assert all(isinstance(one, SCALARS) for cell in cells if isinstance(cell, tuple) for one in cell)


async def test_an_incident_that_is_not_there_is_refused_in_one_sentence(served: Served) -> None:
    """It is named."""
    with pytest.raises(RefusedError, match="there is no incident 'gpt-77'"):
        await ask(served, lambda ops: ops.incident("gpt-77"))
