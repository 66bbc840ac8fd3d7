# SPDX-License-Identifier: Apache-2.0
"""What the controller can be asked: one typed request a method, for asyncio programs."""

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import msgspec

from megascale_ops.errors import ControllerUnreachableError, StrangerError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.connection import Connection, reply_of
from megascale_ops.link.events import read_events
from megascale_ops.schema.collectives import SkewView
from megascale_ops.schema.events import AuditEntries, BadHardwareList, Incident, Incidents, Status
from megascale_ops.schema.health import CheckAsk, NodeAsk, NodeMoves, NodesView, SelfCheckView
from megascale_ops.schema.history import HistoryReply
from megascale_ops.schema.kernels import ProfileAsk, ProfileView
from megascale_ops.schema.live import LIVE_VERSION, Frame
from megascale_ops.schema.messages import (
    CheckpointView,
    Evidence,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    PolicyChange,
    PolicyView,
    StopAsk,
)
from megascale_ops.schema.recording.blocks import RecordedBlock, RecordedBlocks
from megascale_ops.schema.runs import LogPart, LogQuery
from megascale_ops.schema.targets import TargetGroup
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

# 10 s: a controller gives an agent 6 to read a log.
LOG_WAIT_S = 10.0
# 3 s: with the 5 of every request a leader that is paused is left after 8, when a standby has taken over.
SEVERAL_WAIT_S = 3.0
# 60 s: a block has a megabyte, and comes at 20 kB a second.
BLOCK_WAIT_S = 60.0
_frames = msgspec.json.Decoder(Frame)


class Link(Connection):
    """Typed requests to one controller; the arguments are those of ``Connection``.

    Raises:
        ControllerUnreachableError: (every request) no answer before the deadline.
        RefusedError: (every request) the controller refused; the message carries its sentence.
    """

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Report what an agent sees; the reply carries what its node should do."""
        reply = await self._ask("POST", "/v1/heartbeat", HeartbeatReply, body=heartbeat)
        self._newest(reply.epoch)
        return reply

    async def evidence(self, evidence: Evidence) -> None:
        """Hand in what was gathered for one order of one incident."""
        await self._ask("POST", "/v1/evidence", dict[str, Any], body=evidence)

    async def join(self, join: Join, wait_s: float = 20.0) -> JoinReply:
        """Ask for the next round; ``status`` wait means: ask again with the same ``join_id``."""
        wait_s = self._patience(wait_s)
        path = f"/v1/jobs/{quote(join.job, safe='')}/join"
        reply = await self._ask("POST", path, JoinReply, query={"wait_s": str(wait_s)}, body=join, wait_s=wait_s)
        self._newest(reply.epoch)
        return reply

    async def orders(
        self,
        job: str,
        node: str,
        runner_id: str,
        round_: int,
        after: str = "",
        wait_s: float = 20.0,
        incidents: int = 0,
        noticed: int = -1,
    ) -> OrdersReply:
        """Wait for orders to this runner; also its heartbeat.

        ``after`` is the last order id executed, ``incidents`` the highest number of an incident that it has received,
        ``noticed`` that of the newest notice; -1: it wants none.
        """
        wait_s = self._patience(wait_s)
        query = {"node": node, "runner_id": runner_id, "round": str(round_), "after": after, "wait_s": str(wait_s)}
        query |= {"incidents": str(incidents), "noticed": str(noticed)}
        path = f"/v1/jobs/{quote(job, safe='')}/orders"
        reply = await self._ask("GET", path, OrdersReply, query=query, wait_s=wait_s)
        self._newest(reply.epoch)
        return reply

    def _patience(self, wait_s: float) -> float:
        """Return how long an answer may be waited for: of several controllers one may be paused, and say nothing."""
        return min(wait_s, SEVERAL_WAIT_S) if len(self.urls) > 1 else wait_s

    async def leave(self, leave: Leave) -> None:
        """Report that this runner is done, and how it ended."""
        await self._ask("POST", f"/v1/jobs/{quote(leave.job, safe='')}/leave", dict[str, Any], body=leave)

    async def status(
        self, job: str | None = None, *, brief: bool = False, while_round: int = 0, wait_s: float = 0.0
    ) -> Status:
        """Return all jobs as the controller sees them, or one.

        ``brief``: without nodes and ranks, which costs the controller the same for a job of any size. ``while_round``:
        once the job is over or in another round, ``wait_s`` at the latest. A controller that is older than both
        answers at once and with everything.

        Raises:
            VersionError: the controller has a version that this program does not support.
        """
        query = {"job": job or "", "brief": "true" if brief else ""}
        if while_round:
            query |= {"while_round": str(while_round), "wait_s": str(wait_s)}
        asked = {name: value for name, value in query.items() if value}
        found = await self._ask("GET", "/v1/status", Status, query=asked or None, wait_s=wait_s)
        check_version(f"the controller at {self.url}", found.version, MESSAGE_VERSION)
        return found

    async def incidents(self, job: str | None = None, limit: int | None = None, before: str = "") -> Incidents:
        """Return incidents, newest last, without events and evidence texts.

        Without ``limit`` those that the controller has at hand, with it the newest so many that the journal has, older
        than the incident ``before`` where that is given.
        """
        given = {"job": job, "limit": str(limit) if limit else "", "before": before}
        query = {name: value for name, value in given.items() if value}
        return await self._ask("GET", "/v1/incidents", Incidents, query=query or None)

    async def incident(self, incident_id: str) -> Incident:
        """Return one incident with everything known about it."""
        return await self._ask("GET", f"/v1/incidents/{quote(incident_id, safe='')}", Incident)

    async def hardware(self) -> BadHardwareList:
        """Return the GPUs that are remembered as bad, the newest last."""
        return await self._ask("GET", "/v1/hardware", BadHardwareList)

    async def mend_hardware(self, uuid: str) -> None:
        """Record that a GPU was mended or replaced."""
        await self._ask("DELETE", f"/v1/hardware/{quote(uuid, safe='')}", dict[str, Any])

    async def audit(self, job: str = "", limit: int = 100, before: int = 0) -> AuditEntries:
        """Return who ordered what, newest last."""
        given = {"job": job, "limit": str(limit), "before": str(before) if before else ""}
        return await self._ask("GET", "/v1/audit", AuditEntries, query={k: v for k, v in given.items() if v})

    async def nodes(self) -> NodesView:
        """Return the nodes that are not simply healthy, and the day's limit."""
        return await self._ask("GET", "/v1/nodes", NodesView)

    async def node_moves(self, node: str) -> NodeMoves:
        """Return a node's moves, oldest first."""
        return await self._ask("GET", f"/v1/nodes/{quote(node, safe='')}", NodeMoves)

    async def ask_node(self, node: str, ask: NodeAsk) -> NodeMoves:
        """Have something done with a node by hand."""
        return await self._ask("POST", f"/v1/nodes/{quote(node, safe='')}", NodeMoves, body=ask)

    async def check_node(self, node: str, ask: CheckAsk) -> SelfCheckView:
        """Have a node's agent check the node; ``checked_node`` shows what comes of it."""
        return await self._ask("POST", f"/v1/nodes/{quote(node, safe='')}/check", SelfCheckView, body=ask)

    async def checked_node(self, node: str) -> SelfCheckView:
        """Return the newest self-check of a node."""
        return await self._ask("GET", f"/v1/nodes/{quote(node, safe='')}/check", SelfCheckView)

    async def policy(self, job: str) -> PolicyView:
        """Return the policy that a job lives under."""
        return await self._ask("GET", f"/v1/jobs/{quote(job, safe='')}/policy", PolicyView)

    async def set_policy(self, job: str, settings: dict[str, str]) -> PolicyView:
        """Change the policy of a job that lives, and return it as it is then."""
        path = f"/v1/jobs/{quote(job, safe='')}/policy"
        return await self._ask("POST", path, PolicyView, body=PolicyChange(settings))

    async def stop(self, job: str, reason: str = "") -> None:
        """End a job in order; ``reason`` is what its journal says of it."""
        await self._ask("POST", f"/v1/jobs/{quote(job, safe='')}/stop", dict[str, Any], body=StopAsk(reason))

    async def ask_checkpoint(self, job: str) -> CheckpointView:
        """Ask the ranks of a job that take SIGUSR1 for a checkpoint now; ``checkpoint`` says what comes of it."""
        return await self._ask("POST", f"/v1/jobs/{quote(job, safe='')}/checkpoint", CheckpointView)

    async def checkpoint(self, job: str) -> CheckpointView:
        """Return what has come of the last request for a checkpoint."""
        return await self._ask("GET", f"/v1/jobs/{quote(job, safe='')}/checkpoint", CheckpointView)

    async def history(self, job: str) -> bytes:
        """Return the history of a job's steps, as ``schema.history.decode`` reads it."""
        return (await self._ask("GET", f"/v1/jobs/{quote(job, safe='')}/history", HistoryReply)).data

    async def recordings(self) -> RecordedBlocks:
        """Return which blocks of recordings the controller has; it journals who has asked."""
        return await self._ask("GET", "/v1/recordings", RecordedBlocks)

    async def recorded_block(self, name: str) -> bytes:
        """Return one block of a recording."""
        path = f"/v1/recordings/{quote(name, safe='')}"
        return (await self._ask("GET", path, RecordedBlock, wait_s=BLOCK_WAIT_S)).data

    async def logs(self, job: str, query: LogQuery) -> LogPart:
        """Return a part of what a rank printed, which its node's agent may take seconds to read."""
        given = {name: str(value) for name, value in msgspec.to_builtins(query).items()}
        path = f"/v1/jobs/{quote(job, safe='')}/logs"
        return await self._ask("GET", path, LogPart, query=given, wait_s=LOG_WAIT_S)

    async def targets(self) -> tuple[TargetGroup, ...]:
        """Return where the agents' metrics are."""
        return await self._ask("GET", "/v1/sd/agents", tuple[TargetGroup, ...])

    async def skew(self, job: str) -> SkewView:
        """Return which ranks wait for which in a job's collectives."""
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
            VersionError: the controller has a version that this program does not support.
        """
        found = await self._ask("GET", "/v1/live/snapshot", Frame, query={"job": job} if job else None)
        check_version(f"the live view of the controller at {self.url}", found.version, LIVE_VERSION)
        return found

    async def live(self, job: str = "") -> AsyncIterator[Frame]:
        """Yield frames as they come, the first one whole; ends when the controller ends the stream.

        A controller that lives sends one a second: none for ``timeout_s`` is an error as for every request.

        Raises:
            VersionError: the controller has a version that this program does not support.
        """
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, connect=self._timeout_s, sock_read=self._timeout_s)
        asked = self.url
        try:
            async with self._opened().get(
                f"{asked}/v1/live",
                params={"job": job} if job else None,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    self._refuse("/v1/live", await reply_of(response))
                async for data in read_events(response.content.iter_any()):
                    frame = _frames.decode(data)
                    check_version(f"the live view of the controller at {self.url}", frame.version, LIVE_VERSION)
                    yield frame
        except TimeoutError as error:
            self._turn_from({asked}, ControllerUnreachableError())
            raise ControllerUnreachableError(
                f"nothing was heard of the controller at {asked} for {self._timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            self._turn_from({asked}, ControllerUnreachableError())
            reason = error if isinstance(error, OSError) else ConnectionError(str(error))
            raise await self._away(asked, reason) from error
        except ControllerUnreachableError as error:
            self._turn_from({asked}, error)
            raise
        except UNREADABLE as error:
            raise StrangerError(f"{self.url}/v1/live sent what is no frame of a controller: {error}") from error

    async def healthz(self) -> dict[str, Any]:
        """Return the controller's own health: ``status`` ok or degraded, and why."""
        return await self._ask("GET", "/healthz", dict[str, Any])
