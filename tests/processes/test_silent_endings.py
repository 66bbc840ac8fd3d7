# SPDX-License-Identifier: Apache-2.0
"""Exceptions that are not the end of their process, and ends that are not the exception's.

Every run holds its own negative control: the same error where it does end the rank.
"""

import pytest

from megascale_ops.schema.events import Incident
from tests.processes.launch import SCRIPTS, Launch, acted_upon

pytestmark = pytest.mark.processes

ENDINGS = SCRIPTS / "endings.py"
EXIT_TAKES = "its process lives on"


def told(launch: Launch, *ways: str) -> list[Incident]:
    """Run two ranks that end in these ways, one a round, and return what was told of them, oldest first."""
    run = launch.run(*ways, options=("--policy", "absent_patience_s=0"), script=ENDINGS)
    assert launch.finish(run) == 0, launch.output()
    return sorted(acted_upon(launch.incidents()), key=lambda incident: incident.round)


def test_a_failed_script_whose_process_lives_on_is_told_by_its_error_and_not_as_asleep(launch: Launch) -> None:
    """Kept by a function of atexit, by a thread: 15 s, then a restart. The control just fails: nothing is granted."""
    found = told(launch, "1:1:20:fails_atexit", "2:0:35:fails_beside_a_thread", "3:1:50:fails")

    verdicts = [incident.verdict for incident in found if incident.verdict is not None]
    assert [(verdict.round, verdict.fault, verdict.culprits) for verdict in verdicts] == [
        (1, "exception", (1,)),
        (2, "exception", (0,)),
        (3, "exception", (1,)),
    ], verdicts
    for verdict, step in zip(verdicts, (20, 35, 50), strict=True):
        assert f"RuntimeError: no such row: {step} at {ENDINGS}" in verdict.reason
    assert [EXIT_TAKES in verdict.reason for verdict in verdicts] == [True, True, False]


def test_an_older_exception_of_a_thread_is_told_beside_the_kill_that_ended_the_rank(launch: Launch) -> None:
    """With its own step. The control: where the thread's hook ends the process, its exception is the end."""
    found = told(
        launch,
        *("1:1:10:thread_dies", "1:1:20:killed", "2:1:25:thread_loses_its_pipe", "2:1:35:killed"),
        "3:1:45:thread_takes_all_along",
    )

    verdicts = [incident.verdict for incident in found if incident.verdict is not None]
    assert [(verdict.round, verdict.fault, verdict.culprits) for verdict in verdicts] == [
        (1, "killed", (1,)),
        (2, "killed", (1,)),
        (3, "exception", (1,)),
    ], verdicts
    older = [[one.text for one in verdict.evidence if "went on" in one.text] for verdict in verdicts]
    assert [len(texts) for texts in older] == [1, 1, 0]
    assert "a thread of rank 1 (reader) had met ValueError: half a row: 10" in older[0][0]
    assert "after step 9" in older[0][0]
    assert "BrokenPipeError" in older[1][0]
    assert "after step 24" in older[1][0]
    assert "ValueError: half a row: 45" in verdicts[2].reason
