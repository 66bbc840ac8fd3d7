# SPDX-License-Identifier: Apache-2.0
"""Which worker of a data loader keeps its rank waiting, and where it stands.

A rank that waits for a batch stands in its loader's queue, and so it does whatever the reason is. The reason is in one
of its worker processes: those that have nothing to do wait for an index, the other one is in the script's own code.
Only py-spy sees into them: a worker has neither a worker server nor a thread of the recorder.
"""

import time
from typing import NamedTuple

from megascale_agents.collectors import process
from megascale_agents.evidence import frame_classes, py_spy
from megascale_agents.evidence.flight_recorder import NoAnswerError
from megascale_agents.evidence.frame_classes import Frame
from megascale_agents.ownership.rights import Owner

# 16 processes, 20 ms each: a loader has 2 to 16 workers.
_MOST = 16
_EACH_S = 1.0  # fifty times that; one that is not to be seen must not take the others' time
# torch's and torchdata's own loop around what a worker does; below it is the script's dataset, sampler or collation.
_LOADS = "utils/data/_utils/"
_FETCHES = ("fetch.py", "collate.py", "pin_memory.py")


class Worker(NamedTuple):
    """A worker that has a batch to make, and all that was seen of a loader's workers."""

    where: str  # "process 1234 in read (shards.py:12)", "" where none is seen at work
    text: str  # their stacks


async def look(pid: int, deadline_s: float, owner: Owner) -> Worker:
    """Return which process below ``pid`` is making a batch; never longer than the deadline, never raises."""
    end_s = time.monotonic() + deadline_s
    where, texts = "", []
    for child in process.below(pid, _MOST):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        # A process that is stopped already can't be paused, and need not be.
        how = ("--nonblocking",) if process.read_once(child).state in ("T", "t") else ()
        try:
            spied = await py_spy.ask(child, min(left_s, _EACH_S), *how, owner=owner)
        except NoAnswerError:
            continue  # no Python, or gone: torch starts such processes, too
        if child not in process.below(pid, _MOST):
            continue  # the number may be another process's by now
        texts.append(f"process {child}, a child of the rank:\n{spied.text}")
        if not where and makes_a_batch(spied.frames):
            where = f"process {child} in {standing(spied.frames)}"
    return Worker(where, "\n\n".join(texts))


def makes_a_batch(frames: tuple[Frame, ...]) -> bool:
    """Return whether a loader's worker has got an index and not handed its batch in; innermost frame first."""
    return any(_LOADS in frame.file and frame.file.endswith(_FETCHES) for frame in frames)


def standing(frames: tuple[Frame, ...]) -> str:
    """Return the innermost frame, and of a library's also the script's line that led there."""
    written = frame_classes.write(frames)
    own = next((frame for frame in written if "(/" in frame), "")
    return written[0] if not own or own == written[0] else f"{written[0]} from {own}"
