# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with real processes."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import Launch
from tests.processes.networks import Networks, made
from tests.processes.nodes import Clusters


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Real runs, stopped and cleaned whatever the test does."""
    launched = Launch(tmp_path)
    yield launched
    launched.close()


@pytest.fixture
def clusters(launch: Launch) -> Iterator[Clusters]:
    """Controllers with nodes of their own."""
    made = Clusters(launch)
    yield made
    made.close()


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Networks for nodes a and b."""
    with made("a", "b") as networks:
        yield networks


@pytest.fixture(autouse=True)
def one_of_a_group_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of one ``xdist_group`` share what is the machine's (a user's folder in /dev/shm): they wait for each other.

    pytest-xdist 3.8 writes the group into ``_nodeid``, which pytest 9.2 no longer reads: groups keep nobody apart.
    """
    marker = request.node.get_closest_marker("xdist_group")
    if marker is None:
        yield
        return
    with Path(tempfile.gettempdir(), f"megascale-tests-{os.getuid()}-{marker.args[0]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
