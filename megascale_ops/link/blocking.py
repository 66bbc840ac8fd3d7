# SPDX-License-Identifier: Apache-2.0
"""The requests of ``Link`` for threads: the runner's and the command line's."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from megascale_ops.errors import ControllerUnreachableError
from megascale_ops.link.answers import Reply
from megascale_ops.link.connection import HEAR_S
from megascale_ops.link.listeners import first_words
from megascale_ops.link.requests import Link
from megascale_ops.schema.collectives import SkewView
from megascale_ops.schema.events import AuditEntries, BadHardwareList, Incident, Incidents, Status
from megascale_ops.schema.health import CheckAsk, NodeAsk, NodeMoves, NodesView, SelfCheckView
from megascale_ops.schema.kernels import ProfileAsk, ProfileView
from megascale_ops.schema.messages import (
    CheckpointView,
    Evidence,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    PolicyView,
)
from megascale_ops.schema.recording.blocks import RecordedBlocks
from megascale_ops.schema.runs import LogPart, LogQuery
from megascale_ops.schema.targets import TargetGroup

T = TypeVar("T")


class _Direct(Link):
    """A link whose requests block: its coroutines run to their end at once, without an event loop."""

    def __init__(self, url: str, token: str | None, timeout_s: float, ca_file: Path | None) -> None:
        from megascale_ops.link.http_client import (
            HttpClient,
        )  # urllib3: half of what a verb imports that asks no controller

        super().__init__(url, token, timeout_s, ca_file)
        self.clients = {url: HttpClient(url, {}, tls=self._tls) for url in self.urls}

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, data: bytes | None, wait_s: float
    ) -> Reply:
        return self.clients[self.url].ask(
            method, path, query=query, body=data, headers=self._headers, patience_s=self._timeout_s + wait_s
        )

    async def _hear(self, url: str) -> bytes | None:
        return first_words(url, min(HEAR_S, self._timeout_s))  # there is no event loop to keep from its work


class BlockingLink:
    """The same requests for threads.

    Any number of threads may call at once. After ``close``, waiting calls end with ``ControllerUnreachableError``.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0, ca_file: Path | None = None) -> None:
        self._link = _Direct(url, token, timeout_s, ca_file)
        self._closed = False

    @property
    def url(self) -> str:
        """The address that is asked."""
        return self._link.url

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
        """See ``Link.orders``."""
        return self._wait(self._link.orders(job, node, runner_id, round_, after, wait_s, incidents, noticed))

    def leave(self, leave: Leave) -> None:
        """See ``Link.leave``."""
        return self._wait(self._link.leave(leave))

    def status(
        self, job: str | None = None, *, brief: bool = False, while_round: int = 0, wait_s: float = 0.0
    ) -> Status:
        """See ``Link.status``."""
        return self._wait(self._link.status(job, brief=brief, while_round=while_round, wait_s=wait_s))

    def incidents(self, job: str | None = None, limit: int | None = None, before: str = "") -> Incidents:
        """See ``Link.incidents``."""
        return self._wait(self._link.incidents(job, limit, before))

    def incident(self, incident_id: str) -> Incident:
        """See ``Link.incident``."""
        return self._wait(self._link.incident(incident_id))

    def recordings(self) -> RecordedBlocks:
        """See ``Link.recordings``."""
        return self._wait(self._link.recordings())

    def recorded_block(self, name: str) -> bytes:
        """See ``Link.recorded_block``."""
        return self._wait(self._link.recorded_block(name))

    def hardware(self) -> BadHardwareList:
        """See ``Link.hardware``."""
        return self._wait(self._link.hardware())

    def mend_hardware(self, uuid: str) -> None:
        """See ``Link.mend_hardware``."""
        return self._wait(self._link.mend_hardware(uuid))

    def audit(self, job: str = "", limit: int = 100, before: int = 0) -> AuditEntries:
        """See ``Link.audit``."""
        return self._wait(self._link.audit(job, limit, before))

    def nodes(self) -> NodesView:
        """See ``Link.nodes``."""
        return self._wait(self._link.nodes())

    def node_moves(self, node: str) -> NodeMoves:
        """See ``Link.node_moves``."""
        return self._wait(self._link.node_moves(node))

    def ask_node(self, node: str, ask: NodeAsk) -> NodeMoves:
        """See ``Link.ask_node``."""
        return self._wait(self._link.ask_node(node, ask))

    def check_node(self, node: str, ask: CheckAsk) -> SelfCheckView:
        """See ``Link.check_node``."""
        return self._wait(self._link.check_node(node, ask))

    def checked_node(self, node: str) -> SelfCheckView:
        """See ``Link.checked_node``."""
        return self._wait(self._link.checked_node(node))

    def policy(self, job: str) -> PolicyView:
        """See ``Link.policy``."""
        return self._wait(self._link.policy(job))

    def set_policy(self, job: str, settings: dict[str, str]) -> PolicyView:
        """See ``Link.set_policy``."""
        return self._wait(self._link.set_policy(job, settings))

    def stop(self, job: str, reason: str = "") -> None:
        """See ``Link.stop``."""
        return self._wait(self._link.stop(job, reason))

    def ask_checkpoint(self, job: str) -> CheckpointView:
        """See ``Link.ask_checkpoint``."""
        return self._wait(self._link.ask_checkpoint(job))

    def checkpoint(self, job: str) -> CheckpointView:
        """See ``Link.checkpoint``."""
        return self._wait(self._link.checkpoint(job))

    def history(self, job: str) -> bytes:
        """See ``Link.history``."""
        return self._wait(self._link.history(job))

    def logs(self, job: str, query: LogQuery) -> LogPart:
        """See ``Link.logs``."""
        return self._wait(self._link.logs(job, query))

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
        """End waiting calls and close the connections."""
        self._closed = True
        for client in self._link.clients.values():
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _wait(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a request to its end, which ``_Direct`` lets it reach without a pause."""
        if self._closed:
            request.close()
            raise ControllerUnreachableError(f"the link to {self.url} is closed")
        try:
            request.send(None)
        except StopIteration as end:
            answer: T = end.value
            return answer
        except ControllerUnreachableError as error:
            if self._closed:
                raise ControllerUnreachableError(f"the link to {self.url} was closed while waiting") from error
            raise
        request.close()
        raise AssertionError("a request of a blocking link waits for an event loop")
