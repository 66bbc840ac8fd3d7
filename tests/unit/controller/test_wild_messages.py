# SPDX-License-Identifier: Apache-2.0
"""Whatever one job's programs send, the controller lives, answers, and judges all other jobs.

Drawn anew at each run (``tests/drawn_seeds.py``): what draws the same messages again is told with a failure.
"""

import asyncio
import io
import itertools
import os
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from megascale_ops.controller.record.state_machine import ACTIVE
from megascale_ops.link import Link
from megascale_ops.schema.kernels import ProfileAsk
from megascale_ops.schema.messages import Evidence, Heartbeat, JobReport, Join, Leave, Order, PolicyChange
from megascale_ops.schema.progress import Progress, RankReport, StepWork
from tests.fakes import wild_messages
from tests.fakes.served_controller import Served, serve_controller
from tests.matrix import some

MESSAGES = int(os.environ.get("MEGASCALE_TEST_MESSAGES", f"{some(600)}"))
KINDS: tuple[tuple[type[msgspec.Struct], str, float], ...] = (
    (Heartbeat, "/v1/heartbeat", 10),
    (Join, "/v1/jobs/JOB/join?wait_s=0", 0.5),
    (Evidence, "/v1/evidence", 2),
    (Leave, "/v1/jobs/JOB/leave", 0.05),
    (PolicyChange, "/v1/jobs/JOB/policy", 1),
    (ProfileAsk, "/v1/jobs/JOB/profile", 1),
)
# Of these a wild message is nothing but refused: what is changed in them is drawn after they are known to be taken.
ANSWERS = {200, 400, 404, 409, 413}


def join(job: str, node: str, **more: object) -> dict[str, Any]:
    """Return a join that is taken."""
    fields = {
        "job": job, "node": node, "runner_id": f"r-{job}", "join_id": f"j-{time.monotonic_ns()}", "nproc": 2,
        "min_nodes": 1, "max_nodes": 1, "addr": "127.0.0.1", "store_port": 29500, "mono_s": time.monotonic(),
    }  # fmt: skip
    return {**fields, **more}


class Sender:
    """Sends what a wild job's agent and runner would, each time a little otherwise."""

    def __init__(self, http: aiohttp.ClientSession, served: Served, draw: Random) -> None:
        self._http = http
        self._served = served
        self._draw = draw
        self._seq = itertools.count(1)
        self._jobs = itertools.count(1)
        self._nodes = itertools.count(1)
        self._now_s = time.monotonic()
        self._steps = 0
        self.answers: Counter[int] = Counter()
        self.by_path: Counter[tuple[str, int]] = Counter()  # the request, and its answer
        self.agent = 0
        self.job = ""
        self.node = "w"
        self.judged = 0  # heartbeats that met a job that is judged

    @property
    def _round(self) -> int:
        return self._served.loop.jobs[self.job].record.round

    async def send(self) -> None:
        """Send one message."""
        await self._have_job()
        kind, path, _often = self._draw.choices(KINDS, [often for *_, often in KINDS])[0]
        message = self._whole(kind)
        changed, _is_within = wild_messages.wild(kind, message, self._draw)
        raw = wild_messages.written(changed)
        async with self._http.post(self._served.url + path.replace("JOB", self.job), data=io.BytesIO(raw)) as answer:
            said = await answer.text()
        self.answers[answer.status] += 1
        self.by_path[path.rpartition("/")[2], answer.status] += 1
        assert answer.status in ANSWERS, f"{answer.status} {said} to {path} {raw[:2000]!r}"
        if answer.status != 200:
            assert len(said) < 2000

    async def _have_job(self) -> None:
        """Start a job when the last one is over, or waits for what will not come."""
        known = self._served.loop.jobs.get(self.job)
        if known is not None and known.state in ACTIVE:
            return
        if self._served.loop.transitions.nodes.why_barred(self.node):
            # Its own agent has told of a GPU that is remembered as bad: no job is started there for an hour.
            self.node = f"w-{next(self._nodes)}"
        self.job = f"wild-{next(self._jobs)}"
        async with self._http.post(
            f"{self._served.url}/v1/jobs/{self.job}/join?wait_s=5", json=join(self.job, self.node)
        ) as answer:
            assert answer.status == 200, await answer.text()
        self._steps = 0

    def _whole(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        if kind is ProfileAsk:
            return {"steps": 2, "ranks": [0], "deadline_s": 10.0}
        if kind is Join:
            return join(self.job, self.node, previous_round=self._round)
        message = wild_messages.frozen(kind.__name__)
        if kind is PolicyChange:
            return {"settings": {"silence_floor_s": "10", "frozen": "warn"}}
        message["version"] = 1
        if kind is Leave:
            message |= {
                "job": self.job,
                "node": self.node,
                "runner_id": f"r-{self.job}",
                "outcome": "failed",
                "round": self._round,
            }
        if kind is Evidence:
            job = self._served.loop.jobs[self.job]
            incident = job.record.incident or f"{self.job}-{max(1, job.record.incidents)}"
            # Of an order that the node was given, each time another one: else nothing of it is looked at.
            order = Order(f"o{self._draw.random()}", self.job, self.node, "preserve", self._round, incident=incident)
            job.note_asked(order)
            message |= {"job": self.job, "node": self.node, "incident": incident, "order": order.id}
        if kind is Heartbeat:
            self._describe(message)
        return message

    def _describe(self, message: dict[str, Any]) -> None:
        """Make a heartbeat of it that is looked at in full."""
        self._now_s += 1.0
        if self._draw.random() < 0.05:
            self.agent += 1
        message |= {"node": self.node, "agent_id": f"x{self.agent}", "seq": next(self._seq), "mono_s": self._now_s}
        message |= {"wall_s": time.time(), "full": True}
        (report,) = message["jobs"]
        report |= {"job": self.job, "round": self._round}
        (one,) = report["ranks"]
        one |= {"rank": 0, "local_rank": 0, "round": self._round, "sending": 0.5}
        one["progress"] |= {"state": "running", "moved_mono_s": self._now_s}
        one["progress"] |= {"step": self._steps, "steps_seen": self._steps, "phase": "forward"}
        one["work"] = [{**one["work"][0], "step": self._steps + more} for more in range(3)]
        one["process"] |= {"state": "R"}
        self._steps += 3
        self.judged += self._served.loop.jobs[self.job].state in ACTIVE
        report["ranks"] = [one, {**one, "rank": 1, "local_rank": 1}]
        (sample,) = report["collectives"]
        sample |= {"rank": 0, "lines": [["pg 0", "all_reduce", 20, 1]], "rows": "AAAAAAAAAAAAAAAAAA=="}


def good_beat(seq: int) -> Heartbeat:
    """Return what the other job's agent says."""
    now_s = time.monotonic()
    progress = Progress(state="running", step=seq, steps_seen=seq, moved_mono_s=now_s, step_p50_s=0.05)
    work = (StepWork(seq, 0.05, 0.01),)
    ranks = tuple(RankReport(rank, rank, 100 + rank, 1, progress=progress, work=work) for rank in (0, 1))
    return Heartbeat(
        "g", "good", seq, now_s, time.time(), full=True, jobs=(JobReport("good", 1, ranks=ranks),)
    )  # fmt: skip


async def test_whatever_one_job_sends_all_others_are_judged(tmp_path: Path, drawn_seed: int) -> None:
    """Every message is answered, none with 500, and the ticks of the job beside go on to its last step."""
    draw = Random(drawn_seed)  # noqa: S311  no secret
    async with serve_controller(tmp_path) as served, aiohttp.ClientSession() as http, Link(served.url) as link:
        await link.join(msgspec.convert(join("good", "g"), Join))
        sender = Sender(http, served, draw)
        seq = 0
        for number in range(MESSAGES):
            if number % 10 == 0:
                seq += 1
                await link.heartbeat(good_beat(seq))
                await link.orders("good", "g", "r-good", 1, wait_s=0.0)  # its runner lives
            await sender.send()
        ticks = sum(served.loop.tick_times.counts)
        async with asyncio.timeout(30.0):
            while sum(served.loop.tick_times.counts) < ticks + 3:
                await link.healthz()
        status = await link.status("good")
        health = await link.healthz()
        async with http.get(f"{served.url}/metrics") as page:
            metrics = await page.text()

    assert status.jobs[0].step == seq
    assert status.jobs[0].state in {"running", "catching_up", "suspect"}
    assert {path for path, status in sender.by_path if status == 200} >= {"heartbeat", "evidence"}
    assert sender.judged > MESSAGES // 4
    assert sender.answers[200] > MESSAGES // 4
    assert sender.answers[400] > MESSAGES // 50
    assert served.loop.faults.total == Counter(), health
    assert "megascale_controller_own_faults_total 0" in metrics
