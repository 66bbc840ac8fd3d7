# SPDX-License-Identifier: Apache-2.0
"""Call the listeners when a checkpoint begins, ends or was loaded, and when what is known of the saves changes.

The recorder listens here to mark the phase "checkpoint", to know the absolute step after a restore, and to show what
the saves cost. This room stands below the recorder and must not import it; so it keeps lists of callables and knows
nothing about them.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

Event = Literal["save_begin", "save_end", "restored", "sealed", "save_failed"]
Observer = Callable[[Event, int], None]


class Progress(NamedTuple):
    """How far a restore has come in this process."""

    step: int
    done_bytes: int  # read or received
    total_bytes: int  # that this rank reads or receives; it grows once structures are read and tensors are known


ProgressObserver = Callable[[Progress], None]


class Saves(msgspec.Struct, frozen=True):
    """What this process knows of its saves; the newest save is not over as long as one is in flight."""

    step: int = -1  # of the newest save that began
    stall_s: float = 0.0  # how long the training stood still for the newest one
    write_s: float = (
        0.0  # from there until the newest sealed one was sealed; 0 where nothing is saved in the background
    )
    sealed_step: int = -1
    sealed_wall_s: float = 0.0
    in_flight: int = 0
    failed: int = 0


class Restores(msgspec.Struct, frozen=True):
    """What this process knows of its restores: of the newest one, and how many there were of each kind."""

    step: int = -1  # of the newest one
    restore_s: float = 0.0  # how long it took, the search for it included
    read_bytes: int = 0  # what this rank read of it from storage
    passed_over: int = 0  # checkpoints that were found damaged, in all restores
    failed: int = 0  # restores that gave the training nothing though there were checkpoints
    node: int = 0  # from the tier on the nodes, each file where it was written
    buddy: int = 0  # from there, with a buddy's copy of what a node had lost
    shared: int = 0  # from the shared folder
    store: int = 0  # from an object store


SavesObserver = Callable[[Saves], None]
RestoresObserver = Callable[[Restores], None]

observers: list[Observer] = []
"""Called with the event and the step: the first three in the thread that saves or restores; "sealed" and "save_failed",
which only saves in the background have, in any thread. Append to listen."""

saves_observers: list[SavesObserver] = []
"""Called in any thread, one call at a time, with what is now known. Append to listen."""

restores_observers: list[RestoresObserver] = []
"""Called in the thread that restores, with what is now known. Append to listen."""

progress_observers: list[ProgressObserver] = []
"""Called while a restore reads, at most ten times a second and at its end. Append to listen."""

_log = logging.getLogger("megascale_ops.checkpoint")


def tell(event: Event, step: int) -> None:
    """Call every observer. One that raises is removed and said so once: it must never cost a checkpoint."""
    _call(observers, f"{event} of step {step}", event, step)


def tell_saves(saves: Saves) -> None:
    """The same for what is known of the saves."""
    _call(saves_observers, f"the save of step {saves.step}", saves)


def tell_restores(restores: Restores) -> None:
    """The same for what is known of the restores."""
    _call(restores_observers, f"the restore of step {restores.step}", restores)


def tell_progress(progress: Progress) -> None:
    """The same for how far a restore has come."""
    _call(progress_observers, f"the restore of step {progress.step}", progress)


def _call(listening: list[Any], at: str, *told: object) -> None:
    for observer in list(listening):
        try:
            observer(*told)
        except Exception:  # noqa: BLE001  a listener's mistake must not lose the user's checkpoint
            _log.exception("a checkpoint observer failed at %s and is not called again", at)
            listening.remove(observer)
