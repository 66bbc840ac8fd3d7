# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU's memory gives back what was written: patterns, and each word's own address, read back twice.

ECC corrects one bit of a word and reports two; what goes wrong on the way to it, or in three bits, is reported by no
counter. Ones and zeros find bits that stick, alternating ones neighbours that leak, addresses find lines that are
crossed; the second reading finds what the first one has disturbed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import devices
from megascale_ops.diagnostics.report import CheckFinding, Figure

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CHECK = Check(
    "hbm_pattern", "patterns in GPU memory", ("gpu", "torch"), quick_s=15.0, full_s=120.0, alone=True, process="cuda"
)

_WORD_BYTES = 8
# 128 MiB: comparing a piece takes as much again.
_PIECE_WORDS = 1 << 24
_QUICK_BYTES = 2 << 30
# 85 % of what is free: the rest is the context, and room to compare.
_FULL_SHARE = 0.85
_PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)
_READINGS = 2


def measure(task: Task) -> Reading:
    """Write and read back, each GPU in turn."""
    import torch

    found, missing = devices(4 * _PIECE_WORDS * _WORD_BYTES)
    figures = []
    for one in found:
        with torch.cuda.device(one.place):
            free, _ = torch.cuda.mem_get_info()
            wanted = int(free * _FULL_SHARE) if task.thorough else min(_QUICK_BYTES, int(free * _FULL_SHARE))
            pieces = max(1, wanted // (_PIECE_WORDS * _WORD_BYTES) - 2)
            doing(f"writing patterns on {one.label}")
            wrong = wrong_words(pieces, "cuda", _PIECE_WORDS)
            torch.cuda.empty_cache()
        tested = pieces * _PIECE_WORDS * _WORD_BYTES
        figures += [Figure("hbm_tested", one.label, tested), Figure("hbm_wrong", one.label, wrong)]
    return Reading(tuple(figures), (), tuple(missing))


def wrong_words(count: int, device: str, piece_words: int) -> int:
    """Return how many words were not what was written, over all patterns and readings.

    Args:
        count: Pieces of memory.
        device: As torch names it.
        piece_words: Words of eight bytes in a piece.
    """
    import torch

    pieces = [torch.empty(piece_words, dtype=torch.int64, device=device) for _ in range(count)]
    within = torch.arange(piece_words, dtype=torch.int64, device=device)
    room = torch.empty_like(within)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def test(write: Callable[[int, torch.Tensor], object]) -> None:
        """Write all pieces, then read all of them, twice."""
        for at, piece in enumerate(pieces):
            write(at, piece)
        for _ in range(_READINGS):
            for at, piece in enumerate(pieces):
                write(at, room)
                wrong.add_(torch.count_nonzero(piece != room))

    for pattern in _PATTERNS:
        test(partial(_fill, pattern))
    test(lambda at, piece: torch.add(within, at * piece_words, out=piece))
    return int(wrong.item())


def _fill(pattern: int, _at: int, piece: torch.Tensor) -> None:
    piece.fill_(pattern)


def judge(reading: Reading) -> list[CheckFinding]:
    """Name GPUs with a single wrong word."""
    tested = reading.values("hbm_tested")
    found = []
    for gpu, wrong in reading.values("hbm_wrong").items():
        if wrong:
            text = f"{gpu}: {wrong:,.0f} words of {tested[gpu] / (1 << 30):.0f} GiB of memory were not what was written"
            following = "keep it out of jobs; nvidia-smi -q -d ECC,ROW_REMAPPER; dcgmi diag -r 4; then have it replaced"
            found.append(CheckFinding("bad", gpu, text, following))
    return found
