# SPDX-License-Identifier: Apache-2.0
"""How arguments lie in memory for the driver, held against what the compiler itself declares."""

import struct
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.launching.parameters import LayoutError, Map, lay_out, parameters_of  # noqa: E402

from tests.fakes.arguments import Descriptor, Memory  # noqa: E402

PTX = """
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u32 kernel_param_1,
	.param .u32 kernel_param_2,
	.param .u64 kernel_param_3,
	.param .u64 kernel_param_4,
	.param .u64 .ptr .global .align 1 kernel_param_5,
	.param .u32 kernel_param_6,
	.param .u64 .ptr .global .align 1 kernel_param_7,
	.param .u64 .ptr .global .align 1 kernel_param_8
)
.reqntid 384
"""
SIGNATURE = {
    "x_desc": "tensordesc<bf16[64,64],NVMMASharedLayout(...)>",
    "none": "constexpr",
    "out": "*bf16",
    "m": "i32",
}
DECIDED = [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}]


ARGUMENTS: dict[str, Any] = {"x_desc": Descriptor(Memory(4096), [100, 64], [64, 1]), "out": Memory(8192), "m": 100}


def test_every_argument_lies_where_the_compiler_wants_it() -> None:
    """A descriptor is a map, sizes and strides; a constant takes no place; two empty scratch areas come last."""
    laid = lay_out(SIGNATURE, ARGUMENTS, DECIDED, {"x_desc": 0, "out": 2}, PTX)

    assert laid.offsets == (0, 128, 132, 136, 144, 152, 160, 168, 176)
    assert struct.unpack_from("iiqqQi", laid.block, 128) == (100, 64, 64, 1, 8192, 100)
    assert laid.moves == ((0, 0, True), (2, 152, False))
    assert laid.maps == (Map(0, 9, 2, 3, 4096, (100, 64), (64, 1), (64, 64)),)
    assert laid.block[168:] == bytes(16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"signature": SIGNATURE | {"m": "i64"}}, "parameters of .* bytes where .* were laid out"),
        ({"signature": SIGNATURE | {"m": "fp8"}}, "m is of type fp8"),
        ({"signature": SIGNATURE | {"m": ("i32", "i32")}}, "m is of type"),
        ({"descriptors": []}, "x_desc is a descriptor that the host does not make"),
        ({"descriptors": [DECIDED[0] | {"fp4_padded": True}]}, "x_desc is a descriptor"),
        ({"arguments": ARGUMENTS | {"x_desc": ARGUMENTS["x_desc"]._replace(padding="nan")}}, "x_desc is a descriptor"),
        ({"ptx": PTX.replace("entry", "func")}, "the PTX has no entry"),
        ({"ptx": PTX.replace(".u32 kernel_param_6", ".v4 kernel_param_6")}, "the PTX declares"),
        ({"ptx": PTX.replace("\t.param .u64 .ptr .global .align 1 kernel_param_8\n", "\t.param .u32 kernel_param_8\n")},
         "parameters of"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Then Triton launches: a wrong guess would write past a parameter."""
    given = {
        "signature": SIGNATURE, "arguments": ARGUMENTS, "descriptors": DECIDED, "sources": {"x_desc": 0}, "ptx": PTX,
    }  # fmt: skip

    with pytest.raises(LayoutError, match=reason):
        lay_out(**{**given, **changes})


def test_parameters_of_every_size_are_read() -> None:
    """As the compiler writes them, one a line."""
    assert parameters_of(PTX) == [128, 4, 4, 8, 8, 8, 4, 8, 8]
