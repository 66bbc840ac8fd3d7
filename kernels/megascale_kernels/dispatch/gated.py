# SPDX-License-Identifier: Apache-2.0
"""Which way the backward of swiglu(wide) @ w goes, and going it.

The product gather(dy) @ w^T is the gradient of swiglu's result. Our kernel can turn it into that of wide before it is
stored (`ag_gemm/hopper_gated`); else a kernel does so behind the product, whichever way that goes. Which is faster, the
first calls of a shape find out as they do for any operator.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megascale_kernels.dispatch import dispatch, serial
from megascale_kernels.dispatch.dispatch import BORROWED, Contested, Route
from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.swiglu import gradient_of_wide

if TYPE_CHECKING:
    from megascale_kernels.autotune import Contest


class Way(NamedTuple):
    """One way to SwiGLU's gradient.

    Attributes:
        config: how the product runs, not by the serial path.
        is_fused: the gradient is taken before the product is stored.
    """

    config: Config
    is_fused: bool


class Gated(NamedTuple):
    """How calls with tensors of one kind run; decided at the first of them, kept by the workspace.

    Attributes:
        route: that of the product.
        way: how it runs; None is the serial path and a kernel behind it.
        contest: what finds out `way` by the first calls, None where it is known.
    """

    route: Route
    way: Way | None
    contest: "Contest[Way] | None"


def gradient_in_place(dout: Tensor, w: Tensor, wide: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """The gradient of wide, and the gathered rows of dout, perhaps in the workspace: to be read before the next call.

    Args:
        dout: the gradient of this rank's rows of the result, [M / W, K].
        w: the transpose of what swiglu(wide) was multiplied with, [K, F].
        wide: gates and values side by side, [M, 2 F], contiguous.
        workspace: of the forward.

    Returns:
        [M, 2 F] and [M, K].

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
        TileTimeout, RankMismatch: an earlier call failed.
    """
    key = ("swiglu, ag_gemm", dout.shape, dout.stride(), dout.dtype, dout.device, w.shape, w.stride(), w.dtype,
           w.device, wide.shape, wide.stride(), wide.dtype)  # fmt: skip
    made = workspace.plan(key, lambda: _first(dout, w, wide, workspace))
    contest, way = made.contest, made.way
    if contest is not None and contest.decided:
        way, contest = contest.best, None
    elif contest is not None:
        way = contest.begin()
    if way is not None and way.is_fused:
        found = _fused(made.route, way.config, dout, w, wide, workspace)
    else:
        if way is None:
            product, gathered = made.route.serial(dout, w, None, workspace)
        else:
            product, gathered = dispatch.gather_and_multiply(made.route, way.config, dout, w, None, workspace, BORROWED)
        assert gathered is not None  # they were asked for
        found = gradient_of_wide(wide, product), gathered
    if contest is not None:
        contest.end()
    return found


def _fused(
    route: Route, config: Config, dout: Tensor, w: Tensor, wide: Tensor, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    from megascale_kernels.ag_gemm.launch import planned_gradients

    dwide = wide.new_empty(wide.shape)
    read, wide = dispatch.readable(dout, workspace), dispatch.readable(wide, workspace)
    weight = dispatch.weight_of(w, read, route, workspace)
    plan = planned_gradients(read, weight, dwide, wide, workspace, config)
    slot = plan.run(read, weight.matrix, dwide, None, wide)
    shards = plan.gathered(read, slot)[..., : dout.shape[1]]
    if not plan.has_own:
        shards[workspace.rank].copy_(dout)
    return dwide, shards.reshape(-1, dout.shape[1])


def _first(dout: Tensor, w: Tensor, wide: Tensor, workspace: Workspace) -> Gated:
    """Check a call of a kind that is new, and decide its ways.

    Raises:
        Unsupported: arguments that make no sense.
    """
    rows, columns = dout.shape[0] * workspace.world_size, w.shape[1]
    if wide.shape != (rows, 2 * columns) or wide.dtype != dout.dtype or not wide.is_contiguous():
        raise Unsupported(
            f"swiglu_gemm_rs: wide must be a contiguous [{rows}, {2 * columns}] of {dout.dtype}, gates and values side "
            f"by side, got {tuple(wide.shape)} of {wide.dtype} with strides {wide.stride()}"
        )
    call, weight = dispatch.checked_call("ag_gemm", dout, w, None, workspace, None)
    path = serial.path_of(call, workspace)
    can_fuse = wide.device.type == "cuda" and wide.dtype.itemsize == 2 and wide.shape[1] % 16 == 0

    def ways(configs: list[Config | None]) -> list[Way | None]:
        return ways_of(configs, can_fuse=can_fuse)

    key = Contested(call, weight.is_nk, BORROWED, is_gated=True)
    contest = dispatch.contest_of(key, call, weight, workspace, ways)
    config = None if contest is not None else dispatch.overlapped(call, weight, workspace, None)
    return Gated(Route(call, weight.is_nk, config, path), ways([config])[0], contest)


def ways_of(configs: list[Config | None], *, can_fuse: bool) -> list[Way | None]:
    """The ways of a call whose product may run in these, the model's choice first: ours with the gradient fused.

    The best of ours is tried without it as well.
    """
    from megascale_kernels.autotune.contest import MOST_WAYS

    ways: list[Way | None] = []
    for config in configs:
        is_ours = can_fuse and config is not None and config.kernel == "hopper"
        ways.append(None if config is None else Way(config, is_fused=is_ours))
    fused = [way for way in ways if way is not None and way.is_fused]
    if fused and len(configs) > 1:
        ways.insert(ways.index(fused[0]) + 1, Way(fused[0].config, is_fused=False))
    return ways[:MOST_WAYS]
