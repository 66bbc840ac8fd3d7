# SPDX-License-Identifier: Apache-2.0
"""What is told of restores: where from, how much, what was passed over, what failed."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, LocalTier, notify, storage
from megascale_ops.checkpoint.notify import Restores
from megascale_ops.checkpoint.tiers.nodes import Nodes
from megascale_ops.checkpoint.tiers.sets import Candidate
from megascale_ops.errors import CheckpointError

WEIGHTS = {"weights": torch.arange(1000.0)}


@pytest.fixture
def told() -> Iterator[list[Restores]]:
    """What observers hear."""
    heard: list[Restores] = []
    listen = heard.append
    notify.restores_observers.append(listen)
    yield heard
    notify.restores_observers.remove(listen)


def damage(folder: Path) -> None:
    """Flip a bit of the tensors."""
    shard = folder / "__0_0.tensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_restore_tells_how_long_how_much_and_what_it_passed_over(tmp_path: Path, told: list[Restores]) -> None:
    """Counts add up over the restores of a manager; the rest is of the newest."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, WEIGHTS)
    manager.restore({"weights": torch.zeros(1000)})
    damage(storage.final_folder(tmp_path, 2))
    manager.restore({"weights": torch.zeros(1000)})

    first, second = told
    assert (first.step, first.shared, first.passed_over, first.failed) == (2, 1, 0, 0)
    assert (second.step, second.shared, second.passed_over, second.failed) == (1, 2, 1, 0)
    assert (second.node, second.buddy, second.store) == (0, 0, 0)
    assert second.restore_s > 0.0
    assert second.read_bytes >= 4000


def test_a_restore_that_loads_nothing_though_there_is_something_failed(tmp_path: Path, told: list[Restores]) -> None:
    """With what it passed over; where nothing is there it is no restore at all."""
    manager = CheckpointManager(tmp_path)
    assert manager.restore(dict(WEIGHTS)) == -1
    assert told == []
    manager.save(1, WEIGHTS)
    damage(storage.final_folder(tmp_path, 1))

    with pytest.raises(CheckpointError):
        manager.restore({"weights": torch.zeros(1000)})

    assert told == [Restores(passed_over=1, failed=1)]


def test_where_it_came_from_is_told(tmp_path: Path, told: list[Restores]) -> None:
    """The nodes' tier before the shared folder; a store by its URL."""
    local = CheckpointManager(tmp_path / "shared", local=LocalTier(tmp_path / "node"))
    local.save(1, WEIGHTS)
    local.restore({"weights": torch.zeros(1000)})
    local.close()
    remote = CheckpointManager(f"memory://{uuid.uuid4().hex}/run7")
    remote.save(1, WEIGHTS)
    remote.restore({"weights": torch.zeros(1000)})

    assert [(one.node, one.buddy, one.shared, one.store) for one in told] == [(1, 0, 0, 0), (0, 0, 0, 1)]


@pytest.mark.parametrize(
    ("holders", "is_from_buddy"),
    [
        ({"__0_0.tensors": (0, 1), "__2_0.tensors": (0, 1), "plan.msgpack": (0, 1)}, False),
        ({"__0_0.tensors": (0,), "__2_0.tensors": (1,), "plan.msgpack": (0, 1)}, False),  # its copy was not made yet
        ({"__0_0.tensors": (0,), "__2_0.tensors": (0,), "plan.msgpack": (0,)}, True),
        ({"__0_0.tensors": (0,), "__9_0.tensors": (1,), "plan.msgpack": (0,)}, False),  # a rank that is no more
    ],
)
def test_a_buddys_copy_is_one_that_its_writers_node_lacks(
    holders: dict[str, tuple[int, ...]], *, is_from_buddy: bool
) -> None:
    """Ranks 0 and 1 share node 0, ranks 2 and 3 node 1."""
    nodes = Nodes(((0, 1), (2, 3)))

    assert Candidate(6, "set", -1, holders).is_from_buddy(nodes) is is_from_buddy
