# SPDX-License-Identifier: Apache-2.0
"""The ranks of this node, round after round: which run now, how the round before ended, each rank's environment.

Torch's engine starts ranks one by one through a factory; this is that factory's memory. When a round is over it
turns what it saw into ``RankExit`` records, with the last moments from each rank's black box.
"""

import errno
import logging
import os
import signal
import socket
import string
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

import megascale_ops
from megascale_ops.blackbox import boards
from megascale_ops.blackbox.calls import of_ring
from megascale_ops.blackbox.private_folder import private_folder, write_file
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.errors import MegascaleError
from megascale_ops.runner.exits import status_in_words
from megascale_ops.runner.output.console import Console
from megascale_ops.runner.output.log_tail import Source
from megascale_ops.runner.processes import (
    RankPopen,
    children_of,
    handles,
    is_dying,
    kill_for_certain,
    marked_processes,
    session_of,
    signal_group,
    spawn,
    start_ticks,
)
from megascale_ops.runner.ranks.last_words import last_words, tail
from megascale_ops.runner.ranks.leftovers import describe
from megascale_ops.runner.ranks.warm import WarmPool
from megascale_ops.runner.ranks.worker import Worker
from megascale_ops.runner.wrapped.child_watch import SLOW_S, ChildWatch, Death
from megascale_ops.runner.wrapped.launcher_words import read_words
from megascale_ops.runner.wrapped.rank_ends import rank_ends
from megascale_ops.schema import environment
from megascale_ops.schema.identity import RankProcess, RoundFile
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.tiles import TileFact
from megascale_ops.schema.version import MESSAGE_VERSION

log = logging.getLogger(__name__)

# 30 s: the driver frees 140 GB within two; after that something else is wrong and the new rank will report it.
DEVICE_MEMORY_S = 30.0
# 8: what was called in the last step or two; 64 ranks of a node stay below 50 KB.
_LAST_CALLS = 8
# 256 KB: a launcher's words stand before its own traceback and among what 64 ranks print while they go down.
_LAUNCHER_TAIL = 256_000
_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
BOOTSTRAP = Path(megascale_ops.__file__).parent / "recorder" / "bootstrap"


class Place(msgspec.Struct, frozen=True):
    """Where this node's ranks live and write."""

    job: str
    node: str
    run_id: str
    nproc: int
    box_dir: str
    run_dir: str
    checkpoint_dir: str
    stop_grace_s: float
    wrap: bool = False
    role: str = "default"
    max_restarts: int = -1  # -1: no number is set
    prefix_lines: bool = True
    prefix_template: str = ""  # torchrun's ${role_name}, ${rank}, ${local_rank}, ${hostname}; "": its variable's
    has_gpus: bool = False
    fixed_port: bool = False  # rank 0 serves at a port that the user named
    profile_every: int = 0
    shown_ranks: tuple[int, ...] = ()  # local ranks whose output is shown; empty: all
    umask: int = -1  # of the ranks; -1: the runner's


class LocalWorkers:
    """The current round's workers. One owner: the thread that runs torch's engine.

    Attributes:
        is_ending: The run is ended from outside, so that ranks are stopped for good and not for the next round.
    """

    def __init__(
        self,
        place: Place,
        *,
        console: Console | None = None,
        warm: WarmPool | None = None,
        python: str = "",
        companions: Callable[[], tuple[int, int]] = lambda: (0, 0),
        profiler: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self.place = place
        self.round = 0
        self.job_id = ""
        self._restore_before = -1  # of checkpoints: only such of earlier steps are restored; -1: any
        self._first_round = 0
        self.workers: list[Worker] = []
        self.is_ending = False
        self._children: ChildWatch | None = None  # the ranks of a wrapped launcher
        self._stranded = False  # it was given up, since it did not see that one of them had failed
        self._console = console
        self._warm = warm
        self._python = python
        self._companions = companions
        self._profiler = profiler

    def begin_round(self, number: int, job_id: str = "", restore_before: int = -1) -> None:
        """Forget the round before and let its stray children be swept up behind our back."""
        self.job_id = job_id
        self._restore_before = restore_before
        sessions = {worker.proc.pid for worker in self.workers}
        for session in sessions:
            signal_group(session, signal.SIGKILL)
        if self.place.has_gpus or self.place.fixed_port:
            self._wait_for_the_dead()
        self.round = number
        self._first_round = self._first_round or number
        self.workers = []
        self.look_away()
        self._stranded = False
        if self.place.wrap:
            watched = Path(self.place.box_dir), self.place.node, number
            self._children = ChildWatch(*watched, self._give_up_launcher, self._stranded_s())
            self._children.start()
        threading.Thread(target=self._sweep, args=(number, sessions), name="sweep", daemon=True).start()

    def _stranded_s(self) -> float:
        """Return what a launcher gets that does not react: time to look, and its ranks' to save what they have.

        36 s unless told otherwise: deepspeed, ``spawn`` and torchrun grant their other ranks up to 30 s.
        """
        return SLOW_S + self.place.stop_grace_s

    def _give_up_launcher(self, death: Death) -> None:
        """Stop a launcher that does not react to the end of a rank, as torch's engine would stop the other ranks."""
        log.warning(
            "rank %d (process %d) ended (%s), its launcher goes on, and no other rank has moved for %.0f s: "
            "the launcher is stopped",
            *(death.identity.rank, death.identity.pid, status_in_words(death.code), self._stranded_s()),
        )
        self._stranded = True
        for worker in self.workers:
            worker.proc.has_failed = True
            worker.close()

    def look_away(self) -> None:
        """Watch a wrapped launcher's ranks no more."""
        if self._children is not None:
            self._children.stop()
            self._children = None

    def _wait_for_the_dead(self) -> None:
        """A warm worker would be there before the dead have given back their device memory and their port."""
        late = [worker.rank for worker in self.workers if not worker.proc.reap(DEVICE_MEMORY_S)]
        if late:
            log.warning("ranks %s still hold memory or ports after %.0f s; starting anyway", late, DEVICE_MEMORY_S)

    def _sweep(self, number: int, sessions: set[int]) -> None:
        """End what the rounds before have left; those that had left their rank's session are logged."""
        found = marked_processes(self.place.run_id, before_round=number)
        if named := describe([pid for pid in found if not is_dying(pid) and session_of(pid) not in sessions]):
            log.warning("what the ranks of the round before had started was still running and is ended: %s", named)
        kill_for_certain(lambda: marked_processes(self.place.run_id, before_round=number))

    def environment_of(self, env: dict[str, str], stderr_path: str) -> dict[str, str]:
        """Return the environment of one rank's process, on top of the variables of torch's engine."""
        place = self.place
        told = {
            **env,
            environment.JOB: place.job,
            environment.JOB_ID: self.job_id,
            environment.NODE: place.node,
            environment.ROUND: str(self.round),
            environment.BOX_DIR: place.box_dir,
            environment.RUN_DIR: place.run_dir,
            environment.CHECKPOINT_DIR: place.checkpoint_dir,
            environment.STDERR_PATH: stderr_path,
            environment.RUNNER_PID: str(os.getpid()),
            environment.RUN_ID: place.run_id,
            # Torch's engine counts only the failures that it has seen itself, and no restart that was ordered.
            "TORCHELASTIC_RESTART_COUNT": str(self.round - self._first_round),
            **({"TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts)} if place.max_restarts >= 0 else {}),
            **({environment.RESTORE_BEFORE: str(self._restore_before)} if self._restore_before >= 0 else {}),
            **({environment.PROFILE_EVERY: str(place.profile_every)} if place.profile_every else {}),
            **self._profiler(),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(BOOTSTRAP), env.get("PYTHONPATH", "")])),
        }
        told.pop(environment.WRAPPED, None)  # of a run around this one
        if place.wrap:
            told[environment.WRAPPED] = "1"
            # The wrapped launcher sets its own world; the runner's would be taken for it.
            for name in _WORLD_VARIABLES:
                told.pop(name, None)
        return told

    def start(self, arguments: tuple[str, ...], env: dict[str, str], paths: tuple[str, str], local_rank: int) -> Worker:
        """Start one rank, from a warm spare when there is one; its LOCAL_RANK may be a virtual one."""
        rank = int(env.get("RANK", "0"))
        told = self.environment_of(env, paths[1])
        proc = self._take_warm(arguments, told, paths, local_rank) or self._start_cold(arguments, told, paths)
        grace_s = self.place.stop_grace_s
        worker = Worker(proc, local_rank, rank, paths, grace_s, is_ending=lambda: self.is_ending)
        self.workers.append(worker)
        if len(self.workers) == int(env.get("LOCAL_WORLD_SIZE", "1")):
            self._announce()
        return worker

    def hand_on(self, number: int) -> None:
        """Send a signal that the runner got to its ranks, but for those that would only die of it."""
        name = signal.Signals(number).name
        living = [worker for worker in self.workers if worker.proc.poll() is None]
        if not living:
            log.warning("%s came while no rank ran, and was handed on to none", name)
        for worker in living:
            takers = self._takers(worker.proc.pid, number)
            for pid in takers:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            if not takers:
                log.warning("%s was not handed on to rank %d: it has no handler and would die of it", name, worker.rank)

    def _takers(self, pid: int, number: int) -> list[int]:
        """Return the processes of a rank that handle a signal; the ranks, where a wrapped launcher does not."""
        if handles(pid, number):
            return [pid]
        return [child for child in children_of(pid) if handles(child, number)] if self.place.wrap else []

    def _start_cold(self, arguments: tuple[str, ...], env: dict[str, str], paths: tuple[str, str]) -> RankPopen:
        files = [Path(path).open("a") if path else None for path in paths]  # noqa: SIM115  closed below
        try:
            return spawn(arguments, env, files[0], files[1], umask=self.place.umask)
        finally:
            for file in files:
                if file is not None:
                    file.close()

    def _take_warm(
        self, arguments: tuple[str, ...], env: dict[str, str], paths: tuple[str, str], local_rank: int
    ) -> RankPopen | None:
        if self._warm is None or arguments[0] != self._python:
            return None
        return self._warm.assign(
            {
                "argv": list(arguments[1:]),
                "env": env,
                "cwd": str(Path.cwd()),
                "stdout": paths[0],
                "stderr": paths[1],
                "bootstrap": str(BOOTSTRAP / "sitecustomize.py"),
            },
            local_rank,
        )

    def _announce(self) -> None:
        """All ranks of the round run: announce it to the agent, the terminal and the warm pool."""
        self.write_round_file()
        if self._console is not None:
            self._console.follow(
                [
                    Source(path, to_stderr, self._prefix(worker))
                    for worker in self.workers
                    if not self.place.shown_ranks or worker.local_rank_id in self.place.shown_ranks
                    for path, to_stderr in ((worker.stdout_path, False), (worker.stderr_path, True))
                    if path
                ]
            )
        if self._warm is not None:
            self._warm.settle()

    def _prefix(self, worker: Worker) -> str:
        """Return the prefix of a rank's lines; torchrun's option or variable may hold a template for it."""
        template = self.place.prefix_template or os.environ.get(_PREFIX_TEMPLATE)
        if template:
            names = {"role_name": self.place.role, "rank": worker.rank, "local_rank": worker.local_rank_id}
            names["hostname"] = socket.gethostname()
            return string.Template(template).safe_substitute(names)
        return f"[{worker.rank}] " if self.place.prefix_lines else ""

    def write_round_file(self) -> None:
        """Write ``<node>.round.json`` beside the black boxes, in one move."""
        place = self.place
        agent_pid, controller_pid = self._companions()
        content = RoundFile(
            version=MESSAGE_VERSION,
            job=place.job,
            node=place.node,
            round=self.round,
            runner_pid=os.getpid(),
            runner_start_ticks=start_ticks(os.getpid()),
            run_dir=place.run_dir,
            ranks=tuple(
                RankProcess(
                    rank=worker.rank,
                    local_rank=worker.local_rank_id,
                    pid=worker.proc.pid,
                    start_ticks=worker.ticks,
                    stdout_path=worker.stdout_path,
                    stderr_path=worker.stderr_path,
                )
                for worker in self.workers
            ),
            agent_pid=agent_pid,
            controller_pid=controller_pid,
            run_id=place.run_id,
        )
        name = f"{place.node}.round.json"
        try:
            with private_folder(Path(place.box_dir)) as folder:
                put_round_file(folder, name, msgspec.json.encode(content))
        except OSError as error:
            log.error(  # noqa: TRY400  the sentence is enough, and training matters more
                "%s/%s can't be written (%s): the node's agent does not watch the ranks of round %d",
                place.box_dir,
                name,
                error.strerror,
                self.round,
            )

    def exits(self) -> tuple[RankExit, ...]:
        """Return how each rank of the round ended, first death first."""
        ended = [worker for worker in self.workers if worker.proc.poll() is not None]
        told = tuple(self._exit_of(worker) for worker in sorted(ended, key=lambda w: w.proc.ended_mono_s))
        if self._children is None or not told:
            return told
        self._children.stop()
        worker = ended[0]
        return rank_ends(
            msgspec.structs.replace(told[0], by_us=False) if self._stranded else told[0],
            self._children.deaths(),
            self._children.ranks(),
            read_words(tail(worker.stdout_path, _LAUNCHER_TAIL) + "\n" + tail(worker.stderr_path, _LAUNCHER_TAIL)),
            self._with_box,
        )

    def _exit_of(self, worker: Worker) -> RankExit:
        code = worker.proc.poll()
        assert code is not None
        plain = RankExit(
            rank=worker.rank,
            local_rank=worker.local_rank_id,
            pid=worker.proc.pid,
            code=code,
            seen_mono_s=worker.proc.ended_mono_s or time.monotonic(),
            by_us=worker.stopped_by_us,
        )
        if code != 0 and not worker.stopped_by_us:
            said = last_words(worker.stderr_path, self.place.box_dir, worker.rank, worker.proc.pid, code)
            plain = msgspec.structs.replace(plain, stderr_tail=said)
        return self._with_box(plain)[0]

    def _with_box(self, plain: RankExit) -> tuple[RankExit, str]:
        """Return an exit completed from the rank's black box, and the box's state; "" without a box."""
        with suppress(MegascaleError, OSError):  # no black box: the exit status is all there is
            reader = BoxReader(Path(self.place.box_dir) / f"{plain.rank}.box")
            try:
                if reader.identity().pid == plain.pid:
                    progress = reader.progress()
                    calls = of_ring(reader.collectives(), reader.collective())[-_LAST_CALLS:]
                    tiles = self._tiles_of(reader.identity()) if plain.code else ()
                    return msgspec.structs.replace(
                        plain,
                        step=progress.step,
                        phase=progress.phase,
                        steps_seen=progress.steps_seen,
                        error=reader.error(),
                        calls=tuple(calls) if plain.code else (),
                        trail=reader.trail() if plain.code else None,
                        tiles=tiles,
                    ), progress.state
            finally:
                reader.close()
        return plain, ""

    def _tiles_of(self, identity: BoxIdentity) -> tuple[TileFact, ...]:
        """Return where a rank's overlapped kernels were when it ended."""
        found = boards.of_process(Path(self.place.box_dir), str(identity.rank), identity.pid, identity.start_ticks)
        return boards.most_telling(boards.fact_of(board, identity.world_size) for board in found)


def put_round_file(folder: int, name: str, content: bytes) -> None:
    """Write a round file in one move; where there is no room for another file, over the one of the round before.

    That one has its room already. A reader in the same microsecond sees no round file, and looks again.

    Args:
        folder: The open folder of the job's black boxes.
        name: The file's name.
        content: What it shall hold.

    Raises:
        OSError: it can be written in neither way.
    """
    try:
        write_file(folder, name, content)
    except OSError as error:
        with suppress(OSError):
            os.unlink(f"{name}.new", dir_fd=folder)
        if error.errno != errno.ENOSPC:
            raise
        try:
            handle = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            raise error from None
        try:
            os.pwrite(handle, content, 0)
            os.ftruncate(handle, len(content))
        finally:
            os.close(handle)
        where = Path(f"/proc/self/fd/{folder}").readlink()
        log.warning("%s is full: black boxes of ranks that are started now have no room", where)


_WORLD_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
