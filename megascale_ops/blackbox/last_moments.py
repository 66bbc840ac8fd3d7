# SPDX-License-Identifier: Apache-2.0
"""What a rank did last, from its black box alone: for boxes of processes that are long gone.

All times are seconds before the box's *last moment*, the newest time stamp in it: the writer's clock means nothing on
another machine or after a reboot, the differences between its own stamps always do.
"""

import os
import stat
from pathlib import Path

import msgspec

from megascale_ops.blackbox import TornBoxError, boards, nccl_words
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord, GpuStepRecord, StepRecord
from megascale_ops.schema.progress import CollectivePosition, Progress, RankError
from megascale_ops.schema.tiles import TileFact

# Three steps show whether the end came out of a steady run or out of one that was slowing down.
LAST_STEPS = 3
# What 63 bits of nanoseconds hold (292 years): no clock shows more, only a damaged stamp does.
_MOST_S = 2.0**63 * 1e-9


class OpenCollective(msgspec.Struct, frozen=True):
    """A collective that was entered and whose end was never seen; asynchronous ones look the same."""

    group: str
    function: str
    seq: int
    bytes_moved: int
    before_s: float  # entered so long before the last moment


class LastMoments(msgspec.Struct, frozen=True):
    """One rank's end."""

    path: str
    identity: BoxIdentity
    progress: Progress
    silent_s: float  # from its last movement to the last moment
    phase_s: float  # in its last phase
    ended: CollectiveRecord | None  # the last collective that ended
    unfinished: tuple[OpenCollective, ...]  # entered after that, oldest first
    steps: tuple[StepRecord, ...]
    tiles: tuple[TileFact, ...]  # of the boards beside the box, one for each workspace of overlapped kernels
    gpu: GpuStepRecord | None  # the last step that the GPU was seen to have passed
    error: RankError | None
    torn: str = ""  # one sentence where the file ends too early: what stood behind is missing here
    position: CollectivePosition | None = None  # as of the last beat: what a controller judged by
    in_call: bool = True  # what is unfinished was waited in; False: handed over, and a later beat saw no wait
    nccl: tuple[str, ...] = ()  # sentences about what NCCL has not ended, where its profiler plugin was loaded


def read(path: Path) -> LastMoments:
    """Return a rank's last moments from its box.

    Raises:
        BoxError: it is no box, or one of a version that is not understood; the message names the reason.
    """
    box, torn = _open(path)
    with box:
        progress, collectives, steps = box.progress(), box.collectives(), box.steps(LAST_STEPS)
        operations, position = box.nccl(), box.collective()
        last_s = max(
            _last_moment_s(progress, collectives, steps), *(one.enqueued_mono_ns * 1e-9 for one in operations[-1:]), 0.0
        )
        return LastMoments(
            path=os.fsencode(path).decode(errors="backslashreplace"),  # its name need be no text
            identity=box.identity(),
            progress=progress,
            silent_s=max(0.0, last_s - progress.moved_mono_s) if progress.moved_mono_s else 0.0,
            phase_s=max(0.0, last_s - progress.phase_since_mono_s) if progress.phase_since_mono_s else 0.0,
            ended=next((record for record in reversed(collectives) if record.ended_mono_ns), None),
            unfinished=(unfinished := _unfinished(collectives, last_s)),
            position=position,
            in_call=not _is_handed_over(unfinished, position, last_s - progress.beat_mono_s),
            steps=tuple(steps),
            tiles=_tiles(path, box.identity()),
            gpu=next(iter(box.gpu_steps(1)), None),
            error=box.error(),
            torn=torn,
            nccl=tuple(
                nccl_words.told(
                    operations, round(last_s * 1e9), nccl_words.names_of(box.communicators()), box.profiler()
                )
            ),
        )


def _tiles(path: Path, identity: BoxIdentity) -> tuple[TileFact, ...]:
    """Return what the boards beside a box show that its process has made."""
    name = path.name.removesuffix(".old").removesuffix(".box")
    found = boards.of_process(path.parent, name, identity.pid, identity.start_ticks)
    return tuple(boards.fact_of(board, identity.world_size) for board in found)


def _open(path: Path) -> tuple[BoxReader, str]:
    """Open a box; with a sentence if it is truncated, by a full disk for instance, else ""."""
    try:
        return BoxReader(path), ""
    except TornBoxError as error:
        return BoxReader(path, torn=True), str(error)


def find(paths: tuple[Path, ...]) -> list[Path]:
    """Return the boxes among files and folders (searched to any depth), each once, in the order of their names.

    Unreadable paths and folders are included: :func:`read` raises with the reason.

    Raises:
        FileNotFoundError: a path that does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(path) from None
        except OSError:
            is_folder = False
        boxes = _boxes_in(path) if is_folder else [path]
        found |= dict.fromkeys(sorted(boxes, key=lambda box: (str(box.parent), len(box.name), box.name)))
    return list(found)


def _boxes_in(folder: Path) -> list[Path]:
    """Return the boxes below a folder, and the folders that may not be looked into."""
    found: list[Path] = []

    def keep(error: OSError) -> None:
        found.append(Path(error.filename))

    for place, _, names in os.walk(folder, onerror=keep):
        found += [Path(place, name) for name in names if name.endswith((".box", ".box.old"))]
    return found


def _last_moment_s(progress: Progress, collectives: list[CollectiveRecord], steps: list[StepRecord]) -> float:
    stamps = [progress.moved_mono_s, progress.beat_mono_s, progress.phase_since_mono_s]
    stamps += [max(record.enqueued_mono_ns, record.ended_mono_ns) * 1e-9 for record in collectives[-1:]]
    stamps += [step.ended_mono_s for step in steps[-1:]]
    return max((stamp for stamp in stamps if stamp < _MOST_S), default=0.0)


def _is_handed_over(
    unfinished: tuple[OpenCollective, ...], position: CollectivePosition | None, beat_ago_s: float
) -> bool:
    """Say whether no rank waited in what is unfinished: a beat that came after it was entered saw all groups done."""
    if not unfinished or position is None or position.enqueued > position.completed:
        return False
    return unfinished[-1].before_s > beat_ago_s


def _unfinished(collectives: list[CollectiveRecord], last_s: float) -> tuple[OpenCollective, ...]:
    """Return what was entered after the last collective that ended: earlier ones without end were asynchronous."""
    begun = []
    for record in reversed(collectives):
        if record.ended_mono_ns:
            break
        before_s = max(0.0, last_s - record.enqueued_mono_ns * 1e-9)
        begun.append(OpenCollective(record.communicator, record.function, record.seq, record.bytes_moved, before_s))
    return tuple(reversed(begun))
