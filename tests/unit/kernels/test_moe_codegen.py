# SPDX-License-Identifier: Apache-2.0
"""What the assembler makes of the MoE kernels, without a GPU: gathered rows come asynchronously, products by wgmma."""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("torch")

from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS  # noqa: E402
from megascale_kernels.moe import combine_kernel, dispatch_kernel, hopper_combine, hopper_dispatch, routing  # noqa: E402
from megascale_kernels.moe.expert_tiling import COMBINE, DISPATCH  # noqa: E402
from megascale_kernels.planning.tiling import SHARED_MEMORY_LIMIT, swizzled  # noqa: E402

from tests.fixtures.codegen import Machine, compile_for_hopper, compile_gluon  # noqa: E402
from tests.fixtures.made_once import Shelf, shared_folder  # noqa: E402

COMPILED = Shelf(Machine)
ELEMENTS = ("x_ptr", "gathered_ptr", "y_ptr", "out_ptr")
POINTERS = {
    **dict.fromkeys(ELEMENTS, "*bf16"),
    **dict.fromkeys(("gates_ptr", "pair_gate"), "*fp32"),
    **dict.fromkeys(("ids_ptr", "head", "rows", "tiles", "counts", "begins", "pair_row"), "*i32"),
    **dict.fromkeys(("control", "status", "board", "trace"), "*i32"),
    "peers": "*i64", "staging_bytes": "i64",
}  # fmt: skip
TILE = {"BLOCK_M": 128, "BLOCK_K": 64, "PROGRESS": True}
# Words that the jobs' roles keep out of registers; the loops of the products are looked at themselves.
MOST_SPILLED = 512


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    COMPILED.folder = shared_folder(tmp_path_factory)


def types_of(kernel: Any, known: dict[str, str], constants: dict[str, object]) -> dict[str, str]:  # noqa: ANN401 (Triton's)
    """A signature."""
    return {name: {**POINTERS, **known}.get(name, "i32") for name in kernel.arg_names if name not in constants}


def swizzled_box(*box: int) -> str:
    """A descriptor of Gluon's."""
    return f"tensordesc<bf16[{','.join(map(str, box))}],{swizzled(box[-1], rank=len(box))!r}>"


def plain_dispatch() -> Machine:
    """Layer 0 in plain Triton."""
    kernel, constants = dispatch_kernel.dispatch_kernel, {**TILE, "BLOCK_N": 128, "OPERATOR": 7, "TRACE": False}
    boxes = {"w_desc": "tensordesc<bf16[128,64]>", "h_desc": "tensordesc<bf16[128,128]>"}
    return COMPILED.get("dispatch", lambda: compile_for_hopper(
        kernel, types_of(kernel, boxes, constants), constants, sixteens=("hidden", "inner")
    ))  # fmt: skip


def plain_combine() -> Machine:
    """Layer 1 in plain Triton."""
    constants: dict[str, object] = {
        **TILE, "BLOCK_N": 256, "TOP_K": 8, "TOKENS": 8, "COLS": 512, "OPERATOR": 8, "TRACE": False,
    }  # fmt: skip
    kernel = combine_kernel.combine_kernel
    boxes = dict.fromkeys(("h_desc", "y_desc"), "tensordesc<bf16[128,64]>") | {"w_desc": "tensordesc<bf16[256,64]>"}
    return COMPILED.get("combine", lambda: compile_for_hopper(
        kernel, types_of(kernel, boxes, constants), constants, sixteens=("hidden", "inner")
    ))  # fmt: skip


def route() -> Machine:
    """The routing kernel, for 64 experts of a rank."""
    constants: dict[str, object] = {
        "TOP_K": 8, "EXPERTS": 64, "PADDED": 64, "TILE_ROWS": 128, "TOKENS": 64, "PAIRS": 64, "OPERATOR": 6,
        "PROGRESS": True,
    }  # fmt: skip
    kernel = routing.route_kernel
    types = types_of(kernel, {}, constants)
    return COMPILED.get("route", lambda: compile_for_hopper(kernel, types, constants, warps=4))


def specialised_dispatch() -> Machine:
    """Layer 0, warp-specialised."""
    constants: dict[str, object] = {"CFG": DISPATCH, "OPERATOR": 7, "PROGRESS": True, "TRACE": False}
    kernel = hopper_dispatch.hopper_dispatch_kernel
    boxes = {
        "w_desc": swizzled_box(2, DISPATCH.columns // 2, DISPATCH.block_k),
        "h_desc": swizzled_box(DISPATCH.rows, DISPATCH.store_columns),
    }
    return COMPILED.get("hopper dispatch", lambda: compile_gluon(
        kernel, types_of(kernel, boxes, constants), constants, registers=ROOM_FOR_ANNOUNCEMENTS, sixteens=("hidden",)
    ))  # fmt: skip


def specialised_combine() -> Machine:
    """Layer 1, warp-specialised."""
    constants: dict[str, object] = {"CFG": COMBINE, "TOP_K": 8, "OPERATOR": 8, "PROGRESS": True, "TRACE": False}
    kernel = hopper_combine.hopper_combine_kernel
    boxes = {
        "h_desc": swizzled_box(COMBINE.rows, COMBINE.block_k), "w_desc": swizzled_box(COMBINE.columns, COMBINE.block_k),
        "y_desc": swizzled_box(COMBINE.rows, COMBINE.store_columns),
    }  # fmt: skip
    return COMPILED.get("hopper combine", lambda: compile_gluon(
        kernel, types_of(kernel, boxes, constants), constants, registers=ROOM_FOR_ANNOUNCEMENTS, sixteens=("hidden",)
    ))  # fmt: skip


ALL = {
    "route": route, "dispatch": plain_dispatch, "combine": plain_combine, "hopper dispatch": specialised_dispatch,
    "hopper combine": specialised_combine,
}  # fmt: skip


def test_gathered_rows_are_loaded_asynchronously() -> None:
    """Layer 0 copies rows of tokens into shared memory 16 bytes a thread, past the registers, and spills nothing."""
    plain, special = plain_dispatch(), specialised_dispatch()

    assert plain.sass.count("LDGSTS.E.BYPASS.128") >= 8
    assert plain.sass.count("HGMMA.64x128x16.F32.BF16") == 8
    assert special.sass.count("LDGSTS.E.BYPASS.128") == 8
    assert special.sass.count("HGMMA.64x256x16.F32.BF16") == 8
    assert "UTMALDG.3D" in special.sass
    assert plain.spilled_bytes == special.spilled_bytes == 0


def test_a_slot_is_full_when_every_thread_s_copies_are_there() -> None:
    """The barrier of a slot counts TMA once and each of the producer's 128 threads, and copies arrive on it."""
    ptx = specialised_dispatch().ptx

    assert len(re.findall(r"mbarrier\.init\S* \[%r\d+\], 129;", ptx)) == DISPATCH.slots
    assert ptx.count("cp.async.mbarrier.arrive.noinc") == 1
    assert ptx.count("fence.proxy.async.shared::cta") >= 3


def test_results_are_added_up_by_wide_loads() -> None:
    """Layer 1: rows of y come 16 bytes a thread, all of a token's experts before any is added; loops spill nothing."""
    plain, special = plain_combine(), specialised_combine()

    assert plain.spilled_bytes == 0
    assert plain.sass.count("LDG.E.128") >= 8
    assert special.sass.count("LDG.E.128") >= 3 * 8
    assert special.sass.count("HGMMA.64x256x16.F32.BF16") == 8
    assert special.spilled_bytes <= MOST_SPILLED
    lines = special.sass.splitlines()
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    for first, last in ((products[0], products[3]), (products[4], products[7])):
        assert not any(re.search(r"\b(LDL|STL)", line) for line in lines[first:last])


@pytest.mark.parametrize("name", list(ALL))
def test_what_orders_ranks_is_there(name: str) -> None:
    """Acquires, the proxy fence behind them, releases; tiles of layer 1 are drained before they are counted."""
    machine = ALL[name]()

    assert re.search(r"(ld|atom)\.global\.sys\.acquire", machine.ptx)
    assert re.search(r"atom\.global\.sys\.release\.exch", machine.ptx)
    assert "fence.proxy.async.global" in machine.ptx
    assert ("cp.async.bulk.wait_group 0" in machine.ptx) == ("combine" in name)
    assert machine.shared_bytes <= SHARED_MEMORY_LIMIT
