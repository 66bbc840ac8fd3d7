# SPDX-License-Identifier: Apache-2.0
"""A digest tells a flipped bit and elements that changed places, and is the same wherever and however data lies."""

import random

import pytest
import torch
from xxhash import xxh3_128_digest

from megascale_ops.checkpoint.trust import digests
from megascale_ops.checkpoint.trust.digests import BLOCK_BYTES, WORDS, block_sums, digest, elements_at

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8),
    *(torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
]


def drawn(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random bytes as elements; of bool 0 and 1."""
    generator = torch.Generator().manual_seed(count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, to be changed."""
    return tensor.view(torch.uint8).reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    """Of every type, at every kind of length, at the first, the last and drawn places; put back, it is as it was."""
    dice = random.Random(1)  # noqa: S311  nothing secret
    for count in (1, 3, 1000, WORDS + 5, 2 * WORDS * 8 // dtype.itemsize):
        tensor = drawn(dtype, count)
        before, size = digest(tensor), count * dtype.itemsize
        for at in {0, size - 1, *(dice.randrange(size) for _ in range(4))}:
            bit = 0 if dtype is torch.bool else dice.randrange(8)
            raw(tensor)[at] ^= 1 << bit
            assert digest(tensor) != before, (count, at, bit)
            raw(tensor)[at] ^= 1 << bit
        assert digest(tensor) == before


@pytest.mark.parametrize("bit", [0, 7, 15, 31, 32, 47, 62, 63])
def test_two_flipped_bits_of_one_weight_are_seen(bit: int) -> None:
    """Also of the highest: of plain sums with odd weights two flipped signs would cancel out each other."""
    words = torch.zeros(4 * WORDS, dtype=torch.int64)
    before = digest(words)
    flip = 1 << bit if bit < 63 else -(1 << 63)

    for one, other in ((0, 1), (17, 9000), (WORDS - 1, 0), (3, WORDS + 3)):
        words[one] ^= flip
        words[other] ^= flip
        assert digest(words) != before
        words.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_elements_that_changed_places_are_seen(dtype: torch.dtype) -> None:
    """Neighbours, elements of one word, of one block and of two, also where they differ by their sign alone."""
    tensor = torch.ones(3 * BLOCK_BYTES // dtype.itemsize, dtype=dtype)
    dice = random.Random(2)  # noqa: S311  nothing secret
    for one, other in [
        (0, 1),
        (1, 2),
        *((dice.randrange(len(tensor)), dice.randrange(len(tensor))) for _ in range(20)),
    ]:
        if one == other:
            continue
        tensor[one], tensor[other] = -1, 1
        before = digest(tensor)
        tensor[one], tensor[other] = 1, -1
        assert digest(tensor) != before
        tensor[one], tensor[other] = 1, 1


def test_the_sums_are_what_the_docstring_says() -> None:
    """Modulo 2**64, over words and over their upper halves, with weights that keep their promises."""
    low, high = digests._drawn()
    words = drawn(torch.int64, WORDS + 7)

    sums = block_sums(words)

    for block, part in enumerate((words[:WORDS].tolist(), words[WORDS:].tolist())):
        for row, weights, numbers in ((0, low, part), (1, high, [word >> 32 for word in part])):
            wanted = sum(weight * word for weight, word in zip(weights, numbers, strict=False)) % (1 << 64)
            assert int(sums[row, block]) % (1 << 64) == wanted
    for weights in (low, high):
        assert all(weight % 4 == 1 for weight in weights)
        assert len({weight % (1 << 33) for weight in weights}) == WORDS


def test_how_it_lies_in_memory_does_not_count() -> None:
    """Channels last, a transposed view, a slice at an odd address, a conjugate and an expanded one."""
    images = torch.randn(2, 5, 7, 3)
    halves = torch.randn(1001).bfloat16()
    complexes = torch.randn(10, dtype=torch.complex64)

    assert digest(images.to(memory_format=torch.channels_last)) == digest(images)
    assert digest(images.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)) == digest(images)
    assert digest(halves[1:]) == digest(halves[1:].clone())
    assert digest(complexes.conj()) == digest(complexes.conj().resolve_conj())
    assert digest(torch.ones(1).expand(1000)) == digest(torch.ones(1000))
    assert digest(torch.tensor(3.0)) == digest(torch.tensor([3.0]))


def test_nan_compares_by_its_bits_and_so_does_zero() -> None:
    """Equal NaNs are equal, another payload is another value, and so is minus zero."""
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))

    assert digest(quiet) == digest(quiet.clone())
    assert digest(quiet) != digest(other)
    assert digest(torch.zeros(1)) != digest(-torch.zeros(1))


def test_lengths_are_told_apart_and_nothing_has_a_digest_too() -> None:
    """A tensor of no elements; one byte more of zeros."""
    assert digest(torch.empty(0)) == digest(torch.empty(0, 3))
    assert digest(torch.zeros(WORDS * 8, dtype=torch.uint8)) != digest(torch.zeros(WORDS * 8 + 1, dtype=torch.uint8))


def test_many_tensors_are_digested_as_one_by_one() -> None:
    """In their order, with any number of threads."""
    tensors = [drawn(dtype, 50 + number) for number, dtype in enumerate(DTYPES)] + [drawn(torch.float32, 3 * WORDS)]

    together = digests.digests(tensors)

    assert together == [digest(tensor) for tensor in tensors]
    assert len(set(together)) == len(tensors)


def test_small_ones_are_summed_up_together_as_one_by_one() -> None:
    """Counters of an optimizer, odd lengths, views in another order, lazily negative ones, and a Parameter."""
    small = [torch.tensor(float(step)) for step in (3, 3, 4)]
    small += [drawn(dtype, count) for dtype in (torch.float32, torch.bfloat16, torch.int64) for count in (1, 3, 513)]
    small += [drawn(torch.float32, 12).view(3, 4).t(), torch.randn(12).view(4, 3), torch.ones(1).expand(7)]
    small += [torch.nn.Parameter(torch.randn(5)), torch.randn(4, dtype=torch.complex64).conj().imag]

    together = digests.digests(small)

    assert together == [xxh3_128_digest(block_sums(each).numpy().tobytes()) for each in small]
    assert together[0] == together[1] != together[2]


def test_one_block_can_be_looked_at() -> None:
    """The bytes of its elements, in their order."""
    tensor = drawn(torch.int16, BLOCK_BYTES)

    assert torch.equal(elements_at(tensor, 1), raw(tensor)[BLOCK_BYTES : 2 * BLOCK_BYTES])
    assert torch.equal(elements_at(tensor.view(2, -1).t(), 0), raw(tensor.view(2, -1).t().contiguous())[:BLOCK_BYTES])


def test_a_rest_of_bytes_makes_a_block_of_its_own_where_the_others_are_full() -> None:
    """One byte more than a block: the sums are of two blocks, and a change of that byte is seen in the second."""
    bytes_ = torch.zeros(BLOCK_BYTES + 1, dtype=torch.uint8)
    before = block_sums(bytes_)
    bytes_[-1] = 1

    after = block_sums(bytes_)

    assert before.shape == after.shape == (2, 2)
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.equal(before[:, 1], after[:, 1])
