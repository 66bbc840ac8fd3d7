# SPDX-License-Identifier: Apache-2.0
"""The controller's HTTP API under ``/v1``: typed JSON in, typed JSON out, one sentence for every error.

``/`` is the live page; it reads the same addresses as any client, and changes nothing. ``/runbooks/`` has what alerts
link to.

400: the request can't be taken as it is. 401: no or a wrong token. 403: the token is for something else, or a foreign
web page sent it. 404: there is no such thing. 408: it came too slowly. 409: understood and refused. 413: too large.
503: too many pages watch, or another controller leads. 500 is a bug of ours, logged with its traceback.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from megascale_ops.controller import access
from megascale_ops.controller.access import GRANT
from megascale_ops.controller.history.files import HistoryFiles
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.journal.paging import IncidentPages
from megascale_ops.controller.journal.store import Store
from megascale_ops.controller.live.stream import LiveStream
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.metrics.page import Metrics
from megascale_ops.controller.metrics.service_discovery import is_loopback, targets
from megascale_ops.controller.notifying import Notifying
from megascale_ops.controller.recovery.finishing import last_steps
from megascale_ops.controller.rendezvous.poll import Poll
from megascale_ops.controller.server import audit, node_lives
from megascale_ops.controller.server.agent_logs import AgentLogs
from megascale_ops.controller.server.bodies import SlowError, answer, body_of, convert, decode, query_of
from megascale_ops.controller.server.browser import Pages
from megascale_ops.controller.server.connections import encode_error, watched
from megascale_ops.controller.server.openapi import describe
from megascale_ops.controller.server.operations import (
    IncidentsQuery,
    JobQuery,
    Nothing,
    OrdersQuery,
    Parts,
    StatusQuery,
    WaitQuery,
)
from megascale_ops.controller.server.origin import check_host, why_foreign
from megascale_ops.controller.server.rank_logs import RankLogs
from megascale_ops.controller.server.recordings import Recordings
from megascale_ops.controller.server.runbooks import Runbooks
from megascale_ops.controller.server.standing import ALONE, Reply, Standing
from megascale_ops.errors import MegascaleError, NotFoundError, RefusedError, UsageError, VersionError
from megascale_ops.schema.events import BadHardwareList, Health
from megascale_ops.schema.health import CheckAsk
from megascale_ops.schema.history import HistoryReply
from megascale_ops.schema.kernels import ProfileAsk
from megascale_ops.schema.messages import (
    MAX_BODY_BYTES,
    Evidence,
    Heartbeat,
    HeartbeatReply,
    Join,
    Leave,
    PolicyChange,
    StopAsk,
)
from megascale_ops.schema.runs import LogQuery
from megascale_ops.schema.tokens import READ_ALL, Grant

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Rule = Callable[[Grant, web.Request], None]

_encode = msgspec.json.Encoder().encode
_heartbeats = msgspec.json.Decoder(Heartbeat)
_evidence = msgspec.json.Decoder(Evidence)
_joins = msgspec.json.Decoder(Join)
_leaves = msgspec.json.Decoder(Leave)
_asks = msgspec.json.Decoder(ProfileAsk)
_changes = msgspec.json.Decoder(PolicyChange)
_stops = msgspec.json.Decoder(StopAsk)
_checks = msgspec.json.Decoder(CheckAsk)
# 2 s: a journal that cannot be written fails within that time, and a runner that leaves must not hang.
SETTLE_S = 2.0


class _ForeignError(RefusedError):
    """Another site's web page sent the request."""


# The first that fits.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (NotFoundError, 404),
    (access.UnauthorisedError, 401),
    (access.ForbiddenError, 403),
    (_ForeignError, 403),
    (SlowError, 408),
    (web.RequestPayloadError, 400),
    (RefusedError, 409),
    (UsageError, 400),
    (VersionError, 400),
)


class Api:
    """The handlers, with what they need.

    ``open_page``: what the page reads needs no token, but for what ranks print. ``logs_of``: the run folder of the one
    run that has brought this controller up; None of a shared one, which asks agents.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        token: str | access.Access,
        files: HistoryFiles | None = None,
        *,
        open_page: bool = False,
        notifying: Notifying | None = None,
        logs_of: Path | None = None,
        standing: Standing = ALONE,
    ) -> None:
        self._loop = loop
        self._standing = standing
        self._store = store
        self._files = files or HistoryFiles(loop, None)
        self._metrics = Metrics(loop, store, notifying, standing.figures)
        self._paging = IncidentPages(loop.incidents, store)
        self._live = LiveStream(loop)
        self._pages = Pages()
        self._runbooks = Runbooks()
        self._recordings = Recordings(loop)
        self._rank_logs = RankLogs(logs_of)
        self._agent_logs = AgentLogs(loop)
        self._open_page = open_page
        self._described = b""  # the answer to /openapi.json, after the first request
        self._access = access.Access(token, loop.wall) if isinstance(token, str) else token

    async def say_goodbye(self) -> None:
        """Tell pages how things stand, before this controller ends."""
        await self._live.say_goodbye()

    def application(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[watched])
        add = app.router.add_route
        add("POST", "/v1/heartbeat", self._guard(self._heartbeat))
        add("POST", "/v1/evidence", self._guard(self._take_evidence))
        add("POST", "/v1/jobs/{job}/join", self._guard(self._join))
        add("GET", "/v1/jobs/{job}/orders", self._guard(self._orders))
        add("POST", "/v1/jobs/{job}/leave", self._guard(self._leave))
        add("GET", "/v1/jobs/{job}/policy", self._guard(self._policy, may=_may_read_job))
        add("POST", "/v1/jobs/{job}/policy", self._guard(self._set_policy, may=_may_operate_job))
        add("POST", "/v1/jobs/{job}/stop", self._guard(self._stop, may=_may_operate_job))
        add("POST", "/v1/jobs/{job}/checkpoint", self._guard(self._ask_checkpoint, may=_may_operate_job))
        add("GET", "/v1/jobs/{job}/checkpoint", self._guard(self._checkpoint, may=_may_read_job))
        add("GET", "/v1/jobs/{job}/history", self._guard(self._history, may=_may_read_job))
        add("GET", "/v1/jobs/{job}/logs", self._guard(self._logs, may=_may_read_job))
        add("GET", "/v1/jobs/{job}/skew", self._guard(self._skew, may=_may_read_job))
        add("POST", "/v1/jobs/{job}/profile", self._guard(self._profile, may=_may_operate_job))
        add("GET", "/v1/jobs/{job}/profile/{id}", self._guard(self._profiled, may=_may_read_job))
        add("GET", "/v1/status", self._guard(self._status, may=_may_read_asked))
        add("GET", "/v1/incidents", self._guard(self._incidents, may=_may_read_asked, for_page=True))
        add("GET", "/v1/incidents/{id}", self._guard(self._incident, may=_may_read_asked, for_page=True))
        add("POST", "/v1/nodes/{node}/check", self._guard(self._check_node, may=_may_operate_all))
        add("GET", "/v1/nodes/{node}/check", self._guard(self._checked_node, may=_may_read_all))
        add("GET", "/v1/hardware", self._guard(self._hardware, may=_may_read_all))
        add("DELETE", "/v1/hardware/{uuid}", self._guard(self._mend, may=_may_operate_all))
        add("GET", "/v1/nodes", self._guard(partial(node_lives.show_all, self._loop.nodes), may=_may_read_all))
        add("GET", "/v1/nodes/{node}", self._guard(partial(node_lives.show_moves, self._loop.nodes), may=_may_read_all))
        add("POST", "/v1/nodes/{node}", self._guard(partial(node_lives.do, self._loop.nodes), may=_may_operate_all))
        add("GET", "/v1/live", self._guard(self._live.stream, may=_may_read_asked, for_page=True))
        add("GET", "/v1/live/snapshot", self._guard(self._live.snapshot, may=_may_read_asked, for_page=True))
        add("GET", "/v1/audit", self._guard(partial(audit.show, self._store), may=_may_read_all))
        add("GET", "/v1/recordings", self._guard(self._audited(self._recordings.show), may=_may_read_all))
        add("GET", "/v1/recordings/{id}", self._guard(self._recordings.block, may=_may_read_all))
        add("GET", "/metrics", self._guard(self._show_metrics, may=_may_read_all))
        add("GET", "/v1/sd/agents", self._guard(self._targets, may=_may_read_all))
        add("GET", "/leader", self._guard(self._standing.show, open_to_all=True))
        add("GET", "/healthz", self._guard(self._healthz, open_to_all=True))
        add("GET", "/openapi.json", self._guard(self._openapi, open_to_all=True))
        add("GET", "/", self._guard(self._pages.index, open_to_all=True))
        add("GET", "/static/{name}", self._guard(self._pages.static, open_to_all=True))
        add("GET", "/runbooks/", self._guard(self._runbooks.index, open_to_all=True))
        add("GET", "/runbooks/{name}", self._guard(self._runbooks.page, open_to_all=True))
        add("*", "/{anything:.*}", self._guard(self._unknown))
        return app

    def _guard(
        self, handler: Handler, *, may: Rule | None = None, open_to_all: bool = False, for_page: bool = False
    ) -> Handler:
        """Check token and right before, and turn errors into answers after.

        ``may``: raises where the grant does not cover the request; None: the handler asks when it has read the body.
        """
        is_open = for_page and self._open_page
        if may in (_may_operate_job, _may_operate_all):
            handler = self._audited(handler)

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                check_host(request.headers.get("Host", ""))
                if not open_to_all:
                    if self._standing.is_suspended:
                        return self._standing.refusal()
                    grant = self._grant(request.headers, is_open=is_open, is_beat=request.path == "/v1/heartbeat")
                    self._check_origin(request.headers)
                    GRANT.set(grant)
                    convert(request.match_info, Parts)
                    if may is not None:
                        may(grant, request)
                return await handler(request)
            except (web.HTTPException, ConnectionError) as error:
                if isinstance(error, web.HTTPRequestEntityTooLarge):
                    return _error(413, f"the body is too large: at most {MAX_BODY_BYTES} bytes are taken")
                raise  # aiohttp's own: a broken connection
            except Exception as error:  # noqa: BLE001  a boundary that must survive: reported, and logged if internal
                return _error(*_told(error, request.path))

        return guarded

    def _audited(self, handler: Handler) -> Handler:
        """Journal who asks a handler for something, and what comes of it."""

        async def audited(request: web.Request) -> web.StreamResponse:
            try:
                response = await handler(request)
            except MegascaleError as error:
                await audit.keep(self._store, self._loop.wall(), request, GRANT.get(), _told(error, request.path)[0])
                raise
            await audit.keep(self._store, self._loop.wall(), request, GRANT.get(), response.status)
            return response

        return audited

    def _grant(self, headers: Mapping[str, str], *, is_open: bool, is_beat: bool) -> Grant:
        try:
            return self._access.grant(headers)
        except access.UnauthorisedError:
            if is_open:
                return READ_ALL
            self._loop.rejected["unauthorised"] += is_beat
            raise

    def _sees_all(self, headers: Mapping[str, str]) -> bool:
        try:
            access.may_read_all(self._access.grant(headers))
        except RefusedError:
            return False
        return True

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        foreign = why_foreign(headers, has_token=self._access.is_closed)
        if foreign:
            raise _ForeignError(f"refused: {foreign}")

    def _take_beat(self, request: web.Request, body: bytes, grant: Grant) -> HeartbeatReply:
        try:
            heartbeat = access.may_report(grant, decode(_heartbeats, body))
            reply = self._standing.signed(self._loop.heartbeat(heartbeat, grant.job))
        except access.ForbiddenError:
            self._loop.rejected["unauthorised"] += 1
            raise
        except (UsageError, VersionError) as error:
            self._loop.rejected["version" if isinstance(error, VersionError) else "malformed"] += 1
            raise
        self._standing.heard(request, heartbeat.node)
        return reply

    async def _heartbeat(self, request: web.Request) -> web.Response:
        try:
            body = await body_of(request)
        except web.HTTPRequestEntityTooLarge:
            self._loop.rejected["oversized"] += 1
            raise
        return answer(self._take_beat(request, body, GRANT.get()))

    async def _take_evidence(self, request: web.Request) -> web.Response:
        evidence = decode(_evidence, await body_of(request))
        access.may_testify(GRANT.get(), evidence)
        if not self._agent_logs.ingest_evidence(evidence):
            self._loop.evidence(evidence)
        return answer(Nothing())

    async def _join(self, request: web.Request) -> web.Response:
        join = decode(_joins, await body_of(request))
        access.may_operate(GRANT.get(), join.job, join.node)
        _check_job(request, join.job)
        self._standing.heard(request, join.node)
        return self._signed(await self._loop.joining.join(join, query_of(request, WaitQuery).wait_s))

    async def _orders(self, request: web.Request) -> web.Response:
        asked = query_of(request, OrdersQuery)
        job = request.match_info["job"]
        poll = Poll(job, asked.node, asked.runner_id, asked.round, asked.after, asked.incidents, asked.noticed)
        # A poll is a runner's sign of life, and removes the orders it has executed: not for read-only tokens.
        access.may_operate(GRANT.get(), job, poll.node)
        self._standing.heard(request, poll.node)
        return self._signed(await self._loop.orders(poll, asked.wait_s))

    def _signed(self, reply: Reply) -> web.Response:
        """Answer after a wait, unless another controller may have become the leader meanwhile."""
        return self._standing.refusal() if self._standing.is_suspended else answer(self._standing.signed(reply))

    async def _leave(self, request: web.Request) -> web.Response:
        leave = decode(_leaves, await body_of(request))
        access.may_operate(GRANT.get(), leave.job, leave.node)
        _check_job(request, leave.job)
        if leave.job not in self._loop.jobs:
            raise NotFoundError(f"there is no job {leave.job!r}")
        self._loop.leave(leave)
        await last_steps(self._loop.jobs[leave.job])
        await self._loop.settle(leave.job, SETTLE_S)
        return answer(Nothing())

    async def _policy(self, request: web.Request) -> web.Response:
        job = request.match_info["job"]
        view = self._loop.policy(job)
        if view is None:
            raise NotFoundError(f"there is no job {job!r}")
        return answer(view)

    async def _set_policy(self, request: web.Request) -> web.Response:
        change = decode(_changes, await body_of(request))
        job = request.match_info["job"]
        view = self._loop.policy(job, change.settings)
        if view is None:
            raise NotFoundError(f"there is no job {job!r}")
        await self._loop.settle(job, SETTLE_S)
        return answer(view)

    def _job(self, request: web.Request) -> Job:
        job = self._loop.jobs.get(request.match_info["job"])
        if job is None:
            raise NotFoundError(f"there is no job {request.match_info['job']!r}")
        return job

    async def _stop(self, request: web.Request) -> web.Response:
        ask = decode(_stops, await body_of(request))
        job = self._job(request)
        self._loop.by_hand.stop(job, ask.reason)
        await self._loop.settle(job.name, SETTLE_S)
        return answer(Nothing())

    async def _ask_checkpoint(self, request: web.Request) -> web.Response:
        job = self._job(request)
        return answer(self._loop.by_hand.ask_checkpoint(job, self._loop.saved_wall_s(job.name)))

    async def _checkpoint(self, request: web.Request) -> web.Response:
        job = self._job(request)
        return answer(self._loop.by_hand.view(job, self._loop.saved_wall_s(job.name)))

    async def _check_node(self, request: web.Request) -> web.Response:
        ask = decode(_checks, await body_of(request))
        node = request.match_info["node"]
        return answer(self._loop.self_checks.begin(node, ask, "asked for by hand"))

    async def _checked_node(self, request: web.Request) -> web.Response:
        return answer(self._loop.self_checks.view(request.match_info["node"]))

    async def _history(self, request: web.Request) -> web.Response:
        job = self._job(request).name
        raw = await self._files.raw(job)
        if raw is None:
            raise NotFoundError(f"no history of steps is kept of job {job!r}")
        return answer(HistoryReply(raw))

    async def _logs(self, request: web.Request) -> web.Response:
        job, asked = self._job(request), query_of(request, LogQuery)
        if not self._rank_logs.may_read(len(self._loop.jobs)):
            return answer(await self._agent_logs.read(job, asked))
        try:
            return answer(await self._rank_logs.read(asked))
        except NotFoundError:
            if len(job.round.places) < 2:
                raise
        return answer(await self._agent_logs.read(job, asked))  # another node's disk, which this one does not share

    async def _skew(self, request: web.Request) -> web.Response:
        return answer(self._loop.slowness.skewing.view(self._job(request)))

    async def _profile(self, request: web.Request) -> web.Response:
        ask = decode(_asks, await body_of(request))
        return answer(self._loop.profiling.begin(self._job(request), ask))

    async def _profiled(self, request: web.Request) -> web.Response:
        job, name = request.match_info["job"], request.match_info["id"]
        profiling = self._loop.profiling
        # The comparison of 12,288 ranks takes 2 s, for which heartbeats must not wait.
        view = await asyncio.to_thread(profiling.view, job, name) if profiling.is_done(job, name) else None
        return answer(view or profiling.view(job, name))

    async def _status(self, request: web.Request) -> web.Response:
        asked = query_of(request, StatusQuery)
        name = asked.job or GRANT.get().job or None
        if name is not None and asked.while_round:
            await self._loop.round_ends(name, asked.while_round, asked.wait_s)
        status = self._loop.status(name, is_brief=asked.brief)
        if status is None:
            raise NotFoundError(f"there is no job {name!r}")
        return answer(status)

    async def _incidents(self, request: web.Request) -> web.Response:
        asked = query_of(request, IncidentsQuery)
        job = asked.job or GRANT.get().job or None
        return answer(await self._paging.incidents(job, asked.limit or 0, asked.before))

    async def _incident(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        found = await self._paging.incident(name)
        if found is None:
            raise NotFoundError(f"there is no incident {name!r}")
        access.may_read(GRANT.get(), found.job)
        return answer(found)

    async def _hardware(self, _request: web.Request) -> web.Response:
        return answer(BadHardwareList(self._loop.hardware.book.entries()))

    async def _mend(self, request: web.Request) -> web.Response:
        uuid = request.match_info["uuid"]
        if not self._loop.hardware.mend(uuid):
            raise NotFoundError(f"nothing bad is remembered of GPU {uuid!r}")
        return answer(Nothing())

    async def _targets(self, request: web.Request) -> web.Response:
        is_near = is_loopback(request.remote or "")
        return answer(targets(self._loop.registry, self._loop.clock(), is_near=is_near))

    async def _show_metrics(self, request: web.Request) -> web.Response:
        page = await self._metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=page.body, headers={"Content-Type": page.content_type})

    async def _healthz(self, request: web.Request) -> web.Response:
        failing = self._store.failing
        faults = self._loop.faults.now()
        # Open to all, so a fault's text, which names a job, is shown only to tokens that may see every job.
        told = faults[-1] if faults and self._sees_all(request.headers) else "faults of ours, which the log tells"
        return answer(
            Health(
                status="degraded" if failing or self._store.loss or faults else "ok",
                journal=failing or self._store.loss or "ok",
                journal_kept=self._store.kept,
                lag_s=self._loop.lag_s,
                judgement=f"{told}; {len(faults)} in all" if faults else "ok",
            )
        )

    async def _openapi(self, request: web.Request) -> web.Response:
        if not self._described:
            routes = request.app.router.routes()
            self._described = _encode(describe((one.method, one.resource.canonical) for one in routes if one.resource))
        return web.Response(body=self._described, content_type="application/json")

    async def _unknown(self, request: web.Request) -> web.Response:
        raise NotFoundError(f"there is nothing at {request.method} {request.path}")


def _may_read_all(grant: Grant, _request: web.Request) -> None:
    access.may_read_all(grant)


def _may_operate_all(grant: Grant, _request: web.Request) -> None:
    access.may_operate_all(grant)


def _may_read_job(grant: Grant, request: web.Request) -> None:
    access.may_read(grant, request.match_info["job"])


def _may_operate_job(grant: Grant, request: web.Request) -> None:
    access.may_operate(grant, request.match_info["job"])


def _may_read_asked(grant: Grant, request: web.Request) -> None:
    """A job that is named in the query, or without one what the grant is for: handlers show no more than that."""
    access.may_read(grant, query_of(request, JobQuery).job or grant.job)


def _error(status: int, sentence: str) -> web.Response:
    return web.Response(status=status, body=encode_error(sentence), content_type="application/json")


def _told(error: Exception, path: str) -> tuple[int, str]:
    """Return status and sentence for what went wrong; log it with its traceback when it is a bug of ours."""
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status, str(error)
    log.error("a request to %s failed", path, exc_info=error)
    return 500, "the controller met an error of its own; its log has the details"


def _check_job(request: web.Request, job: str) -> None:
    if request.match_info["job"] != job:
        raise UsageError(f"the address names job {request.match_info['job']!r}, the body {job!r}")
