# SPDX-License-Identifier: Apache-2.0
"""The terminal of a run says who is suspected while nothing is stopped yet, and that it has passed."""

import re

import pytest

from tests.processes.launch import LOCKSTEP, Launch, acted_upon

pytestmark = pytest.mark.processes

# Named after 5 s and twice what a step takes, acted upon after minutes.
SOON_NAMED = ("--policy", "silence_factor=2")


def test_a_rank_that_stands_still_is_told_in_the_terminal_and_so_is_that_it_goes_on(launch: Launch) -> None:
    """One line each, with the rank, when it would be acted upon, and the verb that tells more."""
    run = launch.run("--fault=slow_step", "--at=25", "--seconds=14", options=SOON_NAMED, script=LOCKSTEP)

    assert launch.finish(run) == 0, launch.output()
    told = re.findall(r"warning cli: .*rank 1\b.*; nothing yet: it is acted upon if it lasts until", launch.output())
    assert 1 <= len(told) <= 2, launch.output()  # a first look may see less than the next
    assert "`megascale-ops why toy-1 --job toy` tells more" in launch.output()
    assert launch.output().count("(rank 1) has passed: it moved again before anything was stopped") == 1
    assert acted_upon(launch.incidents()) == []


def test_a_healthy_run_says_nothing_of_the_kind(launch: Launch) -> None:
    """Its terminal has the lines of its start and its end."""
    run = launch.run("--steps=100", options=SOON_NAMED, script=LOCKSTEP)

    assert launch.finish(run) == 0, launch.output()
    assert " warning " not in launch.output()
    assert "has passed" not in launch.output()
