# SPDX-License-Identifier: Apache-2.0
"""The cases on which the operators are held on GPUs: shapes, configurations, random operands, and the comparison.

"No worse than serial": against a float64 reference, the error is at most that of NCCL and cuBLAS in the same type.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megascale_kernels import Config, Workspace
from torch import Tensor

PLAIN = Config(block_n=128, stages=3)  # small tiles compile in a second or two


class Shape(NamedTuple):
    """One case: rows of x on a rank, K and N of w, how w lies, whether there is a bias, the type, the configuration."""

    rows: int
    k: int
    n: int
    is_nk: bool = True
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    config: Config = PLAIN


CUBLAS = [Config(kernel="cublas", pieces=pieces) for pieces in (None, 1, 2)]
ALIGNED = Shape(512, 1024, 768)
TAILS = [
    Shape(200, 520, 264, is_nk=False, bias=True),  # rows, K and N end within a tile
    Shape(72, 264, 520, bias=True, dtype=torch.float16),
    Shape(8, 64, 72, bias=True, dtype=torch.float16),  # less than one tile
]
# Rows that don't fill tiles, in the warp-specialised kernels: each shard's last tiles are clipped by TMA.
RAGGED = [
    Shape(rows, 1024, 776, bias=bias, dtype=dtype, config=Config(128, columns, kernel="hopper", tail_split=split))
    for bias, dtype, rows_of in ((True, torch.bfloat16, (201, 64, 129)), (False, torch.float16, (1409, 100, 520)))
    for rows in rows_of
    for columns, split in ((256, None), (128, 0))
]
# Taken apart into cuBLAS's products: tails, bias, both layouts and types, rows that no wide word holds.
IN_PIECES = [
    case._replace(config=config)
    for case in (ALIGNED, *TAILS, RAGGED[0], Shape(33, 72, 40, is_nk=False), Shape(7, 257, 263))
    for config in CUBLAS
]
GATHER_CONFIGS = [
    PLAIN._replace(splits=2),
    PLAIN._replace(carrier="sm", comm_ctas=8, splits=2),
    Config(kernel="hopper"),
    Config(128, 128, kernel="hopper", tail_split=3),  # every tile in parts
    *(Config(128, columns, kernel="hopper", tail_split=0) for columns in (128, 256)),  # all tiles dealt out evenly
    Config(128, 128, kernel="hopper", planned=True, lead=2),  # four of six columns walked with all shards
    Config(128, 128, kernel="hopper", planned=True, lead=2, tail_split=3),
    Config(128, 128, kernel="hopper", planned=True),  # as in the timetable
    Config(kernel="hopper", planned=True, splits=2, group_m=8),
    Config(kernel="hopper", planned=True, stages=3),
]
SCATTER_TILES = ((256, None), (128, None), (256, 0), (128, 0), (256, 2))  # columns, parts of those of the last wave
HOPPER_SCATTERS = [Config(128, columns, kernel="hopper", tail_split=split) for columns, split in SCATTER_TILES]
SCATTER_CONFIGS = [PLAIN._replace(push_tma=False), *HOPPER_SCATTERS]

_workspaces: dict[torch.dtype, Workspace] = {}


def shared_workspace(dtype: torch.dtype = torch.bfloat16) -> Workspace:
    """One workspace per type: making one takes longer than using it."""
    if dtype not in _workspaces:
        _workspaces[dtype] = Workspace(
            max_rows=4096, max_gather_cols=4096, max_scatter_cols=4096, dtype=dtype, adaptive=False
        )
    return _workspaces[dtype]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers that differ between ranks and calls."""
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def operands(case: Shape, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """A random x with so many rows, w and bias."""
    x = drawn(rows, case.k, dtype=case.dtype)
    scale = case.k**-0.5
    w = (
        (drawn(case.n, case.k, dtype=case.dtype) * scale).T
        if case.is_nk
        else drawn(case.k, case.n, dtype=case.dtype) * scale
    )
    bias = drawn(case.n, dtype=case.dtype) if case.bias else None
    if bias is not None:
        dist.broadcast(bias, 0)
    return x, w, bias


def doubled(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same in float64."""
    return [None if tensor is None else tensor.double() for tensor in tensors]


def assert_no_worse(ours: Tensor, serial: Tensor, exact: Tensor) -> None:
    """Compare root mean squares and maxima of the errors; 1.1 and 2 leave room for the noise of few roundings."""
    assert ours.shape == exact.shape
    error, serial_error = ((tensor.double() - exact).abs() for tensor in (ours, serial))
    assert bool(torch.isfinite(error).all())
    rms, serial_rms = (float(e.square().mean().sqrt()) for e in (error, serial_error))
    assert rms <= 1.1 * serial_rms + 1e-9, f"{rms} against {serial_rms}"
    assert float(error.max()) <= 2 * float(serial_error.max()) + 1e-9
