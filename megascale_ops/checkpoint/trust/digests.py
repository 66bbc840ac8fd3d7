# SPDX-License-Identifier: Apache-2.0
"""A digest of a tensor's elements, fast enough to be taken at every save, on the device where they lie.

A tensor is a row of 64-bit words, last dimension fastest whatever its order in memory; a rest of fewer than 8 bytes is
a word with zeros behind it. Blocks of 128 KiB are each summed up twice, modulo 2**64:

    a = sum of w[i] * word[i]            b = sum of v[i] * (word[i] >> 32)

(b once more over the upper halves, because what a change to the top bit of a word adds to ``a`` keeps one bit of its
weight.) The digest is BLAKE2b, 128 bits, of all sums in order. Integer sums are the same in whatever order they are
taken, so CPU, GPU and any number of threads agree.

**What it can't miss.** All weights are odd, so a change within one word changes ``a``. All are 1 modulo 4 and differ
from each other modulo 2**33, so neither does it miss two flipped bits, nor two elements of up to 8 bytes that changed
places. **What it may miss.** Any other change, of data that does not know the weights, with a chance of at most 2**-32
for each block that it touches, where it touches only bits 31 or 63 of words, and half as often for each bit below.

Not for authenticity: who knows the weights can make collisions. Files have SHA-256.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch

# 16,384 words, 128 KiB: a block and its weights fit a core's cache together; the sums are 1/8192 of the data.
WORDS = 16_384
BLOCK_BYTES = 8 * WORDS
# Rows at a time. CPU: 1 MB, which stays in a core's cache between its two sums. GPU: 64 MB, and twice that of products.
_CPU_ROWS, _GPU_ROWS = 8, 512
# The same weights in every process and version: replicas may run on other machines.
_SEED = 0x6D656761


def digests(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The 16-byte digest of each tensor; of one on a GPU without a wait for each.

    Args:
        tensors: of any shape, dtype and device; no DTensor, no sparse or quantized one.
    """
    found = [block_sums(tensor) for tensor in tensors]
    return [hashlib.blake2b(raw, digest_size=16).digest() for raw in _fetched(found)]


def digest(tensor: torch.Tensor) -> bytes:
    """The 16-byte digest of one tensor."""
    return digests([tensor])[0]


def block_sums(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of a tensor, int64 of shape (2, blocks), on its device; 128 KiB of its elements for each block."""
    with torch.no_grad():
        words, last = _words(tensor.detach().resolve_conj().resolve_neg())
        whole = words.numel() // WORDS  # len() of a tensor is a function in Python
        rest = words[whole * WORDS :] if last is None else torch.cat((words[whole * WORDS :], last))
        count = rest.numel()
        sums = torch.empty((2, whole + (count > 0)), dtype=torch.int64, device=words.device)
        if whole:
            _sum_rows(words[: whole * WORDS].view(whole, WORDS), sums[:, :whole])
        if count:
            _sum_rows(rest.view(1, count), sums[:, whole:])
    return sums


def elements_at(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """The bytes of one block of a tensor, in the order of its elements, on the CPU: uint8."""
    flat = _flat(tensor.detach().resolve_conj().resolve_neg()).view(torch.uint8)
    return flat[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].cpu().clone()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of their indices; a view where they lie so."""
    if tensor.dim() == 0 or not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor's elements as int64, a view where its place in memory allows; and a last word of a rest of bytes."""
    flat = _flat(tensor).view(torch.uint8)
    size = flat.numel()
    whole = size - size % 8
    aligned = flat if flat.storage_offset() % 8 == 0 and flat.data_ptr() % 8 == 0 else flat.clone()
    words = aligned[:whole].view(torch.int64)
    if whole == size:
        return words, None
    last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    last[: size - whole] = flat[whole:]
    return words, last.view(torch.int64)


def _sum_rows(rows: torch.Tensor, sums: torch.Tensor) -> None:
    """Sum up rows of words into ``sums``."""
    low, high = _weights(rows.device, rows.shape[1])
    at_once = _CPU_ROWS if rows.device.type == "cpu" else _GPU_ROWS
    room = torch.empty_like(rows[:at_once])
    for start in range(0, rows.shape[0], at_once):
        part = rows[start : start + at_once]
        upper = torch.bitwise_right_shift(part, 32, out=room[: part.shape[0]])
        if rows.device.type == "cpu":  # three times as fast as the products one by one; GPUs have none of integers
            torch.mv(part, low, out=sums[0, start : start + at_once])
            torch.mv(upper, high, out=sums[1, start : start + at_once])
        else:
            torch.sum(part * low, 1, out=sums[0, start : start + at_once])
            torch.sum(upper.mul_(high), 1, out=sums[1, start : start + at_once])


@lru_cache(maxsize=1024)  # of small tensors a slice of the weights costs as much as the sums
def _weights(device: torch.device, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first so many weights of either row."""
    if count < WORDS:
        low, high = _weights(device, WORDS)
        return low[:count], high[:count]
    return tuple(torch.tensor(weights, dtype=torch.int64, device=device) for weights in _drawn())  # type: ignore[return-value]  # two


@lru_cache(maxsize=1)
def _drawn() -> tuple[list[int], list[int]]:
    """Two rows of weights as signed 64-bit numbers: 1 modulo 4, different from each other modulo 2**33."""
    dice = random.Random(_SEED)  # noqa: S311  nothing secret
    rows = [
        [(dice.getrandbits(31) << 33 | middle << 2 | 1) for middle in dice.sample(range(1 << 31), WORDS)]
        for _ in range(2)
    ]
    low, high = ([weight - (1 << 64) if weight >> 63 else weight for weight in row] for row in rows)
    return low, high


def _fetched(found: list[torch.Tensor]) -> Iterator[bytes]:
    """The sums as bytes: one copy for all tensors of a device."""
    by_device: dict[torch.device, list[int]] = {}
    for number, sums in enumerate(found):
        by_device.setdefault(sums.device, []).append(number)
    fetched: dict[int, bytes] = {}
    for numbers in by_device.values():
        together = torch.cat([found[number].reshape(-1) for number in numbers]).cpu().numpy()
        start = 0
        for number in numbers:
            stop = start + found[number].numel()
            fetched[number] = together[start:stop].tobytes()
            start = stop
    return (fetched[number] for number in range(len(found)))
