# SPDX-License-Identifier: Apache-2.0
"""Take a training state apart into tensors and structure, and put it together again.

Each top-level entry of a state, say ``"optimizer"``, becomes

- one tensor per tensor, named by its path as torch.distributed.checkpoint names it (``optimizer.state.0.exp_avg``), so
  that tensors are stored once however many ranks hold them, sharded ones shard by shard;
- one for the rest, ``optimizer::structure``: the same nest of dicts and lists with a ``Slot`` where each tensor
  was, as data (see ``values``). It keeps what the paths alone would lose: integer keys, tuples, numbers, strings;
- one for each value that the user asked to pickle, ``optimizer.x::pickled``.

The second and third are bytes, given on as tensors of bytes: so what writes and reads checkpoints knows tensors and
nothing else. With the structure at hand a fresh optimizer, which has no moments yet, gets back exactly the moments that
were saved.
"""

import copy
import dataclasses
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch

from megascale_ops.checkpoint import values
from megascale_ops.checkpoint.allowed import Allowed, Path, dotted, spelled
from megascale_ops.checkpoint.state.capture import (
    RESERVED_NAME,
    capture_all,
    is_sharded,
    is_stateful,
    overlaps_itself,
    require_storable,
)
from megascale_ops.checkpoint.value_kinds import Pickled, Slot
from megascale_ops.errors import CheckpointError

STRUCTURE = "::structure"
PICKLED = "::pickled"

_NOTHING_MORE = Allowed()


@dataclass(frozen=True)
class Structure:
    """A top-level entry with a ``Slot`` for each tensor. Format 1 pickled it, so its name and its field stay."""

    value: Any


@dataclass(frozen=True)
class Stored:
    """Shape and type of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def structure_key(name: str, variant: int = 0) -> str:
    """Under which key the structure of a top-level entry is stored; ranks may hold variants of it (``variants``)."""
    return f"{name}::variant{variant}{STRUCTURE}" if variant else name + STRUCTURE


def names_in(keys: Iterable[str]) -> list[str]:
    """The top-level entries that a checkpoint with these keys holds."""
    found = {key.removesuffix(STRUCTURE) for key in keys if key.endswith(STRUCTURE)}
    return sorted(name for name in found if not RESERVED_NAME.search(name))


def structure_keys(name: str, keys: Collection[str]) -> list[str]:
    """The keys of all variants of an entry's structure."""
    return list(takewhile(keys.__contains__, (structure_key(name, variant) for variant in count())))


def replace(
    value: Any,  # noqa: ANN401  same
    wanted: Callable[[Path, Any], bool],
    change: Callable[[Path, Any], object],
    path: Path = (),
    allowed: Allowed = _NOTHING_MORE,
) -> Any:  # noqa: ANN401  same
    """Rebuild a nest of dicts, lists, tuples and named dataclasses with everything wanted in it changed.

    Args:
        value: the nest; left as it is.
        wanted: what to change, by its path and itself. What is not wanted and holds nothing is kept as it is.
        change: called with the path and the value, returns what stands there instead.
        path: where in the whole ``value`` stands.
        allowed: into which dataclasses to look.

    Raises:
        CheckpointError: the nest is deeper than can be stored, or holds itself.
    """
    if len(path) > values.MOST_DEEP + 1:
        raise CheckpointError(f"{spelled(path[:4])}... is nested deeper than {values.MOST_DEEP}, or holds itself")

    def again(item: object, key: object) -> object:
        return replace(item, wanted, change, (*path, key), allowed)

    if wanted(path, value):
        return change(path, value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps its type and attributes, such as a module's versions
        for key, item in value.items():
            changed[key] = again(item, key)
        return changed
    if dataclasses.is_dataclass(value) and allowed.has(type(value)):
        made = copy.copy(value)
        for each in dataclasses.fields(value):
            object.__setattr__(made, each.name, again(getattr(value, each.name), each.name))
        return made
    rebuild = _rebuilder(value)
    return rebuild([again(item, index) for index, item in enumerate(value)]) if rebuild else value


def _rebuilder(value: Any) -> Callable[[list[object]], object] | None:  # noqa: ANN401  same
    """How a sequence like this one is made of other items; None for what is no sequence that is looked into."""
    kind = type(value)
    if kind in {list, tuple}:
        return kind
    if kind is deque:
        return lambda items: deque(items, value.maxlen)
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        rebuild: Callable[[list[object]], object] = kind._make
        return rebuild
    return None


def find(value: Any, kind: type, allowed: Allowed = _NOTHING_MORE) -> dict[Path, Any]:  # noqa: ANN401  same
    """Every ``kind`` in a nest, by path."""
    found: dict[Path, Any] = {}
    replace(value, lambda _, item: isinstance(item, kind), found.setdefault, allowed=allowed)
    return found


def take_apart(state: Mapping[str, Any], allowed: Allowed = _NOTHING_MORE) -> dict[str, torch.Tensor]:
    """A flat dict of tensors, ready for torch.distributed.checkpoint.

    Args:
        state: as given to ``save``.
        allowed: what is pickled, and which types of the user's own may stand in it.

    Raises:
        CheckpointError: something in it can't be stored; it names the place and what to do.
    """
    flat, structures = separate(state, allowed)
    return flat | encode(structures, allowed)


def separate(
    state: Mapping[str, Any], allowed: Allowed = _NOTHING_MORE
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The first half of ``take_apart``: tensors by key, and the structure of each entry, not yet encoded.

    Raises:
        CheckpointError: a tensor can't be stored, or an entry does not tell what is saved of it.
    """
    captured = capture_all(state)
    flat: dict[str, Any] = {structure_key(name): None for name in captured}
    owners = {name for name, value in state.items() if is_stateful(value)}

    def store(path: Path, value: Any) -> Slot | Pickled:  # noqa: ANN401  same
        if dotted(path) in allowed.pickled:
            key = _unused(_key_of(path), PICKLED, flat)
            flat[key] = as_bytes(_pickle(value, path))
            return Pickled(key)
        require_storable(value, path, is_loaded_by_its_owner=path[0] in owners)
        key = _unused(_key_of(path), "", flat)
        flat[key] = value
        return Slot(key)

    def wanted(path: Path, value: object) -> bool:
        return isinstance(value, torch.Tensor) or (bool(allowed.pickled) and dotted(path) in allowed.pickled)

    structures = {name: replace(value, wanted, store, (name,), allowed) for name, value in captured.items()}
    return {key: value for key, value in flat.items() if value is not None}, structures


def encode(
    structures: Mapping[str, Any], allowed: Allowed = _NOTHING_MORE, variants: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """The second half: the structures as tensors of bytes, each as the variant that it is.

    Raises:
        CheckpointError: something in one can't be stored.
    """
    return {
        structure_key(name, (variants or {}).get(name, 0)): as_bytes(values.encode(structure, allowed, (name,)))
        for name, structure in structures.items()
    }


def as_bytes(raw: bytes) -> torch.Tensor:
    """Bytes as a tensor of bytes."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _key_of(path: Path) -> str:
    """The name of a tensor in a checkpoint; halves of surrogate pairs, which UTF-8 has not, are spelled out."""
    return dotted(path).encode("utf-8", "backslashreplace").decode()


def _unused(name: str, suffix: str, taken: Mapping[str, Any]) -> str:
    """A key that no other tensor has (``{"a.b": ..., "a": {"b": ...}}`` spell alike), and none that means something."""
    while name + suffix in taken or name.endswith((STRUCTURE, PICKLED)):
        name += "~"
    return name + suffix


def _pickle(value: object, path: Path) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as exc:  # whatever the user's own objects raise when they are asked
        raise CheckpointError(f"{spelled(path)} can't be pickled: {exc}") from exc


def targets(
    value: Any,  # noqa: ANN401  same
    captured: Any,  # noqa: ANN401  same
    structure: Structure,
    stored: Callable[[str], Stored],
    allowed: Allowed = _NOTHING_MORE,
) -> dict[str, torch.Tensor]:
    """The tensors that one top-level entry is loaded into, by key.

    A tensor that the state already has is loaded in place, unless it can't be filled: elements that share memory, a
    tensor of inference mode. One that it lacks (the moments of a fresh optimizer) is made: like its parameter where
    the shapes agree, so on the same device and sharded alike, else plainly on the CPU.

    Args:
        value: the entry as the user gave it.
        captured: what ``capture`` made of it.
        structure: the entry as it was saved.
        stored: answers with shape and type of a key.
        allowed: into which dataclasses to look.

    Raises:
        ValueError: the state and the checkpoint do not fit; the text names the tensor.
    """
    present = {_matched(path): tensor for path, tensor in find(captured, torch.Tensor, allowed).items()}
    parameters = _parameters_by_index(value)
    made: dict[str, torch.Tensor] = {}
    for path, slot in find(structure.value, Slot, allowed).items():
        saved, have = stored(slot.key), present.pop(_matched(path), None)
        if have is not None and tuple(have.shape) != saved.shape:
            raise ValueError(f"{slot.key} has shape {list(saved.shape)} in the checkpoint and {list(have.shape)} here")
        like = parameters.get(path[1]) if len(path) > 1 and path[0] == "state" else None
        if have is not None:
            made[slot.key] = have if _can_be_filled(have) else torch.empty_like(have, requires_grad=False)
        elif like is not None and tuple(like.shape) == saved.shape:
            made[slot.key] = torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
        else:
            made[slot.key] = torch.empty(saved.shape, dtype=saved.dtype)
    if present and not isinstance(value, torch.optim.Optimizer):  # an optimizer forgets what was not saved
        missing = dotted(next(iter(present)))
        raise ValueError(f"the checkpoint does not hold {missing or 'this tensor'} ({len(present)} such)")
    return made


def _matched(path: Path) -> Path:
    """A path as it is looked up: a NaN among its keys is not equal to that of another state."""
    return tuple("nan" if isinstance(key, float) and key != key else key for key in path)  # noqa: PLR0124  NaN


def _can_be_filled(tensor: torch.Tensor) -> bool:
    return is_sharded(tensor) or not (tensor.is_inference() or overlaps_itself(tensor))


def pickles_in(structure: Structure, allowed: Allowed = _NOTHING_MORE) -> dict[Path, str]:
    """Where in an entry pickled values stand, and under which keys they are stored."""
    return {path: found.key for path, found in find(structure.value, Pickled, allowed).items()}


def put_together(structure: Structure, loaded: Mapping[str, Any], allowed: Allowed = _NOTHING_MORE) -> Any:  # noqa: ANN401  same
    """The reverse of ``take_apart`` for one entry."""
    return replace(
        structure.value,
        lambda _, item: isinstance(item, Slot | Pickled),
        lambda _, item: loaded[item.key],
        allowed=allowed,
    )


def _parameters_by_index(value: object) -> dict[int, torch.Tensor]:
    """An optimizer's parameters by the numbers its state dict gives them (their order over all groups)."""
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    return dict(enumerate(parameter for group in value.param_groups for parameter in group["params"]))
