# SPDX-License-Identifier: Apache-2.0
"""The serial path of a MoE layer on a GPU, without a wait of the host: collectives, permutes, grouped products in turn.

    forward    all-gather of experts and gates, then of tokens; a sort by expert, meanwhile; rows gathered; grouped
               product; SwiGLU; grouped product; a token's rows added in fp32; reduce-scatter
    backward   all-gather of output gradients and, again, of tokens; the same products the other way round

It hides next to nothing, but torch's grouped product knows tiles of few rows, so where experts have so many that our
tiles of 128 rows are to a fifth padding it is the faster way (moe_random_2gpu_h200_52711.txt: 0.94 and 0.92 of our
kernels' time with 425 rows an expert). All tokens go to all ranks, as many as the workspace was made for: NCCL's
all-gather takes as much of each rank, and no rank knows what another one has. On two ranks that is what the best
all-to-all sends.

Sums do not depend on the order in which anything comes: a stable sort, a token's rows in the order of its experts, then
NCCL's reduce-scatter. Waits are NCCL's, with its deadline, and a recorder of collectives sees them.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale_kernels import reference
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.tables import Sizes

HOPPER = 9  # major compute capability; earlier ones have torch's grouped product only with waits of the host
ROW_BYTES = 16  # of rows, and of what `torch._grouped_mm` reads: multiples
MOST_KEYS = (1 << 15) - 1  # experts of a rank, and one for what is not ours, in 16 bits: two passes of a sort
MOST_CHOSEN = 64  # pairs of a token that one program adds up
# Rows of all pairs are made room for, since the host does not know how many are ours. A tenth of an H100's memory.
MOST_BYTES = 8 << 30
# A contest may try this path unasked where `bytes_of` are at most one in so many of the bytes that are free: a model
# that just fits must not run out of memory by it. A forward's second product holds up to 1.5 times `bytes_of`, a
# backward up to 2.5 times with gradients of weights that are small beside it.
TRIED_SHARE = 4
COLS, KEYS, WARPS = 1024, 1024, 4
CLEARING_PARTS = 16  # programs that write zeros for one expert

Launch = Callable[..., None]


class Routed(NamedTuple):
    """Whose pairs are ours, and where; made in the forward, kept for a backward.

    Attributes:
        chosen: [W T, 2 k] int32: of each token its experts, -1 where there is none, and its weights' bits.
        key: [W T k] int16: the place of a pair's expert among ours, or their number.
        order: [W T k] int64: pairs by expert, those that are not ours last.
        ends: [E] int32: where each expert's rows end.
        place: [W T k] int32: the row of a pair that is ours.
    """

    chosen: Tensor
    key: Tensor
    order: Tensor
    ends: Tensor
    place: Tensor

    @property
    def filled(self) -> Tensor:
        """How many rows there are, [1]."""
        return self.ends[-1:]

    @property
    def gates(self) -> Tensor:
        """`chosen` as fp32."""
        return self.chosen.view(torch.float32)


class Moving(NamedTuple):
    """A collective that is under way.

    Attributes:
        out: what comes.
        work: to be waited for, by the stream; None where nothing moves.
    """

    out: Tensor
    work: Any

    def arrived(self) -> Tensor:
        """Let the stream wait; what came."""
        if self.work is not None:
            self.work.wait()
        return self.out


def bytes_of(sizes: Sizes, itemsize: int = 2) -> int:
    """The most bytes that a forward holds at a time: gathered tokens, their rows and what these are multiplied to."""
    tokens = sizes.world_size * sizes.pitch * sizes.hidden
    return itemsize * (tokens + sizes.pairs * (sizes.hidden + 2 * sizes.inner))


def free_bytes(device: torch.device) -> int:
    """What this process may still allocate on a GPU: free there, or held unused by torch's caching allocator.

    Of what the allocator holds only whole segments count, which it gives back when it needs others, and none of a CUDA
    graph's pool; and no more than `torch.cuda.set_per_process_memory_fraction` leaves.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch gives it no types
    unused = sum(
        segment["total_size"] for segment in segments
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0) and not segment["active_size"]
    )  # fmt: skip
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)  # not in all versions
    allowed = int(fraction * total) - (torch.cuda.memory_reserved(index) - unused)
    found: int = min(free + unused, allowed)
    return max(0, found)


def why_sizes_cannot(sizes: Sizes, dtype: torch.dtype) -> str:
    """Why this path cannot run a layer of these sizes, "" when it can.

    Args:
        sizes: of the layer, with the most tokens of a rank.
        dtype: of tokens and weights.
    """
    if dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, and the tensors are {dtype}"
    if sizes.pitch < 1 or sizes.hidden * 2 % ROW_BYTES or sizes.inner * 2 % ROW_BYTES:
        return f"H {sizes.hidden} or I {sizes.inner} is no multiple of {ROW_BYTES // 2}, or there is no token"
    if sizes.experts > MOST_KEYS or sizes.top_k > MOST_CHOSEN:
        return f"a rank has {sizes.experts} experts and a token {sizes.top_k}, of at most {MOST_KEYS} and {MOST_CHOSEN}"
    needed = bytes_of(sizes)
    if needed > MOST_BYTES:
        return f"it takes {needed} bytes for the most pairs that a rank may get, and {MOST_BYTES} are the most allowed"
    return ""


def why_not(sizes: Sizes, workspace: Workspace) -> str:
    """`why_sizes_cannot`, and why a workspace's device can't; the same on all ranks."""
    if workspace.device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return f"the tensors are on the {workspace.device.type}, or torch has no grouped product"
    major, minor = torch.cuda.get_device_capability(workspace.device)
    if major != HOPPER:
        return f"the device has compute capability {major}.{minor} and the grouped product needs {HOPPER}.0"
    return why_sizes_cannot(sizes, workspace.dtype)


def moe(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, sizes: Sizes
) -> Tensor:  # fmt: skip
    """The layer, [T, H] to [T, H]; differentiable once in x, gates and both weights.

    Args:
        x: this rank's tokens, [T, H], at most `sizes.pitch` of them; here and below contiguous and aligned.
        ids: experts of each token, [T, k] int32; outside of the experts there are, a pair is dropped.
        gates: their weights, [T, k] floating point.
        w_in: gate and up of this rank's experts, [E / W, 2, I, H].
        w_out: [E / W, H, I].
        workspace: of the group.
        sizes: what all ranks agree on.
    """
    out: Tensor = _SyncFree.apply(x, ids, gates, w_in, w_out, workspace, sizes)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


class _SyncFree(torch.autograd.Function):
    """Forward and backward; what is kept is gate and up of each row, as our kernels keep it, and the routing."""

    @staticmethod
    def forward(ctx, x, ids, gates, w_in, w_out, workspace, sizes) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        out, routed, both = run_forward(x, ids, gates.to(torch.float32), w_in, w_out, workspace, sizes)
        ctx.save_for_backward(x, w_in, w_out, both, *routed)
        ctx.workspace, ctx.sizes, ctx.type_of_gates = workspace, sizes, gates.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]  # torch gives it no types
        x, w_in, w_out, both, *routed = ctx.saved_tensors
        wants_x, _, wants_gates, wants_in, wants_out, *_ = ctx.needs_input_grad
        wanted = [name for name, wants in (("w_in", wants_in), ("w_out", wants_out)) if wants]
        dx, dgates, found = run_backward(
            grad, x, w_in, w_out, both, Routed(*routed), wanted, ctx.workspace, ctx.sizes
        )  # fmt: skip
        return (
            dx if wants_x else None, None, dgates.to(ctx.type_of_gates) if wants_gates else None, found.get("w_in"),
            found.get("w_out"), None, None,
        )  # fmt: skip


def run_forward(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, sizes: Sizes
) -> tuple[Tensor, Routed, Tensor]:
    """`moe` without autograd: the output, the routing, and gate and up of each row, [pairs, 2 I]."""
    from megascale_kernels.moe.kernels.permutation import take_swiglu

    chosen = _gathered(_packed(ids, gates, sizes), workspace).arrived()
    coming = _gathered(_padded(x, sizes.pitch), workspace)
    routed = _routed(chosen, workspace, sizes)
    rows = _rows(coming.arrived(), routed, sizes, places=True)
    del coming
    weight = w_in.view(sizes.experts, 2 * sizes.inner, sizes.hidden).transpose(1, 2)
    both = _product(rows, weight, routed.ends)
    del rows
    h = both.new_empty(sizes.pairs, sizes.inner)
    launch(take_swiglu, sizes.pairs, both, h, routed.filled, sizes.inner, COLS=COLS)
    y = _product(h, w_out.transpose(1, 2), routed.ends)
    return _sent_home(y, routed, workspace, sizes, weighted=True).arrived()[: x.shape[0]], routed, both


def run_backward(
    grad: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, both: Tensor, routed: Routed, wanted: Collection[str],
    workspace: Workspace, sizes: Sizes,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Gradients of tokens and of gates, and of the weights that are wanted; what ranks do together is always the same.

    Args:
        grad: of the output, [T, H].
        x: the tokens, [T, H].
        w_in: [E / W, 2, I, H].
        w_out: [E / W, H, I].
        both: gate and up of each row, as the forward left them.
        routed: the routing.
        wanted: of "w_in" and "w_out".
        workspace: of the group.
        sizes: what all ranks agree on.
    """
    from megascale_kernels.moe.kernels.permutation import swiglu_backward

    found: dict[str, Tensor] = {}
    ends, count = routed.ends, x.shape[0]
    gradients = _gathered(_padded(grad, sizes.pitch), workspace).arrived()
    tokens = _gathered(_padded(x, sizes.pitch), workspace)  # needed last
    back = _rows(gradients, routed, sizes)
    u = _product(back, w_out, ends)
    dpre = torch.empty_like(both)
    dgates = torch.zeros(sizes.world_size * sizes.pitch, sizes.top_k, device=u.device)
    launch(
        swiglu_backward, sizes.pairs, u, both, dpre, routed.order, routed.gates, dgates, routed.filled, sizes.inner,
        TOP_K=sizes.top_k, COLS=COLS,
    )  # fmt: skip
    dx = _product(dpre, w_in.view(sizes.experts, 2 * sizes.inner, sizes.hidden), ends)
    going = [_sent_home(dx, routed, workspace, sizes, weighted=False), _scattered(dgates, workspace)]
    if "w_out" in wanted:
        found["w_out"] = _weight(back, u, ends)
    del back, u, dx
    rows = _rows(tokens.arrived(), routed, sizes)
    if "w_in" in wanted:
        found["w_in"] = _weight(dpre, rows, ends).view_as(w_in)
    of_tokens, of_gates = (moving.arrived()[:count] for moving in going)
    return of_tokens, of_gates, found


def launch(kernel: Any, programs: int, *operands: Tensor | int, **constants: int) -> None:  # noqa: ANN401 - Triton's JITFunction, which has no types
    """Launch on the current stream."""
    kernel[(programs,)](*operands, **constants, num_warps=WARPS)


def _packed(ids: Tensor, gates: Tensor, sizes: Sizes) -> Tensor:
    """Experts and weights of a rank's tokens side by side, so that one collective brings both: [pitch, 2 k] words."""
    count, top_k = ids.shape
    packed = ids.new_full((sizes.pitch, 2 * top_k), -1)
    packed[:count, :top_k] = ids
    packed[:count, top_k:] = gates.contiguous().view(torch.int32)
    return packed


def _padded(rows: Tensor, pitch: int) -> Tensor:
    """A rank's rows and as many more, of anything, as every rank sends; those are never read."""
    if rows.shape[0] == pitch:
        return rows.contiguous()
    out = rows.new_empty(pitch, rows.shape[1])
    out[: rows.shape[0]] = rows
    return out


def _gathered(x: Tensor, workspace: Workspace) -> Moving:
    """Begin to bring together all ranks' rows, [T, N] to [W T, N], beside what is launched next."""
    if workspace.world_size == 1:
        return Moving(x, None)
    out = x.new_empty(workspace.world_size * x.shape[0], x.shape[1])
    # Looked up at each call: a recorder of collectives may have put its own in their place.
    return Moving(out, getattr(dist, reference.GATHER)(out, x, group=workspace.group, async_op=True))


def _scattered(x: Tensor, workspace: Workspace) -> Moving:
    """Begin to add up all ranks' rows and to send each its own: [W T, N] to [T, N]."""
    if workspace.world_size == 1:
        return Moving(x, None)
    out = x.new_empty(x.shape[0] // workspace.world_size, x.shape[1])
    return Moving(out, getattr(dist, reference.SCATTER)(out, x, group=workspace.group, async_op=True))


def _routed(chosen: Tensor, workspace: Workspace, sizes: Sizes) -> Routed:
    """Whose pairs are ours, by expert; `place` is filled when rows are taken."""
    from megascale_kernels.moe.kernels.permutation import find_ours

    pairs, experts = chosen.shape[0] * sizes.top_k, sizes.experts
    key = torch.empty(pairs, dtype=torch.int16, device=chosen.device)
    launch(
        find_ours, -(-pairs // KEYS), chosen, key, pairs, workspace.rank * experts, EXPERTS=experts,
        TOP_K=sizes.top_k, BLOCK=KEYS,
    )  # fmt: skip
    by_expert, order = key.sort(stable=True)
    bounds = torch.arange(1, experts + 1, dtype=torch.int16, device=key.device)
    ends = torch.searchsorted(by_expert, bounds, out_int32=True)
    return Routed(chosen, key, order, ends, torch.empty(pairs, dtype=torch.int32, device=key.device))


def _rows(gathered: Tensor, routed: Routed, sizes: Sizes, *, places: bool = False) -> Tensor:
    """Rows of tokens, or of their gradients, by expert: [pairs, H]; with `places` also where each pair's is."""
    from megascale_kernels.moe.kernels.permutation import take_rows

    rows = gathered.new_empty(sizes.pairs, sizes.hidden)
    launch(
        take_rows, sizes.pairs, gathered, routed.order, routed.place, rows, routed.filled, sizes.hidden,
        TOP_K=sizes.top_k, PLACES=places, COLS=COLS,
    )  # fmt: skip
    return rows


def _sent_home(y: Tensor, routed: Routed, workspace: Workspace, sizes: Sizes, *, weighted: bool) -> Moving:
    """Add up each token's rows and begin to send the sums to their owners, which gives [pitch, H]."""
    from megascale_kernels.moe.kernels.permutation import add_rows

    tokens = sizes.world_size * sizes.pitch
    summed = y.new_empty(tokens, sizes.hidden)
    launch(
        add_rows, tokens, y, routed.place, routed.key, routed.gates, summed, sizes.hidden, EXPERTS=sizes.experts,
        TOP_K=sizes.top_k, WEIGHTED=weighted, COLS=COLS,
    )  # fmt: skip
    return _scattered(summed, workspace)


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of each expert times its weight: [pairs, K] and [E, K, N] to [pairs, N], behind the last row anything."""
    out: Tensor = torch._grouped_mm(rows, weight, offs=ends)  # noqa: SLF001 - torch's only name for it
    return out


def _weight(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Left^T right over the rows of each expert: [pairs, M] and [pairs, N] to [E, M, N]; zeros where it has none."""
    from megascale_kernels.moe.kernels.gradient_kernels import clear_empty_kernel

    out: Tensor = torch._grouped_mm(left.t(), right, offs=ends)  # noqa: SLF001 - as above
    launch(
        clear_empty_kernel, len(ends) * CLEARING_PARTS, out, ends, out[0].numel(), PARTS=CLEARING_PARTS, COLS=COLS
    )  # fmt: skip
    return out
