# SPDX-License-Identifier: Apache-2.0
"""``run --wrap`` around launchers that give no RANK before Python starts: each rank is seen, named, and restarted."""

import shutil
import sys

import pytest

from tests.processes.launch import SCRIPTS, Launch, free_port

pytestmark = pytest.mark.processes

SCRIPT = str(SCRIPTS / "wrapped.py")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, SCRIPT, "--launcher=mpi")


def wrap(launch: Launch, *command: str) -> None:
    """Run a launcher to its end, which is a good one."""
    run = launch.spawn("run", "--job=toy", "--wrap", "--", *command, f"--port={free_port()}")
    assert launch.finish(run) == 0, launch.output()


def python(launcher: str, *options: str) -> tuple[str, ...]:
    """Return the command of a launcher inside the script."""
    return sys.executable, SCRIPT, f"--launcher={launcher}", *options


@pytest.mark.parametrize(
    ("launcher", "fault", "culprit"),
    [
        ("spawn", "killed", 1),
        pytest.param("spawn", "frozen", 1, marks=pytest.mark.matrix),
        ("spawn", "exception", 1),
        pytest.param("lightning", "killed", 1, marks=pytest.mark.matrix),
        ("lightning", "frozen", 1),
        pytest.param("alone", "killed", 0, marks=pytest.mark.matrix),
        ("alone", "frozen", 0),
        ("mpi", "killed", 1),
        pytest.param("mpi", "frozen", 1, marks=pytest.mark.matrix),
    ],
)
def test_a_rank_of_another_launcher_is_named(launch: Launch, launcher: str, fault: str, culprit: int) -> None:
    """Whoever started it: a rank that is killed, stopped or raises is named with its step; the whole starts again."""
    if launcher == "mpi" and not shutil.which("mpirun"):
        pytest.skip("needs Open MPI's mpirun (Debian: openmpi-bin), which make test installs")
    told = {"killed": "kill", "frozen": "stop", "exception": "raise"}[fault]

    command = MPIRUN if launcher == "mpi" else python(launcher)
    wrap(launch, *command, f"--fault={told}")

    (incident,) = launch.incidents()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == (fault, (culprit,)), incident.verdict.reason
    assert incident.verdict.since_step >= 28
    assert incident.state == "recovered"
    assert "is done" in launch.output()
    launch.assert_nothing_left()


def test_a_launcher_that_never_looks_at_its_ranks_is_ended(launch: Launch) -> None:
    """It joins rank 0, which waits for ever for rank 1, which was killed: that one is named, and all start again."""
    wrap(launch, *python("never-looks", "--fault=kill"))

    (incident,) = launch.incidents()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (1,)), incident.verdict.reason
    assert "its launcher has not reacted so far" in launch.output()
    launch.assert_nothing_left()


def test_two_worlds_below_one_launcher_do_not_accuse_each_other(launch: Launch) -> None:
    """The negative control: both have ranks 0 and 1; one of them is watched, the other is left alone, and both end."""
    wrap(launch, *python("two-worlds"))

    assert launch.incidents() == []
    assert launch.output().count("is done") == 4
    assert "is watched on this node" in launch.output() or "is rank" in launch.output()
    launch.assert_nothing_left()
