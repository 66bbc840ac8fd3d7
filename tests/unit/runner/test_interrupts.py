# SPDX-License-Identifier: Apache-2.0
"""Signals that are meant for the ranks are kept from the program's first moment on, and handed on in order."""

import os
import signal
import threading

from megascale_ops.runner.interrupts import signals_handed_on, signals_kept

DEADLINE_S = 60.0


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_what_comes_before_anybody_listens_is_handed_on_then() -> None:
    """It ends nobody, and neither is it lost; what comes later follows it."""
    heard: list[int] = []
    whole = threading.Event()

    def hear(number: int) -> None:
        heard.append(number)
        if len(heard) == 3:
            whole.set()

    with signals_kept() as came:
        _send(signal.SIGUSR2)
        _send(signal.SIGUSR1)
        with signals_handed_on(hear, came) as hand_on:
            hand_on(signal.SIGTERM)
            assert whole.wait(DEADLINE_S)

    assert heard == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM]


def test_afterwards_signals_mean_what_they_meant() -> None:
    """The negative control: handlers of others are back, and what comes on the way out tells nobody any more."""
    heard: list[int] = []
    others: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: others.append(number))
    try:
        with signals_kept() as came:
            with signals_handed_on(heard.append, came):
                pass
            _send(signal.SIGUSR1)
        _send(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert heard == []
    assert others == [signal.SIGUSR1]
