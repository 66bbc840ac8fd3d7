# SPDX-License-Identifier: Apache-2.0
"""Check tensors on the host before a launch; an error names the tensor and what is wrong with it."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config, read_config


class Weight(NamedTuple):
    """A weight as the kernels read it.

    Attributes:
        matrix: contiguous, [N, K] or [K, N].
        is_nk: which of the two.
        k_size: rows of the logical [K, N] matrix.
        n_size: its columns.
    """

    matrix: Tensor
    is_nk: bool
    k_size: int
    n_size: int


def check_input(x: Tensor, workspace: Workspace, what: str) -> None:
    """Refuse an input that the kernels cannot read.

    Raises:
        Unsupported: the message names the wrong property and what to do.
    """
    if x.ndim != 2:
        raise Unsupported(f"{what}: x must be a matrix, got shape {tuple(x.shape)}: flatten the leading dimensions")
    if x.dtype != workspace.dtype:
        raise Unsupported(f"{what}: x is {x.dtype}, the workspace was made for {workspace.dtype}: convert one of them")
    if x.device != workspace.memory.device:
        raise Unsupported(f"{what}: x is on {x.device}, the workspace on {workspace.memory.device}: move x there")
    if not x.is_contiguous():
        raise Unsupported(f"{what}: x of shape {tuple(x.shape)} has strides {x.stride()}: call .contiguous()")


def read_weight(w: Tensor, x: Tensor, what: str) -> Weight:
    """A weight of logical shape [K, N]: contiguous, or the transpose of a contiguous [N, K] (as in nn.Linear).

    Raises:
        Unsupported: shape, dtype, device or strides that the kernels cannot read.
    """
    if w.ndim != 2 or w.shape[0] != x.shape[1]:
        raise Unsupported(f"{what}: x has {x.shape[1]} columns, so w must be [{x.shape[1]}, N]; got {tuple(w.shape)}")
    if w.dtype != x.dtype or w.device != x.device:
        raise Unsupported(f"{what}: w is {w.dtype} on {w.device}, x is {x.dtype} on {x.device}: make them equal")
    k_size, n_size = w.shape
    if w.is_contiguous():
        return Weight(w, is_nk=False, k_size=k_size, n_size=n_size)
    if w.T.is_contiguous():
        return Weight(w.T, is_nk=True, k_size=k_size, n_size=n_size)
    raise Unsupported(
        f"{what}: w of shape {tuple(w.shape)} has strides {w.stride()}: neither it nor its transpose is contiguous"
    )


def check_bias(bias: Tensor | None, n_size: int, x: Tensor, what: str) -> None:
    """Refuse a bias that is not one contiguous row of N elements.

    Raises:
        Unsupported: the message gives what it should be.
    """
    if bias is None:
        return
    if tuple(bias.shape) != (n_size,) or bias.dtype != x.dtype or bias.device != x.device or not bias.is_contiguous():
        raise Unsupported(
            f"{what}: bias must be [{n_size}] {x.dtype} on {x.device}, contiguous; "
            f"got {tuple(bias.shape)} {bias.dtype} on {bias.device} with strides {bias.stride()}"
        )


def check_config(config: Config | None, workspace: Workspace, what: str) -> None:
    """Refuse a configuration that no kernel can run with, also where the call takes the serial path.

    Raises:
        Unsupported: the message names the wrong field.
    """
    if config is None:
        return
    if not isinstance(config, Config):
        raise Unsupported(f"{what}: config must be a megascale_kernels.Config or None, got {type(config).__name__}")
    try:
        wrong = _wrong_with(config)
    except TypeError:  # a field that cannot even be looked up
        wrong = f"config: {config} has a field of the wrong kind"
    if wrong is None and config.carrier == "sm" and what == "ag_gemm":
        most = processors(workspace.device) - 1 if workspace.device.type == "cuda" else config.comm_ctas
        if config.comm_ctas < 1:
            wrong = "config: carrier 'sm' with comm_ctas=0 has nobody who carries"
        elif config.comm_ctas > most:
            wrong = f"config: comm_ctas={config.comm_ctas} leaves none of the {most + 1} multiprocessors to multiply"
    if wrong is None and config.kernel == "cublas" and what == "gemm_ar":
        wrong = "config: kernel 'cublas' takes all-gathers and reduce-scatters apart, no all-reduce"
    if wrong is not None:
        raise Unsupported(f"{what}: {wrong}: see megascale_kernels.Config")


@cache
def _wrong_with(config: Config) -> str | None:
    try:
        read_config(config._asdict())
    except ValueError as error:
        return f"config: {error}"
    for name, least in (("block_m", 16), ("block_n", 16), ("block_k", 16), ("warps", 1)):
        value = getattr(config, name)
        if value < least or value & (value - 1):
            return f"config: {name} is {value}, no power of two from {least} on"
    for name in ("comm_ctas", "tail_split", "lead"):
        if (getattr(config, name) or 0) < 0:
            return f"config: {name} is {getattr(config, name)}, below zero"
    if config.pieces is not None and config.pieces < 1:
        return f"config: pieces is {config.pieces}, and an operator has one product or more"
    return None


def tma_can_read(matrix: Tensor) -> bool:
    """Whether the TMA unit can read a matrix: rows and base on 16-byte boundaries."""
    return matrix.shape[1] * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0 and matrix.numel() > 0


class Product(NamedTuple):
    """How operands lie, some of them widened, for products of torch's of whole rows.

    Attributes:
        is_nk: the weight lies as [N, K].
        n_size: its columns, N.
        depth: what is summed over: x may be wider than the weight is high.
        cuts_weight: the weight lies wider than it is.
    """

    is_nk: bool
    n_size: int
    depth: int
    cuts_weight: bool

    def weight(self, matrix: Tensor) -> Tensor:
        """The weight, [depth, N]."""
        w = matrix.t() if self.is_nk else matrix
        return w[:, : self.n_size] if self.cuts_weight else w


def product_of(weight: Weight) -> Product:
    """How a weight and the rows that were widened with it are multiplied."""
    depth, columns = weight.matrix.shape[::-1] if weight.is_nk else weight.matrix.shape
    return Product(weight.is_nk, weight.n_size, depth, cuts_weight=columns != weight.n_size)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled_apart(*sizes: int) -> tuple[tuple[bool, bool], ...]:
    """What Triton compiles separate code for among sizes that it may specialise: one, and multiples of sixteen."""
    return tuple((size == 1, size % 16 == 0) for size in sizes)
