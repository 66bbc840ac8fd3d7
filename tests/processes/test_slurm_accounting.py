# SPDX-License-Identifier: Apache-2.0
"""`sacct` tells which verdict ended a job, when Slurm itself has forgotten it: a real slurmdbd and MariaDB."""

from collections.abc import Iterator

import pytest

from tests.fakes.slurm import SOON, OneNode
from tests.processes.launch import Launch, until
from tests.processes.slurm_jobs import Job

# A database of its own, and 200 MB of Debian's packages; `make test` holds the comment itself (test_slurm_nodes).
pytestmark = [pytest.mark.processes, pytest.mark.matrix]


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    """Two nodes, and accounting that keeps comments."""
    with OneNode(nodes=2, settings=SOON, cpus=2, accounting=True) as cluster:
        yield cluster


def _comment(slurm: OneNode, job: str) -> str:
    return slurm.ask("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job}", "--format=State,Comment")


def test_accounting_names_the_verdict_that_ended_a_job(slurm: OneNode, launch: Launch) -> None:
    """Behind the user's own comment, while a job that ends well keeps theirs alone."""
    well = Job(slurm, launch, "well", "", "--nodes=2 --comment=grant-17")
    well.until(r"rank 1 on (n\d) trains from step \d+ in round 1")
    well.end()
    failed = Job(slurm, launch, "failed", "--policy killed=stop", "--nodes=2 --comment=grant-17")
    node = failed.until(r"rank 1 on (n\d) trains from step \d+ in round 1")[1]
    failed.kill_rank(node, 1)
    slurm.until_state(failed.id, "FAILED")
    until(lambda: not launch.living(), "all processes to end")

    told = until(lambda: (line := _comment(slurm, failed.id)).startswith("FAILED") and line, "sacct to know the end")
    kept = until(lambda: (line := _comment(slurm, well.id)).startswith("COMPLETED") and line, "sacct to know the other")

    assert told.startswith("FAILED|grant-17; megascale-ops: "), told
    assert "rank 1" in told
    assert kept == "COMPLETED|grant-17"
