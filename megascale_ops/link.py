# SPDX-License-Identifier: Apache-2.0
"""The one client of the controller: typed requests, one kept-open connection pool, clear errors.

Every request may be repeated (heartbeats carry a sequence number, joins a join id, orders are remembered by id), so a
request whose kept-open connection was closed in the meantime is sent once more at once. Anything beyond that is the
caller's patience: ``Backoff`` says how long to pause, ``Spool`` keeps heartbeats while the controller is away.

``Link`` is for asyncio programs (the agent), ``BlockingLink`` for threads (the runner, the command line).
"""

import asyncio
import concurrent.futures
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from megascale_ops.errors import ControllerUnreachableError, RefusedError, UsageError
from megascale_ops.schema.collectives import SkewView
from megascale_ops.schema.events import BadHardwareList, Incident, Incidents, Status
from megascale_ops.schema.history import HistoryReply
from megascale_ops.schema.kernels import ProfileAsk, ProfileView
from megascale_ops.schema.live import LIVE_VERSION, Frame
from megascale_ops.schema.messages import (
    ErrorReply,
    Evidence,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    PolicyChange,
    PolicyView,
)
from megascale_ops.schema.targets import TargetGroup
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

if TYPE_CHECKING:
    import aiohttp  # 0.2 s, for it loads certificates: an agent, whose requests are its own, does not wait for it

T = TypeVar("T")

_AWAY = (502, 503, 504)  # what a proxy says for a controller that is not there
# 64 MB: a hundred times the first frame of 12,288 ranks.
_MOST_EVENT_BYTES = 64_000_000
_encode = msgspec.json.Encoder().encode
_frames = msgspec.json.Decoder(Frame)


class Backoff:
    """Pauses between attempts: doubled each time up to a bound, back to the first after a success."""

    # 0.05 s: a restarted controller is back within a second; 2 s: fifteen thousand nodes must not storm it.
    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return how long to pause now; the next pause is twice as long."""
        pause_s = self._next_s
        self._next_s = min(self._most_s, pause_s * 2)
        return pause_s

    def reset(self) -> None:
        """Begin anew: the last attempt succeeded."""
        self._next_s = self._first_s


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"controller address {url!r} can't be used: it looks like http://HOST:PORT")
    return url.rstrip("/")


class Link:
    """Typed requests to one controller, for asyncio programs.

    Args:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        token: sent as bearer token when given; it appears in no message and no log.
        timeout_s: for connecting and for an answer; a long poll waits ``wait_s`` longer.
        ca_file: certificate authority to trust instead of the system's, for https.

    Raises:
        UsageError: the address or the certificate file can't be used.
        ControllerUnreachableError: (every request) nobody answered before the deadline.
        RefusedError: (every request) the controller said no; the text carries its sentence.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0, ca_file: Path | None = None) -> None:
        self.url = _check_url(url)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        try:
            self._tls = ssl.create_default_context(cafile=str(ca_file)) if ca_file else None
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"certificate file {ca_file} can't be used: {error}") from error

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Report what an agent sees; the reply carries what its node should do."""
        return await self._ask("POST", "/v1/heartbeat", HeartbeatReply, body=heartbeat)

    async def evidence(self, evidence: Evidence) -> None:
        """Hand in what was gathered for one order of one incident."""
        await self._ask("POST", "/v1/evidence", dict[str, Any], body=evidence)

    async def join(self, join: Join, wait_s: float = 20.0) -> JoinReply:
        """Ask for the next round; ``status`` wait means: ask again with the same ``join_id``."""
        path = f"/v1/jobs/{quote(join.job, safe='')}/join"
        return await self._ask("POST", path, JoinReply, query={"wait_s": str(wait_s)}, body=join, wait_s=wait_s)

    async def orders(
        self, job: str, node: str, runner_id: str, round_: int, after: str = "", wait_s: float = 20.0
    ) -> OrdersReply:
        """Wait for orders to this runner; also its sign of life. ``after`` is the last order id obeyed."""
        query = {"node": node, "runner_id": runner_id, "round": str(round_), "after": after, "wait_s": str(wait_s)}
        path = f"/v1/jobs/{quote(job, safe='')}/orders"
        return await self._ask("GET", path, OrdersReply, query=query, wait_s=wait_s)

    async def leave(self, leave: Leave) -> None:
        """Say that this runner is done, and how it ended."""
        await self._ask("POST", f"/v1/jobs/{quote(leave.job, safe='')}/leave", dict[str, Any], body=leave)

    async def status(self, job: str | None = None) -> Status:
        """Return all jobs as the controller sees them, or one.

        Raises:
            VersionError: the controller speaks a version that this program does not.
        """
        found = await self._ask("GET", "/v1/status", Status, query={"job": job} if job else None)
        check_version(f"the controller at {self.url}", found.version, MESSAGE_VERSION)
        return found

    async def incidents(self, job: str | None = None) -> Incidents:
        """Return incidents, newest last, without events and evidence texts."""
        return await self._ask("GET", "/v1/incidents", Incidents, query={"job": job} if job else None)

    async def incident(self, incident_id: str) -> Incident:
        """Return one incident with everything known about it."""
        return await self._ask("GET", f"/v1/incidents/{quote(incident_id, safe='')}", Incident)

    async def hardware(self) -> BadHardwareList:
        """Return the GPUs that are remembered as bad, the newest last."""
        return await self._ask("GET", "/v1/hardware", BadHardwareList)

    async def mend_hardware(self, uuid: str) -> None:
        """Say that a GPU was mended or replaced."""
        await self._ask("DELETE", f"/v1/hardware/{quote(uuid, safe='')}", dict[str, Any])

    async def policy(self, job: str) -> PolicyView:
        """Return the policy that a job lives under."""
        return await self._ask("GET", f"/v1/jobs/{quote(job, safe='')}/policy", PolicyView)

    async def set_policy(self, job: str, settings: dict[str, str]) -> PolicyView:
        """Change the policy of a job that lives, and return it as it is then."""
        path = f"/v1/jobs/{quote(job, safe='')}/policy"
        return await self._ask("POST", path, PolicyView, body=PolicyChange(settings))

    async def history(self, job: str) -> bytes:
        """Return the history of a job's steps, as ``schema.history.decode`` reads it."""
        return (await self._ask("GET", f"/v1/jobs/{quote(job, safe='')}/history", HistoryReply)).data

    async def targets(self) -> tuple[TargetGroup, ...]:
        """Return where the agents' metrics are."""
        return await self._ask("GET", "/v1/sd/agents", tuple[TargetGroup, ...])

    async def skew(self, job: str) -> SkewView:
        """Return who waits for whom in a job's collectives."""
        return await self._ask("GET", f"/v1/jobs/{quote(job, safe='')}/skew", SkewView)

    async def profile(self, job: str, ask: ProfileAsk) -> ProfileView:
        """Ask ranks for kernel timings; the answer names the profile, which ``profiled`` shows."""
        return await self._ask("POST", f"/v1/jobs/{quote(job, safe='')}/profile", ProfileView, body=ask)

    async def profiled(self, job: str, name: str) -> ProfileView:
        """Return what is known of a profile: ``state`` waiting or done."""
        path = f"/v1/jobs/{quote(job, safe='')}/profile/{quote(name, safe='')}"
        return await self._ask("GET", path, ProfileView)

    async def live_snapshot(self, job: str = "") -> Frame:
        """Return what there is to see of a job now; without a name, of the one that needs a look most.

        Raises:
            VersionError: the controller speaks a version that this program does not.
        """
        found = await self._ask("GET", "/v1/live/snapshot", Frame, query={"job": job} if job else None)
        check_version(f"the live view of the controller at {self.url}", found.version, LIVE_VERSION)
        return found

    async def live(self, job: str = "") -> AsyncIterator[Frame]:
        """Yield frames as they come, the first one whole; ends when the controller ends the stream.

        A controller that lives sends one a second: none for ``timeout_s`` is an error as for every request.

        Raises:
            VersionError: the controller speaks a version that this program does not.
        """
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, connect=self._timeout_s, sock_read=self._timeout_s)
        try:
            async with self._opened().get(
                f"{self.url}/v1/live", params={"job": job} if job else None, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    self._refuse("/v1/live", response.status, await response.read())
                async for data in _events(response.content.iter_any()):
                    frame = _frames.decode(data)
                    check_version(f"the live view of the controller at {self.url}", frame.version, LIVE_VERSION)
                    yield frame
        except TimeoutError as error:
            raise ControllerUnreachableError(
                f"nothing was heard of the controller at {self.url} for {self._timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ControllerUnreachableError(f"no controller answers at {self.url}: {error}") from error
        except msgspec.MsgspecError as error:
            raise RefusedError(f"{self.url}/v1/live sent what is no frame of ours: {error}") from error

    async def healthz(self) -> dict[str, Any]:
        """Return the controller's own health: ``status`` ok or degraded, and why."""
        return await self._ask("GET", "/healthz", dict[str, Any])

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _ask(
        self,
        method: str,
        path: str,
        reply_type: type[T],
        *,
        query: dict[str, str] | None = None,
        body: msgspec.Struct | None = None,
        wait_s: float = 0.0,
    ) -> T:
        data = None if body is None else _encode(body)
        try:
            try:
                status, raw = await self._send(method, path, query, data, wait_s)
            except (ConnectionResetError, BrokenPipeError):
                status, raw = await self._send(method, path, query, data, wait_s)
        except TimeoutError as error:
            patience_s = self._timeout_s + wait_s
            raise ControllerUnreachableError(
                f"no answer from the controller at {self.url} in {patience_s:g} s"
            ) from error
        except OSError as error:
            raise ControllerUnreachableError(f"no controller answers at {self.url}: {error}") from error
        if status >= 400:
            self._refuse(path, status, raw)
        try:
            return msgspec.json.decode(raw, type=reply_type)
        except msgspec.MsgspecError as error:
            raise self._no_reply(path, status, error) from error

    def _refuse(self, path: str, status: int, raw: bytes) -> NoReturn:
        """Raise what an answer other than a good one means."""
        try:
            sentence = msgspec.json.decode(raw, type=ErrorReply).error
        except msgspec.MsgspecError as error:
            if status in _AWAY:
                raise ControllerUnreachableError(f"no controller answers at {self.url}: HTTP {status}") from error
            raise self._no_reply(path, status, error) from error
        if status in _AWAY:
            raise ControllerUnreachableError(f"the controller at {self.url} has no time: {sentence}")
        raise RefusedError(sentence)

    def _no_reply(self, path: str, status: int, error: msgspec.MsgspecError) -> RefusedError:
        return RefusedError(f"{self.url}{path} answered HTTP {status} with what is no reply of ours: {error}")

    def _opened(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, data: bytes | None, wait_s: float
    ) -> tuple[int, bytes]:
        """Return a response's status and body; raises OSError, ConnectionResetError where asking again is worth it."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._timeout_s + wait_s, connect=self._timeout_s)
        try:
            async with self._opened().request(
                method, self.url + path, params=query, data=data, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            if isinstance(error, OSError):
                raise
            kind = ConnectionResetError if isinstance(error, aiohttp.ServerDisconnectedError) else ConnectionError
            raise kind(str(error)) from error


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; whatever else an event says is passed over."""
    rest = b""
    async for chunk in chunks:
        # Only what is new can hold the end, but for its first byte: a frame of 12,288 ranks comes in many pieces.
        searched = max(0, len(rest) - 1)
        rest += chunk
        while (end := rest.find(b"\n\n", searched)) >= 0:
            lines = rest[:end].split(b"\n")
            data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
            rest, searched = rest[end + 2 :], 0
            if data:
                yield data
        if len(rest) > _MOST_EVENT_BYTES:
            raise ControllerUnreachableError("an event of the live view has no end")


class BlockingLink:
    """The same requests for threads; an event loop of its own runs in a daemon thread until ``close``.

    Any number of threads may call at once. After ``close``, waiting calls end with ``ControllerUnreachableError``.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0, ca_file: Path | None = None) -> None:
        self._link = Link(url, token, timeout_s, ca_file)
        self.url = self._link.url
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="megascale-link", daemon=True)
        self._thread.start()

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """See ``Link.heartbeat``."""
        return self._wait(self._link.heartbeat(heartbeat))

    def evidence(self, evidence: Evidence) -> None:
        """See ``Link.evidence``."""
        return self._wait(self._link.evidence(evidence))

    def join(self, join: Join, wait_s: float = 20.0) -> JoinReply:
        """See ``Link.join``."""
        return self._wait(self._link.join(join, wait_s))

    def orders(
        self, job: str, node: str, runner_id: str, round_: int, after: str = "", wait_s: float = 20.0
    ) -> OrdersReply:
        """See ``Link.orders``."""
        return self._wait(self._link.orders(job, node, runner_id, round_, after, wait_s))

    def leave(self, leave: Leave) -> None:
        """See ``Link.leave``."""
        return self._wait(self._link.leave(leave))

    def status(self, job: str | None = None) -> Status:
        """See ``Link.status``."""
        return self._wait(self._link.status(job))

    def incidents(self, job: str | None = None) -> Incidents:
        """See ``Link.incidents``."""
        return self._wait(self._link.incidents(job))

    def incident(self, incident_id: str) -> Incident:
        """See ``Link.incident``."""
        return self._wait(self._link.incident(incident_id))

    def hardware(self) -> BadHardwareList:
        """See ``Link.hardware``."""
        return self._wait(self._link.hardware())

    def mend_hardware(self, uuid: str) -> None:
        """See ``Link.mend_hardware``."""
        return self._wait(self._link.mend_hardware(uuid))

    def policy(self, job: str) -> PolicyView:
        """See ``Link.policy``."""
        return self._wait(self._link.policy(job))

    def set_policy(self, job: str, settings: dict[str, str]) -> PolicyView:
        """See ``Link.set_policy``."""
        return self._wait(self._link.set_policy(job, settings))

    def history(self, job: str) -> bytes:
        """See ``Link.history``."""
        return self._wait(self._link.history(job))

    def targets(self) -> tuple[TargetGroup, ...]:
        """See ``Link.targets``."""
        return self._wait(self._link.targets())

    def skew(self, job: str) -> SkewView:
        """See ``Link.skew``."""
        return self._wait(self._link.skew(job))

    def profile(self, job: str, ask: ProfileAsk) -> ProfileView:
        """See ``Link.profile``."""
        return self._wait(self._link.profile(job, ask))

    def profiled(self, job: str, name: str) -> ProfileView:
        """See ``Link.profiled``."""
        return self._wait(self._link.profiled(job, name))

    def healthz(self) -> dict[str, Any]:
        """See ``Link.healthz``."""
        return self._wait(self._link.healthz())

    def close(self) -> None:
        """End waiting calls, close the connections and stop the thread."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def _end(self) -> None:
        waiting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self._link.close()

    def _wait(self, request: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            request.close()
            raise ControllerUnreachableError(f"the link to {self.url} is closed")
        try:
            return asyncio.run_coroutine_threadsafe(request, self._loop).result()
        except concurrent.futures.CancelledError as error:
            raise ControllerUnreachableError(f"the link to {self.url} was closed while waiting") from error


class Spool:
    """Heartbeats that could not be delivered yet, oldest first and bounded.

    ``limit`` 120: two minutes at one a second, 160 KB at 8 ranks. When more are lost, the sequence gap makes the
    controller ask for everything, so nothing but history is gone.
    """

    def __init__(self, limit: int = 120) -> None:
        self._waiting: deque[Heartbeat] = deque(maxlen=limit)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, heartbeat: Heartbeat) -> None:
        """Keep one more; the oldest gives way when the spool is full."""
        if len(self._waiting) == self._waiting.maxlen:
            self.dropped += 1
        self._waiting.append(heartbeat)

    async def send(self, link: Link, heartbeat: Heartbeat) -> HeartbeatReply:
        """Deliver what waits, then ``heartbeat``; the replies' orders are joined.

        A heartbeat that the controller refuses is not kept: it would be refused again.

        Raises:
            ControllerUnreachableError: everything undelivered is kept for the next call.
            RefusedError: the controller refused ``heartbeat`` or one before it.
        """
        self.put(msgspec.structs.replace(heartbeat, spooled=len(self._waiting)))
        orders: list[Any] = []
        last = HeartbeatReply()
        while self._waiting:
            first = self._waiting[0]
            try:
                last = await link.heartbeat(first)
            except RefusedError:
                self._waiting.popleft()
                raise
            if self._waiting and self._waiting[0] is first:
                self._waiting.popleft()
            orders.extend(last.orders)
        return msgspec.structs.replace(last, orders=tuple(orders))
