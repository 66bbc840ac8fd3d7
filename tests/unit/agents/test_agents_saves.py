# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a node's ranks as a few series."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megascale_agents.metrics.saves import FIELDS, restores_of, samples_of
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.blackbox.records import RestoresRecord, SavesRecord
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


def test_of_restores_the_slowest_rank_is_told_and_bytes_add_up(node: FakeNode) -> None:
    """By where they came from, only what there was; each rank has read its own share."""
    node.boxes[0].set_restores(RestoresRecord(10, 2.0, 300, 1, 0, 0, 1, 0, 0))
    node.boxes[1].set_restores(RestoresRecord(10, 2.5, 500, 1, 0, 0, 1, 1, 0))

    rounds = Rounds(str(node.root), node.node, lambda _: None)
    rounds.refresh(1.0)
    found = {(name, labels): value for name, labels, value in restores_of(rounds.ranks(), node.node)}
    rounds.close()

    here = ("job", "node-a")
    assert found == {
        ("megascale_checkpoint_restore_seconds", here): 2.5,
        ("megascale_checkpoint_restore_read_bytes", here): 800.0,
        ("megascale_checkpoint_passed_over_total", here): 1.0,
        ("megascale_checkpoint_failed_restores_total", here): 0.0,
        ("megascale_checkpoint_restores_total", (*here, "buddy")): 1.0,
        ("megascale_checkpoint_restores_total", (*here, "shared")): 1.0,
    }
    assert all(METRICS[name].labels == ("job", "node", "tier")[: len(labels)] for name, labels in found)


def test_ranks_that_restored_nothing_with_us_have_no_series(node: FakeNode) -> None:
    """Zeros would say that a restore takes no time."""
    rounds = Rounds(str(node.root), node.node, lambda _: None)
    rounds.refresh(1.0)
    assert list(restores_of(rounds.ranks(), node.node)) == []
    rounds.close()


def test_before_the_first_seal_there_is_no_time_of_it(node: FakeNode) -> None:
    """0 would be a checkpoint of 1970."""
    node.boxes[1].set_saves(SavesRecord(10, 0.25, 0.0, -1, 0.0, 1, 0))

    assert "megascale_checkpoint_sealed_timestamp_seconds" not in found_on(node)


def test_ranks_that_save_nothing_with_us_have_no_series(node: FakeNode) -> None:
    """Zeros would say that saving costs nothing."""
    assert found_on(node) == {}
