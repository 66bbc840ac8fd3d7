# SPDX-License-Identifier: Apache-2.0
"""What of each tensor this rank holds, which other ranks must hold the same, and what the tensor is.

Ranks hold the same part of a tensor where their *places* are equal: no place at all for a plain tensor, which all
ranks that have its name hold whole; for a DTensor its coordinates in the dimensions of the mesh that cut it. The
dimensions that replicate it are left out: the ranks along them are the replicas. What waits to be summed up (Partial)
is the same nowhere, and is left out altogether.

Not all that has one name on all ranks has to be equal. What does:

    weight   a parameter, of a module or an optimizer in the state; a DTensor that is no module's buffer
    moment   a tensor in an optimizer's state
    named    what the user has named in ``CheckpointManager(replicated=...)``

All else is ``other``: buffers (each rank's BatchNorm has seen its own batches), generators, positions.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from megascale_ops.checkpoint import contents

Kind = Literal["weight", "moment", "named", "other"]
MUST_AGREE: tuple[Kind, ...] = ("weight", "moment", "named")


class Part(NamedTuple):
    """What this rank holds of one tensor."""

    key: str
    entry: str  # the name in the state that it belongs to
    place: str  # "" of a plain tensor
    layout: str  # equal where the same part of the same tensor is held
    kind: Kind
    trains: bool  # a parameter that requires gradients
    tensor: torch.Tensor  # this rank's elements


@dataclass(frozen=True)
class _Known:
    """What the objects in a state tell of its tensors: where in memory they lie, and their names."""

    weights: dict[tuple[int, int], bool] = field(default_factory=dict)  # place in memory -> it trains
    names: dict[str, bool] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    buffer_places: set[tuple[int, int]] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)


def parts(flat: Mapping[str, torch.Tensor], state: Mapping[str, Any], replicated: Iterable[str] = ()) -> list[Part]:
    """Describe what this rank holds of a state; nothing is copied.

    Args:
        flat: the state, taken apart by ``contents``.
        state: as given to ``save``.
        replicated: names of entries, or of places in them (``"ema.weights"``), that must be equal on all ranks.
    """
    known, named, found = _known(state), tuple(replicated), []
    entries = sorted(state, key=len, reverse=True)
    for key, tensor in flat.items():
        held = local(tensor)
        if held is None:
            continue
        place, mine = held
        entry = next((name for name in entries if key == name or key.startswith((f"{name}.", f"{name}::"))), key)
        kind, trains = _kind(key, entry, mine, known, is_sharded=mine is not tensor)
        if any(key == name or key.startswith(f"{name}.") for name in named):
            kind = "named"
        layout = f"{key} {mine.dtype} {list(tensor.shape)} {list(mine.shape)} {place}"
        found.append(Part(key, entry, place, layout, kind, trains, mine))
    return found


def local(tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """This rank's place among those that hold parts of a tensor, and its part; None: none that can be compared.

    Sharded tensors of torch's older kinds are not compared.
    """
    if not (hasattr(tensor, "placements") and hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")):
        is_sharded = hasattr(tensor, "local_shards") or hasattr(tensor, "__create_write_items__")
        return None if is_sharded else ("", tensor)
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if at is None or any(placement.is_partial() for placement in tensor.placements):
        return None
    cut = [
        f"{placement}@{coordinate}/{mesh.size(dim)}"
        for dim, (placement, coordinate) in enumerate(zip(tensor.placements, at, strict=True))
        if not placement.is_replicate()
    ]
    with torch.no_grad():
        return " ".join(cut) or "whole", tensor.to_local()


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """An optimizer's parameters with the number of their group, in the order of their numbers in its state dict."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where this rank's part of a tensor lies in memory: equal for a parameter and what a state dict has of it."""
    held = local(tensor.detach())
    mine = tensor if held is None else held[1]
    return mine.data_ptr(), mine.numel() * mine.element_size()


def _is_flat_optimizer(value: object) -> bool:
    """Whether an entry is what torch makes of an optimizer with ``flatten_optimizer_state_dict``."""
    return isinstance(value, Mapping) and any(isinstance(key, str) and key.startswith("param_groups.") for key in value)


def is_optimizer(value: object) -> bool:
    """Whether an entry is an optimizer, or the state dict of one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _known(state: Mapping[str, Any]) -> _Known:
    known = _Known()
    for entry, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters(remove_duplicate=False):
                known.names[f"{entry}.{name}"] = known.weights[place_of(parameter)] = parameter.requires_grad
            for name, buffer in value.named_buffers(remove_duplicate=False):
                known.buffers.add(f"{entry}.{name}")
                known.buffer_places.add(place_of(buffer))
        elif is_optimizer(value) or _is_flat_optimizer(value):
            known.optimizers.add(entry)
        if isinstance(value, torch.optim.Optimizer):
            for _, taught in parameters_of(value):
                known.weights.setdefault(place_of(taught), taught.requires_grad)
    return known


def _kind(key: str, entry: str, mine: torch.Tensor, known: _Known, *, is_sharded: bool) -> tuple[Kind, bool]:
    """What a tensor is, and whether it trains."""
    if key.endswith((contents.STRUCTURE, contents.PICKLED)):
        return "other", False
    if entry in known.optimizers:
        return "moment", False
    at = (mine.data_ptr(), mine.numel() * mine.element_size())
    trains = known.names.get(key)
    if trains is None and mine.numel() and key not in known.buffers:
        trains = known.weights.get(at)
    if trains is None and is_sharded and key not in known.buffers and at not in known.buffer_places:
        trains = False
    return ("other", False) if trains is None else ("weight", trains)
