# SPDX-License-Identifier: Apache-2.0
"""What of a state must be equal on all ranks is found by what the state's objects tell, and nothing is guessed."""

from typing import Any, cast

import torch
from torch import nn

from megascale_ops.checkpoint import contents
from megascale_ops.checkpoint.trust.check import Check
from megascale_ops.checkpoint.trust.parts import Part, local, parts


def described(state: dict[str, Any], *replicated: str) -> dict[str, Part]:
    """What a save makes of a state, by key."""
    flat = contents.take_apart(state)
    return {part.key: part for part in parts(flat, state, replicated)}


def kinds(state: dict[str, Any], *replicated: str) -> dict[str, str]:
    """What each tensor is taken for."""
    return {key: part.kind for key, part in described(state, *replicated).items() if "::" not in key}


def model() -> nn.Sequential:
    """A layer whose bias is frozen, and statistics."""
    made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    made[0].bias.requires_grad = False
    return made


def stepped(made: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with moments."""
    optimizer = torch.optim.Adam([parameter for parameter in made.parameters() if parameter.requires_grad])
    made(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_parameters_and_moments_must_agree_and_buffers_need_not() -> None:
    """Of a module and its optimizer; which parameters train is known."""
    made = model()
    found = described({"model": made, "optimizer": stepped(made)})

    weights = {key: part.trains for key, part in found.items() if part.kind == "weight"}
    assert weights == {"model.0.weight": True, "model.0.bias": False, "model.1.weight": True, "model.1.bias": True}
    assert {key for key, part in found.items() if part.kind == "other" and "::" not in key} == {
        *("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"),
    }
    assert {key.rpartition(".")[2] for key, part in found.items() if part.kind == "moment"} == {
        *("step", "exp_avg", "exp_avg_sq"),
    }
    assert all(part.place == "" for part in found.values())


def test_a_state_dict_is_known_by_where_its_tensors_lie() -> None:
    """What ``state_dict`` gave shares its memory with the parameters of the optimizer beside it."""
    made = model()
    optimizer = stepped(made)

    found = kinds({"model": made.state_dict(), "optimizer": optimizer.state_dict(), "taught by": optimizer})

    assert found["model.0.weight"] == "weight"
    assert found["model.0.bias"] == found["model.1.running_mean"] == "other"
    assert found["optimizer.state.0.exp_avg"] == found["taught by.state.0.exp_avg"] == "moment"


def test_what_nothing_tells_about_is_other_until_it_is_named() -> None:
    """Tensors of the user's own; a name is of an entry, or of a place in it."""
    state = {"average": {"w": torch.ones(2), "count": torch.ones(1)}, "generator": torch.get_rng_state()}

    assert set(kinds(state).values()) == {"other"}
    assert kinds(state, "average") == {"average.w": "named", "average.count": "named", "generator": "other"}
    assert kinds(state, "average.w") == {"average.w": "named", "average.count": "other", "generator": "other"}
    assert kinds(state, "aver") == kinds(state)


def test_entries_whose_names_begin_alike_are_told_apart() -> None:
    """``model`` and ``model.ema``: an entry may have a dot in its name."""
    found = described({"model": {"w": torch.ones(1)}, "model.ema": {"w": torch.ones(1)}})

    assert {key: part.entry for key, part in found.items() if "::" not in key} == {
        "model.w": "model",
        "model.ema.w": "model.ema",
    }


def test_copies_are_looked_at_as_what_they_were_copied_from() -> None:
    """Described in the foreground, digested later from copies, when the state itself has moved on."""
    made = model()
    optimizer = stepped(made)
    state = {"model": made, "optimizer": optimizer}

    def flat() -> dict[str, torch.Tensor]:
        return contents.take_apart(state)

    check, live = Check("check", watches_freshness=True), Check("check", watches_freshness=True)
    looks = []
    for _ in range(2):
        described = check.describe(parts(flat(), state), state, world_size=2)
        copies = {key: tensor.detach().clone() for key, tensor in flat().items()}
        plain = live.look(live.describe(parts(flat(), state), state, world_size=2))
        made(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        look = check.look(described, copies)
        looks.append((look.summary, plain.summary))
        check.sealed(1, look)
        live.sealed(1, plain)

    assert all(of_copies == of_itself for of_copies, of_itself in looks)
    (movement,) = looks[1][0].movements
    assert (movement.should_change, movement.have_changed) == (True, True)


class Placed:
    """How a tensor is cut along one dimension of a mesh, as torch's placements tell it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def is_partial(self) -> bool:
        """Whether it waits to be summed up."""
        return self.kind == "P"

    def is_replicate(self) -> bool:
        """Whether it is whole on each rank."""
        return self.kind == "R"

    def __repr__(self) -> str:
        return self.kind


class Mesh:
    """A mesh of two by two, and where this rank is in it; nowhere for None."""

    def __init__(self, at: list[int] | None) -> None:
        self._at = at

    def get_coordinate(self) -> list[int] | None:
        """This rank's coordinates."""
        return self._at

    def size(self, dim: int) -> int:
        """Ranks along a dimension."""
        return 2 + dim * 0


class Distributed:
    """A tensor over a mesh."""

    def __init__(self, kinds: str, at: list[int] | None) -> None:
        self.placements, self.device_mesh = [Placed(kind) for kind in kinds], Mesh(at)

    def to_local(self) -> torch.Tensor:
        """This rank's part."""
        return torch.ones(2)


def test_replicas_are_the_ranks_along_dimensions_that_replicate() -> None:
    """Their places are equal; those of other shards are not. What is summed up later is compared with nothing."""
    places = {
        (kinds, *at): held[0] if (held := local(cast("torch.Tensor", Distributed(kinds, at)))) is not None else None
        for kinds in ("RS", "RR", "PS")
        for at in ([0, 0], [1, 0], [0, 1])
    }

    assert places["RS", 0, 0] == places["RS", 1, 0] != places["RS", 0, 1]
    assert places["RR", 0, 0] == places["RR", 1, 0] == places["RR", 0, 1] != ""
    assert {places["PS", *at] for at in ((0, 0), (1, 0), (0, 1))} == {None}
    assert local(cast("torch.Tensor", Distributed("RS", None))) is None
