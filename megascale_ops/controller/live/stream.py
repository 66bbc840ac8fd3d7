# SPDX-License-Identifier: Apache-2.0
"""Frames for open pages: one gatherer for each job that is watched, any number of readers up to a bound.

A frame is gathered once and encoded once for all readers. No reader has a queue: it sends the newest frame that
there is, as a change when it has sent the one before, whole when it has missed one. So a slow reader skips frames and
costs no memory but its socket's buffer, and one that takes nothing for ten seconds is let go.

The first frame of a job takes a while to gather. A client that asks for it (``/v1/live?headline=first``) is sent its
headline as soon as that is known, as an event of its own: a frame that holds no more. For other clients a stream begins
with a whole frame, as it always did.

Nothing is gathered without readers.
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from megascale_ops.controller.access import GRANT
from megascale_ops.controller.live.feed import Feed, Sources
from megascale_ops.controller.live.job_lines import choose
from megascale_ops.controller.loop import Loop
from megascale_ops.schema.messages import ErrorReply

if TYPE_CHECKING:
    from megascale_ops.schema.live import Frame

log = logging.getLogger(__name__)

# 1 s: agents report once a second, so nothing newer is to be had, but for what the controller itself decides.
FRAME_S = 1.0
# 0.1 s: how soon a change of a job's state, verdict or warnings is seen.
LOOK_S = 0.1
# 64 pages: an operations room and every terminal of a team; each costs a few hundred bytes to 100 KB a second.
MOST_READERS = 64
# 10 s without taking a byte: a laptop that was closed. It gets a whole frame when it comes back.
SLOW_S = 10.0
# A snapshot of this age is handed out again: a hundred readers of snapshots cost what one does.
FRESH_S = 0.5
# 2 s: a frame of this age is what a page that opens begins with.
NEW_S = 2.0
# 0.5 s: a frame of 12,288 ranks takes 0.1 s; a run that is over must not wait for its watchers.
GOODBYE_S = 0.5
# 60 s: what is known for snapshots is kept between two of them, so that the heat map is not made anew each time.
KEPT_S = 60.0
_encode = msgspec.json.Encoder().encode
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class _Channel:
    """One job's frames, and the readers that wait for the next one. Owned by ``LiveStream``."""

    def __init__(self, loop: Loop, job: str, *, is_alone: bool = False) -> None:
        self.readers = 0
        self.used_s = 0.0
        self.gathered_s = float("-inf")
        self.is_over = False  # a job has come where there was none, or the controller ends: readers must connect again
        self.change = b""
        self.task: asyncio.Task[None] | None = None
        self.feed = Feed(job)
        self._headline: Frame | None = None  # of the frame that is being gathered
        self._loop = loop
        self._is_alone = is_alone  # its readers may see no other job
        self._lock = asyncio.Lock()
        self._whole = b""
        self._whole_seq = 0
        self._next = asyncio.Event()

    @property
    def seq(self) -> int:
        """The number of the newest frame, 0 before the first."""
        return self.feed.frame.seq if self.feed.frame is not None else 0

    @property
    def is_new(self) -> bool:
        """The newest frame may be shown as what is so now."""
        return self._loop.clock() - self.gathered_s <= NEW_S

    def headline(self) -> bytes:
        """Return the headline of the frame that is being gathered as JSON, b"" when it is not known."""
        return _encode(self._headline) if self._headline is not None else b""

    def whole(self) -> bytes:
        """Return the newest frame whole, as JSON."""
        if self._whole_seq != self.seq:
            self._whole, self._whole_seq = _encode(self.feed.frame), self.seq
        return self._whole

    async def gather(self, oldest_s: float = 0.0) -> None:
        """Make the next frame, unless one is at most ``oldest_s`` old; heartbeats are answered meanwhile."""
        async with self._lock:
            loop = self._loop
            if loop.clock() - self.gathered_s <= oldest_s:
                return
            name = self.feed.job
            jobs = {name: loop.jobs[name]} if self._is_alone and name in loop.jobs else loop.jobs
            histories, checks = loop.histories.by_job, loop.self_checks.view
            sources = Sources(jobs, loop.registry, loop.incidents, histories, loop.nodes.book, checks)
            goodput = loop.goodput(name)
            try:
                for headline in self.feed.gather(
                    sources, now_s=loop.clock(), wall_s=loop.wall(), lag_s=loop.lag_s, goodput=goodput
                ):
                    if headline is not None:
                        self._headline = headline
                        self.wake()
                    await asyncio.sleep(0)
            finally:
                self._headline = None
            self.gathered_s = loop.clock()
            self.change = _encode(self.feed.change)
        self.wake()

    def wake(self) -> None:
        """Let all readers look."""
        waiting, self._next = self._next, asyncio.Event()
        waiting.set()

    async def woken(self) -> None:
        """Wait for whatever comes next: a headline, a frame, the end."""
        await self._next.wait()

    async def end(self) -> None:
        """Make a last frame; streams end with it."""
        try:
            await self.gather()
        finally:
            self.is_over = True
            self.wake()

    async def newer(self, seq: int) -> None:
        """Wait for a frame after ``seq``."""
        while self.seq == seq and not self.is_over:
            await self._next.wait()

    async def run(self) -> None:
        """Make frames until cancelled: one a second, sooner when something happens or columns are missing."""
        oldest_s = NEW_S
        while True:
            mark = self._mark()
            try:
                await self.gather(oldest_s)
            except Exception:
                # A boundary that must survive: a fault in a page must not end the controller. It is logged, and
                # pages show that they get no updates.
                log.exception("a frame of job %s could not be made", self.feed.job)
            oldest_s = 0.0
            await self._pause(LOOK_S if self.feed.is_behind else FRAME_S, mark)
            if not self.feed.job and self._loop.jobs:
                self.is_over = True
                self.wake()
                return

    async def _pause(self, seconds: float, mark: tuple[object, ...]) -> None:
        """Wait until the next frame is due, or something happens."""
        for _look in range(round(seconds / LOOK_S)):
            await asyncio.sleep(LOOK_S)
            if self._mark() != mark:
                return

    def _mark(self) -> tuple[object, ...]:
        """Return what is worth a frame at once when it changes."""
        job = self._loop.jobs.get(self.feed.job)
        if job is None:
            return (len(self._loop.jobs),)
        incident = job.incident
        state = (incident.id, incident.state) if incident is not None else ()
        lost = job.suspicion.lost if job.suspicion is not None else None
        return job.record.state, job.record.round, state, lost, tuple(job.round.warnings)


class LiveStream:
    """The two addresses of the live feed.

    Args:
        loop: what is looked at; nothing of it is changed.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._channels: dict[tuple[str, bool], _Channel] = {}  # by job, and whether it is the only one that is shown

    @property
    def readers(self) -> int:
        """How many streams are open."""
        return sum(channel.readers for channel in self._channels.values())

    async def say_goodbye(self) -> None:
        """Let all who watch see how things stand at the end of this controller, as far as that takes no time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*(one.end() for one in self._channels.values() if one.readers))

    async def snapshot(self, request: web.Request) -> web.Response:
        """Answer with one whole frame."""
        channel = self._open(request)
        if isinstance(channel, web.Response):
            return channel
        await channel.gather(FRESH_S)
        return web.Response(
            body=channel.whole(), content_type="application/json", headers={"Cache-Control": "no-store"}
        )

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send frames as server-sent events until the reader goes."""
        if self.readers >= MOST_READERS:
            return _error(503, f"{MOST_READERS} pages watch this controller already: close one of them")
        channel = self._open(request)
        if isinstance(channel, web.Response):
            return channel
        response = web.StreamResponse(headers=_HEADERS)
        channel.readers += 1
        try:
            if not _wants_headline(request):
                # A frame gathered for another reader a minute ago would be shown as if it were now.
                await channel.gather(NEW_S)
            await response.prepare(request)
            if channel.task is None:
                channel.task = asyncio.create_task(channel.run())
            await self._send(channel, request, response)
        finally:
            channel.readers -= 1
            if not channel.readers:
                await self._end(channel)
        return response

    async def _send(self, channel: _Channel, request: web.Request, response: web.StreamResponse) -> None:
        seq = 0
        try:
            if _wants_headline(request):
                await self._send_headline(channel, response)
            while not (channel.is_over and channel.seq == seq):
                await channel.newer(seq)
                if channel.seq == seq:
                    continue
                body = channel.change if seq and channel.seq == seq + 1 else channel.whole()
                seq = channel.seq
                await _write(response, b"event: frame\nid: %d\ndata: %b\n\n" % (seq, body))
        except TimeoutError:
            log.info("a page took nothing for %.0f s and was let go", SLOW_S)
            if request.transport is not None:
                request.transport.abort()

    @staticmethod
    async def _send_headline(channel: _Channel, response: web.StreamResponse) -> None:
        """Send the headline of the frame that is being gathered, and wait for that frame; nothing when it is there."""
        is_told = False
        while not (channel.is_new or channel.is_over):
            if not is_told and (headline := channel.headline()):
                is_told = True
                await _write(response, b"event: headline\ndata: %b\n\n" % headline)
                continue
            try:
                async with asyncio.timeout(FRAME_S):
                    await channel.woken()
            except TimeoutError:
                # Keep-alive: a page treats a connection that is silent for 5 s as lost, and reconnects.
                await _write(response, b": a frame is being made\n\n")

    def _open(self, request: web.Request) -> "_Channel | web.Response":
        """Return the channel of the job that is asked for, or what to answer instead."""
        loop = self._loop
        alone = GRANT.get().job
        name = request.query.get("job") or alone or choose(loop.jobs, loop.wall())
        if name and name not in loop.jobs:
            return _error(404, f"there is no job {name!r}")
        now_s = loop.clock()
        old = [one for one, known in self._channels.items() if not known.readers and now_s - known.used_s > KEPT_S]
        for one in old:
            del self._channels[one]
        channel = self._channels.get((name, bool(alone)))
        if channel is None or channel.is_over:
            channel = self._channels[name, bool(alone)] = _Channel(loop, name, is_alone=bool(alone))
        channel.used_s = now_s
        return channel

    @staticmethod
    async def _end(channel: _Channel) -> None:
        """Stop gathering for a channel without readers."""
        task, channel.task = channel.task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _wants_headline(request: web.Request) -> bool:
    return request.query.get("headline") == "first"


async def _write(response: web.StreamResponse, event: bytes) -> None:
    async with asyncio.timeout(SLOW_S):
        await response.write(event)


def _error(status: int, sentence: str) -> web.Response:
    return web.Response(status=status, body=_encode(ErrorReply(sentence)), content_type="application/json")
