# SPDX-License-Identifier: Apache-2.0
"""Keep what a restart would sweep away: black boxes, progress boards, the end of each rank's stderr, and an index.

The boxes come from the readers' open files, so they are those of the round in question, even when the next round has
renamed them meanwhile and the round after that has removed them. ``take`` copies everything into memory between two
looks (2 ms for 8 ranks), ``write`` may then take as long as the disk needs.
"""

import time
from typing import NamedTuple

import msgspec

from megascale_agents.evidence import kill_traces
from megascale_agents.evidence.dumps import TEXT_CHARACTERS, state_of
from megascale_agents.evidence.incident_folder import IncidentFolder
from megascale_agents.ownership.rights import Owner
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_ops.schema.messages import EvidenceItem, Order
from megascale_ops.schema.progress import RankReport

INDEX = "evidence.json"
_STDERR_LINES_SENT = 10


class Index(msgspec.Struct, frozen=True):
    """``evidence.json``: what was known of each rank, and which files hold what."""

    job: str
    node: str
    round: int
    incident: str
    wall_s: float
    mono_s: float
    ranks: tuple[RankReport, ...]
    items: tuple[EvidenceItem, ...]


class Piece(NamedTuple):
    """One file to be; ``data`` None when there is nothing to write, and ``text`` is the reason then."""

    kind: str
    rank: int
    name: str
    text: str
    data: bytes | None


class Kept(NamedTuple):
    """Everything to be written for one incident."""

    known: Index  # its items are those of earlier orders
    pieces: list[Piece]


def preserve_round(watch: RoundWatch, order: Order, earlier: tuple[EvidenceItem, ...]) -> Kept:
    """Copy what this node knows of a round.

    Args:
        watch: The round the incident happened in.
        order: The order to preserve it.
        earlier: What earlier orders of the same incident brought (stacks, flight recorder).
    """
    ranks = [watch.ranks[rank] for rank in sorted(watch.ranks)]
    for rank in ranks:  # the order may follow a death by less than the time between two looks
        rank.look_at_process(time.monotonic())
    pieces = [piece for rank in ranks for piece in (_take_box(rank), *_take_boards(rank), _take_stderr(rank))]
    now_s = time.monotonic()
    index = Index(
        job=watch.job,
        node=order.node,
        round=watch.round,
        incident=order.incident,
        wall_s=time.time(),
        mono_s=now_s,
        ranks=tuple(_report(rank, now_s) for rank in ranks),
        items=earlier,
    )
    return Kept(index, pieces)


def traces_of(watch: RoundWatch, kernel_log: str) -> list[Piece]:
    """Return what kernel and control group say of the ranks whose process is gone; reads files, so not on the loop."""
    pieces = []
    for rank in [watch.ranks[number] for number in sorted(watch.ranks)]:
        if rank.is_gone and rank.started is not None:
            pids = tuple(dict.fromkeys((rank.process.pid, rank.started.pid)))
            text = kill_traces.of_kill(pids, watch.bounds.cgroups, kernel_log)
            name = f"rank-{rank.rank}.{kill_traces.KIND}.txt"
            pieces.append(Piece(kill_traces.KIND, rank.rank, name, text, f"{text}\n".encode()))
    return pieces


def write(kept: Kept, run_dir: str, owner: Owner) -> list[EvidenceItem]:
    """Write it all, as the job's owner; what can't be written is said, the rest is written."""
    index = kept.known
    try:
        folder = IncidentFolder(run_dir, owner, index.incident, index.node)
    except (OSError, ValueError) as error:
        return [EvidenceItem(kind="black_box", ok=False, text=f"nothing preserved: {error}")]
    items = [_write_piece(folder, piece) for piece in kept.pieces]
    whole = msgspec.structs.replace(index, items=(*index.items, *items))
    try:
        folder.write(INDEX, msgspec.json.format(msgspec.json.encode(whole)))
    except OSError as error:
        items.append(EvidenceItem(kind="black_box", ok=False, text=f"{INDEX} could not be written: {error}"))
    return items


def unwritten(kept: Kept, why: str) -> list[EvidenceItem]:
    """Return what is known when no file could be written in time."""
    return [
        EvidenceItem(
            kind=piece.kind,
            ok=False,
            rank=piece.rank,
            text=f"could not be written: {why}\n{piece.text}"[:TEXT_CHARACTERS],
            marks=("no_answer",),
        )
        for piece in kept.pieces
    ]


def _report(rank: RankWatch, now_s: float) -> RankReport:
    """Report a rank with its process as it is now: ranks of an ended round are not sampled any more."""
    report = rank.report(now_s)
    return msgspec.structs.replace(report, process=msgspec.structs.replace(report.process, state=state_of(rank)))


def _take_box(rank: RankWatch) -> Piece:
    name = f"rank-{rank.rank}.box"
    if rank.box is None:
        return Piece("black_box", rank.rank, name, "the rank has no black box", None)
    progress = rank.box.progress()
    text = f"{progress.state}, step {progress.step}, phase {progress.phase}"
    return Piece("black_box", rank.rank, name, text, rank.box.raw())


def _take_boards(rank: RankWatch) -> list[Piece]:
    """Take the boards of its overlapped kernels, named so that they lie beside its box as they did before."""
    copies = rank.board_copies()
    return [
        Piece("tiles", rank.rank, f"rank-{rank.rank}.{number}.board", "a progress board", data)
        for number, data in enumerate(copies)
    ]


def _take_stderr(rank: RankWatch) -> Piece:
    name = f"rank-{rank.rank}.stderr.txt"
    if not rank.log.path:
        return Piece("stderr", rank.rank, name, "the rank's stderr is not in a file", None)
    # What a dying rank wrote after the last look matters most.
    try:
        rank.log.poll_stderr()
    except OSError as error:
        return Piece("stderr", rank.rank, name, f"{rank.log.path}: {error}", None)
    lines = rank.log.tail()
    data = ("\n".join(lines) + "\n").encode() if lines else b""
    return Piece("stderr", rank.rank, name, "\n".join(lines[-_STDERR_LINES_SENT:]), data)


def _write_piece(folder: IncidentFolder, piece: Piece) -> EvidenceItem:
    """Write one file and describe it."""
    began_s = time.monotonic()
    path, text, ok = "", piece.text, piece.data is not None
    if piece.data is not None:
        try:
            path = str(folder.write(piece.name, piece.data))
        except OSError as error:
            ok, text = False, f"could not be written: {error}\n{text}"
    took_s = round(time.monotonic() - began_s, 4)
    return EvidenceItem(kind=piece.kind, ok=ok, rank=piece.rank, text=text[-TEXT_CHARACTERS:], path=path, took_s=took_s)
