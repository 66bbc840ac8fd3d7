# SPDX-License-Identifier: Apache-2.0
"""Logs of jobs that NCCL's watchdog ended, as torch 1.13 to 2.13 write them, with the faulty rank known.

Nothing but the watchdog's lines and what a script printed before is there: no black box, no dump. Numbers in ``[PG ...
Rank n]`` and in ``[Rank n]`` are places within the group, as torch prints them; ``[rankN]:`` (2.3 on) is the rank.
"""

import random
from typing import NamedTuple

VERSIONS = ("1.13", "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.8", "2.9", "2.13")
_WHY = (
    "This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks, the order of "
    "collectives is not same for all ranks or the scheduled collective, for some reason, didn't run. Additionally, "
    "this can be caused by GIL deadlock or other reasons such as network errors or bugs in the communications library "
    "(e.g. NCCL), etc. "
)
_OPS = ("ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BROADCAST", "ALLTOALL_BASE")
KINDS = (
    "absent", "absent", "absent_two", "absent_in_mesh", "absent_in_mesh", "other_op", "other_size", "nobody",
    "nobody_in_group", "one_too_many", "stuck", "first_call", "one_behind", "cut_short", "two_apart",
)  # fmt: skip
_CLASSES = {
    "other_op": frozenset({"collective_order", "collective_mismatch"}),
    "other_size": frozenset({"collective_mismatch", "collective_order"}),
    "one_too_many": frozenset({"collective_order", "not_joined", "unknown"}),
    "one_behind": frozenset({"collective_order", "not_joined", "gpu_stuck"}),
    "nobody": frozenset({"unknown", "not_joined"}),
    "nobody_in_group": frozenset({"unknown"}),
}


class Logs(NamedTuple):
    """What the ranks of one job left: text, exit status and whether its launcher stopped it, rank by rank."""

    kind: str
    version: str
    texts: tuple[str, ...]
    codes: tuple[int, ...]
    stopped: tuple[bool, ...]
    culprits: tuple[int, ...]  # empty: no rank's words tell who it is
    classes: frozenset[str]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.texts)


class _Call(NamedTuple):
    op: str
    numel: int
    seq: int


class _Writer:
    """The lines of one version of torch."""

    def __init__(self, rng: random.Random, version: str) -> None:
        self.rng, self.version = rng, version
        self.number = tuple(int(part) for part in version.split("."))
        self.timeout_ms = rng.choice((600_000, 1_800_000, 7_200_000, 120_000))

    def head(self, rank: int) -> str:
        """What glog and torch put before a line."""
        if self.number < (2, 3):
            return "[E ProcessGroupNCCL.cpp:474] "
        if self.number < (2, 4):
            return f"[rank{rank}]:[E ProcessGroupNCCL.cpp:563] "
        date, second = self.rng.randrange(100, 1231), self.rng.randrange(10, 59)
        return f"[rank{rank}]:[E{date} 12:01:{second}.90{rank:04d}111 ProcessGroupNCCL.cpp:632] "

    def place(self, group: str, desc: str, local: int, number: int) -> str:
        """Whose line it is."""
        if self.number < (2, 3):
            return f"[Rank {local}] "
        if self.number < (2, 4):
            return f"[PG {group} Rank {local}] "
        named = f"({desc})" if desc else ""
        if self.number < (2, 5):
            return f"[PG {group} {named + ' ' if named else ''}Rank {local}] "
        return f"[PG ID {number} PG GUID {group}{named} Rank {local}] "

    def work(self, call: _Call) -> str:
        """The work as it describes itself."""
        sizes = f"NumelIn={call.numel}, NumelOut={call.numel * (8 if 'GATHER' in call.op else 1)}, "
        if self.number < (2, 1):
            sizes = f"TensorShape=[{call.numel}], " if self.number >= (2, 0) else ""
        return f"WorkNCCL(SeqNum={call.seq}, OpType={call.op}, {sizes}Timeout(ms)={self.timeout_ms})"

    def timed_out(
        self, rank: int, local: int, group: tuple[str, str, int], call: _Call, enqueued: int, *, first: bool
    ) -> list[str]:
        """The lines of a rank whose watchdog gave a call up."""
        head, place = self.head(rank), self.place(group[0], group[1], local, group[2])
        caught = (
            f"[Rank {local}] Watchdog caught collective operation timeout: {self.work(call)} ran for "
            f"{self.timeout_ms + self.rng.randrange(900)} milliseconds before timing out."
        )
        lines = [head + caught]
        reach = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {call.seq - 1}."
        if self.number >= (2, 6):
            lines.append(
                f"{head}{place} failure detected by watchdog at work sequence id: {call.seq} PG status: last enqueued "
                f"work: {enqueued}, last completed work: {call.seq - 1}"
            )
        elif self.number >= (2, 4):
            lines.append(
                f"{head}{place}Exception (either an error or timeout) detected by watchdog at work: {call.seq}, {reach}"
            )
        if self.number >= (2, 6):
            lines.append(
                f"{head}Stack trace of the failed collective not found, potentially because FlightRecorder is disabled."
            )
            if first:
                lines.append(f"{head}{place}First PG on this rank to signal dumping.")
        if (2, 2) <= self.number < (2, 6):
            lines.append(f"{head}{place}Timeout at NCCL work: {call.seq}, {reach}")
        lines += [
            (
                f"{head}[Rank {local}] Some NCCL operations have failed or timed out. Due to the asynchronous nature "
                "of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data."
            ),
            f"{head}[Rank {local}] To avoid data inconsistency, we are taking the entire process down.",
            (
                f"{head}{place if self.number >= (2, 3) else f'[Rank {local}] '}Process group watchdog thread "
                f"terminated with exception: {caught}"
            ),
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            f"  what():  {place}Process group watchdog thread terminated with exception: {caught}",
        ]
        return lines

    def told_to_dump(self, rank: int, by: int, enqueued: int, completed: int) -> list[str]:
        """The line of the default group's monitor, from 2.5 on, about that group alone."""
        who = "this local rank" if by == rank else f" rank {by}"
        if self.number < (2, 5):
            return []
        return [
            (
                f"{self.head(rank)}{self.place('0', 'default_pg', rank, 0)}Received a dump signal due to a collective "
                f"timeout from {who} and we will try our best to dump the debug info. Last enqueued NCCL work: "
                f"{enqueued}, last completed NCCL work: {completed}.{_WHY}"
            ),
            (
                f"{self.head(rank)}{self.place('0', 'default_pg', rank, 0)}ProcessGroupNCCL preparing to dump debug "
                "info. Include stack trace: 1"
            ),
        ]


def draw(seed: int) -> Logs:
    """Draw a job, its fault and the version of torch."""
    rng = random.Random(seed)  # noqa: S311  # seeds of a test
    kind = rng.choice(KINDS)
    writer = _Writer(rng, rng.choice(VERSIONS))
    own = {"absent_in_mesh": _mesh, "stuck": _stuck, "cut_short": _cut_short, "two_apart": _two_apart}
    return own[kind](rng, writer) if kind in own else _one_group(rng, writer, kind)


def _one_group(rng: random.Random, writer: _Writer, kind: str) -> Logs:
    """All ranks call the collectives of one group."""
    world = rng.choice((3, 4, 4, 8, 8, 16))
    culprits: tuple[int, ...] = () if kind.startswith("nobody") else (rng.randrange(world),)
    if kind == "absent_two":
        world = max(world, 8)
        culprits = tuple(sorted(rng.sample(range(world), 2)))
    seq, ahead = (1, 0) if kind == "first_call" else (rng.randrange(2, 90_000), rng.choice((0, 0, 1, 4, 9)))
    ran = _Call(rng.choice(_OPS), rng.choice((1, 4096, 197_140_480, 9_801_523)), seq)
    if kind == "other_size":
        ran = ran._replace(op="ALLREDUCE")
    other = {
        "other_op": ran._replace(op=rng.choice([op for op in _OPS if op != ran.op])),
        "other_size": ran._replace(numel=ran.numel + rng.choice((1, 64, 4096))),
        "one_behind": ran._replace(seq=seq - 1),
    }.get(kind, ran)
    group = ("3", "DATA_PARALLEL_GROUP", 3) if kind == "nobody_in_group" else ("0", "default_pg", 0)
    absent = kind.startswith("absent") or kind == "first_call"
    inside = set(range(world))
    if absent or kind == "one_too_many":
        inside = inside - set(culprits) if absent else set(culprits)
    first = rng.choice(sorted(inside))
    texts, codes, stopped = [], [], []
    quiet = (seq - 1, seq - 1) if group[0] == "0" else (58, 58)
    for rank in range(world):
        lines = [f"step {40 + at} loss 2.{rng.randrange(99)}" for at in range(3)]
        if rank in inside:
            call = other if rank in culprits else ran
            reach = (seq + ahead, seq - 1) if group[0] == "0" else quiet
            lines += writer.timed_out(rank, rank, group, call, call.seq + ahead, first=True)
            if rng.random() < 0.6:
                lines[-5:-5] = writer.told_to_dump(rank, rank, *reach)
        else:
            behind = rng.choice((0, 0, 0, 2)) if kind.startswith("absent") else 0
            reach = (-1, -1) if kind == "first_call" else (quiet[0] - behind, quiet[1] - behind)
            lines += writer.told_to_dump(rank, first, *reach)
        texts.append("\n".join(lines) + "\n")
        is_dead = rank in inside or writer.number >= (2, 5)
        codes.append(-6 if is_dead else -15)
        stopped.append(not is_dead)
    if kind == "one_too_many" and writer.number < (2, 5):
        culprits = ()  # of the others nothing is known
    classes = _CLASSES.get(kind, frozenset({"not_joined"}))
    return Logs(kind, writer.version, tuple(texts), tuple(codes), tuple(stopped), culprits, classes)


def _mesh(rng: random.Random, writer: _Writer) -> Logs:
    """One rank of a mesh is elsewhere: its tensor peers wait for it, and all others for one that waits."""
    tensor, data = rng.choice(((2, 2), (2, 4), (4, 2), (4, 4), (8, 2)))
    world = tensor * data
    culprit = rng.randrange(world)
    lone = rng.randrange(4, 900)
    tensor_seq, data_seq = rng.randrange(1000, 90_000), rng.randrange(100, 2000)
    texts, codes, stopped = [], [], []
    first = rng.choice([rank for rank in range(world) if rank != culprit])
    for rank in range(world):
        lines = [f" [2026-11-2{rng.randrange(9)} 10:00:00] iteration {40 + at}/ 5000 | lm loss: 2.1" for at in range(2)]
        column, row = divmod(rank, tensor)
        if rank == culprit:
            lines += writer.told_to_dump(rank, first, lone, lone)
        elif column == culprit // tensor:
            group = (str(1 + column), "TENSOR_MODEL_PARALLEL_GROUP", 1)
            call = _Call("ALLREDUCE", 100_663_296, tensor_seq)
            lines += writer.timed_out(rank, row, group, call, tensor_seq + rng.choice((0, 3)), first=True)
        else:
            group = (str(1 + data + row), "DATA_PARALLEL_GROUP", 2)
            call = _Call("_REDUCE_SCATTER_BASE", 50_331_648, data_seq)
            lines += writer.timed_out(rank, column, group, call, data_seq, first=True)
        if rank != culprit and rng.random() < 0.5:
            lines[-5:-5] = writer.told_to_dump(rank, rank, lone, lone)
        texts.append("\n".join(lines) + "\n")
        is_dead = rank != culprit or writer.number >= (2, 5)
        codes.append(-6 if is_dead else -15)
        stopped.append(not is_dead)
    return Logs(
        "absent_in_mesh",
        writer.version,
        tuple(texts),
        tuple(codes),
        tuple(stopped),
        (culprit,),
        frozenset({"not_joined"}),
    )


def _stuck(rng: random.Random, writer: _Writer) -> Logs:
    """The watchdog itself hangs, on all ranks: that is nobody's."""
    world = rng.choice((2, 4, 8))
    texts = []
    for rank in range(world):
        place = writer.place("0", "default_pg", rank, 0)
        texts.append(
            f"step 7\n{writer.head(rank)}{place}ProcessGroupNCCL's watchdog got stuck for 480 seconds without making "
            "progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., "
            "CudaEventDestroy) hang blocking the watchdog, and could be triggered by another thread holding the GIL "
            "inside a CUDA api (for example, CudaEventDestroy), or other deadlock-prone behaviors.\n"
        )
    return Logs("stuck", writer.version, tuple(texts), (-6,) * world, (False,) * world, (), frozenset({"unknown"}))


def _cut_short(rng: random.Random, writer: _Writer) -> Logs:
    """The launcher ends all others as soon as the first two have given up: who was absent stands nowhere."""
    world, seq = rng.choice((4, 8, 16)), rng.randrange(2, 90_000)
    spoke = rng.sample(range(world), 2)
    call = _Call("ALLREDUCE", 4096, seq)
    texts = [
        "step 9\n"
        + "\n".join(
            writer.timed_out(rank, rank, ("0", "default_pg", 0), call, seq, first=True) if rank in spoke else ()
        )
        + "\n"
        for rank in range(world)
    ]
    stopped = tuple(rank not in spoke for rank in range(world))
    codes = tuple(-15 if one else -6 for one in stopped)
    return Logs("cut_short", writer.version, tuple(texts), codes, stopped, (), frozenset({"unknown"}))


def _two_apart(rng: random.Random, writer: _Writer) -> Logs:
    """Two ranks alone disagree: which of them is right, nothing tells."""
    seq = rng.randrange(2, 90_000)
    one = _Call(rng.choice(_OPS[:2]), 4096, seq)
    other = _Call(rng.choice(_OPS[2:]), 4096, seq)
    texts = [
        "\n".join(writer.timed_out(rank, rank, ("0", "default_pg", 0), call, seq, first=True))
        for rank, call in enumerate((one, other))
    ]
    classes = frozenset({"collective_order", "collective_mismatch", "unknown"})
    return Logs("two_apart", writer.version, tuple(texts), (-6, -6), (False, False), (), classes)
