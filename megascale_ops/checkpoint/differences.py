# SPDX-License-Identifier: Apache-2.0
"""What differs between two checkpoints: which tensors changed and by how much, which came or went, which values.

Both are to be verified before: they are read here. Tensors are read some at a time, so that two checkpoints of any size
fit, as long as the largest tensor does twice.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from megascale_ops.checkpoint import latest, manifest, persist
from megascale_ops.checkpoint.contents import Stored
from megascale_ops.checkpoint.value_kinds import Slot

# 256 MB of each checkpoint at a time: below it the calls cost.
_READ_BYTES = 256 << 20
# 4 M elements are compared at a time, as doubles: 32 MB for each of a few intermediate results.
_COMPARED = 4 << 20
# 80 characters of a value: what fits a line.
_VALUE_LENGTH = 80


class TensorChange(msgspec.Struct, frozen=True):
    """How far a tensor moved. Norms are over the elements that are finite in both.

    ``relative`` is the norm of the difference by that of the former, None where that is 0; ``largest`` the largest
    difference of an element; ``changed`` the share of elements that differ; ``not_finite`` how many of the new ones are
    NaN or infinite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    relative: float | None
    largest: float
    changed: float
    not_finite: int


class Change(msgspec.Struct, frozen=True):
    """What was and what is, in words: a tensor's shape and type, or a value; "" where there was none."""

    name: str
    before: str
    after: str


class Differences(msgspec.Struct, frozen=True):
    """All that differs, and how many tensors and values do not."""

    changed: tuple[TensorChange, ...]  # the largest relative change first
    unlike: tuple[Change, ...]  # tensors of another shape or type
    appeared: tuple[Change, ...]
    gone: tuple[Change, ...]
    values: tuple[Change, ...]  # numbers, strings and what else is no tensor
    same_tensors: int
    same_values: int
    saved_by: Change  # how many ranks, in which mesh


def compare(before: Path, after: Path, told: Callable[[int], object] | None = None) -> Differences:
    """Compare two checkpoints that verify.

    Args:
        before: folder of the former.
        after: folder of the later.
        told: hears of the bytes of the later one's tensors as they are compared.
    """
    old, new = persist.stored_in(before), persist.stored_in(after)
    both = [name for name in new if name in old]
    alike = {name: new[name] for name in both if old[name] == new[name]}
    changes = [change for change in _changes(before, after, alike, told) if change.changed]
    values, same_values = _values(persist.read_structures(before), persist.read_structures(after))
    return Differences(
        changed=tuple(sorted(changes, key=_by_size)),
        unlike=tuple(Change(name, _words(old[name]), _words(new[name])) for name in both if name not in alike),
        appeared=tuple(Change(name, "", _words(new[name])) for name in new if name not in old),
        gone=tuple(Change(name, _words(old[name]), "") for name in old if name not in new),
        values=values,
        same_tensors=len(alike) - len(changes),
        same_values=same_values,
        saved_by=Change("saved by", _saved_by(before), _saved_by(after)),
    )


def bytes_compared(before: Path, after: Path) -> int:
    """How many bytes ``compare`` will tell of."""
    old, new = persist.stored_in(before), persist.stored_in(after)
    return sum(_bytes(new[name]) for name in new if old.get(name) == new[name])


def measure(name: str, old: torch.Tensor, new: torch.Tensor) -> TensorChange:
    """How far one tensor moved; both of one shape and type."""
    norm = moved = largest = 0.0
    differ = not_finite = 0
    for one, other in zip(_pieces(old), _pieces(new), strict=True):
        finite = one.isfinite() & other.isfinite()
        gap = torch.where(finite, other - one, 0.0)
        norm += float(torch.where(finite, one, 0.0).square().sum())
        moved += float(gap.square().sum())
        largest = max(largest, float(gap.abs().max()))
        differ += int(((one != other) & ~(one.isnan() & other.isnan())).sum())
        not_finite += int((~other.isfinite()).sum())
    count = max(1, new.numel() * (2 if new.is_complex() else 1))
    relative = (moved / norm) ** 0.5 if norm else (None if moved else 0.0)
    dtype = str(new.dtype).removeprefix("torch.")
    return TensorChange(name, tuple(new.shape), dtype, relative, largest, differ / count, not_finite)


def _changes(
    before: Path, after: Path, alike: Mapping[str, Stored], told: Callable[[int], object] | None
) -> Iterator[TensorChange]:
    for group in _groups(alike):
        olds, news = persist.read_tensors(before, group), persist.read_tensors(after, group)
        for name, stored in group.items():
            yield measure(name, olds[name], news[name])
            if told is not None:
                told(_bytes(stored))


def _groups(wanted: Mapping[str, Stored]) -> Iterator[dict[str, Stored]]:
    """The tensors in parts that are read at once."""
    group: dict[str, Stored] = {}
    size_bytes = 0
    for name, stored in wanted.items():
        if group and size_bytes + _bytes(stored) > _READ_BYTES:
            yield group
            group, size_bytes = {}, 0
        group[name] = stored
        size_bytes += _bytes(stored)
    if group:
        yield group


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's elements as doubles, some at a time; a complex one's parts count as two."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = plain.reshape(-1)
    for start in range(0, flat.numel(), _COMPARED):
        yield flat[start : start + _COMPARED].to(torch.float64)


def _values(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[tuple[Change, ...], int]:
    """The values that differ, and how many do not."""
    befores, afters = dict(_leaves(old)), dict(_leaves(new))
    changes = []
    for name in dict.fromkeys([*befores, *afters]):
        before, after = (_shown(values[name]) if name in values else "" for values in (befores, afters))
        if name not in befores or name not in afters or not _same(befores[name], afters[name]):
            changes.append(Change(name, before, after))
    return tuple(changes), len(befores.keys() | afters.keys()) - len(changes)


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every value in a nest that is no tensor, with its place; an empty container is one, too."""
    if isinstance(value, Slot):
        return
    nested: Iterator[tuple[object, object]] | None = None
    if isinstance(value, dict) and value:
        nested = iter(value.items())
    elif isinstance(value, (list, tuple)) and value:
        nested = iter(enumerate(value))
    if nested is None:
        yield path, value
        return
    for key, item in nested:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _same(one: object, other: object) -> bool:
    try:
        return type(one) is type(other) and (bool(one == other) or (one != one and other != other))  # noqa: PLR0124  NaN
    except (ValueError, TypeError, RuntimeError):  # what compares by element, or not at all
        return repr(one) == repr(other)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."


def _saved_by(folder: Path) -> str:
    sealed = latest.read_manifest(folder)
    return "" if isinstance(sealed, manifest.Fault) else manifest.saved_by(sealed)


def _words(stored: Stored) -> str:
    return f"{str(stored.dtype).removeprefix('torch.')}{list(stored.shape)}"


def _bytes(stored: Stored) -> int:
    count = stored.dtype.itemsize
    for size in stored.shape:
        count *= size
    return count


def _by_size(change: TensorChange) -> tuple[float, str]:
    return (-float("inf") if change.relative is None or change.not_finite else -change.relative), change.name
