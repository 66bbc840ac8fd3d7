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
    from megascale_ops.checkpoint.trust import digests as module
    from megascale_ops.checkpoint.trust.digests import BLOCK_BYTES, block_sums, digests

    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (200 << 20,), dtype=torch.uint8, generator=generator)
    tensors = [raw, raw[: BLOCK_BYTES + 1], raw[:3], raw[:0], raw[1 : 1 + 4 * BLOCK_BYTES]]
    tensors += [raw[: 5 * BLOCK_BYTES].view(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    tensors += [raw[:65_536].view(torch.float32).view(128, 128).t(), torch.tensor(3.0)]
    on_gpu = [tensor.cuda() for tensor in tensors]

    assert digests(on_gpu) == digests(tensors)
    assert module._has_kernel, "Triton's kernel was not used"
    by_torch = [block_sums(tensor).cpu() for tensor in on_gpu]
    assert all(torch.equal(sums, block_sums(tensor)) for sums, tensor in zip(by_torch, tensors, strict=True))
    assert digests([raw.cuda()[1:]]) == digests([raw[1:]])
    before = block_sums(on_gpu[0])
    on_gpu[0][len(raw) // 2] ^= 1
    assert (before != block_sums(on_gpu[0])).any(dim=0).sum() == 1


def test_digests_come_while_a_copy_to_the_host_is_under_way() -> None:
    """They stand in no line behind it: a save in the background would wait for the copy that it hides."""
    from megascale_ops.checkpoint.trust.digests import Begun, digests

    sources = torch.ones(1 << 28, dtype=torch.int64, device="cuda").split(1 << 24)
    target, side = torch.empty(1 << 28, dtype=torch.int64, pin_memory=True), torch.cuda.Stream()
    wanted = digests(sources)  # compiles
    torch.cuda.synchronize()

    with torch.cuda.stream(side):
        for _ in range(20):  # 40 GB
            target.copy_(sources[0]._base, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    found = Begun(sources).digests()
    was_under_way = not copied.query()
    torch.cuda.synchronize()

    assert found == wanted
    assert was_under_way
