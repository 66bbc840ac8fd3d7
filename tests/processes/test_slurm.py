# SPDX-License-Identifier: Apache-2.0
"""Slurm's scripts under Slurm itself: its own daemons run them as part of real jobs on a cluster of one node."""

import sys
from pathlib import Path

import pytest

from megascale_ops.runner.services.attendance import find_agents
from megascale_ops.schema.tokens import new_token
from tests.fakes.slurm import OneNode
from tests.processes.launch import ENDLESS, TOY, Launch, until
from tests.processes.nodes import Clusters, Controller

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).parents[2] / "agents" / "deploy" / "slurm"
PROGRAM = Path(sys.executable).parent / "megascale-ops"


@pytest.fixture
def controller(clusters: Clusters, launch: Launch) -> Controller:
    """A controller that wants a token."""
    cluster = clusters()
    token = launch.tmp_path / "token"
    token.write_text(new_token())
    token.chmod(0o600)
    cluster.controller.token_file = token
    return cluster.controller


class Site:
    """What an administrator puts on a node: settings, and a slurm.conf that names the scripts.

    Slurm gives its scripts no variables of ours, so each is called by a line that says where the settings are.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.run = launch.tmp_path / "run"
        self.box_root = Path(f"{launch.box_root}-0")
        self.settings = launch.tmp_path / "agent.env"

    def set(self, controller: Controller) -> None:
        """Write the settings."""
        self.settings.write_text(
            f"MEGASCALE_CONTROLLER={controller.url}\nMEGASCALE_TOKEN_FILE={controller.token_file}\n"
            f"MEGASCALE_OPS_PROGRAM={PROGRAM}\nMEGASCALE_AGENT_METRICS_LISTEN=127.0.0.1:0\n"
            f"MEGASCALE_OPS_RUN={self.run}\nMEGASCALE_OPS_BOXES={self.launch.box_root}\n"
            # By this the test sees whether anything is left.
            f"XDG_STATE_HOME={self.launch.state}\n"
        )

    def cluster(self, **instead: Path) -> OneNode:
        """Return a cluster whose slurm.conf names our scripts, or others instead."""
        return OneNode(**{name: self._script(name) for name in ("prolog", "epilog", "task_prolog")} | instead)

    def _script(self, name: str) -> Path:
        path = self.launch.tmp_path / name
        path.write_text(f"#!/bin/bash\nMEGASCALE_OPS_SETTINGS={self.settings} exec {SCRIPTS / name}.sh\n")
        path.chmod(0o755)
        return path

    def batch(self, *toy: str) -> str:
        """Return a batch script that trains by `run`, told nothing but what the task prolog tells."""
        run = (PROGRAM, "run", "--job=toy", "--nproc-per-node=1", f"--run-dir={self.launch.run_dir()}", "--", TOY, *toy)
        return f"#!/bin/bash\nexport XDG_STATE_HOME={self.launch.state}\nexec {' '.join(map(str, run))}\n"

    def env(self) -> dict[str, str]:
        """Return what the job's user has."""
        return {name: value for name, value in self.launch.env.items() if not name.startswith("MEGASCALE_")}


def test_a_job_under_slurm_is_watched_by_the_agent_of_its_prolog(controller: Controller, launch: Launch) -> None:
    """`run` in the job finds controller and agent by itself; after the epilog nothing is left, and the node is well."""
    site = Site(launch)
    with site.cluster() as slurm:
        controller.start()
        site.set(controller)

        job = slurm.submit(site.batch(*ENDLESS), site.env())
        slurm.until_state(job, "RUNNING", "FAILED")
        status = controller.cluster.until_status("running", step=3)
        agents = find_agents(site.box_root, status.nodes[0].node)
        kept_by_prolog = int((site.run / job / "agent.pid").read_text().split()[0])
        launch.enough()
        slurm.until_state(job, "COMPLETED", "FAILED")
        until(lambda: slurm.node_state() == "idle", "the epilog to end")

        assert [agent.pid for agent in agents] == [kept_by_prolog]
        assert agents[0].run_pid == 0  # the node's alone: `run` has started none of its own
        assert slurm.job(job)["JobState"] == "COMPLETED", slurm.logs()
        assert not (site.run / job).exists()
        assert not site.box_root.exists()
    controller.kill()
    launch.assert_nothing_left()


def test_a_node_without_settings_stays_in_service(launch: Launch) -> None:
    """The prolog cannot do anything, and the job runs; a prolog that fails would have cost the node."""
    site = Site(launch)
    failing = launch.tmp_path / "failing"
    failing.write_text("#!/bin/bash\nexit 1\n")
    failing.chmod(0o755)
    with site.cluster() as slurm:
        job = slurm.submit("#!/bin/bash\necho the job ran\n", site.env())
        slurm.until_state(job, "COMPLETED", "FAILED")
        until(lambda: slurm.node_state() == "idle", "the epilog to end")

        assert slurm.job(job)["JobState"] == "COMPLETED", slurm.logs()
        assert slurm.output() == "the job ran\n"
    with site.cluster(prolog=failing) as slurm:
        slurm.submit("#!/bin/bash\necho the job ran\n", site.env())
        until(lambda: slurm.node_state() in ("drained", "draining"), "Slurm to take the node out of service")
