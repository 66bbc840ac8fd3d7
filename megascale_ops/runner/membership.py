# SPDX-License-Identifier: Apache-2.0
"""This runner's part in a job: it asks for a place in each round, takes orders while it runs, and leaves at the end.

A long poll for orders is also the runner's heartbeat. While the controller is away, training goes on and the runner
asks again; a controller that comes back without its journal gets the round that runs here.
"""

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable

import msgspec

from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.ranks.local_workers import LocalWorkers
from megascale_ops.schema.events import OVER
from megascale_ops.schema.health import NodeCheck
from megascale_ops.schema.messages import Join, JoinReply, Leave, Notice, Order, RankExit, unknown_outcome
from megascale_ops.schema.policy import JobPolicy

log = logging.getLogger(__name__)

# 20 s: below the idle limits of proxies; the answer comes at once when there is one.
_LONG_POLL_S = 20.0
# 3 s: a network that has just come back has no route for a second.
_LEAVE_S = 3.0
# 0.5 s: nothing waits for a node that is done, and only a controller that is too old to wait is asked so often.
_OTHERS_POLL_S = 0.5
# Back-off while the controller is away: the run's own restarts within a second.
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Terms(msgspec.Struct, frozen=True):
    """What this node offers in every join."""

    min_nodes: int
    max_nodes: int
    addr: str
    policy: JobPolicy
    node_rank: int = -1  # the place among the nodes of the first round that the launch line requests


class Membership:
    """One runner among those of a job. Orders are heard by a thread; all else is asked from one thread."""

    def __init__(
        self,
        link: BlockingLink,
        local_workers: LocalWorkers,
        terms: Terms,
        check: Callable[[tuple[str, ...]], NodeCheck] | None = None,
        notice: Callable[[Notice], None] = lambda _notice: None,
    ) -> None:
        self._notice = notice  # tells the user; one node's runner does
        self._noticed = 0  # the number of the newest
        self._check = check  # measures this node, by the checks that are named, or by all
        self._link = link
        self._local_workers = local_workers
        self._terms = terms
        self._runner_id = uuid.uuid4().hex
        self.round = 0  # 0 before the first
        self.nodes = 1
        self.closed = threading.Event()
        self.is_known = True  # to the controller, by its last orders
        self._joined: tuple[Join | None, JoinReply] = (None, JoinReply(status="wait"))  # of the round that runs
        self._order: Order | None = None
        self._last_order = ""
        self._incidents = 0  # the highest number of an incident received: a controller may lose it, see _resume
        self._left = False
        self._listener: threading.Thread | None = None

    @property
    def order(self) -> Order | None:
        """What the controller has ordered for the round that runs here, if anything."""
        order = self._order
        return order if order is not None and order.round == self.round else None

    def count_out(self) -> None:
        """Record that the controller has ended this runner's part: nothing more is to be sent to it."""
        self._left = True

    def join(self, store_port: int, exits: tuple[RankExit, ...], unmet: tuple[int, ...] = ()) -> JoinReply:
        """Ask for a place in the next round until there is an answer: go, or stop.

        Args:
            store_port: where this node's store for the round is.
            exits: how the ranks of the round before ended.
            unmet: nodes of the round before, by their place in it, that this one could not meet.

        Raises:
            ControllerUnreachableError: no answer, or no round, for ``join_timeout_s``.
        """
        ordered = self.order is not None
        failed = any(exit_.code != 0 and not exit_.by_us for exit_ in exits)
        join = Join(
            job=self._local_workers.place.job,
            node=self._local_workers.place.node,
            runner_id=self._runner_id,
            join_id=uuid.uuid4().hex,
            nproc=self._local_workers.place.nproc,
            min_nodes=self._terms.min_nodes,
            max_nodes=self._terms.max_nodes,
            addr=self._terms.addr,
            node_rank=self._terms.node_rank,
            store_port=store_port,
            mono_s=time.monotonic(),
            previous_round=self.round,
            incidents=self._incidents,
            cause="start" if not self.round else "failure" if failed or not ordered else "order",
            exits=exits,
            unmet=unmet,
            policy=self._terms.policy,
            run_dir=self._local_workers.place.run_dir,
            job_id=self._local_workers.job_id,
            can_check=self._check is not None,
        )
        deadline = time.monotonic() + self._terms.policy.join_timeout_s + _LONG_POLL_S
        self._joined = (None, JoinReply(status="wait"))  # between two rounds there is nothing to resume
        reply = self._ask_until_answered(join, deadline)
        if reply.status == "go":
            self._joined = (join, reply)
            self.round, self.nodes = reply.round, reply.nodes
        return reply

    def _ask_until_answered(self, join: Join, deadline: float) -> JoinReply:
        failures, told = 0, ""
        while True:
            try:
                fresh = msgspec.structs.replace(join, mono_s=time.monotonic())
                reply = self._link.join(fresh, wait_s=_LONG_POLL_S)
                self._incidents = max(self._incidents, reply.incidents)
                failures = 0
            except ControllerUnreachableError as error:
                if failures == 0:
                    log.warning("the controller is away; %s waits for it to join the next round: %s", join.node, error)
                if time.monotonic() > deadline or self.closed.is_set():
                    raise
                time.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            if reply.status == "check" and self._check is not None:
                log.warning("this node is measured before it takes part again: %s", reply.reason)
                began = time.monotonic()
                join = msgspec.structs.replace(join, check=self._check(reply.checks))
                deadline += time.monotonic() - began
                continue
            if reply.status != "wait":
                return reply
            if reply.reason:  # a spare: the job runs without this node, and may need it later
                if not told:
                    log.warning("%s", reply.reason)
                told = reply.reason
                deadline = time.monotonic() + self._terms.policy.join_timeout_s + _LONG_POLL_S
            if time.monotonic() > deadline:
                raise ControllerUnreachableError(
                    f"job {join.job}: no round was formed within {self._terms.policy.join_timeout_s:.0f} s; "
                    f"{join.node} gives up (are at least {join.min_nodes} nodes started?)"
                )

    def listen(self) -> None:
        """Hear orders from now on, in a thread of its own."""
        if self._listener is None:
            self._listener = threading.Thread(target=self._run_listener, name="orders", daemon=True)
            self._listener.start()

    def _run_listener(self) -> None:
        """Hold a long poll for orders; it is also this runner's heartbeat."""
        failures = 0
        while not self.closed.is_set():
            place, asked = self._local_workers.place, self.round
            noticed = self._noticed if self._joined[1].node_rank == 0 else -1  # one node of thousands tells the user
            try:
                reply = self._link.orders(
                    place.job,
                    place.node,
                    self._runner_id,
                    asked,
                    self._last_order,
                    _LONG_POLL_S,
                    self._incidents,
                    noticed,
                )
                self._incidents = max(self._incidents, reply.incidents)
                failures = 0
            except MegascaleError as error:
                if failures == 0 and not self.closed.is_set():
                    log.warning("no orders from the controller (training goes on): %s", error)
                self.closed.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            if noticed >= 0:
                self._noticed = reply.noticed
            for notice in reply.notices if not reply.orders else ():  # what is acted upon the next round tells
                self._notice(notice)
            for order in reply.orders:
                self._last_order = order.id
                if order.round == self.round:
                    self._order, self.is_known = order, reply.known
            if not reply.orders and not reply.known:
                self._resume(asked)
                self.closed.wait(0.5)

    def _resume(self, asked: int) -> None:
        """Describe the round that runs here: the controller may have lost its journal, or the end of it.

        Not when it was asked about another round than the one that runs now: of that one it rightly knows nothing more.
        """
        join, place = self._joined
        if join is None or place.round != asked:
            return
        described = msgspec.structs.replace(
            join,
            cause="resume",
            previous_round=place.round,
            node_rank=place.node_rank,
            nodes=place.nodes,
            job_id=place.job_id,
            incidents=self._incidents,
            mono_s=time.monotonic(),
            exits=(),
        )
        try:
            reply = self._link.join(described, wait_s=0.0)
        except MegascaleError as error:
            log.debug("the controller does not take round %d over: %s", place.round, error)
            return
        if reply.status == "go":
            log.warning("the controller had lost what it knew of this job and watches round %d again", place.round)

    def leave(self, outcome: str, reason: str = "") -> None:
        """Report to the controller that this runner is done; tried for _LEAVE_S, then given up.

        A controller that is older than the outcome gets none in its place: each that it knows is about a node that is
        done or a job that is over, and this job goes on. It sees the node go, as it sees one that dies.
        """
        self.closed.set()
        if self._left or not self.round:
            return
        self._left = True
        place = self._local_workers.place
        leave = Leave(
            job=place.job,
            node=place.node,
            runner_id=self._runner_id,
            outcome=outcome,
            round=self.round,
            exits=self._local_workers.exits(),
            mono_s=time.monotonic(),
            reason=f"{place.node}: {reason}" if reason else "",
        )
        deadline = time.monotonic() + _LEAVE_S
        while True:
            try:
                self._link.leave(leave)
            except MegascaleError as error:
                if isinstance(error, ControllerUnreachableError) and time.monotonic() < deadline:
                    time.sleep(_RETRY_S[0])
                    continue
                if isinstance(error, RefusedError) and unknown_outcome(outcome) in str(error):
                    log.warning(
                        "the controller is older than this program and knows no node that leaves as %s: it will take "
                        "%s for lost, and the job goes on as after a lost node; update the controller",
                        *(outcome, place.node),
                    )
                    return
                log.warning("the controller was not told that %s is done: %s", place.node, error)
            return

    def wait_for_others(self, patience_s: float) -> None:
        """Report that this node's ranks have succeeded, and wait until the job is over or goes on without this node."""
        self.leave("succeeded")
        if self.nodes == 1:
            return
        deadline = time.monotonic() + patience_s
        job = self._local_workers.place.job
        while time.monotonic() < deadline:
            try:
                left_s = max(0.0, min(_LONG_POLL_S, deadline - time.monotonic()))
                told = self._link.status(job, brief=True, while_round=self.round, wait_s=left_s)
                found = next((status for status in told.jobs if status.job == job), None)
            except MegascaleError as error:
                log.warning("the controller does not say whether the other nodes are done: %s", error)
                return
            if found is None or found.round != self.round or found.state in OVER:
                return
            time.sleep(_OTHERS_POLL_S)
        log.warning(
            "other nodes of job %s are still not done after %.0f s; %s ends",
            job,
            patience_s,
            self._local_workers.place.node,
        )


def local_address(controller_url: str) -> str:
    """Return the address by which other nodes reach this one: the one that the way to the controller starts from."""
    host = controller_url.rsplit("//", maxsplit=1)[-1].split("/", maxsplit=1)[0].rsplit(":", 1)[0].strip("[]")
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
