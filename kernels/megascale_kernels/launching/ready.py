# SPDX-License-Identifier: Apache-2.0
"""Make a compiled kernel ready to be launched by the driver alone."""

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from megascale_kernels.launching.native import Launcher
from megascale_kernels.launching.parameters import LayoutError, lay_out

LOG = logging.getLogger("megascale_kernels")
WARP = 32

# What a call hands over, in this order: the addresses of its tensors.
X, W, OUT, BIAS, WIDE = range(5)  # the last: gates and values beside the result
ASIDE = False  # copies run on a stream of their own, not on the caller's
ABSENT = 7  # never handed over, so zero: what lies at a place that no call changes is its first byte

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
    *,
    follows: bool = False,
    gate: int = 0,
    told: int = 0,
) -> Any | None:  # noqa: ANN401 - a capsule of `launcher.c`
    """A launch for `Launcher.launch`, or None where Triton has to launch.

    Args:
        native: what will launch it.
        kernel: the jit function; compiled by now, or it is compiled here.
        arguments: its run-time arguments, in order.
        constants: its compile-time arguments and options.
        grid: programs.
        sources: which of `X`, `W`, `OUT`, `BIAS`, `WIDE`, or of a call's addresses, a parameter's address is, for those
            that differ between calls.
        copies: what is copied from x before the kernel, on the side stream.
        follows: the kernel calls `signals.follow_launch`, and is launched while the one before on the stream runs.
        gate: address of a word: copies begin when it has come to the number of the launch before, and not behind what
            the caller's stream has done so far; 0 is none.
        told: address of a word that takes the launch's stamp behind the last copy; 0 is none.
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
        tuple(map(tuple, laid.maps)), tuple(copies), ASIDE, follows, gate, told,
    )  # fmt: skip


def copies_alone(native: Launcher, copies: Sequence[Copy], *, here: bool = False) -> object:
    """Copies with no kernel behind them; `here`: on the stream of the call, so that what follows finds them done."""
    made: object = native.make(0, 0, 0, 0, b"", (), (), (), tuple(copies), here)
    return made


class Run(NamedTuple):
    """Launches that follow each other without anything between them.

    Attributes:
        launches: what the driver launches, in order.
        is_last: no others come after them in this call.
    """

    launches: tuple[object, ...]
    is_last: bool


def in_a_row(steps: Iterable[Any], apart: type) -> tuple[Any, ...]:
    """Steps of a call, those that the driver launches next to each other brought together in a `Run`.

    Args:
        steps: what was made ready, and what is done otherwise.
        apart: of which type the latter are; they stay as they are.
    """
    runs = [(others, list(run)) for others, run in groupby(steps, lambda step: isinstance(step, apart))]
    last = max(number for number, (others, _) in enumerate(runs) if not others)
    found: list[Any] = []
    for number, (others, run) in enumerate(runs):
        found += run if others else [Run(tuple(run), number == last)]
    return tuple(found)


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
