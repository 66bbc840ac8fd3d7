# SPDX-License-Identifier: Apache-2.0
"""The matrix: every fault that can be injected, and the verdict and action that are right for it.

One row per fault. ``classes`` are the words of ``schema.fault_classes`` that are right for it, ``who`` the ranks that
are to blame. A row without classes is one after which nothing may happen: every negative control, and the death of our
own parts, which training must not notice. ``inside`` rows are suffered by the rank itself (``misdeeds``); the others
are done to it from outside (``outside``).
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from megascale_ops.chaos.legitimate import WAITS

Kind = Literal["fail_stop", "hang", "fail_slow", "data", "checkpoint", "control", "negative"]
# one: the chosen rank alone; all: every rank; node: the ranks of the second node; any: every rank named is right.
Who = Literal["one", "all", "node", "any", "nobody"]
# embedded: one `run` with a controller of its own; relayed: the controller is reached through a relay that can be cut;
# two_nodes: a controller and two runners.
Layout = Literal["embedded", "relayed", "two_nodes"]

KINDS: tuple[Kind, ...] = ("fail_stop", "hang", "fail_slow", "data", "checkpoint", "control", "negative")

# 15 s: the longest that a verdict of a hang may take with steps of 50 ms; 5 s of them are the floor of patience.
HANG_S = 15.0
# A trial does not wait nine minutes for what is named within 15 s: silence is acted upon once evidence is clear. What
# the default grants instead is held by the negative controls, and by `benchmarks/legitimate_waits.py --hangs`.
EAGER = ("absent_patience_s=0",)
# 25 s to be back: stop, start four Pythons that import torch on two cores (6 s), and a loaded machine.
RECOVER_S = 25.0
# 25 s: some 400 steps; a 20 % straggler is to be named within 20 of them, a 5 % one within 100.
SLOW_S = 25.0


class Fault(NamedTuple):
    """One row of the matrix.

    ``name_s`` is how long the verdict may take, ``recover_s`` how long until all ranks make steps again. ``at`` is the
    step at which it happens, -1 for before the first one. ``steps`` ends the job where it must end by itself.
    """

    name: str
    kind: Kind
    text: str  # what is done, one sentence for people
    classes: tuple[str, ...] = ()
    who: Who = "one"
    acted: bool = False  # whether the job must be restarted
    goes_on: bool = False  # new ranks must train on, though it is not the job that starts them
    everywhere: bool = False  # every rank suffers it, not the chosen one alone
    inside: bool = True
    name_s: float = HANG_S
    recover_s: float = RECOVER_S
    at: int = 40
    steps: int = 100_000
    arguments: tuple[str, ...] = ()  # more arguments of the workload
    policy: tuple[str, ...] = ()  # NAME=VALUE for `run --policy`
    layout: Layout = "embedded"
    kernels: bool = False  # needs the overlapped kernels (Triton)
    root: bool = False  # needs root (a file system is mounted)
    gpu: bool = False  # done to a GPU: only ranks over NCCL have one
    sockets: bool = False  # done to the connections between the ranks
    least: int = 2  # ranks: with fewer there is no right answer
    long: bool = False  # takes minutes by its nature: run only by name or with --long
    ours: bool = False  # breaks a part that only our launcher has
    end_s: float = 60.0  # how long the end may take where nothing may happen, beside the steps
    live: bool = False  # can be done to a running job of the user's

    def culprits(self, rank: int, world: int) -> tuple[int, ...] | None:
        """Return the ranks that are to blame when ``rank`` was chosen; None when any rank named is right."""
        named: dict[Who, tuple[int, ...] | None] = {
            "one": (rank,),
            "all": tuple(range(world)),
            "node": tuple(range(world // 2, world)),
            "any": None,
            "nobody": (),
        }
        return named[self.who]

    @property
    def quiet(self) -> bool:
        """Whether nothing may happen."""
        return not self.classes


def _stop(name: str, text: str, *classes: str, who: Who = "one", inside: bool = True, **more: object) -> Fault:
    row = Fault(name, "fail_stop", text, classes, who, acted=True, inside=inside, name_s=5.0)
    return row._replace(**more)  # type: ignore[arg-type]  # fields of the row, by name


def _hang(name: str, text: str, *classes: str, **more: object) -> Fault:
    row = Fault(name, "hang", text, classes, acted=True)._replace(**more)  # type: ignore[arg-type]  # same
    return row._replace(policy=(*EAGER, *row.policy))


def _slow(name: str, text: str, *arguments: str, classes: tuple[str, ...] = ("straggler",), **more: object) -> Fault:
    row = Fault(name, "fail_slow", text, classes, name_s=SLOW_S, arguments=arguments)
    return row._replace(**more)  # type: ignore[arg-type]  # same


def _damaged(name: str, text: str) -> Fault:
    """Return a row in which a checkpoint is damaged and a rank killed: the one before must be taken."""
    return Fault(
        name, "checkpoint", text + ", then a rank is killed", ("killed",), acted=True, inside=False, name_s=5.0
    )


def _own(name: str, text: str, **more: object) -> Fault:
    row = Fault(name, "control", text, inside=False, steps=300, ours=True)
    return row._replace(**more)  # type: ignore[arg-type]  # same


def _quiet(name: str, text: str, *arguments: str, **more: object) -> Fault:
    row = Fault(name, "negative", text, who="nobody", everywhere=True, arguments=arguments, steps=160)
    return row._replace(**more)  # type: ignore[arg-type]  # same


_FAIL_STOP = (
    _stop("exception_one", "one rank raises an exception", "exception"),
    _stop(
        "exception_all",
        "every rank raises the same exception",
        "exception_everywhere",
        "exception",
        who="all",
        everywhere=True,
    ),
    _stop("exception_startup", "one rank raises before it joins the others", "exception", at=-1, name_s=10.0),
    _stop("exception_thread", "a thread of one rank raises, and its hook ends the process", "exception", "exit_code"),
    _stop("sigkill", "one rank is killed with SIGKILL", "killed", inside=False, live=True),
    _stop("sigterm", "one rank is ended with SIGTERM", "killed", inside=False, live=True),
    _stop("segfault", "one rank reads address 0", "segfault"),
    _stop("abort", "one rank calls abort", "aborted"),
    _stop("out_of_memory", "one rank asks for more memory than its limit", "out_of_memory"),
    _stop(
        *("tile_given_up", "one rank sleeps until the kernels of the others give up waiting for its tile"),
        *("tile_timeout",),
        arguments=("--overlap-s=2",),  # less than the 2.5 s after which silence is looked at
        kernels=True,
    ),
    _stop("exit_early", "one rank ends with status 0 in mid-training", "exited_early"),
    _stop("exit_silent", "one rank ends with status 1 and says nothing", "exit_code"),
    _stop("own_connection", "a server of its own refuses one rank's request", "service_down"),
    _stop(
        *("loader_killed", "the data loader's worker of one rank is killed with SIGKILL", "killed", "out_of_memory"),
        arguments=("--loader-workers=1",),
    ),
    _stop(
        *("node_killed", "every process of the second node is killed with SIGKILL", "node_lost"),
        who="node",
        inside=False,
        layout="two_nodes",
        name_s=25.0,
        recover_s=45.0,
    ),
)
# Two minutes: beyond any judge's verdict, so that it is not the kernels' own deadline that ends the wait.
_OVERLAPPED = {"arguments": ("--overlap-s=120",), "kernels": True}
# Saving is a declared phase; 1,800 s are granted by default.
_IMPATIENT = {"policy": ("phase_patience_s=8",)}
_HANG = (
    _hang("sigstop", "one rank is stopped with SIGSTOP", "frozen", inside=False, live=True),
    # 20 s: burning CPU outside collectives may be a compilation; the judge takes six times its patience.
    _hang(
        "stuck_loop", "one rank loops in Python outside collectives", "stuck", policy=("busy_floor_s=8",), name_s=45.0
    ),
    _hang("gil_held", "native code of one rank holds the interpreter's lock", "gil_held"),
    _hang("sleep_syscall", "one rank sleeps in a system call", "sleeping"),
    # They wait for what may come by itself, as far as the evidence shows.
    _hang("lock_twice", "one rank waits for a lock that it holds itself", "sleeping", long=True),
    _hang("pipe_unfed", "one rank reads a pipe into which nobody writes", "sleeping", "storage_stall", long=True),
    _hang("http_unanswered", "one rank waits for a server that never answers", "sleeping", long=True),
    _hang("child_stopped", "one rank waits for a child that is stopped", "sleeping", long=True),
    _hang(
        *("loader_hung", "the data loader's worker of one rank never answers", "data_stall"),
        arguments=("--loader-workers=1",),
    ),
    _hang("storage_hung", "one rank writes to storage that never answers, while saving", "storage_stall", **_IMPATIENT),
    _hang(
        *("kernel_endless", "the GPU of one rank gets a kernel that does not end before its all_reduce", "gpu_stuck"),
        gpu=True,
    ),
    _hang("collective_skipped", "one rank leaves one all_reduce out", "not_joined", "collective_order"),
    _hang("collectives_swapped", "one rank calls two collectives in the other order", "collective_order"),
    _hang("shapes_differ", "one rank gathers a tensor of another shape", "collective_mismatch"),
    _hang("types_differ", "one rank reduces float64 where the others reduce float32", "collective_mismatch"),
    _hang("sizes_differ", "one rank reduces twice as many numbers", "collective_mismatch"),
    _hang("gather_never_sent", "one rank never comes to an overlapped gather", "tile_timeout", **_OVERLAPPED),
    _hang("scatter_never_sent", "one rank never comes to an overlapped scatter", "tile_timeout", **_OVERLAPPED),
    _hang("stopped_in_kernel", "one rank is stopped inside an overlapped scatter", "frozen", **_OVERLAPPED),
    # Saving is a declared phase, and phase_patience_s grants it half an hour: the contradiction does not need it.
    # With two ranks it is undecidable whether one does too much or the other too little.
    _hang(
        *("saves_alone", "one rank saves a checkpoint where the others go on with their step", "collective_order"),
        least=3,
    ),
    _hang("group_not_created", "one rank never creates a process group", "group_never_formed", "not_joined", least=3),
    # It sleeps: over NCCL, whose ranks meet in their first collective, only that is seen, and the others wait there.
    _hang(
        *("rendezvous_never", "one rank never joins the rendezvous", "group_never_formed", "not_joined", "sleeping"),
        at=-1,
        policy=("startup_patience_s=12",),  # four Pythons import torch on two cores in six
        name_s=40.0,
    ),
)
_FAIL_SLOW = (
    _slow("compute_5", "one rank computes 5 % longer", "--slow=0.05"),
    _slow("compute_20", "one rank computes 20 % longer", "--slow=0.2"),
    _slow("compute_100", "one rank computes twice as long", "--slow=1.0"),
    # 10 ms of real work a step: with the core shared by nine processes it takes some 90. On two cores the other three
    # ranks share the second one and need 30.
    _slow("cpu_starved", "eight busy processes share the core of one rank", "--burn-ms=10", inside=False, live=True),
    _slow("gc_storm", "one rank collects garbage in every step"),
    _slow("data_slow", "one rank's batches come 20 ms late"),
    _slow("launch_late", "one rank launches its collectives 15 ms late"),
    _slow("drift", "one rank gets slower by 1 % of a step every minute", name_s=900.0, long=True),
    _slow("slow_one_in_fifty", "one rank needs 300 ms longer in one step of fifty", classes=("straggler", "slow")),
    # 512 KB at 4 MB/s take 0.13 s.
    _slow("slow_link", "one rank sends 4 MB/s", "--payload-kb=512", classes=("slow_link", "straggler"), sockets=True),
)
_DATA = (
    Fault("loss_nan", "data", "the loss becomes not a number on every rank", ("loss_nan",), "any", everywhere=True),
    Fault(
        "loss_spike",
        "data",
        "the loss is a hundred times larger for five steps",
        ("loss_spike",),
        "any",
        everywhere=True,
    ),
)
_CHECKPOINT = (
    _damaged("checkpoint_torn", "a file of the newest checkpoint is cut in half"),
    _damaged("checkpoint_flipped", "a byte of the newest checkpoint is flipped"),
    _damaged("checkpoint_missing", "a file of the newest checkpoint is removed"),
    _damaged("checkpoint_stale", "the newest checkpoint is replaced by a copy of the one before"),
    Fault(
        *("disk_full", "checkpoint", "the disk of the checkpoints is full until the fault was named", ("disk_full",)),
        who="any",
        acted=True,
        inside=False,
        root=True,
    ),
)
_CONTROL = (
    _own("agent_killed", "the agent is killed", who="nobody", live=True),
    _own("controller_killed", "the controller is killed", who="nobody", live=True),
    _own(
        *("runner_killed", "the runner is killed and started again: training goes on from a checkpoint"),
        classes=("runner_lost",),
        who="any",
        goes_on=True,
    ),
    # 8 s: half of what makes a node lost.
    _own(
        *("partition_controller", "the node is cut off from its controller for 8 s"),
        who="nobody",
        steps=400,
        layout="relayed",
    ),
    Fault(
        *("partition_ranks", "control", "nothing that one rank sends arrives any more"),
        classes=("link_cut",),
        acted=True,
        sockets=True,
    ),
    Fault(
        *("duplicate_rank", "control", "a second process says that it is a rank", ("duplicate_rank",)),
        inside=False,
        ours=True,  # reported in a black box
    ),
)
_ALONE = {"everywhere": False}
_NEGATIVE = (
    _quiet("eval_declared", "all ranks evaluate for 6 s inside a declared phase", "--seconds=6"),
    _quiet("eval_undeclared", "all ranks evaluate for 6 s and say nothing", "--seconds=6"),
    _quiet("eval_one_declared", "one rank evaluates for 8 s, declared, while the others wait", "--seconds=8", **_ALONE),
    # Without what the recorder sees of it, it would be stuck after 8 s.
    _quiet(
        "eval_one_undeclared",
        "one rank evaluates for 25 s and says nothing, while the others wait",
        "--seconds=25",
        policy=(*EAGER, "busy_floor_s=8", "busy_factor=1"),
        everywhere=False,
    ),
    _quiet("first_step_minute", "the first step takes a minute", "--seconds=60", at=0, steps=60),
    # 300 s: the compiler of a busy machine took over a minute.
    _quiet("recompilation", "every rank compiles its model again in mid-run", end_s=300.0),
    _quiet("checkpoint_slow", "one checkpoint takes 8 s", "--seconds=8"),
    _quiet("slow_step_once", "one step of one rank takes 2 s", "--seconds=2", **_ALONE),
    _quiet("idle_before_start", "the job idles for 20 s before its first step", "--seconds=20", at=-1),
    _quiet("end_apart", "the ranks end 3 s apart", "--seconds=3"),
    _quiet("debugger_attached", "a debugger stops one rank for 8 s; the script has declared it", steps=200, **_ALONE),
    _quiet(
        *("tile_late", "one rank works for 15 s, undeclared, while the kernels of the others wait for its tile"),
        *("--seconds=15", "--overlap-s=120"),
        everywhere=False,
        kernels=True,
    ),
    _quiet("one_bad_batch", "the loss is a hundred times larger in a single step"),
    _quiet("steps_alternate", "short and long steps take turns", steps=200),
    _quiet("lengths_uneven", "every rank has sequences of other lengths in every step", steps=300),
)
# 15 s: three times the floor of patience; `benchmarks/legitimate_waits.py` makes them minutes.
_UNDECLARED = tuple(
    _quiet(
        *(name, f"one rank {wait.text}, and says nothing", "--seconds=15", *wait.arguments),
        everywhere=False,
        long=not wait.brief,
        end_s=300.0 if wait.compiles else 60.0,  # the compiler of a busy machine took over a minute
    )
    for name, wait in WAITS.items()
)

MATRIX = (*_FAIL_STOP, *_HANG, *_FAIL_SLOW, *_DATA, *_CHECKPOINT, *_CONTROL, *_NEGATIVE, *_UNDECLARED)
BY_NAME = {row.name: row for row in MATRIX}


def chosen(kinds: Iterable[str], *, long: bool) -> list[Fault]:
    """Return the rows of some kinds (of all when none is named), those that take minutes only when ``long``."""
    wanted = set(kinds) or set(KINDS)
    return [row for row in MATRIX if row.kind in wanted and (long or not row.long)]
