# SPDX-License-Identifier: Apache-2.0
"""What is asked for: sizes, mask and cut of one attention, checked; and how the kernels are to run."""

from typing import NamedTuple

import torch
from torch import Tensor

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace

HEAD_DIMS = (64, 128)  # those of the kernels; torch serves the others
WHAT = "sp_attention"
KERNELS = ("triton", "hopper")
BLOCKS = ("block_m", "block_n", "keys_block", "keys_step", "queries_block", "queries_step")


class AttentionConfig(NamedTuple):
    """How the kernels run; all ranks must use the same.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a block.
        warps: warps of a program, in plain Triton.
        stages: blocks of K and V in shared memory.
        splits: pieces in which a rank's K and V travel, each announced by itself.
        kernel: "triton", or "hopper" for the warp-specialised forward (not for packed sequences).
        backward: the same of the backward.
        keys_block: keys of a tile of their gradients.
        keys_step: queries that such a tile takes at a time.
        queries_block: queries of a tile of their gradient.
        queries_step: keys that such a tile takes at a time.
    """

    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    stages: int = 2
    splits: int = 2
    kernel: str = "triton"
    backward: str = "triton"
    keys_block: int = 128
    keys_step: int = 64
    queries_block: int = 128
    queries_step: int = 64


class Problem(NamedTuple):
    """One attention, as this rank sees it.

    Attributes:
        world_size: ranks over which the sequence is cut, W.
        batch: sequences, B, all cut alike.
        halves: chunks of a sequence that a rank holds: 2 in the zig-zag, else 1.
        chunk: tokens of a chunk.
        q_heads: heads of q.
        kv_heads: heads of k and v; a divisor of q_heads.
        head_dim: elements of a head.
        causal: no query sees keys behind itself.
        varlen: the sequence holds several packed ones (`cu_seqlens`).
        scale: of the scores.
    """

    world_size: int
    batch: int
    halves: int
    chunk: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    varlen: bool
    scale: float

    @property
    def rows(self) -> int:
        """Tokens of this rank, over the batch."""
        return self.batch * self.halves * self.chunk

    @property
    def sequence(self) -> int:
        """Tokens of one sequence, over all ranks."""
        return self.world_size * self.halves * self.chunk

    @property
    def kv_columns(self) -> int:
        """Elements of K of one token."""
        return self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Heads of q that share one head of k and v."""
        return self.q_heads // self.kv_heads

    @property
    def variant(self) -> int:
        """What ranks must agree on beside sizes, as a number."""
        return self.batch << 4 | self.varlen << 3 | self.causal << 2 | self.halves


def read_problem(
    q: Tensor, k: Tensor, v: Tensor, world_size: int, cu_seqlens: Tensor | None, scale: float | None, *, causal: bool,
    zigzag: bool,
) -> Problem:  # fmt: skip
    """Check shapes: q [B, T, Hq, D] or [T, Hq, D], k and v likewise with Hkv heads, T tokens of this rank.

    Raises:
        Unsupported: the message names the wrong property and what to do.
    """
    if q.ndim not in (3, 4) or k.ndim != q.ndim or k.shape != v.shape:
        raise Unsupported(
            f"{WHAT}: q must be [batch, tokens, heads, head_dim] or [tokens, heads, head_dim], k and v alike with "
            f"heads of their own; got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    batch = q.shape[0] if q.ndim == 4 else 1
    tokens, q_heads, head_dim = q.shape[-3:]
    kv_heads = k.shape[-2]
    if k.shape[:-2] != q.shape[:-2] or k.shape[-1] != head_dim:
        raise Unsupported(f"{WHAT}: q {tuple(q.shape)} and k {tuple(k.shape)} differ in more than their heads")
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads:
        raise Unsupported(f"{WHAT}: {q_heads} heads of q cannot share {kv_heads} heads of k: take a divisor")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise Unsupported(
                f"{WHAT}: {name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: make them equal"
            )
    cuts = zigzag and (causal or cu_seqlens is not None)  # else nothing depends on where a token stands
    if cuts and tokens % 2:
        raise Unsupported(
            f"{WHAT}: in the zig-zag a rank holds two chunks of a sequence, but {tokens} tokens are no two equal ones: "
            f"pad the sequence to a multiple of {2 * world_size}, or cut it in order and say zigzag=False"
        )
    if cu_seqlens is not None:
        _check_lengths(cu_seqlens, q, batch, tokens * world_size)
    return Problem(
        world_size, batch, 2 if cuts else 1, tokens // 2 if cuts else tokens, q_heads, kv_heads, head_dim, causal,
        cu_seqlens is not None, head_dim**-0.5 if scale is None else float(scale),
    )  # fmt: skip


def _check_lengths(cu_seqlens: Tensor, q: Tensor, batch: int, sequence: int) -> None:
    """Refuse boundaries that are none; on a GPU their values are not looked at, which would stop the host.

    Raises:
        Unsupported: the message says what is wrong.
    """
    if batch != 1:
        raise Unsupported(f"{WHAT}: cu_seqlens packs sequences into one, so q has no batch; got {tuple(q.shape)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise Unsupported(
            f"{WHAT}: cu_seqlens is a row of at least two int32 or int64 numbers, from 0 to the end of the last "
            f"sequence; got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if cu_seqlens.device != q.device:
        raise Unsupported(f"{WHAT}: cu_seqlens is on {cu_seqlens.device}, q on {q.device}: move it there")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        numbers = cu_seqlens.tolist()
        if numbers[0] != 0 or sorted(numbers) != numbers or numbers[-1] > sequence:
            raise Unsupported(
                f"{WHAT}: cu_seqlens must begin with 0, never fall, and end at {sequence} tokens at most (those of all "
                f"ranks); got {numbers}"
            )


def check_tensors(q: Tensor, workspace: Workspace) -> None:
    """Refuse tensors of another type or elsewhere than the workspace.

    Raises:
        Unsupported: the message names both.
    """
    if q.dtype != workspace.dtype:
        raise Unsupported(f"{WHAT}: q is {q.dtype}, the workspace was made for {workspace.dtype}: convert one of them")
    if q.device != workspace.memory.device:
        raise Unsupported(f"{WHAT}: q is on {q.device}, the workspace on {workspace.memory.device}: move q there")


def check_attention_config(config: AttentionConfig) -> None:
    """Refuse a configuration that no kernel can run with.

    Raises:
        Unsupported: the message names the wrong field.
    """
    if not isinstance(config, AttentionConfig):
        raise Unsupported(f"{WHAT}: config must be an AttentionConfig or None, got {type(config).__name__}")
    for name, least in (*((name, 16) for name in BLOCKS), ("warps", 1)):
        value = getattr(config, name)
        if not isinstance(value, int) or value < least or value & (value - 1):
            raise Unsupported(f"{WHAT}: config: {name} is {value}, no power of two from {least} on")
    for name in ("stages", "splits"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise Unsupported(f"{WHAT}: config: {name} is {value}, below one")
    for name in ("kernel", "backward"):
        if getattr(config, name) not in KERNELS:
            raise Unsupported(f"{WHAT}: config: {name} is {getattr(config, name)!r}: choose from {', '.join(KERNELS)}")
