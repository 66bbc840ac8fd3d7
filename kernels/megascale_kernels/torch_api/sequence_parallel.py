# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is cut over ranks, as people call it: a function, and a module without parameters."""

import torch
from torch import Tensor, nn

from megascale_kernels.attention.problem import AttentionConfig
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.torch_api import attention_ops


def sp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workspace: Workspace,
    *,
    causal: bool = False,
    zigzag: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks: softmax(scale q k^T) v.

    K and V travel by copy engines while the kernel works on those of its own rank. Results do not depend on how fast
    the ranks are: sums are made in one order, without atomics.

    Args:
        q: [batch, tokens, heads, head_dim] or [tokens, heads, head_dim], tokens of this rank. Contiguous, or copied.
        k: the same with a divisor of the heads (grouped-query attention).
        v: as k.
        workspace: made for at least batch * S rows of 2 * kv_heads * head_dim elements to gather, S tokens of a whole
            sequence.
        causal: a query sees no key behind itself.
        zigzag: rank r of W holds chunks r and 2W - 1 - r of 2W, in this order (`shard_sequence`), so that a causal mask
            gives every rank the same work; False: chunk r of W.
        scale: of the scores; head_dim ** -0.5 by default.
        cu_seqlens: int32 or int64 [n + 1], from 0 to the end of the last: several sequences packed into one, without a
            batch, each seeing itself alone. They count tokens over all ranks, the same numbers on each; a sequence may
            lie on several ranks. Tokens behind the last belong to none: their output is 0. On a GPU the numbers are not
            checked, and all elements, padding too, must be finite.
        config: how to run; None decides. All ranks must pass the same.

    Returns:
        of q's shape.

    Raises:
        Unsupported: wrong shape, type or device; the message names what to do.
        WorkspaceTooSmall: the message names the size that is needed.
        RankMismatch: ranks called different things.
        TileTimeout: a peer did not come; later calls raise it as well, until all ranks have called `workspace.reset`.

    Source: TileLink (2503.20313), section 7.4; flash attention (2307.08691).
    """
    run = attention_ops.compiled if torch.compiler.is_compiling() else attention_ops.eager
    return run(q, k, v, cu_seqlens, workspace, (causal, zigzag, scale, config))


class SequenceParallelAttention(nn.Module):
    """`sp_attention` with its choices kept: what a transformer block calls between its projections.

    Args:
        workspace: as for `sp_attention`.
        causal: likewise.
        zigzag: likewise.
        scale: likewise.
        config: likewise.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        causal: bool = True,
        zigzag: bool = True,
        scale: float | None = None,
        config: AttentionConfig | None = None,
    ) -> None:
        super().__init__()
        self.workspace, self.causal, self.zigzag, self.scale, self.config = workspace, causal, zigzag, scale, config

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Take q, k and v of this rank; give the output, of q's shape."""
        return sp_attention(
            q, k, v, self.workspace, causal=self.causal, zigzag=self.zigzag, scale=self.scale, cu_seqlens=cu_seqlens,
            config=self.config,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The mask and how the sequence is cut."""
        return f"causal={self.causal}, zigzag={self.zigzag}, rank {self.workspace.rank}/{self.workspace.world_size}"
