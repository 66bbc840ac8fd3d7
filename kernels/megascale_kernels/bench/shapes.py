# SPDX-License-Identifier: Apache-2.0
"""The matrix shapes of the literature's transformer layers, as one rank of N sees them.

The first product of an MLP gathers its input (K is the hidden size H, N a share of the inner size I); the second
scatters its output (N is H, K a share of I). The share is taken twice: "global" divides I by the GPUs in use, as a user
would; "tp8" divides it by eight, so each GPU has the small product that it has in the papers' eight-GPU runs, where
there is the least to hide communication behind.
"""

import re
from typing import NamedTuple

# Hidden and inner sizes: the models' configurations; the set is that of FLUX (2406.06858) and TileLink (2503.20313).
MODELS = {
    "LLaMA-7B": (4096, 11008),
    "LLaMA-8B": (4096, 14336),
    "LLaMA-70B": (8192, 28672),
    "LLaMA-405B": (16384, 53248),
    "GPT-3": (12288, 49152),
    "Qwen2-72B": (8192, 29568),
}
ROWS = (512, 1024, 2048, 4096, 8192)
SCALES = ("global", "tp8")
OPERATORS = ("ag_gemm", "gemm_rs")


class Shape(NamedTuple):
    """One row of the table.

    Attributes:
        name: the model, or "given".
        scale: "global" or "tp8", or "-".
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
    """

    name: str
    scale: str
    m: int
    n: int
    k: int

    @property
    def label(self) -> str:
        """The shape in a sentence."""
        return f"{self.name} {self.scale} M {self.m}" if self.scale != "-" else f"{self.m}x{self.n}x{self.k}"


def model_shape(operator: str, name: str, scale: str, m: int, gpus: int) -> Shape:
    """One model's layer on one rank."""
    hidden, inner = MODELS[name]
    share = inner // (gpus if scale == "global" else 8)
    return Shape(name, scale, m, *((share, hidden) if operator == "ag_gemm" else (hidden, share)))


def wanted(operator: str, asked: str | None, rows: tuple[int, ...], scales: tuple[str, ...], gpus: int) -> list[Shape]:
    """The shapes to measure, in the order of the table.

    Args:
        operator: "ag_gemm" or "gemm_rs".
        asked: comma-separated models ("70B" for LLaMA-70B) and sizes MxNxK as one rank sees them; None is every model.
        rows: values of M for the models.
        scales: which of `SCALES`.
        gpus: ranks.

    Raises:
        ValueError: an unknown model, or rows that do not divide among the ranks.
    """
    found: list[Shape] = []
    for word in asked.split(",") if asked else MODELS:
        given = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word.strip())
        if given:
            found.append(Shape("given", "-", *map(int, given.groups())))
            continue
        names = [name for name in MODELS if word.strip().lower() in (name.lower(), name.lower().split("-")[-1])]
        if not names:
            raise ValueError(f"--shapes {word.strip()}: not MxNxK, and not one of {', '.join(MODELS)}")
        found += [model_shape(operator, names[0], scale, m, gpus) for scale in scales for m in rows]
    for shape in found:
        if shape.m % gpus or min(shape.m, shape.n, shape.k) < 1:
            raise ValueError(f"{shape.label}: M must be a positive multiple of the {gpus} GPUs, N and K positive")
    # The sizes that users run first: they are measured even when the budget ends early.
    return sorted(found, key=lambda shape: SCALES.index(shape.scale) if shape.scale in SCALES else -1)
