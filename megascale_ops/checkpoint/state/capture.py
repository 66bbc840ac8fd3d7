# SPDX-License-Identifier: Apache-2.0
"""Ask the entries of a state for what is saved of them, and refuse what can't be stored, before anything is written."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megascale_ops.checkpoint.allowed import Path, spelled
from megascale_ops.errors import CheckpointError

# What structures of which ranks hold variants are stored under; no entry is called so.
RESERVED_NAME = re.compile(r"::variant\d+\Z")

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_WHOLE_NUMBERS = frozenset((torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, *_SIGNED))


def is_stateful(value: object) -> bool:
    """Whether a value is saved through ``state_dict()`` and loaded through ``load_state_dict()``; a class is not."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def capture(value: Any) -> Any:  # noqa: ANN401  a state holds whatever the user puts there
    """What of a value is saved: its state dict if it has one, else itself."""
    return value.state_dict() if is_stateful(value) else value


def capture_all(state: Mapping[Any, Any]) -> dict[str, Any]:
    """What of each entry of a state is saved.

    Raises:
        CheckpointError: an entry's name is no text, or its ``state_dict`` fails; it names the entry.
    """
    captured = {}
    for name, value in state.items():
        require_name(name)
        try:
            captured[name] = capture(value)
        except Exception as exc:  # whatever a user's own object raises
            raise CheckpointError(f"{spelled((name,))}.state_dict() failed: {in_one_line(exc)}") from exc
    return captured


def require_name(name: object) -> None:
    """Refuse an entry of a state that has no name in every language.

    Raises:
        CheckpointError: its name is no string, or one that UTF-8 can't spell.
    """
    if not isinstance(name, str):
        kind = type(name).__qualname__
        raise CheckpointError(f"{spelled((name,))}: the entries of a state have names, and {kind} is none: give a str")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise CheckpointError(f"{spelled((name,))}: its name has half a character, which UTF-8 can't spell")
    if RESERVED_NAME.search(name):
        raise CheckpointError(f"{spelled((name,))}: names that end so are ours: give the entry another one")


def in_one_line(error: BaseException) -> str:
    """What was raised, with all its lines in one."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def require_storable(tensor: torch.Tensor, path: Path, *, is_loaded_by_its_owner: bool) -> None:
    """Refuse what is no block of elements in memory, or would come back as something else.

    Args:
        tensor: any.
        path: where in the state it stands.
        is_loaded_by_its_owner: through ``load_state_dict``, which copies elements into tensors of its own. Others are
            put into the state as they are made here, which is without the type of a subclass.

    Raises:
        CheckpointError: it can't be stored, with its place.
    """
    if is_sharded(tensor):
        return  # each rank writes its own block
    kind = next(_faults(tensor, is_loaded_by_its_owner=is_loaded_by_its_owner), "")
    if kind == "uninitialized":
        raise CheckpointError(f"{spelled(path)} is not initialized yet: let a batch through the module first")
    if kind == "freed":
        raise CheckpointError(f"{spelled(path)} has no memory: it was freed, or it is of a kind that has none")
    if kind:
        raise CheckpointError(f"{spelled(path)}: a {kind} tensor can't be stored as it is: store what it is made of")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether DCP asks the tensor itself which part of it lies here."""
    return any(hasattr(tensor, name) for name in ("to_local", "local_shards", "__create_write_items__"))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a plain tensor may share memory (``expand``, ``unfold``), so that it can't be filled."""
    reach = 0
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for stride, size in dims:
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def _faults(tensor: torch.Tensor, *, is_loaded_by_its_owner: bool) -> Iterator[str]:
    """What a tensor is that can't be stored; the next is asked only where the one before is not."""
    if torch.nn.parameter.is_lazy(tensor):
        yield "uninitialized"
    if tensor.is_nested:
        yield "nested"
    if tensor.layout is not torch.strided:
        yield str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or tensor.device.type == "meta":
        yield "quantized" if tensor.is_quantized else "meta"
    if not _has_arithmetic(tensor.dtype):
        yield str(tensor.dtype).removeprefix("torch.")
    is_plain = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    if hasattr(tensor, "__tensor_flatten__") or not (is_plain or is_loaded_by_its_owner):
        yield type(tensor).__qualname__
    if tensor.numel() and not _has_memory(tensor):
        yield "freed"


def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether torch knows what an element is; of quint4x2, bits8, int3 and their like it can't even copy some."""
    return dtype.is_floating_point or dtype.is_complex or dtype in _WHOLE_NUMBERS


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # torch's, of what stands for a tensor: fake ones, those of a transformation
        return False
