# SPDX-License-Identifier: Apache-2.0
"""Take a training state apart into tensors and structure, and put it together again.

Each top-level entry of a state, say ``"optimizer"``, becomes

- one entry per tensor, named by its path as torch.distributed.checkpoint names it (``optimizer.state.0.exp_avg``), so
  that tensors are stored once however many ranks hold them, sharded ones shard by shard;
- one entry for the rest, ``optimizer::structure``: the same nest of dicts and lists with a ``Slot`` where each tensor
  was. It keeps what the paths alone would lose: integer keys, tuples, numbers, strings.

With the structure at hand a fresh optimizer, which has no moments yet, gets back exactly the moments that were saved.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Path = tuple[Any, ...]
Leaf = TypeVar("Leaf")

_STRUCTURE = "::structure"


@dataclass(frozen=True)
class Slot:
    """Stands in a structure where a tensor was; ``key`` is the tensor's name in the checkpoint."""

    key: str


@dataclass(frozen=True)
class Structure:
    """A top-level entry without its tensors. Not a dict, so that it is not flattened any further."""

    value: Any


@dataclass(frozen=True)
class Stored:
    """Shape and type of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def structure_key(name: str) -> str:
    """Under which key the structure of a top-level entry is stored."""
    return name + _STRUCTURE


def names_in(keys: Iterable[str]) -> list[str]:
    """The top-level entries that a checkpoint with these keys holds."""
    return sorted(key.removesuffix(_STRUCTURE) for key in keys if key.endswith(_STRUCTURE))


def is_stateful(value: object) -> bool:
    """Whether a value is saved through ``state_dict()`` and loaded through ``load_state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def capture(value: Any) -> Any:  # noqa: ANN401  a state holds whatever the user puts there
    """What of a value is saved: its state dict if it has one, else itself."""
    return value.state_dict() if is_stateful(value) else value


def replace(value: Any, kind: type[Leaf], change: Callable[[Path, Leaf], object], path: Path = ()) -> Any:  # noqa: ANN401  same
    """Rebuild a nest of dicts, lists and tuples with every ``kind`` in it changed.

    Args:
        value: the nest; left as it is.
        kind: the type to look for. Anything else that is not a dict, list or tuple is kept as it is.
        change: called with the path and the leaf, returns what stands there instead.
        path: where in the whole ``value`` stands.
    """
    if isinstance(value, kind):
        return change(path, value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps its type and attributes, such as a module's versions
        for key, item in value.items():
            changed[key] = replace(item, kind, change, (*path, key))
        return changed
    if type(value) in {list, tuple}:
        return type(value)(replace(item, kind, change, (*path, index)) for index, item in enumerate(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace(item, kind, change, (*path, index)) for index, item in enumerate(value)))
    return value


def find(value: Any, kind: type[Leaf]) -> dict[Path, Leaf]:  # noqa: ANN401  same
    """Every ``kind`` in a nest, by path."""
    found: dict[Path, Leaf] = {}
    replace(value, kind, found.setdefault)
    return found


def take_apart(captured: Mapping[str, Any]) -> dict[str, Any]:
    """A flat dict of tensors and structures, ready for torch.distributed.checkpoint."""
    flat: dict[str, Any] = {structure_key(name): None for name in captured}

    def store(path: Path, tensor: torch.Tensor) -> Slot:
        key = ".".join(map(str, path))
        while key in flat:  # {"a.b": ..., "a": {"b": ...}} spell alike
            key += "~"
        flat[key] = tensor
        return Slot(key)

    for name, value in captured.items():
        flat[structure_key(name)] = Structure(replace(value, torch.Tensor, store, (name,)))
    return flat


def targets(
    value: Any,  # noqa: ANN401  same
    captured: Any,  # noqa: ANN401  same
    structure: Structure,
    stored: Callable[[str], Stored],
) -> dict[str, torch.Tensor]:
    """The tensors that one top-level entry is loaded into, by key.

    A tensor that the state already has is loaded in place. One that it lacks (the moments of a fresh optimizer) is
    made: like its parameter where the shapes agree, so on the same device and sharded alike, else plainly on the CPU.

    Args:
        value: the entry as the user gave it.
        captured: what ``capture`` made of it.
        structure: the entry as it was saved.
        stored: answers with shape and type of a key.

    Raises:
        ValueError: the state and the checkpoint do not fit; the text names the tensor.
    """
    present = find(captured, torch.Tensor)
    parameters = _parameters_by_index(value)
    made: dict[str, torch.Tensor] = {}
    for path, slot in find(structure.value, Slot).items():
        saved, have = stored(slot.key), present.pop(path, None)
        if have is not None and tuple(have.shape) != saved.shape:
            raise ValueError(f"{slot.key} has shape {list(saved.shape)} in the checkpoint and {list(have.shape)} here")
        like = parameters.get(path[1]) if len(path) > 1 and path[0] == "state" else None
        if have is not None:
            made[slot.key] = have
        elif like is not None and tuple(like.shape) == saved.shape:
            made[slot.key] = torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
        else:
            made[slot.key] = torch.empty(saved.shape, dtype=saved.dtype)
    if present and not isinstance(value, torch.optim.Optimizer):  # an optimizer forgets what was not saved
        missing = ".".join(map(str, next(iter(present))))
        raise ValueError(f"the checkpoint does not hold {missing or 'this tensor'} ({len(present)} such)")
    return made


def put_together(structure: Structure, loaded: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401  same
    """The reverse of ``take_apart`` for one entry."""
    return replace(structure.value, Slot, lambda _, slot: loaded[slot.key])


def _parameters_by_index(value: object) -> dict[int, torch.Tensor]:
    """An optimizer's parameters by the numbers its state dict gives them (their order over all groups)."""
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    return dict(enumerate(parameter for group in value.param_groups for parameter in group["params"]))
