# SPDX-License-Identifier: Apache-2.0
"""Seeds that are drawn anew at each run, and the line at the end of a run that draws the same again.

A test that draws its input takes the fixture ``drawn_seed``. What it drew is told beside its name if it fails, in the
last lines of the run, whatever is captured, cut away or run by other workers:

    MEGASCALE_TEST_SEED=81723 pytest 'tests/unit/controller/test_wild_messages.py::test_...' draws the same again
"""

import os
import random

import pytest
from _pytest.terminal import TerminalReporter

VARIABLE = "MEGASCALE_TEST_SEED"


@pytest.fixture
def drawn_seed(request: pytest.FixtureRequest) -> int:
    """The seed of a test that draws: another one at each run, or what ``MEGASCALE_TEST_SEED`` says."""
    seed = int(os.environ.get(VARIABLE) or random.SystemRandom().randrange(1 << 32))
    request.node.user_properties.append((VARIABLE, seed))  # goes with each report, from workers too
    return seed


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say for each test that failed what it had drawn."""
    for report in [one for kind in ("failed", "error") for one in terminalreporter.stats.get(kind, [])]:
        for name, seed in getattr(report, "user_properties", ()):
            if name == VARIABLE:
                terminalreporter.line(f"{VARIABLE}={seed} pytest '{report.nodeid}' draws the same again")
