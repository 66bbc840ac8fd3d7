# SPDX-License-Identifier: Apache-2.0
"""What each rank has of its own is saved under its number, and a rank gets back what stands under its own."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, PerRank, RandomStates
from megascale_ops.checkpoint import ranks as of_checkpoints
from megascale_ops.errors import CheckpointError, UsageError


class Loader:
    """A data loader that knows where it is."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"position": self.position, "buffer": torch.arange(self.position)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go there."""
        self.position = saved["position"]


class Rank:
    """One of several ranks, which meets nobody."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Be another rank."""
    monkeypatch.setattr(of_checkpoints, "Ranks", lambda _group: Rank(rank))


def test_a_rank_takes_what_it_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are saved under one name, each its own; one that is new is refused, or keeps what it has."""
    saved = {}
    for rank in range(2):
        as_rank(monkeypatch, rank)
        saved |= PerRank(Loader(10 + rank)).state_dict()
    loader = Loader()

    PerRank(loader).load_state_dict(saved)

    assert loader.position == 11
    as_rank(monkeypatch, 2)
    with pytest.raises(ValueError, match="nothing was saved for rank 2: restore with as many ranks as saved it"):
        PerRank(loader).load_state_dict(saved)
    PerRank(loader, absent="keep").load_state_dict(saved)
    assert loader.position == 11


def drawn(own: dict[str, Any]) -> list[float]:
    """A number of each generator."""
    of_each = [own["python"].random(), float(own["numpy"].random()), float(torch.rand(1, generator=own["torch"]))]
    return [random.random(), float(np.random.random()), float(torch.rand(1)), *of_each]  # noqa: NPY002, S311  whose states are saved


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """Python's, NumPy's, torch's, and three of the user's own; without any pickle."""
    own = {"python": random.Random(1), "numpy": np.random.default_rng(2), "torch": torch.Generator().manual_seed(3)}  # noqa: S311  no secret
    manager, state = CheckpointManager(tmp_path), {"random": RandomStates(own)}
    manager.save(1, state)
    first, second = drawn(own), drawn(own)

    manager.restore(state)

    assert (drawn(own), drawn(own)) == (first, second)
    assert first != second
    assert not list(tmp_path.rglob("*.pickle"))
    manager.close()


def test_a_job_of_more_ranks_keeps_new_generators_and_refuses_new_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank had saved is not handed to another one."""
    manager, loader = CheckpointManager(tmp_path), Loader(5)
    manager.save(1, {"random": RandomStates(), "loader": PerRank(loader)})
    monkeypatch.setattr("megascale_ops.checkpoint.state.per_rank.PerRank._key", "rank 1")
    expected = torch.get_rng_state()

    manager.restore({"random": RandomStates()})

    assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(CheckpointError, match=r"'loader' does not fit: the checkpoint does not hold rank 1.buffer"):
        manager.restore({"loader": PerRank(Loader(5))})
    manager.close()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PerRank(Loader(), absent="drop"), "absent='drop' means nothing: it is refuse or keep"),  # type: ignore[arg-type]
        (lambda: PerRank(7), "PerRank takes what has state_dict and load_state_dict; int has not both"),
        (lambda: RandomStates({"x": 7}), "RandomStates takes generators of random, NumPy and torch; 'x' is a int"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, sentence: str) -> None:  # noqa: ANN401  any maker
    """In one sentence."""
    with pytest.raises(UsageError, match=sentence):
        make()
