# SPDX-License-Identifier: Apache-2.0
"""The rendezvous backend ``megascale``: the controller decides who takes part and when everybody starts again.

Registered under torch's entry point ``torchrun.handlers``, so plain torchrun can use it:

    torchrun --rdzv-backend megascale --rdzv-endpoint HOST:PORT --rdzv-id JOB --max-restarts 100 train.py

Every round gets a TCPStore of its own. Torch keeps one store for all rounds, with keys that carry no attempt number;
a restarted rank may read its peer's dead address from it, and the restart hangs (torch issue 135712). Each node offers
a fresh store when it joins; the controller picks the one of node rank 0 and the others are dropped.

A restart is ordered from outside through ``num_nodes_waiting() > 0``, which torch asks for between two looks at the
ranks. The flag is tied to the round it was given for: one left over from an earlier round would restart for ever.
"""

import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs leave them out
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from megascale_ops.errors import ControllerUnreachableError, MegascaleError, UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.crew import Crew, Place
from megascale_ops.runner.processes import Worker
from megascale_ops.runner.profiler import Profiler, has_device
from megascale_ops.schema import environment
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.messages import JobPolicy, Join, JoinReply, Leave, Order, RankExit

log = logging.getLogger(__name__)

# 20 s: below the idle limits of proxies; the answer comes at once when there is one.
_LONG_POLL_S = 20.0
# 30 s: time for the store of node rank 0 to be reached over a busy network.
_STORE_TIMEOUT = timedelta(seconds=30)
# 0.5 s: nothing waits for a node that is done.
_OTHERS_POLL_S = 0.5
# Back-off while the controller is away: it restarts within a second when it is ours.
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class JobStopped(MegascaleError):  # noqa: N818  not an error of ours: the controller's decision
    """The controller ended the job; the text is its reason."""

    def __init__(self, reply: JoinReply) -> None:
        super().__init__(reply.reason or "the controller ended the job")
        self.reply = reply
        self.exit_code = reply.exit_code


class Terms(msgspec.Struct, frozen=True):
    """What this node offers in every join."""

    min_nodes: int
    max_nodes: int
    addr: str
    policy: JobPolicy


class MegascaleRendezvous(RendezvousHandler):
    """Torch's view of the controller. Methods are called by torch elastic from one thread."""

    def __init__(
        self,
        link: BlockingLink,
        crew: Crew,
        terms: Terms,
        *,
        observe: Callable[[str, JoinReply], None] = lambda _kind, _reply: None,
    ) -> None:
        self._link = link
        self._crew = crew
        self._terms = terms
        self._observe = observe
        self._runner_id = uuid.uuid4().hex
        self._round = 0
        self._nodes = 1
        self._joined: tuple[Join | None, JoinReply] = (None, JoinReply(status="wait"))  # of the round that runs
        self._order: Order | None = None
        self._last_order = ""
        self._is_known = True  # to the controller, as far as its last orders say
        self._closed = threading.Event()
        self._left = False
        self._stores: list[TCPStore] = []
        self._listener: threading.Thread | None = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the store that node rank 0 offered."""
        return True

    def get_backend(self) -> str:
        """Return the name that torchrun's ``--rdzv-backend`` takes."""
        return "megascale"

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._crew.place.job

    def is_closed(self) -> bool:
        """Tell whether this runner has left."""
        return self._closed.is_set()

    def set_closed(self) -> None:
        """Take no further part."""
        self._closed.set()

    def num_nodes_waiting(self) -> int:
        """Return 1 when the controller has ordered a restart of the current round.

        Raises:
            JobStopped: when it has ordered the end of the job.
        """
        order = self._order
        if order is None or order.round != self._round:
            return 0
        if order.kind == "shutdown":
            self._left = True  # whoever ends it has counted this runner out
            code = 0 if self._is_known else 1  # not known any more: another runner has this one's place
            raise JobStopped(JoinReply(status="stop", reason=order.reason, incident=order.incident, exit_code=code))
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round.

        Raises:
            JobStopped: the controller ended the job instead.
            ControllerUnreachableError: nobody answered for ``join_timeout_s``.
        """
        exits = self._crew.exits() if self._round else ()
        while True:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)  # noqa: S104  the ranks of other nodes must reach it
            reply = self._join(store.port, exits)
            if reply.status == "stop":
                self._left = True
                self._observe("stop", reply)
                raise JobStopped(reply)
            self._round, self._nodes = reply.round, reply.nodes
            self._crew.begin_round(reply.round)
            self._observe("go", reply)
            self._listen()
            try:
                if reply.node_rank != 0:
                    store = TCPStore(reply.master_addr, reply.master_port, is_master=False, timeout=_STORE_TIMEOUT)
            except DistError as error:
                # The controller is reached and the other node is not: nothing that ends this runner for good.
                where = f"{reply.master_addr}:{reply.master_port}"
                log.warning("round %d: its store at %s can't be reached (%s); asking anew", reply.round, where, error)
                exits = ()
                continue
            break
        # The store of the round before may still serve a rank that is dying: let it live one round longer.
        self._stores = [*self._stores[-1:], store]
        return RendezvousInfo(
            PrefixStore(f"megascale/{reply.round}", store),
            reply.node_rank,
            reply.nodes,
            RendezvousStoreInfo(reply.master_addr, reply.master_port),
        )

    def _join(self, store_port: int, exits: tuple[RankExit, ...]) -> JoinReply:
        ordered = self._order is not None and self._order.round == self._round
        failed = any(exit_.code != 0 and not exit_.by_us for exit_ in exits)
        join = Join(
            job=self._crew.place.job,
            node=self._crew.place.node,
            runner_id=self._runner_id,
            join_id=uuid.uuid4().hex,
            nproc=self._crew.place.nproc,
            min_nodes=self._terms.min_nodes,
            max_nodes=self._terms.max_nodes,
            addr=self._terms.addr,
            store_port=store_port,
            mono_s=time.monotonic(),
            previous_round=self._round,
            cause="start" if not self._round else "failure" if failed or not ordered else "order",
            exits=exits,
            policy=self._terms.policy,
            run_dir=self._crew.place.run_dir,
        )
        deadline = time.monotonic() + self._terms.policy.join_timeout_s + _LONG_POLL_S
        self._joined = (None, JoinReply(status="wait"))  # between two rounds there is nothing to resume
        reply = self._ask_until_answered(join, deadline)
        if reply.status == "go":
            self._joined = (join, reply)
        return reply

    def _ask_until_answered(self, join: Join, deadline: float) -> JoinReply:
        failures, told = 0, ""
        while True:
            try:
                fresh = msgspec.structs.replace(join, mono_s=time.monotonic())
                reply = self._link.join(fresh, wait_s=_LONG_POLL_S)
                failures = 0
            except ControllerUnreachableError as error:
                if failures == 0:
                    log.warning("the controller is away; %s waits for it to join the next round: %s", join.node, error)
                if time.monotonic() > deadline or self._closed.is_set():
                    raise
                time.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
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

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = threading.Thread(target=self._run_listener, name="orders", daemon=True)
            self._listener.start()

    def _run_listener(self) -> None:
        """Hold a long poll for orders; it is also this runner's sign of life."""
        failures = 0
        while not self._closed.is_set():
            place, asked = self._crew.place, self._round
            try:
                reply = self._link.orders(place.job, place.node, self._runner_id, asked, self._last_order, _LONG_POLL_S)
                failures = 0
            except MegascaleError as error:
                if failures == 0 and not self._closed.is_set():
                    log.warning("no orders from the controller (training goes on): %s", error)
                self._closed.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            for order in reply.orders:
                self._last_order = order.id
                if order.round == self._round:
                    self._order, self._is_known = order, reply.known
            if not reply.orders and not reply.known:
                self._resume(asked)
                self._closed.wait(0.5)

    def _resume(self, asked: int) -> None:
        """Describe the round that runs here: the controller may have lost its journal, and knows nothing of us.

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

    @property
    def round(self) -> int:
        """Number of the current round; 0 before the first."""
        return self._round

    def leave(self, outcome: str) -> None:
        """Tell the controller that this runner is done; silence on failure, since nothing depends on it."""
        self._closed.set()
        if self._left or not self._round:
            return
        self._left = True
        place = self._crew.place
        try:
            self._link.leave(
                Leave(
                    job=place.job,
                    node=place.node,
                    runner_id=self._runner_id,
                    outcome=outcome,
                    round=self._round,
                    exits=self._crew.exits(),
                    mono_s=time.monotonic(),
                )
            )
        except MegascaleError as error:
            log.warning("the controller was not told that %s is done: %s", place.node, error)

    def wait_for_others(self, patience_s: float) -> None:
        """Say that this node's ranks have succeeded, and wait until the job is over or goes on without this node."""
        self.leave("succeeded")
        if self._nodes == 1:
            return
        deadline = time.monotonic() + patience_s
        job = self._crew.place.job
        while time.monotonic() < deadline:
            try:
                found = next((status for status in self._link.status(job).jobs if status.job == job), None)
            except MegascaleError as error:
                log.warning("the controller does not say whether the other nodes are done: %s", error)
                return
            if found is None or found.round != self._round or found.state in {"finished", "failed"}:
                return
            time.sleep(_OTHERS_POLL_S)
        log.warning(
            "other nodes of job %s are still not done after %.0f s; %s ends", job, patience_s, self._crew.place.node
        )

    def shutdown(self) -> bool:
        """Leave, called by torch when its engine is done for whatever reason."""
        codes = [worker.proc.poll() for worker in self._crew.workers]
        self.leave("succeeded" if codes and all(code == 0 for code in codes) else "failed")
        return True


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


def install_factory(crew: Crew) -> None:
    """Let torch's elastic engine start ranks through ``crew``.

    The engine looks its factory up by this name at every start; there is no public way to give it another.
    """
    from torch.distributed.elastic.multiprocessing import api

    def start(  # the engine's keywords; numa_options and the like are not for us
        entrypoint: str,
        args: tuple[str, ...],
        env: dict[str, str],
        stdout: str,
        stderr: str,
        **_: object,
    ) -> Worker:
        merged = {**os.environ, **env}
        return crew.start((entrypoint, *map(str, args)), merged, (stdout or "", stderr or ""))

    vars(api)["get_subprocess_handler"] = start


def _from_torchrun(params: RendezvousParameters) -> RendezvousHandler:
    """Build the handler for plain torchrun, where all we are told is an endpoint, a job and ``--rdzv-conf``."""
    job = check_name("job", params.run_id)
    node = check_name("node", str(params.get("node") or socket.gethostname()))
    root = Path(str(params.get("box_root") or environment.DEFAULT_BOX_ROOT))
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "megascale-ops" / job
    run_dir = Path(str(params.get("run_dir") or state))
    for folder in (root, root / job, run_dir, run_dir / "checkpoints"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    url = params.endpoint if "//" in params.endpoint else f"http://{params.endpoint}"
    token_file = params.get("token_file") or os.environ.get(environment.TOKEN_FILE)
    token = Path(str(token_file)).read_text().strip() if token_file else os.environ.get(environment.TOKEN)
    place = Place(
        job=job,
        node=node,
        run_id=uuid.uuid4().hex,
        nproc=_nproc_of_torchrun(params),
        box_dir=str(root / job),
        run_dir=str(run_dir),
        checkpoint_dir=os.environ.get(environment.CHECKPOINT_DIR) or str(run_dir / "checkpoints"),
        stop_grace_s=5.0,
        has_gpus=Path("/dev/nvidiactl").exists(),
    )
    profiler = Profiler(str(params.get("nccl_profiler") or "off"), os.environ, has_device=has_device())
    crew = Crew(place, profiler=profiler.variables)
    install_factory(crew)
    terms = Terms(params.min_nodes, params.max_nodes, params.local_addr or local_address(url), JobPolicy())
    return MegascaleRendezvous(BlockingLink(url, token or None), crew, terms)


def _nproc_of_torchrun(params: RendezvousParameters) -> int:
    """Return how many ranks this node will have: torch does not tell a rendezvous, so read torchrun's own options.

    ``--rdzv-conf nproc=N`` says it where the process was not started by torchrun's command line.
    """
    if params.get("nproc"):
        return int(params.get("nproc"))
    from torch.distributed.run import determine_local_world_size, parse_args

    try:
        options = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return int(determine_local_world_size(options.nproc_per_node))
    except (SystemExit, ValueError) as error:
        raise UsageError("the number of ranks of this node is not known: add --rdzv-conf nproc=N") from error


def _create(params: RendezvousParameters) -> RendezvousHandler:
    handler = params.get("handler")
    return handler if isinstance(handler, MegascaleRendezvous) else _from_torchrun(params)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point for torch's rendezvous registry."""
    return _create
