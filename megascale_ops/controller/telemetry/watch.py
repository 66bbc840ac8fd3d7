# SPDX-License-Identifier: Apache-2.0
"""Hand incidents and steps to OpenTelemetry: a look a second at what has changed, and nothing that waits.

Of steps one span a job in STEPS_S at most is told, whatever the job's pace: where the round's steps went from and to,
and what one took. A bug here is logged and harms no judgement.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.telemetry.records import (
    OVER,
    Log,
    Span,
    Steps,
    incident_span,
    judged_as,
    steps_span,
    verdict_log,
)
from megascale_ops.controller.telemetry.sender import Sender
from megascale_ops.schema.events import Incident

log = logging.getLogger(__name__)

LOOK_S = 1.0
# 10 s: six spans a minute and job, 300 a minute for 50 jobs; a trend shows, and no backend is flooded.
STEPS_S = 10.0
# 1 s for what waits when the controller ends: the run that started it gives it three.
LAST_WORDS_S = 1.0
_SICK_S = 60.0


class _Told:
    """What was told of one incident."""

    __slots__ = ("incident", "is_over", "judged")

    def __init__(self, incident: Incident) -> None:
        self.incident = incident
        self.is_over = incident.state in OVER
        self.judged = judged_as(incident)


class _Pace:
    """Up to where the steps of a round are told, and what was last seen of them; -1: none is known yet."""

    __slots__ = ("seen", "told")

    def __init__(self, now: Steps) -> None:
        self.told = self.seen = now


class Telemetry:
    """What one controller tells a collector.

    Args:
        loop: whose jobs and incidents are told of.
        sender: takes spans and logs away.
    """

    def __init__(self, loop: Loop, sender: Sender) -> None:
        self._loop = loop
        self._sender = sender
        self._told: OrderedDict[str, _Told] = OrderedDict()
        self._paces: dict[str, _Pace] = {}  # by job

    def begin(self) -> None:
        """Begin; what is known by now was told by the controller before, but for the ends of what goes on."""
        self._told = OrderedDict((name, _Told(one)) for name, one in self._loop.incidents.items())
        self._sender.start()

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                self.poll()
            except Exception:  # a boundary: a fault here must not end the controller, and is logged
                log.exception("incidents and steps could not be told; it is tried again in %g s", _SICK_S)
                await asyncio.sleep(_SICK_S)
            await asyncio.sleep(LOOK_S)

    def poll(self, *, is_last: bool = False) -> None:
        """Hand over what is to be told now; never waits."""
        for record in (*self._of_incidents(), *self._of_steps(is_last=is_last)):
            self._sender.put(record)

    async def close(self) -> None:
        """Tell what has happened since, and give what waits a moment to go."""
        try:
            self.poll(is_last=True)
        except Exception:  # a boundary, as in ``watch``: what else ends now must end
            log.exception("the last incidents and steps could not be told")
        await asyncio.to_thread(self._sender.stop, LAST_WORDS_S)

    def _of_incidents(self) -> Iterator[Span | Log]:
        now_s = self._loop.wall()
        for name, incident in self._loop.incidents.items():
            told = self._told.get(name)
            if told is not None and told.incident is incident:
                continue
            now = self._told[name] = _Told(incident)
            job_id = self._job_id(incident.job)
            if now.judged is not None and (told is None or told.judged != now.judged):
                yield verdict_log(incident, job_id, now_s)
            if now.is_over and (told is None or not told.is_over):
                yield incident_span(incident, job_id, now_s)
        while len(self._told) > 2 * len(self._loop.incidents) + 100:  # those that the loop has forgotten
            self._told.popitem(last=False)

    def _of_steps(self, *, is_last: bool) -> Iterator[Span]:
        for job in self._loop.jobs.values():
            record = job.record
            now = Steps(record.round, job.round.step, job.round.last_step_wall_s)
            known = self._paces.get(job.name)
            if known is not None and known.seen.round != now.round:  # its last steps, after which another began
                yield from self._span(job, known)
                known = None
            if known is None or known.told.step < 0 or now.step < known.seen.step:
                self._paces[job.name] = _Pace(now)
                continue
            known.seen = now
            if is_last or job.is_over or now.wall_s - known.told.wall_s >= STEPS_S:
                yield from self._span(job, known)
        for name in [name for name in self._paces if name not in self._loop.jobs]:
            del self._paces[name]

    def _span(self, job: Job, pace: _Pace) -> Iterator[Span]:
        """Yield the span of what is not told of a pace."""
        before, pace.told = pace.told, pace.seen
        if 0 <= before.step < pace.seen.step:
            yield steps_span(job.name, job.record.job_id, before, pace.seen, job.record.world_size)

    def _job_id(self, name: str) -> str:
        job = self._loop.jobs.get(name)
        return job.record.job_id if job is not None else ""
