# SPDX-License-Identifier: Apache-2.0
"""Our own parts are killed for real; training does not notice, and nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megascale_ops.runner.processes import start_ticks
from megascale_ops.schema.events import Incident
from tests.matrix import wide
from tests.processes.launch import ENDLESS, LOCKSTEP, PATIENCE_S, PLAIN, SCRIPTS, Launch, acted_upon, until

pytestmark = pytest.mark.processes

DYING = SCRIPTS / "dying_controller.py"
# On the way from a fault to the round after it. `degraded` and the two ends have tests of their own.
STATES = (
    "restarting", "confirming", "running", "suspect", "diagnosing", "stopping", "replacing", "catching_up",
)  # fmt: skip


class Dying:
    """A controller that SIGKILLs itself right after journaling a state, and the one that follows it."""

    def __init__(self, launch: Launch, state: str) -> None:
        self._launch = launch
        self._port_file = port_file = launch.tmp_path / "port"
        store = f"sqlite:///{launch.tmp_path / 'journal.db'}"
        self._serve = (f"--store={store}", f"--port-file={port_file}", f"--run-dir={launch.tmp_path}")
        command = [sys.executable, str(DYING), state, "--listen=127.0.0.1:0", *self._serve]
        with (launch.tmp_path / "dying.log").open("ab") as out:
            self._proc = subprocess.Popen(command, env=launch.env, stdout=out, stderr=out)
        launch.procs.append(self._proc)
        until(port_file.exists, "the controller to serve")
        self._address = f"127.0.0.1:{port_file.read_text().strip()}"
        self._url = f"http://{self._address}"
        self.option = f"--controller={self._url}"

    def until_followed(self) -> None:
        """Wait for the death, and for the successor to serve at the same address, with the same journal."""
        assert self._proc.wait(PATIENCE_S) == -signal.SIGKILL, self._launch.output("dying.log")
        self._port_file.unlink()
        self._launch.spawn("controller", f"--listen={self._address}", *self._serve, log="successor.log")
        until(self._port_file.exists, "the successor to serve")

    def incidents(self) -> list[Incident]:
        """Return what the successor knows."""
        return self._launch.incidents(where=self._url)

    def the_incident(self) -> Incident:
        """Return the only one of them that was acted upon."""
        return self._launch.the_incident(where=self._url)

    def told(self) -> str:
        """Return what all have printed."""
        return self._launch.output() + self._launch.output("successor.log")


def test_the_agent_is_killed_and_training_goes_on(launch: Launch) -> None:
    """A new agent takes over; the ranks stay as they are."""
    run = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(10)
    found = launch.round_file()
    assert found is not None

    os.kill(found.agent_pid, signal.SIGKILL)
    until(lambda: "the agent ended" in launch.output(), "the runner to notice")
    launch.until_more_steps(100)  # only the new agent can report them
    launch.enough()

    assert launch.finish(run) == 0
    assert "in round 2" not in launch.output()
    assert acted_upon(launch.incidents()) == []


def test_the_controller_is_killed_and_training_goes_on(launch: Launch) -> None:
    """It comes back at the same address with the same journal, and still recovers what breaks afterwards."""
    run = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(10)
    controller = launch.controller()
    assert controller is not None

    os.kill(int(controller["pid"]), signal.SIGKILL)
    time.sleep(2.0)
    os.kill(launch.pid(1), signal.SIGKILL)
    until(lambda: any(incident.marks.stepped for incident in launch.incidents()), "the recovery")
    launch.enough()

    assert launch.finish(run) == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (1,))
    launch.assert_nothing_left()


@pytest.mark.parametrize("state", wide(STATES, keep=["restarting"]))
def test_a_controller_killed_in_any_state_goes_on_where_it_stood(launch: Launch, state: str) -> None:
    """Its successor finishes the recovery, and knows of one incident."""
    dying = Dying(launch, state)
    fault, script = ("hang", LOCKSTEP) if state in {"suspect", "confirming"} else ("sigkill", PLAIN)
    # A hang is acted upon once evidence is clear, not after nine minutes; of a kill a busy machine needs no haste.
    eager = ("--policy=absent_patience_s=0", "--policy=silence_floor_s=3", "--policy=silence_factor=5")
    options = (dying.option, *(eager if fault == "hang" else ()))
    run = launch.run(f"--fault={fault}", options=options, script=script)

    dying.until_followed()

    assert launch.finish(run) == 0, dying.told()
    assert dying.the_incident().round == 1


@pytest.mark.matrix
def test_a_controller_killed_while_the_job_is_degraded_still_recovers_what_breaks(launch: Launch) -> None:
    """One node of two: the ranks train on, and the successor brings a killed one back on the one node."""
    dying = Dying(launch, "degraded")
    options = (dying.option, "--nnodes=1:2", "--policy", "last_call_s=1")
    run = launch.run(*ENDLESS, options=options, script=PLAIN)

    dying.until_followed()
    before = launch.pid(1)
    os.kill(before, signal.SIGKILL)
    until(lambda: any(one.marks.stepped for one in dying.incidents()), "the recovery")
    launch.enough()

    assert launch.finish(run) == 0, dying.told()
    incident = dying.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits, incident.round) == ("killed", (1,), 1)


@pytest.mark.matrix
def test_a_controller_killed_when_the_job_has_failed_still_ends_it(launch: Launch) -> None:
    """No order had left it yet: the runner learns from the successor that there is nothing to wait for, and why."""
    dying = Dying(launch, "failed")
    run = launch.run("--fault=sigkill", options=(dying.option, "--max-restarts=0"), script=PLAIN)

    dying.until_followed()

    assert launch.finish(run) == 1, dying.told()
    assert "in round 2" not in launch.output()
    incident = dying.the_incident()
    assert incident.verdict is not None
    assert incident.verdict.fault == "killed"
    assert incident.verdict.reason in launch.output()


@pytest.mark.matrix
def test_a_controller_killed_when_the_job_has_finished_opens_nothing_again(launch: Launch) -> None:
    """Its runner ends as if nothing had been, and the successor knows a job that finished."""
    dying = Dying(launch, "finished")
    run = launch.run(options=(dying.option,), script=PLAIN)

    dying.until_followed()

    assert launch.finish(run) == 0, dying.told()
    done = launch.command("status", "--json", dying.option)
    assert [job["state"] for job in json.loads(done.stdout)["jobs"]] == ["finished"], done.stdout + done.stderr
    assert acted_upon(dying.incidents()) == []


def test_a_killed_runner_leaves_its_ranks_to_die_and_the_next_start_tidies(launch: Launch) -> None:
    """Its ranks go with it; what it could not tidy the next start of the job finds, removes and reports."""
    run = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(5)
    ranks = [launch.pid(0), launch.pid(1)]

    os.kill(run.pid, signal.SIGKILL)
    run.wait(PATIENCE_S)
    until(lambda: not any(start_ticks(pid) for pid in ranks), "the ranks to die with their runner")
    again = launch.run("--steps=60", script=PLAIN)

    assert launch.finish(again) == 0, launch.output()
    assert "had died without tidying" in launch.output()
    launch.assert_nothing_left()


def sleepers(launch: Launch) -> list[bytes]:
    """Return what of the script below runs."""
    lines = []
    for pid in launch.living():
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return [line for line in lines if line.startswith(b"sleep\0")]


def test_a_killed_runner_of_a_shell_script_leaves_orphans_that_the_next_start_kills(launch: Launch) -> None:
    """A process that is no Python and has left its group is found by the mark it inherited."""
    script = launch.tmp_path / "loop.sh"
    script.write_text("#!/bin/sh\nsetsid sleep 1000 &\nsleep 1000\n")
    script.chmod(0o755)
    run = launch.spawn("run", "--job=toy", "--", str(script))
    until(lambda: len(sleepers(launch)) == 2, "the script to have started both")
    os.kill(run.pid, signal.SIGKILL)
    run.wait(PATIENCE_S)

    script.write_text("#!/bin/sh\nexit 0\n")
    again = launch.spawn("run", "--job=toy", "--", str(script))

    assert launch.finish(again) == 0, launch.output()
    launch.assert_nothing_left()


def test_a_second_runner_and_the_end_of_the_terminal_disturb_nothing(launch: Launch) -> None:
    """The same job again: one sentence, exit code 2. SIGHUP under nohup: nothing. Neither run nor ranks notice."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does before it starts the program
    try:
        run = launch.run(*ENDLESS, script=PLAIN)
    finally:
        signal.signal(signal.SIGHUP, before)
    launch.until_step(5)

    second = launch.command("run", "--job=toy", "--nproc-per-node=2", "--", str(PLAIN))
    os.kill(run.pid, signal.SIGHUP)
    launch.until_more_steps(50)
    launch.enough()

    assert second.returncode == 2
    assert second.stderr.strip().splitlines()[-1].startswith("megascale-ops: job toy already runs on")
    assert launch.finish(run) == 0, launch.output()
    assert "in round 2" not in launch.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything_in_order(launch: Launch, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM: exit code 128 + signal, nothing left, not even what the ranks started and let go."""
    script = launch.tmp_path / "forks.py"
    script.write_text(
        "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '1000'])\n" + PLAIN.read_text().replace('"""', "'''")
    )
    run = launch.run(*ENDLESS, script=script)
    launch.until_step(5)

    os.kill(run.pid, number)

    assert launch.finish(run) == 128 + number
    how = "stopped by SIGTERM" if number == signal.SIGTERM else "stopped by hand"
    assert f": {how} on " in launch.output()
    launch.assert_nothing_left()
