# SPDX-License-Identifier: Apache-2.0
"""A policy that is changed while a real run lives, and a dry run that stops nothing."""

import os
import signal

import pytest

from megascale_ops.schema.events import Incident
from tests.matrix import wide
from tests.processes.launch import ENDLESS, LOCKSTEP, PLAIN, Launch, acted_upon, until

pytestmark = pytest.mark.processes


def test_a_dry_run_leaves_a_stopped_rank_alone(launch: Launch) -> None:
    """SIGSTOP: named, nothing stopped, the incident says what would have been done; after SIGCONT the run ends well."""
    run = launch.run(*ENDLESS, options=("--dry-run",), script=PLAIN)
    launch.until_step(20)
    pid = launch.pid(1)

    os.kill(pid, signal.SIGSTOP)
    told = until(lambda: _told(launch), f"the incident; so far:\n{launch.output()}")
    state = until(launch.status, "the controller to answer")
    os.kill(pid, signal.SIGCONT)
    launch.enough()
    code = launch.finish(run)

    assert code == 0, launch.output()
    assert (state.state, state.round) == ("running", 1)
    assert told.verdict is not None
    assert (told.verdict.fault, told.verdict.culprits, told.state) == ("frozen", (1,), "harmless")
    assert told.done.startswith("dry run: would have restarted: ")
    assert [one.id for one in launch.incidents() if one.verdict and one.verdict.fault == "frozen"] == [told.id]
    assert "in round 2" not in launch.output()
    replayed = launch.command("policy", "replay", "toy", "--policy", "dry_run=false")
    assert "would have restarted" in replayed.stdout
    assert "otherwise now: restart" in replayed.stdout
    launch.assert_nothing_left()


def test_a_fault_that_the_policy_ignores_is_explained_and_left_alone(launch: Launch) -> None:
    """SIGSTOP under frozen=ignore: nothing is stopped, and `why` says so, whose doing it was and by which numbers."""
    run = launch.run(*ENDLESS, options=("--policy=frozen=ignore",), script=PLAIN)
    launch.until_step(20)
    pid = launch.pid(1)

    os.kill(pid, signal.SIGSTOP)
    told = until(lambda: _told(launch), f"the incident; so far:\n{launch.output()}")
    os.kill(pid, signal.SIGCONT)
    launch.until_more_steps(20)
    launch.enough()
    code = launch.finish(run)

    assert code == 0, launch.output()
    assert "in round 2" not in launch.output()
    assert told.done == "nothing was done: this job's policy says ignore for frozen"
    card = launch.command("why", told.id, f"--run-dir={launch.run_dir()}").stdout
    assert "nothing was done: this job's policy says ignore for frozen" in " ".join(card.split())
    assert f"process {pid} of rank 1 is in state T" in " ".join(card.split())
    launch.assert_nothing_left()


def _told(launch: Launch) -> Incident | None:
    found = [one for one in launch.incidents() if one.done and one.verdict and one.verdict.fault == "frozen"]
    return found[0] if found else None


def test_a_changed_patience_holds_at_once(launch: Launch) -> None:
    """A hang that would be borne for 5 minutes is judged within seconds after ``policy set``, and the run recovers."""
    patience = ("--policy=silence_floor_s=300", "--policy=busy_floor_s=300")
    run = launch.run(*ENDLESS, "--fault=hang", options=patience, script=LOCKSTEP)
    launch.until_step(20)
    refused = launch.command("policy", "set", "toy", "silence_flor_s=1", is_cold=True)
    before = acted_upon(launch.incidents())

    eager = ("absent_patience_s=0", "silence_floor_s=5", "busy_floor_s=5", "busy_factor=1")
    done = launch.command("policy", "set", "toy", *eager)
    until(lambda: "restarting as round 2" in launch.output(), "the verdict")
    # Five seconds would be too little for the ranks' start and end on a busy machine.
    back = launch.command("policy", "set", "toy", "silence_floor_s=300", "busy_floor_s=300", "busy_factor=6")
    until(lambda: any(one.state == "recovered" for one in launch.incidents()), "the recovery")
    launch.enough()
    code = launch.finish(run)

    assert refused.returncode == 2
    assert "did you mean 'silence_floor_s'" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert back.returncode == 0, back.stderr
    assert "changed while it lives" in done.stdout
    assert before == []
    assert code == 0, launch.output()
    assert "in round 2" in launch.output()
    assert [incident.state for incident in acted_upon(launch.incidents())] == ["recovered"]
    launch.assert_nothing_left()


LIMITS = [
    ("restarts_per_hour=1", 1, "1 restarts in the last hour"),
    ("killed=stop", 0, "this job's policy says stop for killed"),
    # Each round begins after a checkpoint and dies where the one before did.
    ("fruitless_restarts=2", 2, "2 restarts in a row led to no step that had not been made before"),
]


@pytest.mark.parametrize(
    ("setting", "restarts", "why"),
    wide(LIMITS, keep=[LIMITS[-1]]),
)
def test_a_limit_ends_what_would_go_on_for_ever(launch: Launch, setting: str, restarts: int, why: str) -> None:
    """A rank that is killed in every round: as many restarts as the policy grants, then the job ends and says why."""
    faulty = ("--steps=60", "--fault=sigkill", "--rank=0", "--rounds=9")
    run = launch.run(*faulty, options=(f"--policy={setting}",), nproc=1, script=PLAIN)

    code = launch.finish(run)

    assert code != 0
    assert f"in round {restarts + 1}" in launch.output()
    assert f"in round {restarts + 2}" not in launch.output()
    actions = [one.verdict.action for one in acted_upon(launch.incidents()) if one.verdict is not None]
    assert actions == ["restart"] * restarts + ["stop"]
    assert why in launch.output()
    launch.assert_nothing_left()


def test_restarts_that_lead_further_are_no_loop(launch: Launch) -> None:
    """The negative control: killed as often, each time after steps that none had made before, the run ends well."""
    faulty = ("--steps=60", "--fault=sigkill", "--rank=0", "--rounds=3", "--further=10")
    run = launch.run(*faulty, options=("--policy=fruitless_restarts=2",), nproc=1, script=PLAIN)

    code = launch.finish(run)

    assert code == 0, launch.output()
    actions = [one.verdict.action for one in acted_upon(launch.incidents()) if one.verdict is not None]
    assert actions == ["restart"] * 3
    assert "in round 4" in launch.output()
    launch.assert_nothing_left()
