# SPDX-License-Identifier: Apache-2.0
"""What is timed on one case: ours, our kernel alone, the copies alone, NCCL, and torch's attention behind it or alone.

Torch's attention does the same work as ours: this rank's queries, each stretch of them by one call. Under a causal
mask its flash backend takes a rectangle with the diagonal at its lower right; cuDNN's has only square ones, so there
the keys before a chunk and the chunk itself are two calls, merged by the logarithms of their sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megascale_kernels import reference
from megascale_kernels.ag_gemm.all_gather import ALL_GATHER, all_gather_kernel
from megascale_kernels.attention import sdpa
from megascale_kernels.attention.launch import AttentionLaunch, Gather, Operands
from megascale_kernels.attention.problem import AttentionConfig, Problem
from megascale_kernels.attention.tile_walk import bounds_of
from megascale_kernels.autotune.timing import Call
from megascale_kernels.bench.sp_attention.heads import Case
from megascale_kernels.device.layout import signature
from megascale_kernels.dispatch.attention_path import own_choice
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.torch_api.sequence_parallel import sp_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Tensors(NamedTuple):
    """One case's tensors on this rank, leaves where gradients are wanted.

    Attributes:
        q: [B, T, Hq, D].
        k: [B, T, Hkv, D].
        v: likewise.
        dout: a gradient of the output.
        whole_k: keys of all ranks by position, [B, S, Hkv, D].
        whole_v: values likewise.
        ends: `cu_seqlens` on the device.
        ends_here: the same on the host.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    whole_k: Tensor
    whole_v: Tensor
    ends: Tensor | None
    ends_here: Tensor | None


class Contenders:
    """The ways to compute one case.

    Args:
        case: which.
        workspace: of ours.
        config: of ours; None lets it choose.
        backward: forward and backward together.
    """

    def __init__(self, case: Case, workspace: Workspace, config: AttentionConfig | None, *, backward: bool) -> None:
        self.case, self.workspace, self.config, self.backward = case, workspace, config, backward
        self.problem: Problem = case.problem(workspace.world_size)
        self.given = self._drawn()

    def _drawn(self) -> Tensors:
        problem, workspace = self.problem, self.workspace
        tokens = problem.halves * problem.chunk
        generator = torch.Generator(workspace.device).manual_seed(1 + workspace.rank)

        def random(heads: int) -> Tensor:
            shape = (problem.batch, tokens, heads, problem.head_dim)
            return torch.randn(shape, device=workspace.device, dtype=workspace.dtype, generator=generator)

        q, k, v, dout = (random(heads) for heads in (problem.q_heads, *[problem.kv_heads] * 2, problem.q_heads))
        whole_k, whole_v = (self.whole(tensor) for tensor in (k, v))
        here = torch.tensor([0, *self.case.segments]) if self.case.segments else None
        ends = None if here is None else here.to(workspace.device)
        leaves = [tensor.requires_grad_(self.backward) for tensor in (q, k, v)]
        wholes = [tensor.requires_grad_(self.backward) for tensor in (whole_k, whole_v)]
        return Tensors(leaves[0], leaves[1], leaves[2], dout, wholes[0], wholes[1], ends, here)

    def whole(self, own: Tensor) -> Tensor:
        """Tokens of all ranks by position, by NCCL; full attention takes them in any order."""
        shards = reference.all_gather(own.detach()[None], self.workspace.group)
        if self.problem.halves == 1 and self.problem.batch == 1:
            return shards.view(1, -1, *own.shape[2:])
        return sdpa.whole_sequence(shards, self.problem)

    # --- ours --------------------------------------------------------------------------------------------------

    def ours(self) -> list[Tensor]:
        """The operator as a user calls it: output, and gradients."""
        given, case = self.given, self.case
        q, k, v = given.q, given.k, given.v
        if given.ends is not None:
            q, k, v = q[0], k[0], v[0]  # packed sequences have no batch
        out = sp_attention(q, k, v, self.workspace, causal=case.causal, cu_seqlens=given.ends, config=self.config)
        out = out.view(given.q.shape)
        if not self.backward:
            return [out]
        return [out, *torch.autograd.grad(out, (given.q, given.k, given.v), given.dout)]

    def local(self) -> Call:
        """Our forward kernel on K and V that are there."""
        problem, workspace, given = self.problem, self.workspace, self.given
        config = self.config or own_choice(problem)
        plan = AttentionLaunch(problem, workspace, config, gather=False)
        bounds = bounds_of(given.ends, problem, workspace.device)
        rows = [tensor.detach().flatten(0, 1).flatten(1) for tensor in (given.q, given.k, given.v)]
        operands = Operands(rows[0], rows[1], rows[2], bounds)
        out = torch.empty_like(rows[0])
        lse = torch.empty(problem.q_heads, problem.rows, device=workspace.device)
        return lambda: plan.run(operands, out, lse)

    def copies(self) -> Call:
        """The gather by copy engines, and a kernel of one program that waits for it."""
        problem, workspace, given = self.problem, self.workspace, self.given
        gather = Gather(problem, workspace, (self.config or own_choice(problem)).splits)
        k, v = (tensor.detach().flatten(0, 1).flatten(1) for tensor in (given.k, given.v))
        stamp = signature(ALL_GATHER, problem.rows, 0, problem.kv_columns, 0)
        options = {"OPERATOR": ALL_GATHER, "PROGRESS": workspace.progress, "num_warps": 1, "enable_fp_fusion": True}

        def run(slot: int) -> tuple[object, ...]:
            return *channel_arguments(workspace, slot, stamp), 0, problem.rows, problem.kv_columns

        def call() -> None:
            slot = workspace.begin("copies alone", lambda: all_gather_kernel.warmup(*run(0), grid=(1,), **options))
            gather.push(k, v, slot, stamp, counted=False)
            all_gather_kernel[(1,)](*run(slot), **options)
            workspace.join_copies()

        return call

    # --- torch -------------------------------------------------------------------------------------------------

    def nccl(self) -> tuple[Tensor, Tensor]:
        """All-gather of K and V."""
        return self.whole(self.given.k), self.whole(self.given.v)

    def torch(self, backend: str) -> list[Tensor]:
        """The backend on gathered K and V: pieces of the output, or output and gradients."""
        return self._attended(backend, self.given.whole_k, self.given.whole_v)

    def serial(self, backend: str) -> list[Tensor]:
        """NCCL first; in backward the gradients of K and V go to their owners by a reduce-scatter."""
        whole = self.nccl()
        if not self.backward:
            return self._attended(backend, *whole)
        out, dq, *wholes = self._attended(backend, *(tensor.requires_grad_() for tensor in whole))
        shares = [sdpa.by_ranks(tensor, self.problem).contiguous() for tensor in wholes]
        return [out, dq, *(reference.reduce_scatter(share, self.workspace.group)[0] for share in shares)]

    def _attended(self, backend: str, whole_k: Tensor, whole_v: Tensor) -> list[Tensor]:
        given, problem = self.given, self.problem
        ends = None if given.ends_here is None else given.ends_here.tolist()
        pieces = []
        with sdpa_kernel(BACKENDS[backend]):
            for stretch in sdpa.stretches(problem, self.workspace.rank, ends):
                q = given.q[:, stretch.row : stretch.row + stretch.rows]
                keys = slice(stretch.first, stretch.last)
                square = not problem.causal or stretch.rows == stretch.last - stretch.first
                attend = sdpa.attend_stretch if backend == "flash" or square else merged
                pieces.append(attend(q, whole_k[:, keys], whole_v[:, keys], problem))
            if not self.backward:
                return pieces
            out = torch.cat(pieces, 1)
            return [out, *torch.autograd.grad(out, (given.q, whole_k, whole_v), given.dout)]

    def backends(self) -> dict[str, Callable[[], object]]:
        """Those that can serve this case."""
        names = [name for name in BACKENDS if name == "flash" or not (self.backward and self.problem.causal)]
        return {name: lambda name=name: self.torch(name) for name in names}  # type: ignore[misc]  # a default binds it

    def distance(self, backend: str) -> float:
        """How far ours is from torch's, relative, the largest over ranks and results; the serial path's in backward."""
        mine = self.ours()
        theirs = self.serial(backend) if self.backward else [torch.cat(self.torch(backend), 1)]
        apart = [
            float(
                (one.detach().float() - other.detach().float()).norm() / other.detach().float().norm().clamp(min=1e-20)
            )
            for one, other in zip(mine, theirs, strict=True)
        ]
        largest = torch.tensor(max(apart, key=lambda value: value if value == value else float("inf")))  # noqa: PLR0124 - NaN
        largest = largest.nan_to_num(nan=float("inf")).to(self.workspace.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.workspace.group)
        return float(largest)


def merged(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """CuDNN under a causal mask whose diagonal ends at the lower right: the keys before, then the square behind."""
    rows, keys = q.shape[1], k.shape[1]
    q = q.transpose(1, 2)
    parts = []
    for where, causal in ((slice(0, keys - rows), False), (slice(keys - rows, keys), True)):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - no public call gives the sums
            q, k[:, where].transpose(1, 2), v[:, where].transpose(1, 2), None, compute_log_sumexp=True,
            is_causal=causal, scale=problem.scale,
        )  # fmt: skip
        parts.append((found[0], found[1].reshape(q.shape[0], q.shape[1], rows, 1)))
    (first, first_sum), (second, second_sum) = parts
    weight = torch.sigmoid(second_sum - first_sum).to(first.dtype)
    return torch.lerp(first, second, weight).transpose(1, 2)
