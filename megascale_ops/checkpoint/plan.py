# SPDX-License-Identifier: Apache-2.0
"""Where in a checkpoint's files each tensor lies: ``plan.msgpack``.

A tensor is a box of elements; each rank that holds part of it writes one or more chunks, boxes inside it. The
plan names for every chunk its file and the bytes there, which are the elements as they lie in memory, last dimension
fastest. So a job of another number of ranks can cut the tensors anew, and reading them needs nothing but this file.

Everything here is judgement: bytes and sizes in, a plan or a reason out. A plan that was read promises that its
chunks lie within their tensors and their files, are as long as their elements, and that no byte is counted twice.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod

import msgspec

from megascale_ops.foreign import UNREADABLE

FILE_NAME = "plan.msgpack"


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, and where its elements lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int  # which of the plan's files
    start: int  # bytes
    length: int  # bytes


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor with all its chunks."""

    dtype: str  # as torch prints it: torch.float32
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors of a checkpoint by key."""

    files: tuple[str, ...]
    tensors: dict[str, Tensor]


def encode(plan: Plan) -> bytes:
    """The bytes of ``plan.msgpack``."""
    return msgspec.msgpack.encode(plan)


def decode(raw: bytes, sizes: Mapping[str, int], itemsize: Callable[[str], int]) -> Plan:
    """Read a plan and check it against the files that it speaks of.

    Args:
        raw: the file.
        sizes: bytes of every file of the checkpoint, by name.
        itemsize: bytes of an element of a dtype; raises KeyError for what is none.

    Raises:
        ValueError: it is no plan, or not one of these files.
    """
    try:
        plan = msgspec.msgpack.decode(raw, type=Plan)
    except (*UNREADABLE, OverflowError) as exc:
        raise ValueError(f"{FILE_NAME} is not a plan as this program writes it") from exc
    try:
        wrong = next(_faults(plan, sizes, itemsize), None)
    except KeyError as exc:
        raise ValueError(f"{FILE_NAME} speaks of {ascii(exc.args[0])[:80]}, which is not here") from exc
    if wrong:
        raise ValueError(f"{FILE_NAME} is not the plan of these files: {wrong}")
    return plan


def _faults(plan: Plan, sizes: Mapping[str, int], itemsize: Callable[[str], int]) -> Iterator[str]:
    """What of a plan cannot be, one by one."""
    used = [0] * len(plan.files)
    for key, tensor in plan.tensors.items():
        width = itemsize(tensor.dtype)
        named = ascii(key)[:80]
        for chunk in tensor.chunks:
            if not (_lies_within(chunk, tensor) and chunk.length == prod(chunk.sizes) * width):
                yield f"a chunk of {named} does not fit its tensor"
                return
            if not 0 <= chunk.file < len(plan.files):
                yield f"a chunk of {named} is in no file"
                return
            if not 0 <= chunk.start <= sizes[plan.files[chunk.file]] - chunk.length:
                yield f"a chunk of {named} lies outside its file"
            used[chunk.file] += chunk.length
        if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.size):
            yield f"the chunks of {named} do not fill it"
    for name, used_bytes in zip(plan.files, used, strict=True):
        if used_bytes > sizes[name]:
            yield f"more lies in {ascii(name)[:80]} than it has bytes"


def _lies_within(chunk: Chunk, tensor: Tensor) -> bool:
    dims = len(tensor.size)
    return len(chunk.offsets) == len(chunk.sizes) == dims and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
    )
