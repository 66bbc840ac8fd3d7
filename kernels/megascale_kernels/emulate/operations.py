# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401
# (Triton has no types: what comes from it, or goes to it, is Any)
"""What can be put on a stream: a kernel, or something that the host or the copy engine does."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.emulate.errors import EmulationError
from megascale_kernels.emulate.programs import trail
from megascale_kernels.emulate.races import WRITE, Deed
from megascale_kernels.emulate.spans import span_of_tensor

if TYPE_CHECKING:
    from megascale_kernels.emulate.machine import Machine

# A launch's options for the compiler, not the kernel.
COMPILER_OPTIONS = frozenset(
    ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid", "launch_pdl")
)
# A copy goes in pieces, so that other programs run in the middle of it.
COPY_PIECES = 4
_NOTHING: Mapping[str, Any] = {}


class Launch(NamedTuple):
    """A kernel on a stream of a rank.

    Attributes:
        rank: whose stream.
        kernel: a `@triton.jit` function.
        grid: number of programs, or up to three numbers.
        args: as in `kernel[grid](*args, **kwargs)`; CPU tensors, numbers, tuples, host descriptors.
        kwargs: the same by name; options of the compiler are ignored.
        stream: name of the stream.
        after: names of further streams of this rank whose operations so far it waits for.
    """

    rank: int
    kernel: Any
    grid: int | tuple[int, ...]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = _NOTHING
    stream: str = "compute"
    after: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__) if hasattr(self.kernel, "fn") else str(self.kernel)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The grid in three dimensions."""
        grid = (self.grid,) if isinstance(self.grid, int) else self.grid
        if not 1 <= len(grid) <= 3 or min(grid) < 1:
            raise EmulationError(f"{self.name}: a grid has one to three positive numbers, not {self.grid}")
        x, y, z = (*grid, 1, 1)[:3]
        return x, y, z


class Call(NamedTuple):
    """Something that the host or the copy engine does on a stream of a rank.

    Attributes:
        rank: whose stream.
        function: gets a `Host`, through which it reads and writes.
        name: for findings.
        stream: name of the stream.
        after: names of further streams of this rank whose operations so far it waits for.
    """

    rank: int
    function: Callable[["Host"], None]
    name: str = "call"
    stream: str = "copy"
    after: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """One program."""
        return (1, 1, 1)


class Host:
    """What a `Call` may do; every access takes part in the search for races."""

    def __init__(self, machine: "Machine", rank: int) -> None:
        self._machine = machine
        self._rank = rank

    def read(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor."""
        self._access(tensor, 0, "read")
        return tensor.clone()

    def write(self, target: Tensor, value: Tensor | float) -> None:
        """Overwrite a tensor."""
        self._access(target, WRITE, "write")
        target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy as the copy engine does: piece by piece along the first axis."""
        pieces = min(COPY_PIECES, target.shape[0]) if target.ndim else 1
        for part, piece in zip(target.chunk(pieces), source.chunk(pieces), strict=True):
            self._access(piece, 0, "copy from")
            self._access(part, WRITE, "copy to")
            part.copy_(piece)

    def _access(self, tensor: Tensor, flags: int, operation: str) -> None:
        machine = self._machine
        assert machine.scheduler is not None
        machine.memory.add(tensor, self._rank, "host tensor")
        machine.scheduler.step()
        if tensor.numel():
            machine.note(span_of_tensor(tensor), Deed(flags, operation, trail()))


def copy(rank: int, target: Tensor, source: Tensor, *, stream: str = "copy", after: tuple[str, ...] = ()) -> Call:
    """A copy by the copy engine on a stream of `rank`."""
    return Call(rank, lambda host: host.copy(target, source), "copy engine", stream, after)


def integer(value: Any) -> int:
    """The number in a tensor of one element, a compile-time constant or a Python number."""
    if hasattr(value, "handle"):
        return int(value.handle.data.item())
    return int(getattr(value, "value", value))


def bind(launch: Launch, machine: "Machine") -> dict[str, Any]:
    """The arguments of a launch as the interpreter wants them; tensors become accessible memory.

    Raises:
        EmulationError: arguments that do not fit the kernel.
    """
    signature = _signature(launch.kernel.fn)
    given = {
        key: value for key, value in launch.kwargs.items() if key in signature.parameters or key not in COMPILER_OPTIONS
    }
    try:
        bound = signature.bind(*launch.args, **given)
    except TypeError as error:
        raise EmulationError(f"{launch.name}: {error}") from None
    bound.apply_defaults()
    arguments = {}
    for name, value in bound.arguments.items():
        _add(machine, launch.rank, f"{launch.name}.{name}", value)
        constant = "constexpr" in str(signature.parameters[name].annotation)
        arguments[name] = value if constant else _converted(value)
    return arguments


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _add(machine: "Machine", rank: int, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        machine.memory.add(value, rank, name)
    elif isinstance(value, TensorDescriptor):
        _add(machine, rank, name, value.base)
    elif isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        for field, item in zip(fields, value, strict=True):
            _add(machine, rank, f"{name}.{field}", item)


def _converted(value: Any) -> Any:
    """Tensors become pointers, integers become scalars; flags and floating-point numbers stay as they are."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, tuple):
        items = [_converted(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return stock._implicit_cvt(value)  # noqa: SLF001 (the conversion that the interpreter itself uses)
