# SPDX-License-Identifier: Apache-2.0
"""A rank breaks for real; the run names it and goes on from its checkpoint."""

import os
import select
import signal
import time
from contextlib import suppress

import psutil
import pytest

from tests.processes.launch import ENDLESS, LOCKSTEP, TOY, Launch, acted_upon, until

pytestmark = pytest.mark.processes
# Silence is acted upon as soon as evidence is clear; by default an absentee would be given nine minutes.
EAGER = ("--policy=absent_patience_s=0",)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        # A signal, memory, an end that looks well; the others differ in a status that tests/unit reads.
        # The exception is torch's toy's: Gloo's message on the other rank must not be taken for a cause.
        ("exception", "exception"),
        ("sigkill", "killed"),
        ("segfault", "segfault"),
        ("abort", "aborted"),
        ("memory", "out_of_memory"),
        ("exit0", "exited_early"),
        pytest.param("exit3", "exit_code", marks=pytest.mark.matrix),
    ],
)
def test_a_rank_that_dies_is_named_and_training_goes_on(launch: Launch, fault: str, named: str) -> None:
    """Whatever rank 1 dies of: one incident with the right class and rank, and the run ends well."""
    run = launch.run(f"--fault={fault}", script=TOY if fault == "exception" else LOCKSTEP)

    code = launch.finish(run)

    assert code == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == (named, (1,)), incident.verdict
    assert incident.state == "recovered"
    assert "begins at step 20 in round 2" in launch.output()
    folder = launch.run_dir() / "incidents" / incident.id
    assert (folder / "verdict.json").is_file()
    assert {path.name for path in folder.glob("*/rank-*.box")} == {"rank-0.box", "rank-1.box"}
    launch.assert_nothing_left()


def test_a_rank_that_left_is_named_where_no_connection_breaks(launch: Launch) -> None:
    """As over NCCL: the two others wait for each other, and nobody dies of the one that has ended with status 0."""
    run = launch.run("--fault=leaves", nproc=3, script=LOCKSTEP)

    code = launch.finish(run)

    assert code == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("exited_early", (1,)), incident.verdict
    assert "ended while the others wait for it" in incident.verdict.reason
    launch.assert_nothing_left()


def test_the_same_exception_on_all_ranks_twice_is_a_bug_in_the_script(launch: Launch) -> None:
    """It is restarted once; the same at the same step again stops the job and says so."""
    run = launch.run("--fault=exception_everywhere", "--rounds=99", "--at=5", script=LOCKSTEP)

    code = launch.finish(run)

    assert code == 1
    first, second = acted_upon(launch.incidents())
    assert first.verdict is not None
    assert second.verdict is not None
    assert (first.verdict.fault, set(first.verdict.culprits)) == ("exception_everywhere", {0, 1})
    assert (second.verdict.fault, second.verdict.action) == ("script_bug", "stop")
    assert "loss is broken" in launch.output()
    assert "Traceback" not in "\n".join(line for line in launch.output().splitlines() if not line.startswith("["))
    launch.assert_nothing_left()


def test_a_frozen_rank_is_named_killed_and_replaced(launch: Launch) -> None:
    """State T beyond the grace is a verdict of its own; no time-out of the script's is needed."""
    run = launch.run(*ENDLESS, script=LOCKSTEP)
    launch.until_step(15)

    os.kill(launch.pid(1), signal.SIGSTOP)
    incident = until(lambda: next((i for i in launch.incidents() if i.marks.stepped), None), "recovery")
    launch.enough()

    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("frozen", (1,))
    assert launch.finish(run) == 0
    launch.assert_nothing_left()


def test_a_rank_stopped_and_continued_in_time_is_left_alone(launch: Launch) -> None:
    """SIGSTOP and SIGCONT within the grace: no restart, whatever was suspected."""
    # 6 s instead of 1.5: it is the judge that is tried, not how soon a busy machine comes to the second signal.
    run = launch.run(*ENDLESS, options=("--policy=frozen_grace_s=6",), script=LOCKSTEP)
    launch.until_step(15)

    pid = launch.pid(1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)  # two heartbeats report it
    os.kill(pid, signal.SIGCONT)
    launch.until_more_steps(50)
    launch.enough()

    assert launch.finish(run) == 0
    assert "in round 2" not in launch.output()
    assert acted_upon(launch.incidents()) == []


def test_a_rank_that_hangs_is_named_by_the_patience_learned(launch: Launch) -> None:
    """Rank 1 sleeps outside collectives, rank 0 waits in one: rank 1 is named, nobody set a time-out."""
    run = launch.run("--fault=hang", "--steps=60", options=EAGER)

    code = launch.finish(run)

    assert code == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("sleeping", (1,))
    assert any(item.kind == "stacks" and "toy.py" in item.text for item in incident.evidence), incident.evidence


def test_of_several_ranks_that_hang_all_are_named(launch: Launch) -> None:
    """Two of four sleep outside collectives, in the same step: both are to blame, and neither of those who wait."""
    run = launch.run("--fault=hang", "--also=2", "--steps=60", nproc=4, options=EAGER, script=LOCKSTEP)

    code = launch.finish(run)

    assert code == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert incident.verdict.culprits == (1, 2)
    # Evidence has two seconds: where a busy machine let nobody tell within them, that is said.
    unheard = "nothing tells what it does instead" in incident.verdict.reason
    assert incident.verdict.fault == ("not_joined" if unheard else "sleeping"), incident.verdict.reason
    assert "where 2 ranks wait" in incident.verdict.reason
    launch.assert_nothing_left()


def test_a_job_in_which_all_ranks_sleep_is_idle_and_nobody_is_named(launch: Launch) -> None:
    """None waits for another, so none is to blame more than the others; it is started again all the same."""
    patience = (*EAGER, "--policy=busy_floor_s=6", "--policy=busy_factor=1")
    run = launch.run("--fault=hang", "--rank=0", "--also=1", "--steps=60", options=patience, script=LOCKSTEP)

    code = launch.finish(run)

    assert code == 0, launch.output()
    incident = acted_upon(launch.incidents())[0]
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits, incident.state) == ("idle", (), "recovered")
    assert "all 2 ranks sleep" in incident.verdict.reason
    launch.assert_nothing_left()


def _is_waiting_spare(process: psutil.Process) -> bool:
    """Whether ``process`` is a warm spare that has said it is ready: the byte lies unread in the pipe it was given."""
    *_, script, number, _stdin = ["", "", "", *process.cmdline()]
    if not script.endswith("/standby.py"):
        return False
    ready = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return bool(select.select([ready], [], [], 0)[0])
    finally:
        os.close(ready)


def _waiting_spares(runner: int) -> set[int]:
    """Return the pids of the runner's spares that could become ranks now."""
    found = set()
    for child in psutil.Process(runner).children():
        with suppress(psutil.Error, OSError):  # it has just ended or begun
            if _is_waiting_spare(child):
                found.add(child.pid)
    return found


def test_warm_workers_take_the_place_of_the_dead(launch: Launch) -> None:
    """With --warm a restart uses spares that have imported torch: the new ranks are processes that waited before."""
    run = launch.run(*ENDLESS, options=("--warm", "--policy", "silence_floor_s=20"))
    launch.until_step(15)
    spares = until(lambda: found if len(found := _waiting_spares(run.pid)) == 2 else None, "two spares to be ready")

    os.kill(launch.pid(0), signal.SIGKILL)
    until(lambda: any(incident.marks.stepped for incident in launch.incidents()), "the recovery")
    ranks = {launch.pid(0), launch.pid(1)}
    launch.enough()

    assert launch.finish(run) == 0
    assert ranks == spares
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (0,))
    assert "in round 2" in launch.output()
    launch.assert_nothing_left()
