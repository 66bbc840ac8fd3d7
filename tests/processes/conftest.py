# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with real processes."""

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
