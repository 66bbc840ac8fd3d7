# SPDX-License-Identifier: Apache-2.0
"""Call the listeners when a checkpoint begins, ends or was loaded.

The recorder listens here to mark the phase "checkpoint" and, after a restore, to know the absolute step. This room
stands below the recorder and must not import it; so it keeps a list of callables and knows nothing about them.
"""

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

Event = Literal["save_begin", "save_end", "restored"]
Observer = Callable[[Event, int], None]


class Progress(NamedTuple):
    """How far a restore has come in this process."""

    step: int
    done_bytes: int  # read or received
    total_bytes: int  # that this rank reads or receives; it grows once structures are read and tensors are known


ProgressObserver = Callable[[Progress], None]

observers: list[Observer] = []
"""Called with the event and the step, in the thread that saves or restores. Append to listen."""

progress_observers: list[ProgressObserver] = []
"""Called while a restore reads, at most ten times a second and at its end. Append to listen."""

_log = logging.getLogger("megascale_ops.checkpoint")


def tell(event: Event, step: int) -> None:
    """Call every observer. One that raises is removed and said so once: it must never cost a checkpoint."""
    for observer in list(observers):
        try:
            observer(event, step)
        except Exception:  # noqa: BLE001  a listener's mistake must not lose the user's checkpoint
            _log.exception("a checkpoint observer failed at %s of step %d and is not called again", event, step)
            observers.remove(observer)


def tell_progress(progress: Progress) -> None:
    """Call every observer of progress; one that raises is treated alike."""
    for observer in list(progress_observers):
        try:
            observer(progress)
        except Exception:  # noqa: BLE001  same
            _log.exception("an observer of a restore's progress failed and is not called again")
            progress_observers.remove(observer)
