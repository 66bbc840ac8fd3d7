# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, and taking it: the overlapped kernels, or the collective and the product one after another.

Everything that is wrong with a call is said here, on the host, before anything is launched. The path is chosen from
what all ranks share (sizes, types, the device's generation), never from what only one rank sees, such as an address:
ranks on different paths would wait for each other.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from megascale_kernels.dispatch import serial
from megascale_kernels.dispatch.serial import Call, Path
from megascale_kernels.errors import WorkspaceTooSmall
from megascale_kernels.memory import operands
from megascale_kernels.memory.operands import Weight
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config

if TYPE_CHECKING:
    from megascale_kernels.ag_gemm.decomposed import DecomposedGather
    from megascale_kernels.ag_gemm.launch import GatherLaunch
    from megascale_kernels.autotune import Contest

Way = TypeVar("Way")
LOG = logging.getLogger("megascale_kernels")
TMA_BYTES = 16  # the TMA unit reads matrices whose rows and first byte lie on such boundaries
MOST_CONTESTS = 65536  # shapes; a server whose M takes every value must not grow for ever
WIDENED = ("ag_gemm", "gemm_rs")  # whose matrices are copied where their rows end badly
HOPPER = 9  # major compute capability whose matrix instructions the kernels are written for


# What becomes of an all-gather's rows: nothing, they are read in the workspace, or the caller keeps them.
NONE, BORROWED, OWN = range(3)


class Contested(NamedTuple):
    """What calls have in common that share a contest.

    Attributes:
        call: the operator and its sizes.
        is_nk: how the weight lies.
        rows: what becomes of gathered rows.
        behind: what of SwiGLU is taken behind the product, "" for nothing (`gated.py`, whose ways the contest is
            between).
    """

    call: Call
    is_nk: bool
    rows: int
    behind: str = ""


class Route(NamedTuple):
    """How calls with tensors of one kind run; decided at the first of them, kept by the workspace.

    Attributes:
        call: the operator and its sizes.
        is_nk: the weight lies as [N, K].
        config: how our kernel runs; None is the serial path.
        serial: the serial path.
        contest: what finds out `config` by the first calls, None where it is known.
    """

    call: Call
    is_nk: bool
    config: Config | None
    serial: Path
    contest: "Contest[Config] | None" = None


def ag_gemm(
    x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None, *, gathered: bool
) -> tuple[Tensor, Tensor | None]:
    """Gather(x) @ w + bias and, when asked for, the gathered rows in memory of their own; no autograd.

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
        TileTimeout, RankMismatch: an earlier call failed.
    """
    return _ag_gemm(x, w, workspace, bias, config, OWN if gathered else NONE)


def ag_gemm_in_place(x: Tensor, w: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Gather(x) @ w and the gathered rows, perhaps in the workspace: to be read before the next call."""
    out, rows = _ag_gemm(x, w, workspace, None, None, BORROWED)
    assert rows is not None  # they were asked for
    return out, rows


def gemm_rs(x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None) -> Tensor:
    """This rank's rows of the sum over ranks of x @ w, plus bias; no autograd. Raises what `ag_gemm` raises."""
    route = _route("gemm_rs", x, w, bias, workspace, config)
    contest, chosen = route.contest, route.config
    if contest is not None and contest.decided:
        chosen = contest.best
        contest = None
    elif contest is not None:
        chosen = contest.begin()
    out: Tensor
    if chosen is None:
        out = route.serial(x, w, bias, workspace)
    else:
        from megascale_kernels.gemm_rs.launch import launch

        out = x.new_empty((route.call.m // workspace.world_size, route.call.n))
        x = readable(x, workspace)
        launch(x, weight_of(w, x, route, workspace), out, aligned_bias(bias), workspace, chosen)
    if contest is not None:
        contest.end()
    return out


def gemm_ar(x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None) -> Tensor:
    """The sum over ranks of x @ w on every rank, plus bias; no autograd. Raises what `ag_gemm` raises."""
    route = _route("gemm_ar", x, w, bias, workspace, config)
    if route.config is None:
        out: Tensor = route.serial(x, w, bias, workspace)
        return out
    from megascale_kernels.gemm_ar import launch

    out = x.new_empty((route.call.m, route.call.n))
    x = readable(x, workspace)
    launch(x, weight_of(w, x, route, workspace), out, aligned_bias(bias), workspace, route.config)
    return out


def start_gather(x: Tensor, workspace: Workspace) -> Callable[[], Tensor]:
    """Begin to gather x, [M / W, K], beside what is launched next; the answer, when called, returns all rows, [M, K].

    Copy engines carry the rows. (NCCL's kernels would wait for a multiprocessor while an operator, which holds them
    all, waits for a peer whose operator waits behind NCCL.)
    """
    reason = workspace.plan(("gather", x.shape, x.dtype, x.device), lambda: _why_no_gather(x, workspace))
    if reason:
        return lambda: serial.all_gather(x, workspace)
    from megascale_kernels.ag_gemm.all_gather import finish, start

    begun = start(readable(x, workspace), workspace.beside())
    return lambda: finish(begun)


def _why_no_gather(x: Tensor, workspace: Workspace) -> str:
    """Why copy engines cannot gather rows like x, "" when they can."""
    m_shard, k_size = x.shape
    weight = Weight(x, is_nk=True, k_size=k_size, n_size=m_shard)
    call = Call("all_gather", m_shard * workspace.world_size, m_shard, k_size)
    reason = _why_serial(call, weight, workspace) or ""
    if reason:
        _say_once(call._replace(n=0), reason)
    return reason


def _ag_gemm(
    x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None, rows: int
) -> tuple[Tensor, Tensor | None]:
    """The product, and the gathered rows where `rows` wants them."""
    route = _route("ag_gemm", x, w, bias, workspace, config, rows)
    contest, chosen = route.contest, route.config
    if contest is not None and contest.decided:
        chosen = contest.best
        contest = None
    elif contest is not None:
        chosen = contest.begin()
    gathered: Tensor | None
    if chosen is None:
        out, gathered = route.serial(x, w, bias, workspace)
    else:
        out, gathered = gather_and_multiply(route, chosen, x, w, bias, workspace, rows)
    if contest is not None:
        contest.end()
    return out, None if rows == NONE else gathered


def gather_and_multiply(
    route: Route, chosen: Config, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, rows: int
) -> tuple[Tensor, Tensor | None]:
    """The product, not by the serial path, and the gathered rows where `rows` wants them."""
    from megascale_kernels.ag_gemm.launch import planned

    out = x.new_empty((route.call.m, route.call.n))
    read, bias = readable(x, workspace), aligned_bias(bias)
    weight = weight_of(w, read, route, workspace)
    plan = planned(read, weight, out, bias, workspace, chosen, own=rows != NONE)
    slot = plan.run(read, weight.matrix, out, bias)
    if rows == NONE:
        return out, None
    return out, kept_rows(plan, read, slot, x, workspace, borrowed=rows == BORROWED)


def kept_rows(
    plan: "GatherLaunch | DecomposedGather", read: Tensor, slot: int, x: Tensor, workspace: Workspace, *,
    borrowed: bool = False,
) -> Tensor:  # fmt: skip
    """The gathered rows of a launch that took `slot`, [M, K], in memory of their own unless `borrowed`.

    `read` is x as the launch read it.
    """
    shards = plan.gathered(read, slot)[..., : x.shape[1]]
    if not plan.has_own:
        shards[workspace.rank].copy_(x)
    # Shards lie apart where the tile height does not divide them; they are brought together in new memory.
    kept = shards if borrowed else shards.clone(memory_format=torch.contiguous_format)
    return kept.reshape(-1, x.shape[1])


def _route(
    operator: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    config: Config | None,
    rows: int = NONE,
) -> Route:
    """How this call runs. Whatever a check looks at is part of the key, so what passed once has passed."""
    if config is not None:
        operands.check_config(config, workspace, operator)  # before it becomes part of a key
    key = (
        operator, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device, config,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device), rows,
    )  # fmt: skip
    route: Route | None = workspace.planned.plans.get(key)  # without the two steps of `plan` at every call
    if route is not None:
        return route
    return workspace.plan(key, lambda: _first_route(operator, x, w, bias, workspace, config, rows))


def _first_route(
    operator: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    config: Config | None,
    rows: int,
) -> Route:
    """Check a call of a kind that is new, and decide its path.

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
    """
    call, weight = checked_call(operator, x, w, bias, workspace, config)
    contest: Contest[Config] | None = None
    if config is None:
        key = Contested(call, weight.is_nk, rows)
        contest = contest_of(key, call, weight, workspace, lambda configs: configs)
    if contest is not None:
        return Route(call, weight.is_nk, None, serial.path_of(call, workspace), contest)
    chosen = overlapped(call, weight, workspace, config)
    return Route(call, weight.is_nk, chosen, serial.path_of(call, workspace))


def checked_call(
    operator: str, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None
) -> tuple[Call, Weight]:
    """The sizes of a call and how its weight lies.

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
    """
    weight = _checked(x, w, bias, workspace, config, operator)
    m_size = x.shape[0] * (workspace.world_size if operator == "ag_gemm" else 1)
    call = Call(operator, m_size, weight.n_size, weight.k_size)
    if operator == "ag_gemm":
        _check_room(call, workspace, call.m * call.k, "max_gather_cols", call.k)
    elif operator == "gemm_rs":
        sent = call.m // workspace.world_size * (workspace.world_size - 1)
        _check_room(call, workspace, sent * call.n, "max_scatter_cols", call.n)
    return call, weight


def contest_of(
    key: object, call: Call, weight: Weight, workspace: Workspace,
    ways_of: "Callable[[list[Config | None]], list[Way | None]]",
) -> "Contest[Way] | None":  # fmt: skip
    """What finds out how a shape runs, where that has to be found out; the same on all ranks.

    Args:
        key: of calls that share a contest.
        call: the operator and its sizes.
        weight: what it multiplies with.
        workspace: whose calls they are.
        ways_of: the ways that take part, from the configurations that may be best.
    """
    if not workspace.adaptive or workspace.native is None or torch.are_deterministic_algorithms_enabled():
        return None
    if _why_serial(call, weight, workspace) is not None:
        return None
    from megascale_kernels.autotune import Contest, contenders

    contests = workspace.planned.contests
    if key not in contests:
        if len(contests) >= MOST_CONTESTS:
            contests.clear()
        ways = ways_of(contenders(call.operator, call.m, call.n, call.k, workspace))
        contests[key] = Contest(ways, workspace) if len(ways) > 1 else None
    found: Contest[Way] | None = contests[key]
    return found


def _checked(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None, what: str
) -> Weight:
    operands.check_input(x, workspace, what)
    weight = operands.read_weight(w, x, what)
    operands.check_bias(bias, weight.n_size, x, what)
    operands.check_config(config, workspace, what)
    return weight


def _check_room(call: Call, workspace: Workspace, elements: int, argument: str, cols: int) -> None:
    needed = elements * workspace.dtype.itemsize
    if needed > workspace.layout.data_bytes:
        raise WorkspaceTooSmall(
            f"{call}: {needed} bytes pass through the workspace, which has room for {workspace.layout.data_bytes} "
            f"(max_rows={workspace.max_rows}, max_gather_cols={workspace.max_gather_cols}, "
            f"max_scatter_cols={workspace.max_scatter_cols}): make it with max_rows={call.m}, {argument}={cols}"
        )


def overlapped(call: Call, weight: Weight, workspace: Workspace, config: Config | None) -> Config | None:
    """The configuration of the kernels for this call, or None for the serial path."""
    reason = _why_serial(call, weight, workspace)
    if reason is None and config is None:
        from megascale_kernels.autotune import choose

        config = choose(call.operator, call.m, call.n, call.k, workspace)
        reason = None if config is not None else "it is predicted to be faster"
    if reason is None:
        return config
    _say_once(call, reason)
    return None


def _why_serial(call: Call, weight: Weight, workspace: Workspace) -> str | None:
    """Why the kernels cannot serve a call, or None when they can; the same on all ranks."""
    if workspace.device.type != "cuda":
        return f"the tensors are on the {workspace.device.type}"
    if workspace.world_size == 1:
        return "one rank has nothing to overlap"
    if 0 in (call.m, call.n, call.k):
        return "there is nothing to multiply"
    return _why_device_cannot(workspace.device) or _why_sizes_cannot(call, weight, workspace)


def _why_device_cannot(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major == HOPPER:
        return None
    return f"the device has compute capability {major}.{minor} and the kernels need {HOPPER}.0"


def _why_sizes_cannot(call: Call, weight: Weight, workspace: Workspace) -> str | None:
    columns = weight.matrix.shape[1]
    if call.operator in WIDENED:
        needed = call.m * _wide(call.k, workspace) * workspace.dtype.itemsize
        if call.operator == "ag_gemm" and needed > workspace.layout.data_bytes:
            return f"rows of x, widened to {_wide(call.k, workspace)} elements, do not fit into the workspace"
        return None
    for name, found in (("x", call.k), ("w", columns)):
        if found != _wide(found, workspace):
            return f"rows of {name} have {found} elements, which is no multiple of {TMA_BYTES} bytes"
    staged = workspace.world_size * call.m * call.n * workspace.dtype.itemsize
    if call.operator == "gemm_ar" and staged > workspace.layout.data_bytes:
        return f"all ranks' partial results ({staged} bytes) do not fit into the workspace"
    return None


def _wide(columns: int, workspace: Workspace) -> int:
    """Columns that the TMA unit can read: their bytes are a multiple of `TMA_BYTES`."""
    step = TMA_BYTES // workspace.dtype.itemsize
    return -(-columns // step) * step


@cache
def _say_once(call: Call, reason: str) -> None:
    LOG.debug("%s: serial path because %s", call, reason)


def readable(matrix: Tensor, workspace: Workspace) -> Tensor:
    """The matrix where the TMA unit can read it: moved if it begins elsewhere, widened by zeros if its rows end badly.

    cuBLAS reads such rows as well, at a fifth of its speed, so that widening them costs a fraction of what it gains.
    """
    columns = matrix.shape[1]
    wide = _wide(columns, workspace)
    if wide != columns:
        return torch.nn.functional.pad(matrix, (0, wide - columns))
    return matrix if matrix.data_ptr() % TMA_BYTES == 0 else matrix.clone()


def aligned_bias(bias: Tensor | None) -> Tensor | None:
    """The bias where every rank's is: one elsewhere would be compiled for apart, while the other ranks wait."""
    if bias is None or bias.data_ptr() % TMA_BYTES == 0:
        return bias
    return bias.clone()


def weight_of(w: Tensor, x: Tensor, route: Route, workspace: Workspace) -> Weight:
    """The weight as it lies in memory, where the TMA unit can read it; x is what it will be multiplied with."""
    return Weight(readable(w.T if route.is_nk else w, workspace), route.is_nk, x.shape[1], route.call.n)
