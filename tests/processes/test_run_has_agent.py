# SPDX-License-Identifier: Apache-2.0
"""Whatever has happened on the node before or happens meanwhile, a run has an agent: frozen ranks are named."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress

import pytest

from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.services.attendance import find_agents
from megascale_ops.schema.events import Incident
from tests.processes.launch import ENDLESS, PATIENCE_S, PLAIN, Launch, acted_upon, all_have_made, until

pytestmark = pytest.mark.processes


def serve(launch: Launch) -> str:
    """Start a controller and return its address."""
    port_file = launch.tmp_path / "port"
    store = f"--store=sqlite:///{launch.tmp_path / 'ops.db'}"
    launch.spawn("controller", "--listen=127.0.0.1:0", store, f"--port-file={port_file}", log="controller.log")
    until(port_file.exists, "the controller to serve")
    return f"http://127.0.0.1:{port_file.read_text().strip()}"


def agent_of(launch: Launch) -> int:
    """Return the pid of the agent that the run has started."""
    found = until(launch.round_file, "the ranks to start")
    assert found.agent_pid
    return found.agent_pid


def kill_runner(launch: Launch, run: subprocess.Popen[bytes], *, agent_lingers: bool) -> int:
    """SIGKILL a runner; return its agent's pid, which goes down as well, or stays for as long as we like."""
    agent = agent_of(launch)
    if agent_lingers:
        os.kill(agent, signal.SIGSTOP)
    os.kill(run.pid, signal.SIGKILL)
    run.wait(PATIENCE_S)
    return agent


def incidents(url: str) -> list[Incident]:
    """Return all incidents of a controller, whole."""
    with BlockingLink(url, timeout_s=PATIENCE_S) as link:
        return [link.incident(one.id) for one in link.incidents().incidents]


def until_step(launch: Launch, run: subprocess.Popen[bytes], url: str = "") -> None:
    """Wait until all ranks of a run have made 15 steps, which only an agent can tell.

    ``url``: of its controller, else its own. What the run before it has made does not count: with a controller
    that outlives them that one's round goes on to be reported until the new one is.
    """

    def round_of_run() -> int | None:
        found = launch.round_file()
        return found.round if found is not None and found.runner_pid == run.pid else None

    this_round = until(round_of_run, "the run to start its ranks")

    def reached() -> bool:
        with suppress(MegascaleError), BlockingLink(url) if url else launch.link() as link:
            return any(job.round == this_round and all_have_made(15, job) for job in link.status().jobs)
        return False

    until(reached, f"step 15; output so far:\n{launch.output()}")


def freeze(launch: Launch, run: subprocess.Popen[bytes], told: Callable[[], list[Incident]]) -> None:
    """Freeze rank 1 and let the run recover and come to its end."""
    os.kill(launch.pid(1), signal.SIGSTOP)
    until(lambda: any(one.marks.stepped for one in told()), "the recovery")
    launch.enough()
    assert launch.finish(run) == 0, launch.output()


def assert_frozen_by_agent(found: list[Incident]) -> None:
    """Rank 1 was named as frozen, and an agent has brought what is to be known."""
    incident = next(one for one in found if one.verdict is not None and one.verdict.fault == "frozen")
    assert incident.verdict is not None
    assert incident.verdict.culprits == (1,)
    assert {item.rank for item in incident.evidence if item.kind == "black_box" and item.ok} == {0, 1}


@pytest.mark.parametrize("agent_lingers", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_a_run_that_follows_a_killed_one_at_once(launch: Launch, *, agent_lingers: bool) -> None:
    """The dying runner's agent still holds its lock when the next run starts, and is not taken for a daemon."""
    killed = launch.run(*ENDLESS, script=PLAIN)
    until_step(launch, killed)
    agent = kill_runner(launch, killed, agent_lingers=agent_lingers)

    run = launch.run(*ENDLESS, script=PLAIN)
    until_step(launch, run)
    freeze(launch, run, launch.incidents)

    assert_frozen_by_agent(launch.incidents())
    if agent_lingers:
        os.kill(agent, signal.SIGCONT)
    launch.assert_nothing_left()


@pytest.mark.matrix
def test_a_killed_runners_agent_reports_to_the_same_controller(launch: Launch) -> None:
    """Its agent lingers and is of no use; the next run with that controller starts one beside it."""
    url = serve(launch)
    options = (f"--controller={url}",)
    killed = launch.run(*ENDLESS, options=options, script=PLAIN)
    until_step(launch, killed, url)
    agent = kill_runner(launch, killed, agent_lingers=True)

    run = launch.run(*ENDLESS, options=options, script=PLAIN)
    until_step(launch, run, url)
    freeze(launch, run, lambda: incidents(url))

    assert_frozen_by_agent(incidents(url))
    os.kill(agent, signal.SIGCONT)


def test_a_daemon_that_dies_for_good_is_replaced(launch: Launch) -> None:
    """The run is served by the node's daemon and starts no agent, until the daemon is gone and does not come back."""
    url = serve(launch)
    daemon = launch.spawn("agent", f"--controller={url}", log="agent.log")
    until(lambda: find_agents(launch.box_root, socket.gethostname()), "the daemon to start")
    run = launch.run(*ENDLESS, options=(f"--controller={url}",), script=PLAIN)
    until_step(launch, run, url)
    found = launch.round_file()

    daemon.kill()
    daemon.wait(PATIENCE_S)
    until(lambda: "this run has started its own" in launch.output(), "the run to start its own agent")
    freeze(launch, run, lambda: incidents(url))

    assert found is not None
    assert found.agent_pid == 0
    assert_frozen_by_agent(incidents(url))


def test_two_runs_at_once_have_an_agent_each(launch: Launch) -> None:
    """Each run's own controller gets reports of its ranks, whichever came first."""
    first = launch.run(*ENDLESS, job="first", script=PLAIN)
    launch.until_step(5, job="first")
    second = launch.run(*ENDLESS, script=PLAIN)
    until_step(launch, second)
    freeze(launch, second, launch.incidents)

    first.terminate()
    launch.finish(first)
    assert_frozen_by_agent(launch.incidents())
    assert acted_upon(launch.incidents("first")) == []
    launch.assert_nothing_left()
