# SPDX-License-Identifier: Apache-2.0
"""EPS-MoE's expert pipeline: groups of experts in flight, their products and all-to-alls interleaved.

The experts of every rank are cut into groups. All dispatches are begun at once and arrive in order; while a group is
multiplied, the tokens of later ones and the results of earlier ones travel. The backward runs the same pipeline from
its end. Source: EPS-MoE (2410.12247), the expert pipeline scheduler, and its choice between grouped and dense products.

It stands on torch's collectives and products, so it serves any device, type and size, also where our fused kernels
(`moe_experts`), which hide more on one host, do not run: between hosts, on other GPUs, in fp32.
"""

from torch import Tensor

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.experts import check_experts
from megascale_kernels.moe.schedules.in_flight import Crew
from megascale_kernels.moe.schedules.schedule_model import Layer, Links, expert_groups
from megascale_kernels.moe.schedules.shuffle import Shuffle


def crew_of(workspace: Workspace) -> Crew:
    """The ranks of a workspace."""
    return Crew(workspace.group, workspace.world_size, workspace.deadline_s)


def moe_pipelined(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, *,
    groups: int | None = None, dense_rows: int | None = None, links: Links | None = None,
) -> Tensor:  # fmt: skip
    """`moe_experts` as a pipeline over groups of experts (EPS-MoE, 2410.12247).

    Args:
        x: this rank's tokens, [T, H]; ranks may have different numbers of them, also none.
        ids: the experts of each token, [T, top_k], integers; a pair whose expert is below zero is dropped.
        gates: their weights, [T, top_k], floating point.
        w_in: gate and up matrices of this rank's experts, [E / W, 2, I, H]: rank r has experts r E / W and further.
        w_out: their down matrices, [E / W, H, I].
        workspace: its group, element type and deadline; its memory is not used.
        groups: of experts, 1 to E / W; None lets a model of the pipeline decide, from `workspace.max_rows`, which all
            ranks share. All ranks must pass the same.
        dense_rows: a group whose experts have so many rows each on average multiplies expert by expert, others as one
            grouped product; None always groups.
        links: between the ranks, for the model that decides `groups`; NVLink by default. All ranks must pass the same.

    Returns:
        [T, H]: a token without experts gets zeros. Differentiable once in x, gates, w_in and w_out.

    Raises:
        Unsupported: shapes, types, devices or groups that make no sense.
        RankMismatch: ranks called different things.
        TileTimeout: a peer did not come (on the CPU; NCCL has its own time limit).
    """
    check_experts(x, ids, gates, w_in, w_out, workspace)
    experts, _, inner, hidden = w_in.shape
    if groups is not None and not 1 <= groups <= experts:
        raise Unsupported(f"moe_pipelined(groups={groups}): a rank has {experts} experts, so 1 to {experts} groups")
    if dense_rows is not None and dense_rows < 1:
        raise Unsupported(f"moe_pipelined(dense_rows={dense_rows}): a positive number of rows, or None")
    if groups is None:
        tokens = workspace.max_rows // workspace.world_size
        layer = Layer(workspace.world_size, tokens, ids.shape[1], experts, hidden, inner, x.element_size())
        groups = expert_groups(layer, links)
    all_to_all.agree(
        f"moe_pipelined(H {hidden}, I {inner}, experts {experts}, top {ids.shape[1]}, {groups} groups, {x.dtype})",
        workspace,
    )
    shuffle = Shuffle(ids, experts, crew_of(workspace), parts=groups)
    coming = [shuffle.dispatch(x, part) for part in range(groups)]
    weights = zip(shuffle.by_part(w_in), shuffle.by_part(w_out), strict=True)
    going = []
    for part, (begun, (part_in, part_out)) in enumerate(zip(coming, weights, strict=True)):
        y = shuffle.multiply(begun, part, part_in, part_out, dense_rows=dense_rows)
        going.append(shuffle.combine(y, part))
    return shuffle.add(x, [shuffle.finish(begun, part) for part, begun in enumerate(going)], gates)
