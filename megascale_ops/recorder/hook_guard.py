# SPDX-License-Identifier: Apache-2.0
"""Switch off one piece of the recorder after its first failure: one line on stderr, and the script runs on."""

import sys
from collections.abc import Callable
from typing import Any

_said: set[str] = set()


def step_aside(piece: str, error: BaseException) -> None:
    """Report on stderr that ``piece`` is no longer recorded, and the error; once per piece and process."""
    if piece in _said:
        return
    _said.add(piece)
    stream = sys.stderr or sys.__stderr__
    if stream is None:  # pythonw and daemons close it; then there is nowhere to report
        return
    reason = " ".join(str(error).split())[:300]
    try:
        stream.write(f"megascale-ops recorder: {piece} steps aside: {type(error).__name__}: {reason}\n")
        stream.flush()
    except (OSError, ValueError):  # a stderr that is closed or full must not end the script either
        return


def guarded(piece: str, event: Callable[..., None]) -> Callable[..., None]:
    """Return ``event`` as a function that never raises: after its first failure it does nothing."""
    failed = False

    def call(*args: object) -> None:
        nonlocal failed
        if failed:
            return
        try:
            event(*args)
        except Exception as error:  # noqa: BLE001  a hook's fault must never reach the script; reported once
            failed = True
            step_aside(piece, error)

    return call


def guarded_plain(piece: str, event: Callable[[], None]) -> Callable[[], None]:
    """Do what :func:`guarded` does for an event without arguments: handing on ``*args`` costs 0.1 us each time."""
    failed = False

    def call() -> None:
        nonlocal failed
        if failed:
            return
        try:
            event()
        except Exception as error:  # noqa: BLE001  as above
            failed = True
            step_aside(piece, error)

    return call


def guarded_about(piece: str, event: Callable[[Any], None]) -> Callable[..., None]:
    """Return :func:`guarded` of an event that takes one argument; further arguments of torch's hooks are dropped."""
    failed = False

    def call(thing: object, *_: object) -> None:
        nonlocal failed
        if failed:
            return
        try:
            event(thing)
        except Exception as error:  # noqa: BLE001  as above
            failed = True
            step_aside(piece, error)

    return call
