# SPDX-License-Identifier: Apache-2.0
"""Where in a checkpoint's files each tensor lies: ``plan.msgpack``.

A tensor is a box of elements; each rank that holds a part of it writes one or more chunks, smaller boxes at an offset. The plan
names for every chunk its file and the bytes there, which are the elements as they lie in memory, last dimension
fastest. So a job of another number of ranks can cut the tensors anew, and reading them needs nothing but this file.

Everything here is judgement: bytes and sizes in, a plan or a reason out. A plan that was read promises that all its
chunks lie within their tensors and their files, fill both without counting anything twice, and are as long as their elements.
"""

from collections.abc import Callable, Mapping
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
        used = [0] * len(plan.files)
        for key, tensor in plan.tensors.items():
            width = itemsize(tensor.dtype)
            for chunk in tensor.chunks:
                if not (_lies_within(chunk, tensor) and chunk.length == prod(chunk.sizes) * width):
                    raise ValueError(f"a chunk of {ascii(key)[:80]} does not fit its tensor")
                if not 0 <= chunk.file < len(plan.files) or chunk.start < 0:
                    raise ValueError(f"a chunk of {ascii(key)[:80]} lies nowhere")
                used[chunk.file] += chunk.length
                if chunk.start + chunk.length > sizes[plan.files[chunk.file]]:
                    raise ValueError(f"a chunk of {ascii(key)[:80]} lies beyond the end of its file")
            if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.size):
                raise ValueError(f"the chunks of {ascii(key)[:80]} do not fill it")
        for name, bytes_used in zip(plan.files, used, strict=True):
            if bytes_used > sizes[name]:
                raise ValueError(f"more lies in {ascii(name)[:80]} than it has bytes")
    except KeyError as exc:
        raise ValueError(f"{FILE_NAME} speaks of {ascii(exc.args[0])[:80]}, which is not here") from exc
    except (*UNREADABLE, OverflowError, TypeError) as exc:
        raise ValueError(f"{FILE_NAME} is not a plan as this program writes it") from exc
    except ValueError as exc:
        raise ValueError(f"{FILE_NAME} is not the plan of these files: {exc}") from exc
    return plan


def _lies_within(chunk: Chunk, tensor: Tensor) -> bool:
    dims = len(tensor.size)
    return len(chunk.offsets) == len(chunk.sizes) == dims and all(
        0 <= offset and 0 <= size and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
    )
