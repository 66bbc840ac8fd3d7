# SPDX-License-Identifier: Apache-2.0
"""Run the ranks by torch's elastic engine and return how they ended.

The engine keeps what it is good at: assigning ranks, starting, watching and stopping processes. What it would decide
(how often to restart, with which nodes) our rendezvous decides, by the controller; so its own restart budget is set
out of the way.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # torch's stubs leave one of them out
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from megascale_ops.errors import MegascaleError
from megascale_ops.runner.plan import Plan
from megascale_ops.runner.processes import NotStartedError
from megascale_ops.runner.rendezvous import JobStopped, MegascaleRendezvous
from megascale_ops.schema.messages import JoinReply

# The controller counts restarts; the engine must never run out before it.
_NO_LIMIT = 1_000_000_000
# 300 s: torch's own default for nodes that end at different times.
_EXIT_PATIENCE_S = 300.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# 2 s: a shell and the kernel, or srun and slurmd, may each send the same; who is impatient sends a later one.
_SAME_S = 2.0


class Outcome(msgspec.Struct, frozen=True):
    """How the launch ended: ``word`` is succeeded, failed, cancelled or stopped (by the controller)."""

    word: str
    code: int
    reason: str = ""
    reply: JoinReply | None = None


class RoundLogs(LogsSpecs):
    """A folder for every round, ``<log dir>/round-<n>/rank-<r>``: a restart never deletes what came before.

    The folder is this node's alone: what lies there of the same round is of an earlier life of the job.

    Args:
        log_dir: Where the folders go.
        rendezvous: Gives the number of the round that is being started.
    """

    def __init__(self, log_dir: str, rendezvous: MegascaleRendezvous) -> None:
        super().__init__(log_dir)
        self._rendezvous = rendezvous

    @property
    def root_log_dir(self) -> str:
        """Return the folder that holds all rounds."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of one round; torch's own follower gets nothing to follow."""
        base = Path(self.root_log_dir) / f"round-{self._rendezvous.round}"
        _set_aside(base)
        stdouts: dict[int, str] = {}
        stderrs: dict[int, str] = {}
        errors: dict[int, str] = {}
        for local_rank, env in envs.items():
            folder = base / f"rank-{env['RANK']}"
            folder.mkdir(parents=True, exist_ok=True)
            stdouts[local_rank] = str(folder / "stdout.log")
            stderrs[local_rank] = str(folder / "stderr.log")
            errors[local_rank] = str(folder / "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
        return LogsDest(stdouts, stderrs, {}, {}, errors)


def _set_aside(folder: Path) -> None:
    """Rename a folder of the same round of an earlier life of this job."""
    if folder.exists():
        lives = len(list(folder.parent.glob(f"{folder.name}.earlier-*")))
        folder.rename(folder.with_name(f"{folder.name}.earlier-{lives + 1}"))


class NotMet(MegascaleError):  # noqa: N818  no error: a round that did not begin
    """The nodes of a round did not meet in its store."""


class Engine(LocalElasticAgent):
    """Torch's engine, with other ways to wait for the other nodes, at the begin of a round and at the end."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, rendezvous: MegascaleRendezvous) -> None:
        super().__init__(spec, logs, start_method="spawn")
        self._rendezvous_of_ours = rendezvous

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Run the rounds; a signal to the runner stops the ranks for good, and marks their ends as not a restart's."""
        try:
            found: RunResult = super()._invoke_run(role)
        except SignalException:
            self._rendezvous_of_ours.end()
            _hear_a_second_one(self._rendezvous_of_ours.hurry)
            raise
        return found

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes; where they can't be met the controller is asked anew, and decides.

        Torch gives up with the first store in which the nodes do not meet, and the whole job with it.
        """
        while True:
            with suppress(NotMet):
                super()._rendezvous(worker_group)
                return

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        try:
            found: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        except DistError as error:
            self._rendezvous_of_ours.ask_anew(error, reached=_reaches(store))
            raise NotMet(str(error)) from error
        return found

    def _exit_barrier(self) -> None:
        """Wait until every node is done, or goes on without this one.

        Torch waits in the round's store, deaf to orders: when another node fails meanwhile, its restart would wait
        five minutes for us. The store that this node may serve must live until then.
        """
        self._rendezvous_of_ours.wait_for_others(_EXIT_PATIENCE_S)


def _reaches(store: Store) -> bool:
    """Return whether a round's store can be reached: then the nodes missing in it may only be late."""
    try:
        store.check(["torchelastic/role_info/0"])
    except DistError:
        return False
    return True


def _hear_a_second_one(hurry: Callable[[], None]) -> None:
    """Call ``hurry`` at a further signal, while the ranks are stopped because of the first one.

    Torch's handler raises once more: then its engine begins to wait anew, and a third signal leaves ranks behind. Until
    the way out puts its own handlers there.
    """
    first_s = time.monotonic()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - first_s >= _SAME_S:
            hurry()

    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, handle)


@contextmanager
def _sigterm_asked_about(takes: Callable[[], bool] | None) -> Iterator[None]:
    """Stop the ranks at a SIGTERM only where ``takes`` says no; None: torch's engine has its own handler."""
    if takes is None:
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if not takes():
            raise SignalException("SIGTERM", signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def launch(
    plan: Plan,
    rendezvous: MegascaleRendezvous,
    *,
    monitor_interval_s: float,
    role: str,
    takes_sigterm: Callable[[], bool] | None = None,
) -> Outcome:
    """Run the ranks of this node to their end.

    Args:
        plan: What is started.
        rendezvous: Meets the other nodes, by the controller.
        monitor_interval_s: From one look at the ranks to the next.
        role: Of the ranks, as torch has it.
        takes_sigterm: Asked at each SIGTERM, in its handler: whether it is taken care of; if not, ranks are stopped.

    Raises:
        ControllerUnreachableError: no round was formed before the deadline.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    hangup = "" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ",SIGHUP"  # ignored under nohup
    sigterm = "SIGTERM," if takes_sigterm is None else ""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"{sigterm}SIGINT,SIGQUIT{hangup}"
    if plan.threads:
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    spec = WorkerSpec(
        role=role,
        local_world_size=plan.nproc,
        entrypoint=plan.program,
        args=plan.arguments,
        rdzv_handler=rendezvous,
        max_restarts=_NO_LIMIT,
        monitor_interval=monitor_interval_s,
        virtual_local_rank=plan.virtual_local_rank,
    )
    try:
        with _sigterm_asked_about(takes_sigterm):
            result = Engine(spec, RoundLogs(plan.log_dir, rendezvous), rendezvous).run()
    except JobStopped as stopped:
        return Outcome("stopped", stopped.exit_code, str(stopped), stopped.reply)
    except SignalException as error:
        return Outcome("cancelled", 128 + int(error.sigval), f"stopped by {error.sigval.name}")
    except NotStartedError as error:
        return Outcome("failed", 1, str(error))
    except OSError as error:  # a log folder on a full disk, no more processes
        named = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return Outcome("failed", 1, f"the ranks can't be started: {named}{error.strerror or error}")
    if result.is_failed():
        return Outcome("failed", 1, "ranks failed and torch's engine gave up")
    return Outcome("succeeded", 0)
