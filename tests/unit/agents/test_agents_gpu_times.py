# SPDX-License-Identifier: Apache-2.0
"""GPU times of a node's ranks as a few series."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megascale_agents.metrics.gpu_times import NAME, samples_of
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.blackbox.records import GpuStepRecord
from megascale_ops.schema.metrics import METRICS
from tests.fakes.node import FakeNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """Three ranks on a node."""
    made = FakeNode(tmp_path)
    made.start_round(3)
    yield made
    made.kill_all()


def test_the_median_of_the_ranks_newest_steps(node: FakeNode) -> None:
    """Of one rank without a GPU nothing counts; an older step neither."""
    rounds = Rounds(str(node.root), node.node, lambda _: None)
    rounds.refresh(1.0)
    node.boxes[0].add_gpu_step(GpuStepRecord(0, 0, 9.0, forward_s=8.0))
    node.boxes[0].add_gpu_step(GpuStepRecord(1, 1, 0.4, forward_s=0.1, backward_s=0.2))
    node.boxes[2].add_gpu_step(GpuStepRecord(1, 1, 0.6, forward_s=0.3, backward_s=0.2))

    found = {labels: value for name, labels, value in samples_of(rounds.ranks(), node.node) if name == NAME}
    rounds.close()

    assert found == {
        ("job", "node-a", "data"): 0.0,
        ("job", "node-a", "forward"): pytest.approx(0.2),
        ("job", "node-a", "backward"): pytest.approx(0.2),
        ("job", "node-a", "optimizer"): 0.0,
        ("job", "node-a", "checkpoint"): 0.0,
    }
    assert METRICS[NAME].labels == ("job", "node", "part")


def test_without_a_gpu_there_is_no_series(node: FakeNode) -> None:
    """Zeros would say that the GPU needs no time."""
    rounds = Rounds(str(node.root), node.node, lambda _: None)
    rounds.refresh(1.0)

    assert list(samples_of(rounds.ranks(), node.node)) == []
    rounds.close()
