# SPDX-License-Identifier: Apache-2.0
"""The sums of ``digests`` for all tensors of a GPU in one launch of a Triton kernel, at the speed of its memory.

torch has no product of integers and their sum in one pass: with its functions the same takes 64 bytes of traffic for
each 8, and some ten launches a tensor. The sums are written by the kernel itself into locked host memory. A copy would
stand in line behind the gigabytes that a save in the background has under way, since a GPU's copies to the host take
turns.

Imported where it is used: Triton takes a second, and may not be there.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

# Blocks of a program: the weights, which all read from the second-level cache, are read once for so many. With 256
# words of each at a time in 8 warps a thread has 78 registers (sm_90), so 24 warps of a multiprocessor wait for memory.
_ROWS = 8
_STEP = 256
_WARPS = 8


class Memory(NamedTuple):
    """Contiguous bytes on a device; the address is a multiple of 8."""

    address: int
    size_bytes: int


class Sums:
    """Sums under way.

    Args:
        memories: all on one device, which is the current one.
        low: weights of words, as many as a block has.
        high: weights of their upper halves.
        kept: whatever must live until then.
    """

    def __init__(
        self, memories: Sequence[Memory], low: torch.Tensor, high: torch.Tensor, kept: Sequence[torch.Tensor] = ()
    ) -> None:
        is_gpu = low.device.type == "cuda"
        table, self._blocks = table_of(memories, low.numel())
        self._out = torch.empty(2 * sum(self._blocks), dtype=torch.int64, pin_memory=is_gpu)
        self._kept: Sequence[torch.Tensor] = (*kept, low, high)
        self._end = torch.cuda.Event() if is_gpu else None
        if len(table):
            rows = torch.from_numpy(table)
            self._table = rows.pin_memory().to(low.device, non_blocking=True) if is_gpu else rows
            out = self._out.data_ptr()
            _sums[(len(table),)](
                self._table, low, high, out, ROWS=_ROWS, WORDS=low.numel(), STEP=_STEP, num_warps=_WARPS
            )
        if self._end is not None:
            self._end.record()

    def __del__(self) -> None:
        with suppress(Exception):  # CUDA itself may be gone
            if self._end is not None:  # the kernel may still write to what would be given out anew
                self._end.synchronize()

    def fetch(self) -> list[bytes]:
        """Wait for them: of each memory the first sums of all blocks, then the second ones."""
        if self._end is not None:
            self._end.synchronize()
        found, at, out = [], 0, self._out.numpy().view(np.uint8).data
        for count in self._blocks:
            found.append(bytes(out[at : at + 16 * count]))
            at += 16 * count
        self._kept = ()
        return found


def table_of(memories: Sequence[Memory], block_words: int) -> tuple[np.ndarray, list[int]]:
    """A row for each program, and how many blocks each memory has.

    A row is its first byte, its whole words, the bytes behind them, where its first sum goes, and how many words behind
    that its second one.
    """
    sizes = np.array([each.size_bytes for each in memories], dtype=np.int64)
    words = sizes // 8
    blocks = (words + (sizes % 8 > 0) + block_words - 1) // block_words
    programs = (blocks + _ROWS - 1) // _ROWS
    owner = np.repeat(np.arange(len(memories)), programs)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(programs) - programs, programs)
    most = _ROWS * block_words
    whole = np.clip(words[owner] - number * most, 0, most)
    is_last = number == programs[owner] - 1
    addresses = np.array([each.address for each in memories], dtype=np.uint64).view(np.int64)
    first_block = np.cumsum(blocks) - blocks
    table = np.stack(
        [
            addresses[owner] + number * most * 8,
            whole,
            np.where(is_last, sizes[owner] % 8, 0),
            2 * first_block[owner] + number * _ROWS,
            blocks[owner],
        ],
        axis=1,
    )
    return np.ascontiguousarray(table, dtype=np.int64), [int(count) for count in blocks]


@triton.jit(do_not_specialize=["out"])
def _sums(table, low, high, out, ROWS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr):
    row_of_table = table + tl.program_id(0).to(tl.int64) * 5
    address = tl.load(row_of_table)
    words = tl.load(row_of_table + 1)
    rest = tl.load(row_of_table + 2)
    place = tl.load(row_of_table + 3)
    count = tl.load(row_of_table + 4)
    data = address.to(tl.pointer_type(tl.int64))
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, STEP)
    first = tl.zeros((ROWS, STEP), tl.int64)
    second = tl.zeros((ROWS, STEP), tl.int64)
    for start in range(0, WORDS, STEP):
        at = rows[:, None] * WORDS + start + columns[None, :]
        word = tl.load(data + at, mask=at < words, other=0)
        first += word * tl.load(low + start + columns)[None, :]
        second += (word >> 32) * tl.load(high + start + columns)[None, :]
    # What is left is fewer than 8 bytes: a word with zeros behind them.
    eight = tl.arange(0, 8)
    behind = (address + words * 8).to(tl.pointer_type(tl.uint8))
    byte = tl.load(behind + eight, mask=eight < rest, other=0).to(tl.int64)
    last = tl.sum(byte << (eight * 8).to(tl.int64))
    column = words % WORDS
    is_its = (rows == words // WORDS) & (rest > 0)
    a = tl.sum(first, 1) + tl.where(is_its, last * tl.load(low + column), 0)
    b = tl.sum(second, 1) + tl.where(is_its, (last >> 32) * tl.load(high + column), 0)
    used = (words + tl.where(rest > 0, 1, 0) + WORDS - 1) // WORDS
    sums = out.to(tl.int64).to(tl.pointer_type(tl.int64)) + place + rows
    tl.store(sums, a, mask=rows < used)
    tl.store(sums + count, b, mask=rows < used)
