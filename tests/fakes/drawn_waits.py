# SPDX-License-Identifier: Apache-2.0
"""Waits that end by themselves, drawn at random: what heartbeats and evidence show of them, with time as numbers.

Each of the kinds of `chaos/legitimate.py` shows itself to the judge in one of a few ways (``LOOKS_LIKE``), and so do
some that take GPUs or a network. A wait is drawn with its job: how long steps take, how many ranks there are, in which
phase it happens, how long it lasts, what of an idle process's noise is seen. ``is_hurt`` asks the judge at ten moments.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.hangs.evidence import gather
from megascale_ops.diagnosis.hangs.patience import raised
from megascale_ops.diagnosis.hangs.verdict import judge
from megascale_ops.schema.gpu_queue import GpuOperation, GpuQueue
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.work import ChildWork, ProcessWork
from tests.fakes.hung_job import ABSENT, WAITING, made_calls, rank_view, said_of, stack_of

if TYPE_CHECKING:
    from megascale_ops.diagnosis.rank_view import RankView

POLICY = JobPolicy()
# Where a script does what is not declared: between two backward passes, by the recorder's hooks.
BETWEEN = ("data", "forward", "optimizer", "other")
ANYWHERE = (*BETWEEN, "backward")
MOMENTS = 10
OVER_S = 4.0
# The first collective of a group that was made in the middle of a run.
FIRST_CALL = made_calls("all_reduce", last=1)


class Shown(NamedTuple):
    """How a rank that keeps the others waiting shows itself."""

    phases: tuple[str, ...]
    most_s: float  # as long may it last
    look: Callable[[Random, float], tuple[EvidenceItem, ...]]  # what a look at so many seconds shows
    view: Callable[[float], dict[str, object]] = lambda _: {}  # what heartbeats show then
    all_wait: bool = False  # it is in the collective, too


def _idle(chance: Random, **more: object) -> ProcessWork:
    """What a process counts that does nothing: its recorder, a dump, a watchdog that reads its store."""
    noise = {
        "own_cpu_s": chance.uniform(0.0, 0.14),
        "io_bytes": chance.randrange(60_000),
        "socket_bytes": chance.randrange(4_000),
    }
    return ProcessWork(100.0, OVER_S, **{**noise, **more})  # type: ignore[arg-type]  # its fields


def _process(work: ProcessWork) -> EvidenceItem:
    return EvidenceItem("process", ok=True, work=work)


def _frames(line: str) -> tuple[str, ...]:
    return (line, "one_step (/home/u/train.py:112)", "main (/home/u/train.py:201)")


def _asleep(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    children = (ChildWork(4711, "aws s3 cp a b", "S", is_new=True),) if chance.random() < 0.4 else ()
    seen = stack_of("in_syscall", frames=_frames("wait (/home/u/train.py:40)"))
    return _process(_idle(chance, children=children)), seen, seen, seen


def _marked(mark: str) -> Callable[[Random, float], tuple[EvidenceItem, ...]]:
    def look(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
        seen = stack_of(mark, "in_syscall", frames=_frames("read (/home/u/data.py:31)"))
        return _process(_idle(chance)), seen, seen, seen

    return look


def _busy(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    seen = stack_of("in_python", frames=_frames("compress (/home/u/train.py:55)"))
    return _process(_idle(chance, own_cpu_s=3.9, is_running=True)), seen, seen, seen


def _locked(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    return (_process(_idle(chance, own_cpu_s=3.9, is_running=True)), stack_of("gil_held"))


def _works(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    done = chance.choice(({"child_cpu_s": 3.0}, {"io_bytes": 10**7}, {"socket_bytes": 10**6}, {"grown_bytes": 10**6}))
    return _process(_idle(chance, **done)), stack_of("in_syscall", frames=_frames("wait (subprocess.py:1264)"))


def _compiles(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    return _process(_idle(chance, own_cpu_s=3.0)), stack_of(frames=_frames("lower (torch/_inductor/graph.py:900)"))


def _waits_for_gpu(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    seen = stack_of("in_native", frames=_frames("synchronize (torch/cuda/__init__.py:1100)"))
    return _process(_idle(chance, own_cpu_s=3.9, is_running=True)), seen, seen, seen


def _unanswered(_chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    return (EvidenceItem("stacks", ok=False, marks=("no_answer",)),)


def _sends(chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    return (_process(_idle(chance, socket_bytes=50_000_000)), stack_of("in_collective"))


def _late_gpu(_chance: Random, age_s: float) -> tuple[EvidenceItem, ...]:
    """Three looks in which the GPU goes on with nothing."""
    queue = GpuQueue((GpuOperation("aa", "AllReduce", 41, waited_s=age_s, begun=False),), state=5)
    seen = EvidenceItem("collectives", ok=True, gpu=queue)
    return seen, seen, seen, stack_of("in_native", frames=_frames("item (/home/u/train.py:120)"))


def _nothing(_chance: Random, _age_s: float) -> tuple[EvidenceItem, ...]:
    return (stack_of("in_collective"),)


# Asleep: as long as an absentee is left alone; a minute: as long as what no script's own wait looks like.
_ABSENT_S, _PHASE_S, _STUCK_S = POLICY.absent_patience_s, POLICY.phase_patience_s, POLICY.stuck_patience_s
ASLEEP = Shown(BETWEEN, _ABSENT_S, _asleep)
LOADER = Shown(("data",), _ABSENT_S, _marked("in_data_loader"))
STORAGE = Shown(BETWEEN, _ABSENT_S, _marked("in_storage"))
ONE_CALL = Shown(ANYWHERE, _ABSENT_S, _busy, lambda _: {"busy": 1.0, "state": "R"})
LOCKED = Shown(ANYWHERE, _ABSENT_S, _locked, lambda age_s: {"busy": 1.0, "state": "R", "beat_age_s": age_s})
WORKS = Shown(ANYWHERE, _PHASE_S, _works)
COMPILES = Shown(ANYWHERE, _PHASE_S, _compiles, lambda _: {"busy": 1.0})
WANDERS = Shown(
    ANYWHERE,
    _PHASE_S,
    _busy,
    lambda age_s: {"busy": 1.0, "wandered": 3 + int(age_s), "wandered_ago_s": min(8.0, age_s)},
)
GPU_WAIT = Shown(ANYWHERE, _ABSENT_S, _waits_for_gpu, lambda _: {"busy": 1.0, "state": "R"})
UNKNOWN = Shown(BETWEEN, _ABSENT_S, _unanswered)
DECLARED = Shown(("eval", "checkpoint", "upload"), _PHASE_S, _asleep)
SLOW_LINE = Shown(ANYWHERE, _PHASE_S, _sends, all_wait=True)
LATE_GPU = Shown(ANYWHERE, _STUCK_S, _late_gpu, lambda _: {"busy": 1.0}, all_wait=True)
FLAPS = Shown(ANYWHERE, _STUCK_S, _nothing, all_wait=True)
FORMS = Shown(ANYWHERE, _ABSENT_S, _nothing, all_wait=True)

LOOKS_LIKE: dict[str, Shown] = {
    **dict.fromkeys(
        ("child_sleeps", "child_network", "child_evaluates", "http_silent", "http_trickles", "http_judge"), ASLEEP
    ),
    **dict.fromkeys(("http_in_threads", "asyncio_client", "service_wait", "file_grows", "lock_file"), ASLEEP),
    **dict.fromkeys(("flock_held", "input_late", "pdb_prompt", "debugger_undeclared", "sleeps", "backs_off"), ASLEEP),
    **dict.fromkeys(("child_busy", "shell_tree", "pipeline", "process_pool", "object_store", "copytree"), WORKS),
    **dict.fromkeys(("zip_files", "writes_synced"), WORKS),
    **dict.fromkeys(("download_guarded", "fifo_slow"), STORAGE),
    **dict.fromkeys(("one_call", "tokenises", "copies_memory", "thread_works"), ONE_CALL),
    **dict.fromkeys(("evaluates", "validates_unevenly", "metrics_computed"), WANDERS),
    **dict.fromkeys(("exports", "compiles"), COMPILES),
    "one_call_locked": LOCKED,
    "loader_slow": LOADER,
    # Beside those of the list.
    "evaluates_on_gpu": GPU_WAIT,
    "agent_too_busy": UNKNOWN,
    "declared": DECLARED,
    "slow_line": SLOW_LINE,
    "gpu_late": LATE_GPU,
    "network_flaps": FLAPS,
    "group_forms": FORMS,
}


class Drawn(NamedTuple):
    """One wait in one job."""

    kind: str
    phase: str
    step_s: float  # the median; the slowest of a hundred takes ``slowest`` times as long
    slowest: float
    ranks: int
    culprit: int
    lasts_s: float


def draw(kind: str, chance: Random) -> Drawn:
    """Return a wait of a kind: steps of 20 ms to a minute, 2 to 12 ranks, a second to as long as is granted."""
    shown = LOOKS_LIKE[kind]
    ranks = chance.randint(2, 12)
    most_s = shown.most_s * 0.999
    lasts_s = most_s if chance.random() < 0.3 else chance.uniform(1.0, most_s)
    step_s = 0.02 * 3000.0 ** chance.random()
    slowest = 1.0 + chance.expovariate(1.0)
    return Drawn(kind, chance.choice(shown.phases), step_s, slowest, ranks, chance.randrange(ranks), lasts_s)


def is_hurt(wait: Drawn, chance: Random, policy: JobPolicy = POLICY) -> bool:
    """Return whether the judge would have the job stopped before the wait is over."""
    policy = raised(policy, policy.restart_price_s)
    ages_s = [wait.lasts_s * (moment + 1) / MOMENTS for moment in range(MOMENTS)]
    return any(_is_acted_upon(wait, chance, age_s, policy) for age_s in ages_s)


def _is_acted_upon(wait: Drawn, chance: Random, age_s: float, policy: JobPolicy) -> bool:
    shown = LOOKS_LIKE[wait.kind]
    views: list[RankView] = []
    evidence: list[EvidenceItem] = []
    for rank in range(wait.ranks):
        is_culprit = rank == wait.culprit
        more = shown.view(age_s) if is_culprit else {"busy": chance.choice((0.0, 1.0))}
        phase = wait.phase if is_culprit else "backward"
        view = rank_view(
            rank, waits=shown.all_wait or not is_culprit, silent_s=age_s, phase=phase, phase_s=age_s, **more
        )  # type: ignore[arg-type]  # fields of rank_view
        progress = msgspec.structs.replace(
            view.report.progress, step_p50_s=wait.step_s, step_p99_s=wait.step_s * wait.slowest
        )
        views.append(view._replace(report=msgspec.structs.replace(view.report, progress=progress)))
        waited_in = FIRST_CALL if shown is FORMS else WAITING
        calls = waited_in if shown.all_wait or not is_culprit else ABSENT
        items = shown.look(chance, age_s) if is_culprit else (stack_of("in_collective"), *_of_others(wait.kind, chance))
        evidence += said_of(rank, calls, *items)
    suspicion = watchdog.judge(views, policy, 1e6)
    if suspicion is None:
        return False
    judged = judge(suspicion, views, gather(evidence), wait.ranks, policy)
    return judged.verdict.fault != "slow" and suspicion.age_s >= judged.patience_s


def _of_others(kind: str, chance: Random) -> tuple[EvidenceItem, ...]:
    """Return what ranks that wait show besides."""
    if kind == "gpu_late":
        queue = GpuQueue((GpuOperation("aa", "AllReduce", 41, begun=True),), state=5)
        return (EvidenceItem("collectives", ok=True, gpu=queue),)
    return _sends(chance, 0.0)[:1] if kind == "slow_line" else ()
