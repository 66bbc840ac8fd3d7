# SPDX-License-Identifier: Apache-2.0
"""Nodes under Slurm's own daemons: a verdict's is drained, an administrator's is left out, a spare steps in."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes.slurm import SOON, OneNode
from tests.processes.launch import Launch, until
from tests.processes.slurm_jobs import Job
from tests.processes.warmed import stand_in

pytestmark = pytest.mark.processes

# Slurm's own program, by a user without rights in this cluster.
BY_NOBODY = '#!/bin/bash\nexec setpriv --reuid=65534 --regid=65534 --clear-groups /usr/bin/scontrol "$@"\n'


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    """Three nodes."""
    with OneNode(nodes=3, settings=SOON, cpus=2) as cluster:
        cluster.let_all_in()
        yield cluster


def verb(slurm: OneNode, *words: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    """Run one of our verbs; ``path``: where it finds Slurm's programs first."""
    return subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli.main", *words],
        env={**slurm.env, "PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def without_rights(launch: Launch) -> str:
    """Return a folder for PATH in which scontrol is a user's that may nothing."""
    path = launch.tmp_path / "bin" / "scontrol"
    path.parent.mkdir(exist_ok=True)
    path.write_text(BY_NOBODY)
    path.chmod(0o755)
    return str(path.parent)


def test_a_node_that_a_verdict_puts_out_is_drained_and_a_spare_steps_in(slurm: OneNode, launch: Launch) -> None:
    """Three nodes, two train; the drained one keeps our reason until it is resumed, and only ours can be."""
    job = Job(slurm, launch, "spare", "--nnodes=2 --policy killed=evict", "--nodes=3", program=stand_in())
    bad = job.until(r"rank 1 on (n\d) trains from step \d+ in round 1")[1]
    job.until("which waits as a spare")

    job.kill_rank(bad, 1)
    until(lambda: slurm.node_state(bad).startswith("drain"), f"the drain; the controller:\n{job.log()}")
    job.until(r"rank 1 on n\d trains from step \d+ in round 2")
    listed = verb(slurm, "slurm", "nodes")
    job.end()
    no_right = verb(slurm, "slurm", "resume", bad, path=without_rights(launch))
    back = verb(slurm, "slurm", "resume", bad)

    assert slurm.job(job.id)["JobState"] == "COMPLETED", job.printed
    assert not re.search(rf"on {bad} trains from step \d+ in round 2", job.printed)
    assert re.search(rf"{bad} · drain\w* · ours · megascale-ops: trains-{job.id}: ", listed.stdout), listed
    assert no_right.returncode == 1
    assert "Invalid user id; it takes Slurm's level Operator" in no_right.stderr
    assert "Traceback" not in no_right.stderr
    assert back.stdout == f"node {bad} is back in service\n"
    until(lambda: slurm.node_state(bad) == "idle", "the node to be in service")


def test_what_an_administrator_has_drained_is_not_used(slurm: OneNode, launch: Launch) -> None:
    """In mid-job: what runs there goes on; the next round leaves it out for the spare; nobody but they resume it."""
    job = Job(slurm, launch, "admin", "--nnodes=2", "--nodes=3", program=stand_in())
    first = job.until(r"rank 0 on (n\d) trains from step \d+ in round 1")[1]
    drained = job.until(r"rank 1 on (n\d) trains from step \d+ in round 1")[1]
    job.until("which waits as a spare")

    slurm.ask("scontrol", "update", f"nodename={drained}", "state=drain", "reason=fan")
    job.until_logged(rf"node {drained} is draining by root \(fan\): no new round takes it")
    went_on = "round 2" not in job.printed
    job.kill_rank(first, 1)
    job.until(r"rank 1 on n\d trains from step \d+ in round 2")
    job.end()
    refused = verb(slurm, "slurm", "resume", drained)
    slurm.ask("scontrol", "update", f"nodename={drained}", "state=resume")

    assert went_on
    assert not re.search(rf"on {drained} trains from step \d+ in round 2", job.printed)
    assert slurm.job(job.id)["JobState"] == "COMPLETED", job.printed
    assert refused.returncode == 1
    assert "by root (fan) and stays so" in refused.stderr


def test_without_the_right_the_job_goes_on(slurm: OneNode, launch: Launch) -> None:
    """One sentence with the right that lacks, in the log and the journal; the node stays in service."""
    job = Job(
        slurm,
        launch,
        "no-right",
        "--nnodes=1:2 --policy killed=evict",
        "--nodes=2",
        without_rights(launch),
        program=stand_in(),
    )
    bad = job.until(r"rank 1 on (n\d) trains from step \d+ in round 1")[1]

    job.kill_rank(bad, 1)
    job.until(r"rank 0 on n\d trains from step \d+ in round 2")
    job.until_logged(
        rf"node {bad} is not drained in Slurm, \S+ goes on without it: scontrol: Invalid user id; it takes"
    )
    state = slurm.node_state(bad)
    job.end()

    assert not re.search(rf"on {bad} trains from step \d+ in round 2", job.printed)
    assert state in ("mixed", "allocated")


def test_the_record_of_a_failed_job_names_the_verdict(slurm: OneNode, launch: Launch) -> None:
    """`scontrol show job` shows it behind the user's own comment; two jobs on a cluster know nothing of each other."""
    job = Job(slurm, launch, "failed", "--policy killed=stop", "--nodes=2 --comment=grant-17", program=stand_in())
    other = Job(slurm, launch, "other", "--nnodes=1", "--nodes=1", program=stand_in())
    other.until(r"rank 0 on n\d trains from step \d+ in round 1")
    node = job.until(r"rank 1 on (n\d) trains from step \d+ in round 1")[1]

    job.kill_rank(node, 1)
    slurm.until_state(job.id, "FAILED")
    record = slurm.ask("scontrol", "show", "job", job.id)
    beside = slurm.job(other.id)["JobState"]
    slurm.ask("scancel", other.id)
    until(lambda: not launch.living(), "all processes to end")

    assert re.search(r"Comment=grant-17; megascale-ops: .*rank 1", record), record
    assert beside == "RUNNING"
