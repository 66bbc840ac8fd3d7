# SPDX-License-Identifier: Apache-2.0
"""Tell what a save has found: to the log, to listeners, and to who reads the checkpoint later.

``listeners`` hear of every save that looked, with nothing where all is well, so that an alarm ends when it is over. The
recorder listens and writes it into the rank's black box, from where it becomes a warning of the controller.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.trust.file_digests import digest_of
from megascale_ops.checkpoint.trust.verdicts import Alarm

FILE_NAME = "trust.json"
# 4 MB: 1,000 names of 100 characters for each of a few dozen ranks.
MOST_BYTES = 4 << 20

Listener = Callable[[int, Sequence[Alarm]], None]

listeners: list[Listener] = []
"""Called on every rank with the step and what is not well, in the thread that saves. Append to listen."""

_log = logging.getLogger("megascale_ops.checkpoint")


class Findings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a save has found of what it saved; ``trust.json`` in the folder. Later versions only add."""

    step: int
    ranks: int = 1
    compared: int = 0  # tensors that were held against their replicas, of the rank that has most
    alarms: tuple[Alarm, ...] = ()
    since: int = -1  # the save before, that this one was compared with; -1: none
    unchanged: tuple[str, ...] = ()  # parameters that require gradients and have not changed since


def tell(step: int, alarms: Sequence[Alarm], *, leads: bool) -> None:
    """Log on the leading rank, and call every listener; one that raises is removed, and that is told once."""
    if leads:
        for alarm in alarms:
            _log.warning("checkpoint of step %d: %s: %s", step, alarm.fault.replace("_", " "), alarm.text)
    for listener in list(listeners):
        try:
            listener(step, alarms)
        except Exception:  # noqa: BLE001  a listener's mistake must not lose the user's checkpoint
            _log.exception("a listener failed at step %d and is not called again", step)
            listeners.remove(listener)


def read(folder: Path) -> Findings | None:
    """What the save of a verified checkpoint has found; None: it did not look, or the file can't be read."""
    try:
        return decode(foreign.read(folder / FILE_NAME, MOST_BYTES))
    except OSError:
        return None


def remind(sealed: Manifest | None, get: Callable[[], bytes]) -> None:
    """Log what the save of a checkpoint that is restored now had found of it; what is damaged is not believed.

    Args:
        sealed: its manifest.
        get: gives the bytes of ``trust.json``.
    """
    entry = next((each for each in sealed.files if each.name == FILE_NAME), None) if sealed is not None else None
    if sealed is None or entry is None:
        return
    try:
        raw = get()
    except OSError:
        raw = b""
    found = decode(raw) if digest_of(raw, entry.digest) == entry.digest else None
    if found is None:
        _log.warning("what the save of step %d had found can't be read: %s is damaged", sealed.step, FILE_NAME)
        return
    for alarm in found.alarms:
        _log.warning("what is restored was told of when it was saved, at step %d: %s", found.step, alarm.text)


def encode(findings: Findings) -> bytes:
    """The bytes of ``trust.json``."""
    return msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n"


def decode(raw: bytes) -> Findings | None:
    """Read what stands in a verified checkpoint; None: it is not as this program writes it."""
    try:
        return msgspec.json.decode(raw, type=Findings)
    except foreign.UNREADABLE:
        return None
