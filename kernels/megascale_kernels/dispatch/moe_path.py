# SPDX-License-Identifier: Apache-2.0
"""How a MoE layer runs that names no configuration: as it was tuned, as its first calls found out, or by the model.

The same mechanism as for matrix products (`dispatch.py`): where calls can be timed, the first ones of a size are a
contest between a few configurations, and the serial path where that may be faster, which all ranks begin together and
end with the same answer; `adaptive=False` or torch's deterministic mode leave it to the file of tunings and the model,
so that two runs give the same bits. A backward goes the way that its forward went, so in training both decide.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import experts

if TYPE_CHECKING:
    from megascale_kernels.autotune.contest import Contest
    from megascale_kernels.moe.moe_config import MoeConfig
    from megascale_kernels.moe.tables import Sizes

MOST_CONTESTS = 4096  # layers of one workspace; sizes belong to a model


def moe_experts(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, *,
    config: "MoeConfig | None" = None, fused: bool | None = None, tensor_parallel: int = 1,
) -> Tensor:  # fmt: skip
    """`moe.experts.moe_experts` with the configuration chosen where there is none; raises what that raises."""
    layer = (x, ids, gates, w_in, w_out, workspace)
    if config is not None or fused is False or not experts.serves(*layer, tensor_parallel):
        return experts.moe_experts(*layer, config=config, fused=fused, tensor_parallel=tensor_parallel)
    sizes = experts.sizes_of(ids, w_in, workspace, tensor_parallel)
    contest = _contest(sizes, workspace, serial=not fused)
    chosen = _chosen(sizes, workspace) if contest is None else contest.begin()
    # A contest or a tuning may choose the serial path; a caller who insists on our kernels gets them.
    serial = chosen is None and not fused
    out = experts.moe_experts(
        *layer, config=chosen, fused=False if serial else fused, tensor_parallel=tensor_parallel
    )  # fmt: skip
    if contest is not None:
        contest.end(out.grad_fn)
    return out


def _chosen(sizes: "Sizes", workspace: Workspace) -> "MoeConfig | None":
    from megascale_kernels.autotune.moe_choosing import choose_moe

    # A plan may not be None: it is kept in a tuple.
    found: tuple[MoeConfig | None] = workspace.plan(("moe choice", sizes), lambda: (choose_moe(sizes, workspace),))
    return found[0]


def _contest(sizes: "Sizes", workspace: Workspace, *, serial: bool) -> "Contest[MoeConfig] | None":
    """What finds out how a layer runs, where that has to be found out; the same on all ranks.

    Args:
        sizes: of the layer.
        workspace: whose calls they are.
        serial: whether the serial path may take part: who insists on our kernels has a contest without it.
    """
    if not workspace.adaptive or workspace.native is None or torch.are_deterministic_algorithms_enabled():
        return None
    from megascale_kernels.autotune.contest import Contest
    from megascale_kernels.autotune.moe_choosing import has_room_in_series, moe_contenders

    contests = workspace.planned.contests
    key = ("moe", sizes, serial)
    if key not in contests:
        if torch.cuda.is_current_stream_capturing():
            return None  # no turn is timed in a capture: the first call outside of one begins the contest
        if len(contests) >= MOST_CONTESTS:
            contests.clear()
        ways = moe_contenders(sizes, workspace, serial=serial)
        has_room = partial(has_room_in_series, sizes, workspace, deadline_s=2 * workspace.deadline_s)
        contests[key] = Contest(ways, workspace, has_room=has_room) if len(ways) > 1 else None
    found: Contest[MoeConfig] | None = contests[key]
    return found
