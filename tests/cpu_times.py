# SPDX-License-Identifier: Apache-2.0
"""What each test costs the machine, for ``pytest --cpu-times FILE``.

On two cores that others use too the wall time of a test of processes tells little: it grows with what runs beside it.
The CPU time of its processes stays, and the rest of the wall time is waiting. One line of JSON a test, appended as it
ends, by every worker: a run that is cut short keeps what it has.

A process counts when its parents have waited for it, up to pytest. One that is left to init (a runner that was killed
leaves its controller so) is missing.
"""

import json
import resource
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--cpu-times", metavar="FILE", type=Path, help="append each test's CPU and wall seconds to FILE")


def cpu_s(who: int) -> float:
    """Return user and system time of this process, or of its children that have ended."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def forked_cpu_s() -> float:
    """Return that of what was forked out of a warm parent, which tells it when a process has ended."""
    warmed = sys.modules.get("tests.processes.warmed")
    return float(warmed.spent_s()) if warmed is not None else 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test with its fixtures; a fixture of a module falls to its first and its last test."""
    path = item.config.getoption("--cpu-times")
    if path is None:
        return (yield)
    start_s = time.monotonic()
    own_s, children_s = cpu_s(resource.RUSAGE_SELF), cpu_s(resource.RUSAGE_CHILDREN) + forked_cpu_s()
    outcome = yield
    measured = {
        "test": item.nodeid,
        "wall_s": round(time.monotonic() - start_s, 3),
        "own_cpu_s": round(cpu_s(resource.RUSAGE_SELF) - own_s, 3),
        "children_cpu_s": round(cpu_s(resource.RUSAGE_CHILDREN) + forked_cpu_s() - children_s, 3),
    }
    with path.open("a") as lines:
        lines.write(json.dumps(measured) + "\n")
    return outcome
