# SPDX-License-Identifier: Apache-2.0
"""Whether the same product is the same, bit for bit: on every GPU, and each time.

A GPU that computes wrongly says so nowhere: no Xid, no ECC error, no NaN as a rule. The library takes the same kernel
for the same shape, model and version, and its sums have one order, so that equal inputs give equal bits; what differs
from the majority of its equals, or from itself, is damaged. Digests may be compared between nodes of the same
versions as well, which is what settles a disagreement of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import devices
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

if TYPE_CHECKING:
    import torch

CHECK = Check(
    "agreement", "bitwise agreement of GPUs", ("gpu", "torch"), quick_s=20.0, full_s=120.0, alone=True, process="cuda"
)

_SIZE = 8192
_SEED = 33
# 100 products take 0.15 s on a GPU of 700 TFLOP/s, 20,000 half a minute.
_QUICK, _FULL = 100, 20_000
_NEXT = "keep it out of jobs; `diagnose --full` repeats it 20,000 times; dcgmi diag -r 4; then have it replaced"


def measure(task: Task) -> Reading:
    """Multiply the same matrices everywhere, again and again."""
    import torch

    found, missing = devices(5 * _SIZE * _SIZE * 2 + (64 << 20))
    repeats = _FULL if task.thorough else _QUICK
    generator = torch.Generator().manual_seed(_SEED)
    # Made once on the host: the same bits everywhere. 16 rows of it are random, all others shifts of these: 8,192
    # squared random numbers take the host half a second.
    seed = torch.randn(16, _SIZE, generator=generator)
    a = torch.cat([seed.roll(shift, 1) for shift in range(_SIZE // 16)]).to(torch.bfloat16)
    operands, wrongs = {}, {}
    for one in found:
        doing(f"allocating on {one.label}")
        device = f"cuda:{one.place}"
        left = a.to(device)
        right = left.T.contiguous()
        operands[one.place] = (left, right, left @ right, torch.empty_like(left))
        wrongs[one.place] = torch.zeros((), dtype=torch.int64, device=device)
    doing("multiplying on all GPUs")
    for _ in range(repeats):  # one product on each GPU in turn: all of them work at once
        for one in found:
            left, right, first, product = operands[one.place]
            with torch.cuda.device(one.place):
                torch.mm(left, right, out=product)
                wrongs[one.place] += (product.view(torch.int16) != first.view(torch.int16)).any()
    figures, facts = [], []
    versions = f"torch {torch.__version__}, cuBLAS {_cublas_version()}"
    for one in found:
        doing(f"waiting for {one.label}")
        wrong = int(wrongs[one.place].item())
        digest = _digest(operands[one.place][2].cpu())
        figures += [Figure("products", one.label, repeats + 1), Figure("products_wrong", one.label, wrong)]
        facts.append(Fact("product_digest", one.label, digest, f"{one.model}, {versions}"))
    return Reading(tuple(figures), tuple(facts), tuple(missing))


def _digest(product: torch.Tensor) -> str:
    """Return the digest of a product on the host, of its bytes where they lie."""
    size = product.numel() * product.element_size()
    return hashlib.sha256((ctypes.c_char * size).from_address(product.data_ptr())).hexdigest()


def _cublas_version() -> str:
    """Return the version of the library that multiplied: another one may sum in another order. "": it is not told."""
    with contextlib.suppress(OSError, AttributeError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if "/libcublasLt.so" in line:
                library = ctypes.CDLL(line[line.index("/") :])
                library.cublasLtGetVersion.restype = ctypes.c_size_t
                return str(library.cublasLtGetVersion())
    return ""


def judge(reading: Reading) -> list[CheckFinding]:
    """Name GPUs that differ from themselves, or from the majority of their equals."""
    found = []
    counts = reading.values("products")
    for gpu, wrong in reading.values("products_wrong").items():
        if wrong:
            text = (
                f"{gpu}: {wrong:.0f} of {counts[gpu]:.0f} repetitions of one product differ from its first: "
                "it computes wrongly"
            )
            found.append(CheckFinding("bad", gpu, text, _NEXT))
    groups: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for fact in reading.facts:
        if fact.name == "product_digest":
            groups[fact.peers][fact.of] = fact.value
    for digests in groups.values():
        found += disagreeing(digests)
    return found


def disagreeing(digests: dict[str, str]) -> list[CheckFinding]:
    """Name those whose product is not the majority's; without a majority all of them, since one can't be told."""
    counts = Counter(digests.values())
    if len(counts) < 2:
        return []
    (digest, votes), *_ = counts.most_common(1)
    if votes * 2 > len(digests):
        return [
            CheckFinding(
                "bad", gpu, f"{gpu}: its product differs from that of {votes} equal GPUs: it computes wrongly", _NEXT
            )
            for gpu, own in digests.items()
            if own != digest
        ]
    named = ", ".join(digests)
    text = f"{named} disagree about one product, and no majority tells which of them computes wrongly"
    following = "compare with another node of the same versions: diagnose --compare A.json B.json"
    return [CheckFinding("bad", next(iter(digests)), text, following)]
