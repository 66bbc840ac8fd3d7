# SPDX-License-Identifier: Apache-2.0
"""Kernels that overlap communication with computation tile by tile; they import nothing of ours.

    workspace = Workspace(group, max_rows=8192, max_gather_cols=8192, max_scatter_cols=8192)
    out = ag_gemm(x, weight.T, workspace)

Importing the package loads neither torch nor Triton; the first use of a name does.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_kernels.attention.problem import AttentionConfig
    from megascale_kernels.attention.sharding import positions_of, shard_sequence, unshard_sequence
    from megascale_kernels.errors import (
        KernelError,
        MissingDependency,
        RankMismatch,
        TileTimeout,
        Unsupported,
        WorkspaceTooSmall,
    )
    from megascale_kernels.memory.workspace import Workspace
    from megascale_kernels.moe.moe_config import MoeConfig
    from megascale_kernels.moe.schedules.expert_pipeline import moe_pipelined
    from megascale_kernels.moe.schedules.locality import capacity_bound, local_experts, locality_loss
    from megascale_kernels.moe.schedules.parm import ParmGroups, ParmRouting, moe_parm
    from megascale_kernels.moe.schedules.schedule_model import Links
    from megascale_kernels.planning.config import Config
    from megascale_kernels.torch_api.activations import swiglu
    from megascale_kernels.torch_api.gated_mlp import GatedMLP
    from megascale_kernels.torch_api.layers import ColumnParallelLinear, RowParallelLinear
    from megascale_kernels.torch_api.moe_ops import MoELayer, moe_experts
    from megascale_kernels.torch_api.moe_shortcut import ShortcutBlock, ShortcutExperts
    from megascale_kernels.torch_api.operators import ag_gemm, gated_mlp, gemm_ar, gemm_rs, swiglu_gemm_rs
    from megascale_kernels.torch_api.parallel_styles import OverlapColwise, OverlapRowwise
    from megascale_kernels.torch_api.sequence_parallel import SequenceParallelAttention, sp_attention

__all__ = [
    "AttentionConfig",
    "ColumnParallelLinear",
    "Config",
    "GatedMLP",
    "KernelError",
    "Links",
    "MissingDependency",
    "MoELayer",
    "MoeConfig",
    "OverlapColwise",
    "OverlapRowwise",
    "ParmGroups",
    "ParmRouting",
    "RankMismatch",
    "RowParallelLinear",
    "SequenceParallelAttention",
    "ShortcutBlock",
    "ShortcutExperts",
    "TileTimeout",
    "Unsupported",
    "Workspace",
    "WorkspaceTooSmall",
    "ag_gemm",
    "capacity_bound",
    "gated_mlp",
    "gemm_ar",
    "gemm_rs",
    "local_experts",
    "locality_loss",
    "moe_experts",
    "moe_parm",
    "moe_pipelined",
    "positions_of",
    "shard_sequence",
    "sp_attention",
    "swiglu",
    "swiglu_gemm_rs",
    "unshard_sequence",
]

_ROOMS = {
    "errors": ("KernelError", "MissingDependency", "RankMismatch", "TileTimeout", "Unsupported", "WorkspaceTooSmall"),
    "moe.moe_config": ("MoeConfig",),
    "moe.schedules.schedule_model": ("Links",),
    "torch_api.moe_ops": ("MoELayer", "moe_experts"),
    "moe.schedules.expert_pipeline": ("moe_pipelined",),
    "moe.schedules.locality": ("capacity_bound", "local_experts", "locality_loss"),
    "moe.schedules.parm": ("ParmGroups", "ParmRouting", "moe_parm"),
    "torch_api.moe_shortcut": ("ShortcutBlock", "ShortcutExperts"),
    "attention.problem": ("AttentionConfig",),
    "attention.sharding": ("positions_of", "shard_sequence", "unshard_sequence"),
    "planning.config": ("Config",),
    "memory.workspace": ("Workspace",),
    "torch_api.activations": ("swiglu",),
    "torch_api.operators": ("ag_gemm", "gated_mlp", "gemm_ar", "gemm_rs", "swiglu_gemm_rs"),
    "torch_api.gated_mlp": ("GatedMLP",),
    "torch_api.sequence_parallel": ("SequenceParallelAttention", "sp_attention"),
    "torch_api.layers": ("ColumnParallelLinear", "RowParallelLinear"),
    "torch_api.parallel_styles": ("OverlapColwise", "OverlapRowwise"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_NEEDED = ("torch", "triton")


class _Package(ModuleType):
    """The package itself. Kernel files are named after the operators they serve, and the operators win.

    Python binds a submodule to its package when it is first imported: without this, `megascale_kernels.ag_gemm` would
    be the function before the first launch and the file afterwards.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _ROOM_OF):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """Import the attribute's module on first use (PEP 562).

    Raises:
        MissingDependency: torch or Triton is not installed; the message names the command that installs them.
    """
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        from megascale_kernels.errors import MissingDependency

        raise MissingDependency(
            f"megascale_kernels.{name} needs {missing}, which is not installed: pip install 'megascale-ops[kernels]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
