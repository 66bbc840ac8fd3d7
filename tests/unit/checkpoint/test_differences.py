# SPDX-License-Identifier: Apache-2.0
"""What differs between two checkpoints, tensor by tensor."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, differences, storage
from megascale_ops.checkpoint.differences import Change, Differences, compare, measure


def saved(root: Path, *states: dict[str, Any]) -> list[Path]:
    """Save one state after the other; their folders."""
    manager = CheckpointManager(root, keep=9)
    for step, state in enumerate(states):
        manager.save(step, state)
    return [storage.final_folder(root, step) for step in range(len(states))]


def test_each_kind_of_difference_is_told(tmp_path: Path) -> None:
    """What moved and how far, what is of another shape or type, what came, what went, values."""
    before = {
        "m": {"w": torch.tensor([3.0, 4.0]), "b": torch.ones(3), "i": torch.arange(4), "s": torch.ones(2)},
        "lr": 0.1,
        "notes": {"seed": 1, "nan": math.nan, "empty": {}},
    }
    after = {
        "m": {"w": torch.tensor([3.0, 4.5]), "b": torch.ones(3), "i": torch.arange(4).float(), "n": torch.ones(1)},
        "lr": 0.05,
        "notes": {"seed": 1, "nan": math.nan, "empty": {}},
    }

    found = compare(*saved(tmp_path, before, after))

    assert [(one.name, one.relative, one.largest, one.changed) for one in found.changed] == [("m.w", 0.1, 0.5, 0.5)]
    assert found.unlike == (Change("m.i", "int64[4]", "float32[4]"),)
    assert found.appeared == (Change("m.n", "", "float32[1]"),)
    assert found.gone == (Change("m.s", "float32[2]", ""),)
    assert found.values == (Change("lr", "0.1", "0.05"),)
    assert (found.same_tensors, found.same_values) == (1, 3)


def test_a_checkpoint_does_not_differ_from_itself(tmp_path: Path) -> None:
    """Not NaN from NaN either."""
    folder = saved(tmp_path, {"w": torch.tensor([1.0, math.nan]), "x": 1})[0]

    assert compare(folder, folder) == Differences((), (), (), (), (), 1, 1, Change("saved by", "1 rank", "1 rank"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (torch.zeros(4), torch.tensor([0.0, 0.0, 2.0, 0.0]), (None, 2.0, 0.25, 0)),
        (torch.ones(2), torch.tensor([1.0, math.inf]), (0.0, 0.0, 0.5, 1)),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1.0, 1.0, 0.5, 0)),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j]), (0.1, 0.5, 0.5, 0)),
        (torch.empty(0), torch.empty(0), (0.0, 0.0, 0.0, 0)),
        (torch.tensor(2.0).bfloat16(), torch.tensor(3.0).bfloat16(), (0.5, 1.0, 1.0, 0)),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), (0.0, 0.0, 0.0, 0)),
    ],
)
def test_a_change_is_measured_for_every_type(
    old: torch.Tensor, new: torch.Tensor, expected: tuple[float | None, float, float, int]
) -> None:
    """From zero there is no relative change; what is not finite is counted and left out of norms."""
    found = measure("w", old, new)

    assert (found.relative, found.largest, found.changed, found.not_finite) == expected


def test_large_tensors_are_compared_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces add up, and every byte is told of once; what is worst stands first."""
    monkeypatch.setattr(differences, "_COMPARED", 7)
    monkeypatch.setattr(differences, "_READ_BYTES", 200)
    generator = torch.Generator().manual_seed(1)
    old = {f"t{number}": torch.randn(10, 5, generator=generator) for number in range(3)}
    new = {name: tensor * (1.0 + number) for number, (name, tensor) in enumerate(old.items())}
    folders = saved(tmp_path, old, new)
    heard: list[int] = []

    found = compare(folders[0], folders[1], heard.append)

    assert [one.name for one in found.changed] == ["t2", "t1"]
    assert [one.relative for one in found.changed] == pytest.approx([2.0, 1.0])
    assert sum(heard) == differences.bytes_compared(*folders) == 3 * 200
