# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, and taking it: the overlapped kernels, or the collective and the product one after another.

Everything that is wrong with a call is said here, on the host, before anything is launched. The path is chosen from
what all ranks share (sizes, types, the device's generation), never from what only one rank sees, such as an address:
ranks on different paths would wait for each other.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megascale_kernels.dispatch import serial
from megascale_kernels.dispatch.serial import Call
from megascale_kernels.errors import WorkspaceTooSmall
from megascale_kernels.memory import operands
from megascale_kernels.memory.operands import Weight
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config

LOG = logging.getLogger("megascale_kernels")
TMA_BYTES = 16  # the TMA unit reads matrices whose rows and first byte lie on such boundaries
HOPPER = 9  # major compute capability whose matrix instructions the kernels are written for


def ag_gemm(
    x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None, *, gathered: bool
) -> tuple[Tensor, Tensor | None]:
    """Gather(x) @ w + bias and, when asked for, the gathered rows in memory of their own; no autograd.

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
        TileTimeout, RankMismatch: an earlier call failed.
    """
    out, rows, borrowed = _ag_gemm(x, w, workspace, bias, config)
    if not gathered:
        return out, None
    return out, _with_own_rows(rows.clone(memory_format=torch.contiguous_format), x, workspace) if borrowed else rows


def ag_gemm_in_place(x: Tensor, w: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Gather(x) @ w and the gathered rows, perhaps in the workspace: to be read before the next call."""
    out, rows, borrowed = _ag_gemm(x, w, workspace, None, None)
    return out, _with_own_rows(rows, x, workspace) if borrowed else rows


def gemm_rs(x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None) -> Tensor:
    """This rank's rows of the sum over ranks of x @ w, plus bias; no autograd. Raises what `ag_gemm` raises."""
    weight = _checked(x, w, bias, workspace, config, "gemm_rs")
    world_size = workspace.world_size
    call = Call("gemm_rs", x.shape[0], weight.n_size, weight.k_size)
    _check_room(call, workspace, call.m // world_size * (world_size - 1) * call.n, "max_scatter_cols", call.n)
    chosen = _overlapped(call, weight, workspace, config)
    if chosen is None:
        return serial.gemm_rs(call, x, w, workspace, bias)
    from megascale_kernels.gemm_rs.launch import launch

    out = x.new_empty((call.m // world_size, call.n))
    launch(_aligned(x), _readable(weight), out, _aligned_bias(bias), workspace, chosen)
    return out


def gemm_ar(x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None) -> Tensor:
    """The sum over ranks of x @ w on every rank, plus bias; no autograd. Raises what `ag_gemm` raises."""
    weight = _checked(x, w, bias, workspace, config, "gemm_ar")
    call = Call("gemm_ar", x.shape[0], weight.n_size, weight.k_size)
    chosen = _overlapped(call, weight, workspace, config)
    if chosen is None:
        return serial.gemm_ar(call, x, w, workspace, bias)
    from megascale_kernels.gemm_ar import launch

    out = x.new_empty((call.m, call.n))
    launch(_aligned(x), _readable(weight), out, _aligned_bias(bias), workspace, chosen)
    return out


def start_gather(x: Tensor, workspace: Workspace) -> Callable[[], Tensor]:
    """Begin to gather x, [M / W, K], beside what is launched next; the answer, when called, returns all rows, [M, K].

    Copy engines carry the rows. (NCCL's kernels would wait for a multiprocessor while an operator, which holds them
    all, waits for a peer whose operator waits behind NCCL.)
    """
    m_shard, k_size = x.shape
    weight = Weight(x, is_nk=True, k_size=k_size, n_size=m_shard)
    call = Call("all_gather", m_shard * workspace.world_size, 0, k_size)
    reason = _why_serial(call._replace(n=m_shard), weight, workspace)
    if reason is not None:
        _say_once(call, reason)
        return lambda: serial.all_gather(x, workspace)
    from megascale_kernels.ag_gemm.all_gather import finish, start

    begun = start(_aligned(x), workspace.beside())
    return lambda: finish(begun)


def _ag_gemm(
    x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None, config: Config | None
) -> tuple[Tensor, Tensor, bool]:
    """The product, the gathered rows, and whether these lie in the workspace, our own missing."""
    weight = _checked(x, w, bias, workspace, config, "ag_gemm")
    call = Call("ag_gemm", x.shape[0] * workspace.world_size, weight.n_size, weight.k_size)
    _check_room(call, workspace, call.m * call.k, "max_gather_cols", call.k)
    chosen = _overlapped(call, weight, workspace, config)
    if chosen is None:
        return *serial.ag_gemm(call, x, w, workspace, bias), False
    from megascale_kernels.ag_gemm.launch import launch

    out = x.new_empty((call.m, call.n))
    return out, launch(_aligned(x), _readable(weight), out, _aligned_bias(bias), workspace, chosen), True


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


def _overlapped(call: Call, weight: Weight, workspace: Workspace, config: Config | None) -> Config | None:
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
    for name, columns in (("x", call.k), ("w", weight.matrix.shape[1])):
        if columns * workspace.dtype.itemsize % TMA_BYTES:
            return f"rows of {name} have {columns} elements, which is no multiple of {TMA_BYTES} bytes"
    staged = workspace.world_size * call.m * call.n * workspace.dtype.itemsize
    if call.operator == "gemm_ar" and staged > workspace.layout.data_bytes:
        return f"all ranks' partial results ({staged} bytes) do not fit into the workspace"
    return None


@cache
def _say_once(call: Call, reason: str) -> None:
    LOG.debug("%s: serial path because %s", call, reason)


def _aligned(matrix: Tensor) -> Tensor:
    """The matrix, moved where the TMA unit can read it if it begins elsewhere."""
    return matrix if matrix.data_ptr() % TMA_BYTES == 0 else matrix.clone()


def _aligned_bias(bias: Tensor | None) -> Tensor | None:
    """The bias where every rank's is: one elsewhere would be compiled for apart, while the other ranks wait."""
    return None if bias is None else _aligned(bias)


def _readable(weight: Weight) -> Weight:
    return weight._replace(matrix=_aligned(weight.matrix))


def _with_own_rows(shards: Tensor, x: Tensor, workspace: Workspace) -> Tensor:
    """Fill in this rank's rows, which the kernel read where they lay: [W, M / W, K] to [M, K].

    Shards that lie apart, because the tile height does not divide them, are gathered into new memory.
    """
    shards[workspace.rank].copy_(x)
    return shards.reshape(-1, x.shape[1])
