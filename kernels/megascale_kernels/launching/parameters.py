# SPDX-License-Identifier: Apache-2.0
"""How the arguments of a compiled Triton kernel lie in memory when the driver launches it.

Triton binds, specialises and packs some forty arguments at every call. They hardly differ from call to call, so they
are laid out here once, as a block of bytes with an offset for each parameter, and a launch then writes addresses.

A tensor descriptor becomes three kinds of parameters: the map that the TMA unit reads (128 bytes), the sizes (32 bits
each) and the strides (64 bits each). Behind all arguments come the addresses of two scratch areas, which our kernels do
not use. None of that is documented, so it is held against what the compiler wrote: the list of parameters in the
kernel's PTX. A layout that differs is refused, and Triton launches such a kernel itself.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAP_BYTES = 128  # of a CUtensorMap
MAP_ALIGNMENT = 64
SCRATCH = 2  # pointers that Triton adds: global and profile scratch
# What struct calls the numbers that a signature names.
NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
           "u64": "Q", "fp32": "f"}  # fmt: skip
PTX_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "s8": 1, "s16": 2, "s32": 4,
             "s64": 8, "f32": 4, "f64": 8}  # fmt: skip
# Triton numbers element types as the device does; the host's numbers differ for these (`driver.py` of the wheel).
HOST_TYPES = {8: 10, 9: 8, 10: 9}


class LayoutError(Exception):
    """A kernel whose parameters are not understood; the message says what differs."""


class Map(NamedTuple):
    """A tensor map to encode.

    Attributes:
        offset: byte of the block where it lies.
        element_type: the driver's number of the element type.
        element_bytes: bytes of an element.
        swizzle: the driver's number of the swizzle.
        address: of the tensor.
        shape: sizes, outermost first.
        strides: in elements, outermost first.
        box: what one instruction moves.
    """

    offset: int
    element_type: int
    element_bytes: int
    swizzle: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Laid(NamedTuple):
    """The parameters of one launch.

    Attributes:
        block: all of them, maps left empty.
        offsets: byte of the block where each begins.
        moves: (source, offset, whether it is a map) of each address that differs between calls.
        maps: what is to be encoded.
    """

    block: bytes
    offsets: tuple[int, ...]
    moves: tuple[tuple[int, int, bool], ...]
    maps: tuple[Map, ...]


class _Block:
    """Bytes that grow, each parameter at a multiple of its alignment."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.offsets: list[int] = []
        self.sizes: list[int] = []

    def add(self, value: bytes, alignment: int = 0) -> int:
        """Append one parameter, aligned as its size unless told otherwise; returns where it begins."""
        self.bytes += bytes(-len(self.bytes) % (alignment or len(value)))
        self.offsets.append(len(self.bytes))
        self.sizes.append(len(value))
        self.bytes += value
        return self.offsets[-1]

    def add_argument(self, name: str, kind: object, value: Any) -> int:  # noqa: ANN401 - whatever a kernel takes
        """Append all parameters of one argument; returns where the first begins.

        Raises:
            LayoutError: a type that is not understood.
        """
        if not isinstance(kind, str):
            raise LayoutError(f"{name} is of type {kind!r}")
        if kind.startswith("tensordesc"):
            offset = self.add(bytes(MAP_BYTES), MAP_ALIGNMENT)
            for size in value.shape:
                self.add(struct.pack("i", size))
            for stride in value.strides:
                self.add(struct.pack("q", stride))
            return offset
        if kind.startswith("*"):
            return self.add(struct.pack("Q", value.data_ptr()))
        if kind not in NUMBERS:
            raise LayoutError(f"{name} is of type {kind}")
        return self.add(struct.pack(NUMBERS[kind], value))


def lay_out(
    signature: Mapping[str, Any],
    arguments: Mapping[str, Any],
    descriptors: Sequence[Mapping[str, Any] | None],
    sources: Mapping[str, int],
    ptx: str,
) -> Laid:
    """Lay out the arguments of a launch.

    Args:
        signature: name and Triton's type of each parameter, in order; "constexpr" takes no place.
        arguments: name and value: tensors, descriptors with `base`, `shape` and `strides`, integers.
        descriptors: what the compiler decided for each descriptor (`metadata.tensordesc_meta`), in order.
        sources: parameters whose address differs between calls, and which of the call's addresses each takes.
        ptx: the kernel, by whose list of parameters the layout is checked.

    Raises:
        LayoutError: something that is not understood; Triton must launch this kernel.
    """
    block = _Block()
    moves: list[tuple[int, int, bool]] = []
    maps: list[Map] = []
    decided = iter(descriptors)
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        offset = block.add_argument(name, kind, arguments[name])
        is_map = kind.startswith("tensordesc")
        if is_map:
            maps.append(_map(name, offset, arguments[name], next(decided, None)))
        if name in sources:
            moves.append((sources[name], offset, is_map))
    for _ in range(SCRATCH):
        block.add(bytes(8))
    declared = parameters_of(ptx)
    if declared != block.sizes:
        raise LayoutError(f"the kernel has parameters of {declared} bytes where {block.sizes} were laid out")
    return Laid(bytes(block.bytes), tuple(block.offsets), tuple(moves), tuple(maps))


def _map(name: str, offset: int, value: Any, decided: Mapping[str, Any] | None) -> Map:  # noqa: ANN401 - either descriptor class of Triton's
    if decided is None or decided.get("fp4_padded") or getattr(value, "padding", "zero") != "zero":
        raise LayoutError(f"{name} is a descriptor that the host does not make")
    kind = decided["elem_type"]
    return Map(
        offset, HOST_TYPES.get(kind, kind), decided["elem_size"], decided["swizzle"], value.base.data_ptr(),
        tuple(value.shape), tuple(value.strides), tuple(decided["block_size"]),
    )  # fmt: skip


def parameters_of(ptx: str) -> list[int]:
    """Bytes of each parameter of the one kernel in a PTX text.

    Raises:
        LayoutError: no list of parameters is found, or one is of an unknown type.
    """
    entry = re.search(r"\.visible\s+\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise LayoutError("the PTX has no entry")
    sizes = []
    for line in filter(str.strip, entry.group(1).split(",")):
        found = re.search(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\b[^\[]*?(?:\[(\d+)\])?\s*$", line.strip())
        if found is None or found.group(1) not in PTX_BYTES:
            raise LayoutError(f"the PTX declares {line.strip()!r}")
        sizes.append(PTX_BYTES[found.group(1)] * int(found.group(2) or 1))
    return sizes
