# SPDX-License-Identifier: Apache-2.0
"""A digest taken on a GPU is the one that the same bytes have on the CPU, of every type and place in memory."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_gpu_gives_the_digest_of_the_cpu() -> None:
    """From one element to 200 MB, contiguous and not, at odd addresses; and a flipped bit is seen."""
    from megascale_ops.checkpoint.trust.digests import BLOCK_BYTES, block_sums, digests

    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (200 << 20,), dtype=torch.uint8, generator=generator)
    tensors = [raw, raw[: BLOCK_BYTES + 1], raw[:3], raw[:0], raw[1 : 1 + 4 * BLOCK_BYTES]]
    tensors += [raw[: 5 * BLOCK_BYTES].view(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    tensors += [raw[:65_536].view(torch.float32).view(128, 128).t(), torch.tensor(3.0)]
    on_gpu = [tensor.cuda() for tensor in tensors]

    assert digests(on_gpu) == digests(tensors)
    assert digests([raw.cuda()[1:]]) == digests([raw[1:]])
    before = block_sums(on_gpu[0])
    on_gpu[0][len(raw) // 2] ^= 1
    assert (before != block_sums(on_gpu[0])).any(dim=0).sum() == 1
