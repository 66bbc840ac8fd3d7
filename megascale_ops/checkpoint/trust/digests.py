# SPDX-License-Identifier: Apache-2.0
"""A digest of a tensor's elements, fast enough to be taken at every save, on the device where they lie.

A tensor is a row of 64-bit words, last dimension fastest whatever its order in memory; a rest of fewer than 8 bytes is
a word with zeros behind it. Blocks of 128 KiB are each summed up twice, modulo 2**64:

    a = sum of w[i] * word[i]            b = sum of v[i] * (word[i] >> 32)

(b once more over the upper halves, because what a change to the top bit of a word adds to ``a`` keeps one bit of its
weight.) The digest is XXH3, 128 bits, of all sums in order: of 10 GB they are 1.2 MB, for which a training that saves
waits 0.1 ms, of BLAKE2b it would be 1.2. Integer sums are the same in whatever order they are
taken, so CPU, GPU and any number of threads agree.

**What it can't miss.** All weights are odd, so a change within one word changes ``a``. All are 1 modulo 4 and differ
from each other modulo 2**33, so neither does it miss two flipped bits, nor two elements of up to 8 bytes that changed
places. **What it may miss.** Any other change, of data that does not know the weights, with a chance of at most 2**-32
for each block that it touches, where it touches only bits 31 or 63 of words, and half as often for each bit below.

Not for authenticity: who knows the weights can make collisions. Files have digests of their own (``file_digests``).
"""

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from xxhash import xxh3_128_digest

if TYPE_CHECKING:
    from megascale_ops.checkpoint.trust.gpu_sums import Sums

# 16,384 words, 128 KiB: a block and its weights fit a core's cache together; the sums are 1/8192 of the data.
WORDS = 16_384
BLOCK_BYTES = 8 * WORDS
# Rows at a time. CPU: 1 MB, which stays in a core's cache between its two sums. GPU: 64 MB, and twice that of products.
_CPU_ROWS, _GPU_ROWS = 8, 512
# 4 KB of these types: an optimizer's counters, of which there may be thousands, are summed up together.
_SMALL_BYTES = 4096
_SMALL = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64))
# The same weights in every process and version: replicas may run on other machines.
_SEED = 0x6D656761

_has_kernel = True  # until it has failed

_log = logging.getLogger("megascale_ops.checkpoint")


def digests(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The 16-byte digest of each tensor; of one on a GPU without a wait for each.

    Args:
        tensors: of any shape, dtype and device; no DTensor, no sparse or quantized one.
    """
    return Begun(tensors).digests()


class Begun:
    """Digests that GPUs have begun to compute, behind what they were given before; what may change them comes behind.

    Args:
        tensors: as in ``digests``.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        by_device: dict[torch.device, list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            if tensor.device.type == "cuda":
                by_device.setdefault(tensor.device, []).append(number)
        self._sums = [(numbers, _on_gpu(device, self._of(numbers))) for device, numbers in by_device.items()]
        by_torch = [number for numbers, sums in self._sums if sums is None for number in numbers]
        self._by_torch = {number: block_sums(self._tensors[number]) for number in by_torch}

    def digests(self) -> list[bytes]:
        """Wait for them; those of tensors on the CPU are taken meanwhile.

        First, not after the wait: an optimizer keeps a counter for each parameter on the CPU, and thousands of them
        take milliseconds for which the training would wait.
        """
        raws = _of_small(self._tensors)
        summed = {number for numbers, sums in self._sums if sums is not None for number in numbers}.union(raws)
        others = {number: self._by_torch.get(number) for number in range(len(self._tensors)) if number not in summed}
        found = [block_sums(self._tensors[number]) if sums is None else sums for number, sums in others.items()]
        raws.update(zip(others, _fetched(found), strict=True))
        for numbers, sums in self._sums:
            if sums is not None:
                raws.update(zip(numbers, sums.fetch(), strict=True))
        return [xxh3_128_digest(raws[number]) for number in range(len(self._tensors))]

    def _of(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        return [self._tensors[number] for number in numbers]


def _of_small(tensors: Sequence[torch.Tensor]) -> dict[int, bytes]:
    """The sums of all tensors on the CPU that are so small that calls cost more than sums do, by their numbers."""
    groups: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for number, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu" and 0 < size <= _SMALL_BYTES and tensor.dtype in _SMALL:
            groups.setdefault((tensor.dtype, tensor.shape), []).append(number)
    found: dict[int, bytes] = {}
    with torch.no_grad():
        for numbers in groups.values():
            together = torch.stack([tensors[number] for number in numbers]).resolve_neg()
            flat = together.contiguous().view(len(numbers), -1).view(torch.uint8)
            rows = torch.zeros((len(numbers), -(-flat.shape[1] // 8) * 8), dtype=torch.uint8)
            rows[:, : flat.shape[1]] = flat
            words = rows.view(torch.int64)
            low, high = _weights(words.device, words.shape[1])
            sums = torch.stack((torch.mv(words, low), torch.mv(torch.bitwise_right_shift(words, 32), high)), 1)
            raw = sums.numpy().tobytes()
            found.update((number, raw[16 * at : 16 * at + 16]) for at, number in enumerate(numbers))
    return found


def _on_gpu(device: torch.device, tensors: Iterable[torch.Tensor]) -> "Sums | None":
    """All sums in one launch; None where there is no Triton that compiles, and torch's functions do it later."""
    global _has_kernel  # noqa: PLW0603  tried once in a process
    if not _has_kernel:
        return None
    try:
        from megascale_ops.checkpoint.trust.gpu_sums import Memory, Sums

        with torch.no_grad(), torch.cuda.device(device):
            plain = [_as_lies(tensor) for tensor in tensors]
            memories = [Memory(each.data_ptr(), each.numel() * each.element_size()) for each in plain]
            return Sums(memories, *_weights(device, WORDS), kept=plain)
    except Exception as exc:  # noqa: BLE001  whatever a compiler, its C compiler or a driver may say
        _has_kernel = False
        _log.info("digests of tensors on GPUs are taken by torch's own functions, at a tenth of the speed: %s", exc)
        return None


def _as_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one behind the other, from an address that words have; without a copy where they lie so."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    return plain if plain.data_ptr() % 8 == 0 else plain.clone()


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
