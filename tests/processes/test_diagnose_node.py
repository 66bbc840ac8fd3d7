# SPDX-License-Identifier: Apache-2.0
"""A node is checked from elsewhere: the verb asks the controller, its agent measures, the result comes back."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks import diagnose_faults
from megascale_ops.schema.health import SelfCheck
from tests.processes.launch import ENDLESS, PLAIN, Launch

pytestmark = pytest.mark.processes


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Real runs, stopped and cleaned whatever the test does."""
    launched = Launch(tmp_path)
    yield launched
    launched.close()


def test_a_node_is_checked_by_its_agent(launch: Launch) -> None:
    """Refused where a job trains, made with --preempt; summary, card, page and metrics have it; nothing is left."""
    node = socket.gethostname()
    run = launch.run(*ENDLESS, nproc=1, script=PLAIN)
    launch.until_step(3)

    refused = launch.command("diagnose", "--node", node)
    asked = ("diagnose", "--node", node, "--preempt", "--check", "limits", "--check", "numa")
    made = launch.command(*asked, "--json")
    unknown = launch.command("diagnose", "--node", "nowhere", is_cold=True)
    with launch.link() as link:
        shown = link.checked_node(node)
    launch.enough()

    assert launch.finish(run) == 0
    assert (refused.returncode, unknown.returncode) == (2, 2)
    assert f"job toy trains on node {node}: --preempt checks it all the same" in refused.stderr
    assert f"no agent of a node 'nowhere' was heard; heard of: {node}" in unknown.stderr
    assert made.returncode in (0, 1), made.stderr  # a machine of tests may have a bad limit
    found = msgspec.json.decode(made.stdout, type=SelfCheck)
    assert (found.node, found.depth, found.made, found.trouble) == (node, "quick", 2, "")
    assert (shown.state, shown.check) == ("done", found)
    launch.assert_nothing_left()


def test_faults_of_this_machine_are_named() -> None:
    """One of each kind that needs no rights: few open files; and a disk that damages a byte, where FUSE may be used."""
    draw = random.Random(5)  # noqa: S311  no secret

    assert diagnose_faults.few_files(draw).is_right
    try:
        damaged = diagnose_faults.damaging_disk(draw)
    except (PermissionError, OSError) as error:
        pytest.skip(f"no file system over FUSE here: {error}")
    assert damaged.is_right, damaged
