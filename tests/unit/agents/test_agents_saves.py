# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a node's ranks as a few series."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megascale_agents.metrics.saves import FIELDS, samples_of
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.blackbox.records import SavesRecord
from megascale_ops.schema.metrics import METRICS
from tests.fakes.node import FakeNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """Three ranks on a node."""
    made = FakeNode(tmp_path)
    made.start_round(3)
    yield made
    made.kill_all()


def found_on(node: FakeNode) -> dict[str, float]:
    """What a scrape says."""
    rounds = Rounds(str(node.root), node.node, lambda _: None)
    rounds.refresh(1.0)
    samples = list(samples_of(rounds.ranks(), node.node))
    rounds.close()
    assert {labels for _, labels, _ in samples} <= {("job", "node-a")}
    return {name: value for name, _, value in samples}


def test_of_all_ranks_the_most_is_told(node: FakeNode) -> None:
    """The longest stall, and a failure that each rank counted once is one."""
    node.boxes[0].set_saves(SavesRecord(10, 0.25, 3.0, 5, 1000.5, 1, 2))
    node.boxes[2].set_saves(SavesRecord(10, 0.5, 4.0, 5, 1000.0, 0, 2))

    assert found_on(node) == {
        "megascale_checkpoint_stall_seconds": 0.5,
        "megascale_checkpoint_write_seconds": 4.0,
        "megascale_checkpoint_saves_in_flight": 1.0,
        "megascale_checkpoint_failed_saves_total": 2.0,
        "megascale_checkpoint_sealed_timestamp_seconds": 1000.5,
    }
    assert all(METRICS[name].labels == ("job", "node") for name in FIELDS)


def test_before_the_first_seal_there_is_no_time_of_it(node: FakeNode) -> None:
    """0 would be a checkpoint of 1970."""
    node.boxes[1].set_saves(SavesRecord(10, 0.25, 0.0, -1, 0.0, 1, 0))

    assert "megascale_checkpoint_sealed_timestamp_seconds" not in found_on(node)


def test_ranks_that_save_nothing_with_us_have_no_series(node: FakeNode) -> None:
    """Zeros would say that saving costs nothing."""
    assert found_on(node) == {}
