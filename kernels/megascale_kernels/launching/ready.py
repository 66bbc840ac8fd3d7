# SPDX-License-Identifier: Apache-2.0
"""Make a compiled kernel ready to be launched by the driver alone."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from megascale_kernels.launching.native import Launcher
from megascale_kernels.launching.parameters import LayoutError, lay_out

LOG = logging.getLogger("megascale_kernels")
WARP = 32

# What a call hands over, in this order: the addresses of its tensors.
X, W, OUT, BIAS = range(4)

# (bytes into x, bytes, target address, address of the flag that announces it; 0: none), and, where it is not x that is
# read, which of a call's addresses.
Copy = tuple[int, int, int, int] | tuple[int, int, int, int, int]


def ready(
    native: Launcher,
    kernel: Any,  # noqa: ANN401 - Triton's JITFunction, which has no types
    arguments: Sequence[Any],
    constants: dict[str, Any],
    grid: tuple[int],
    sources: dict[str, int],
    copies: Sequence[Copy] = (),
) -> Any | None:  # noqa: ANN401 - a capsule of `launcher.c`
    """A launch for `Launcher.launch`, or None where Triton has to launch.

    Args:
        native: what will launch it.
        kernel: the jit function; compiled by now, or it is compiled here.
        arguments: its run-time arguments, in order.
        constants: its compile-time arguments and options.
        grid: programs.
        sources: which of `X`, `W`, `OUT`, `BIAS`, or of a call's addresses, a parameter's address is, for those that
            differ between calls.
        copies: what is copied from x before the kernel, on the side stream.
    """
    compiled = kernel.warmup(*arguments, grid=grid, **constants)
    try:
        _refuse_extras(compiled.metadata)
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        laid = lay_out(
            compiled.src.signature, named, compiled.metadata.tensordesc_meta or (), sources, compiled.asm["ptx"]
        )
    except (LayoutError, AttributeError, KeyError) as error:
        _say_once(kernel.__name__, str(error))
        return None
    compiled.run  # noqa: B018 - loads the binary
    metadata = compiled.metadata
    return native.make(
        compiled.function, grid[0], WARP * metadata.num_warps, metadata.shared, laid.block, laid.offsets, laid.moves,
        tuple(map(tuple, laid.maps)), tuple(copies),
    )  # fmt: skip


def copies_alone(native: Launcher, copies: Sequence[Copy]) -> object:
    """Copies with no kernel behind them."""
    made: object = native.make(0, 0, 0, 0, b"", (), (), (), tuple(copies))
    return made


@cache
def _say_once(kernel: str, reason: str) -> None:
    LOG.warning("%s is launched by Triton, at some 400 us more a call: %s", kernel, reason)


def _refuse_extras(metadata: Any) -> None:  # noqa: ANN401 - Triton's named tuple, made at run time
    """Refuse a kernel that wants more of its launch than a grid.

    Raises:
        LayoutError: it names what.
    """
    for name, plain in (
        ("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False), ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
    ):  # fmt: skip
        found = getattr(metadata, name, plain)
        if found != plain:
            raise LayoutError(f"{name} is {found}")
