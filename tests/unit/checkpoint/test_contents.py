# SPDX-License-Identifier: Apache-2.0
"""A training state taken apart and put together again."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megascale_ops.checkpoint import contents, values
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.errors import CheckpointError


class Pair(NamedTuple):
    """A named tuple in somebody's state."""

    left: Any
    right: Any


NAMED = Allowed.of((), (Pair,), old_pickles=False)


def structure_of(flat: dict[str, torch.Tensor], name: str, allowed: Allowed = NAMED) -> contents.Structure:
    """The structure of an entry, as a restore reads it."""
    raw = flat[contents.structure_key(name)].numpy().tobytes()
    return contents.Structure(values.decode(raw, allowed))


def test_any_nest_comes_back_with_its_types() -> None:
    """Integer keys, tuples, ordered dicts and what is not a tensor survive."""
    value = {
        0: OrderedDict(a=torch.ones(2), b="text"),
        "list": [1, (torch.zeros(3), None)],
        "pair": Pair(torch.arange(4), {"deep": 2.5}),
        "number": 7,
    }

    flat = contents.take_apart({"entry": value}, NAMED)
    structure = structure_of(flat, "entry")
    del flat[contents.structure_key("entry")]
    back = contents.put_together(structure, flat)

    assert sorted(flat) == ["entry.0.a", "entry.list.1.0", "entry.pair.0"]
    assert torch.equal(back[0]["a"], torch.ones(2))
    assert (type(back[0]), back[0]["b"], back["number"]) == (OrderedDict, "text", 7)
    assert type(back["list"][1]) is tuple
    assert isinstance(back["pair"], Pair)
    assert back["pair"].right == {"deep": 2.5}


def test_taking_apart_leaves_the_state_as_it_is() -> None:
    """Saving must not touch what is being trained."""
    inner = {"weight": torch.ones(2)}

    contents.take_apart({"model": inner})

    assert isinstance(inner["weight"], torch.Tensor)


def test_names_that_spell_alike_do_not_collide() -> None:
    """``{"a.b": x}`` and ``{"a": {"b": y}}`` are two tensors."""
    state = {"s": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}}

    flat = contents.take_apart(state)
    back = contents.put_together(structure_of(flat, "s"), flat)

    assert back["a.b"].item() == 0
    assert back["a"]["b"].item() == 1


def test_a_bare_tensor_is_an_entry_too() -> None:
    """The simplest state of all."""
    flat = contents.take_apart({"x": torch.ones(2)})

    assert torch.equal(contents.put_together(structure_of(flat, "x"), flat), torch.ones(2))
    assert contents.names_in(flat) == ["x"]


def test_a_fresh_optimizer_gets_room_for_the_moments_it_lacks() -> None:
    """Made like the parameter, so on its device; a counter is made plainly."""
    model = nn.Linear(3, 2)
    trained, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    trained.step()
    flat = contents.take_apart({"optimizer": trained.state_dict()})
    structure = structure_of(flat, "optimizer")
    del flat[contents.structure_key("optimizer")]

    made = contents.targets(
        fresh, fresh.state_dict(), structure, lambda key: contents.Stored(tuple(flat[key].shape), flat[key].dtype)
    )

    assert {key: tensor.shape for key, tensor in made.items()} == {key: tensor.shape for key, tensor in flat.items()}
    assert not any(tensor.requires_grad for tensor in made.values())


def test_tensors_that_are_there_are_loaded_in_place() -> None:
    """The very tensors of the model, so that what refers to them goes on."""
    model = nn.Linear(3, 2)
    flat = contents.take_apart({"model": model.state_dict()})

    made = contents.targets(
        model,
        model.state_dict(),
        structure_of(flat, "model"),
        lambda key: contents.Stored(tuple(flat[key].shape), flat[key].dtype),
    )

    assert made["model.weight"].data_ptr() == model.weight.data_ptr()


def test_what_does_not_fit_is_named() -> None:
    """Another shape, or a tensor that was never saved: the name and the shapes are told."""
    flat = contents.take_apart({"model": {"weight": torch.ones(2)}})
    structure = structure_of(flat, "model")

    with pytest.raises(ValueError, match=r"model.weight has shape \[2\] in the checkpoint and \[3\] here"):
        contents.targets(None, {"weight": torch.ones(3)}, structure, lambda _: contents.Stored((2,), torch.float32))
    with pytest.raises(ValueError, match=r"does not hold bias \(1 such\)"):
        contents.targets(
            None,
            {"weight": torch.ones(2), "bias": torch.ones(1)},
            structure,
            lambda _: contents.Stored((2,), torch.float32),
        )


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(2, 2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_a_tensor_that_is_no_block_of_memory_is_refused_by_its_place(tensor: torch.Tensor, kind: str) -> None:
    """Before anything is written."""
    with pytest.raises(CheckpointError, match=rf"state\['a'\]\['b'\]: a {kind} tensor can't be stored as it is"):
        contents.take_apart({"a": {"b": tensor}})


def test_no_name_of_a_tensor_passes_for_a_structure_or_a_pickle() -> None:
    """Names that end as ours do are changed, so that no tensor is taken for something else."""
    state = {"m": {"x::structure": torch.ones(1), "y::pickled": torch.zeros(1)}}

    flat = contents.take_apart(state)
    back = contents.put_together(structure_of(flat, "m"), flat)

    assert contents.names_in(flat) == ["m"]
    assert sorted(flat) == ["m.x::structure~", "m.y::pickled~", "m::structure"]
    assert [tensor.item() for tensor in back.values()] == [1, 0]
