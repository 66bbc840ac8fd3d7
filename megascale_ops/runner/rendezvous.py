# SPDX-License-Identifier: Apache-2.0
"""The rendezvous backend ``megascale``: the controller decides which nodes take part and when all start again.

Registered under torch's entry point ``torchrun.handlers``, so plain torchrun can use it:

    torchrun --rdzv-backend megascale --rdzv-endpoint HOST:PORT --rdzv-id JOB --max-restarts 100 train.py

Every round gets a TCPStore of its own. Torch keeps one store for all rounds, with keys that carry no attempt number;
a restarted rank may read its peer's dead address from it, and the restart hangs (torch issue 135712). Each node offers
a fresh store when it joins; the controller picks the one of node rank 0 and the others are dropped.

A restart is ordered from outside through ``num_nodes_waiting() > 0``, which torch asks for between two looks at the
ranks. The flag is tied to the round it was given for: one left over from an earlier round would restart for ever.
"""

import logging
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs leave them out
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.membership import Membership, Terms
from megascale_ops.runner.ranks.local_workers import LocalWorkers
from megascale_ops.schema.health import NodeCheck
from megascale_ops.schema.messages import JoinReply, Notice

log = logging.getLogger(__name__)

# 30 s: time for the store of node rank 0 to be reached over a busy network.
_STORE_TIMEOUT = timedelta(seconds=30)


class JobStopped(MegascaleError):  # noqa: N818  no error: the controller's decision
    """The controller ended the job; the text is its reason."""

    def __init__(self, reply: JoinReply) -> None:
        super().__init__(reply.reason or "the controller ended the job")
        self.reply = reply
        self.exit_code = reply.exit_code


class MegascaleRendezvous(RendezvousHandler):
    """Torch's view of the controller. Methods are called by torch elastic from one thread."""

    def __init__(
        self,
        link: BlockingLink,
        local_workers: LocalWorkers,
        terms: Terms,
        *,
        observe: Callable[[str, JoinReply | Notice], None] = lambda _kind, _reply: None,
        master: tuple[str, int] = ("", 0),
        check: Callable[[tuple[str, ...]], NodeCheck] | None = None,
    ) -> None:
        self._link = link
        self._local_workers = local_workers
        self._master = master
        self._part = Membership(link, local_workers, terms, check, lambda notice: observe("notice", notice))
        self._observe = observe
        self._stores: list[TCPStore] = []
        self._unmet: tuple[int, ...] = ()

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the store that node rank 0 offered, unless the user has named a port for rank 0's own.

        Torch makes every rank a client as long as this is true, also of ``tcp://HOST:PORT`` where no rank would serve.
        """
        return not self._master[1]

    def get_backend(self) -> str:
        """Return the name that torchrun's ``--rdzv-backend`` takes."""
        return "megascale"

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._local_workers.place.job

    def is_closed(self) -> bool:
        """Return whether this runner has left."""
        return self._part.closed.is_set()

    def set_closed(self) -> None:
        """Take no further part."""
        self._part.closed.set()

    def num_nodes_waiting(self) -> int:
        """Return 1 when the controller has ordered a restart of the current round.

        Raises:
            JobStopped: when it has ordered the end of the job.
        """
        order = self._part.order
        if order is None:
            return 0
        if order.kind == "shutdown":
            self._part.count_out()  # the controller has counted this runner out
            code = 0 if self._part.is_known else 1  # not known any more: another runner has this one's place
            raise JobStopped(JoinReply(status="stop", reason=order.reason, incident=order.incident, exit_code=code))
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round.

        Raises:
            JobStopped: the controller ended the job instead.
            ControllerUnreachableError: no answer for ``join_timeout_s``.
        """
        exits = self._local_workers.exits() if self._part.round else ()
        while True:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)  # noqa: S104  the ranks of other nodes must reach it
            reply = self._part.join(store.port, exits, self._unmet)
            self._unmet = ()
            if reply.status == "stop":
                self._part.count_out()
                self._observe("stop", reply)
                raise JobStopped(reply)
            self._local_workers.begin_round(reply.round, reply.job_id, reply.restore_before)
            self._observe("go", reply)
            self._part.listen()
            try:
                if reply.node_rank != 0:
                    store = TCPStore(reply.master_addr, reply.master_port, is_master=False, timeout=_STORE_TIMEOUT)
            except DistError as error:
                # The controller is reached and the other node is not: this runner may try again.
                where = f"{reply.master_addr}:{reply.master_port}"
                log.warning("round %d: its store at %s can't be reached (%s); asking anew", reply.round, where, error)
                exits, self._unmet = (), (0,)
                continue
            break
        # The store of the round before may still serve a rank that is dying: let it live one round longer.
        self._stores = [*self._stores[-1:], store]
        return RendezvousInfo(
            PrefixStore(f"megascale/{reply.round}", store),
            reply.node_rank,
            reply.nodes,
            RendezvousStoreInfo(self._master[0] or reply.master_addr, self._master[1] or reply.master_port),
        )

    def ask_anew(self, error: DistError, *, reached: bool) -> None:
        """Record that the nodes of this round did not meet in its store; the next join reports it to the controller."""
        self._unmet = () if reached else (0,)
        log.warning("round %d: its nodes did not meet (%s); asking anew", self.round, error)

    @property
    def round(self) -> int:
        """Number of the current round; 0 before the first."""
        return self._part.round

    def end(self) -> None:
        """Take note that the run is ended from outside: what is stopped now is not started again."""
        self._local_workers.is_ending = True

    def hurry(self) -> None:
        """Grant the ranks that are being stopped no more time; called by a signal's handler."""
        for worker in self._local_workers.workers:
            worker.hurry()

    def leave(self, outcome: str, reason: str = "") -> None:
        """Report to the controller that this runner is done; a failure is ignored, since nothing depends on it."""
        self._part.leave(outcome, reason)

    def wait_for_others(self, patience_s: float) -> None:
        """Report that this node's ranks have succeeded, and wait until the job is over or goes on without this node."""
        self._part.wait_for_others(patience_s)

    def shutdown(self) -> bool:
        """Leave, called by torch when its engine is done for whatever reason."""
        codes = [worker.proc.poll() for worker in self._local_workers.workers]
        self.leave("succeeded" if codes and all(code == 0 for code in codes) else "failed")
        self._link.close()
        return True


def _create(params: RendezvousParameters) -> RendezvousHandler:
    handler = params.get("handler")
    if isinstance(handler, MegascaleRendezvous):
        return handler
    from megascale_ops.runner.torchrun import part_in

    return MegascaleRendezvous(*part_in(params))


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point for torch's rendezvous registry."""
    return _create
