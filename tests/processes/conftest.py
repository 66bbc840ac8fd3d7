# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with real processes."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.groups import GROUPS
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
    """Tests of a group wait for each other, also where other workers, or another call of pytest, hold the rest."""
    group = GROUPS.get(request.path.relative_to(request.config.rootpath).as_posix())
    if group is None:
        yield
        return
    with Path(tempfile.gettempdir(), f"megascale-tests-{os.getuid()}-{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
