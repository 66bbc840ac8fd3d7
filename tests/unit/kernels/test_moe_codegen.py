# SPDX-License-Identifier: Apache-2.0
"""What the assembler makes of the MoE kernels, without a GPU: gathered rows come asynchronously, products by wgmma."""

import re
from functools import partial
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("torch")

from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS  # noqa: E402
from megascale_kernels.moe.kernels import (  # noqa: E402
    combine_kernel,
    dispatch_kernel,
    gradient_kernels,
    hopper_combine,
    hopper_dispatch,
    permutation,
    routing,
)
from megascale_kernels.moe.kernels.expert_tiling import (  # noqa: E402
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    columns_at_once,
)
from megascale_kernels.planning.tiling import SHARED_MEMORY_LIMIT, swizzled  # noqa: E402
from megascale_kernels.progress.board_format import NOTIFY, WAIT_BEGIN, WAIT_END  # noqa: E402

from tests.fixtures.codegen import Machine, compile_for_hopper, compile_gluon  # noqa: E402
from tests.fixtures.made_once import Shelf, shared_folder  # noqa: E402
from tests.matrix import wide  # noqa: E402

COMPILED = Shelf(Machine)
ELEMENTS = ("x_ptr", "gathered_ptr", "y_ptr", "out_ptr")
POINTERS = {
    **dict.fromkeys(ELEMENTS, "*bf16"),
    **dict.fromkeys(("gates_ptr", "pair_gate"), "*fp32"),
    **dict.fromkeys(("ids_ptr", "head", "rows", "tiles", "counts", "begins", "pair_row"), "*i32"),
    **dict.fromkeys(("control", "status", "board", "trace"), "*i32"),
    "peers": "*i64", **dict.fromkeys(("staging_bytes", "data_bytes"), "i64"),
}  # fmt: skip
TILE = {"BLOCK_M": 128, "BLOCK_K": 64, "PROGRESS": True, "FOLLOWS": False}
SAVED = ("h_desc", "gate_desc", "up_desc")
OF_BACKWARD = {
    **dict.fromkeys(("u_ptr", "pre_ptr", "dpre_ptr", "a_ptr", "b_ptr"), "*bf16"),
    **dict.fromkeys(("ends_ptr",), "*i32"), "dgates_ptr": "*fp32",
}  # fmt: skip
SIXTEENS = ("columns", "inner", "a_columns", "b_columns")
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


def plain_dispatch(*, saves: bool = False, backward: bool = False) -> Machine:
    """Layer 0 in plain Triton; for a backward it stores gate and up, in one it takes the weight the other way round."""
    kernel, constants = dispatch_kernel.dispatch_kernel, {**TILE, "BLOCK_N": 128, "OPERATOR": 7, "TRACE": False}
    constants |= {"TOP_K": 8, "SELECTIVE": False, "ids_ptr": None, "SAVES": saves, "BACKWARD": backward}
    boxes = {"w_desc": "tensordesc<bf16[128,64]>", **dict.fromkeys(SAVED, "tensordesc<bf16[128,128]>")}
    if backward:
        boxes["w_desc"] = "tensordesc<bf16[64,128]>"
    if not saves:
        constants |= dict.fromkeys(SAVED[1:])
    return COMPILED.get(f"dispatch {saves} {backward}", lambda: compile_for_hopper(
        kernel, types_of(kernel, boxes, constants), constants, sixteens=("hidden", "inner")
    ))  # fmt: skip


def plain_combine(*, backward: bool = False) -> Machine:
    """Layer 1 in plain Triton."""
    constants: dict[str, object] = {
        **TILE, "BLOCK_N": 256, "TOP_K": 8, "MOST_HERE": 8, "TOKENS": 8, "COLS": 512, "OPERATOR": 8, "TRACE": False,
        "BACKWARD": backward,
    }  # fmt: skip
    kernel = combine_kernel.combine_kernel
    boxes = dict.fromkeys(("h_desc", "y_desc"), "tensordesc<bf16[128,64]>")
    boxes["w_desc"] = "tensordesc<bf16[64,256]>" if backward else "tensordesc<bf16[256,64]>"
    return COMPILED.get(f"combine {backward}", lambda: compile_for_hopper(
        kernel, types_of(kernel, boxes, constants), constants, sixteens=("hidden", "inner")
    ))  # fmt: skip


def route() -> Machine:
    """The routing kernel, for 64 experts of a rank."""
    constants: dict[str, object] = {
        "TOP_K": 8, "MOST_HERE": 8, "EXPERTS": 64, "PADDED": 64, "TILE_ROWS": 128, "TOKENS": 64, "PAIRS": 64,
        "OPERATOR": 6, "PROGRESS": True, "FOLLOWS": True,
    }  # fmt: skip
    kernel = routing.route_kernel
    types = types_of(kernel, {}, constants)
    return COMPILED.get("route", lambda: compile_for_hopper(kernel, types, constants, warps=4))


def specialised_dispatch(*, saves: bool = False, backward: bool = False, selective: bool = False) -> Machine:
    """Layer 0, warp-specialised."""
    tiling = DISPATCH_BACKWARD if backward else DISPATCH
    constants: dict[str, object] = {
        "CFG": tiling, "SAVES": saves, "OPERATOR": 7, "PROGRESS": True, "TRACE": False, "FOLLOWS": True
    }  # fmt: skip
    constants |= {"TOP_K": 8, "SELECTIVE": selective} | ({} if selective else {"ids_ptr": None})
    kernel = hopper_dispatch.hopper_dispatch_kernel
    boxes = dict.fromkeys(SAVED, swizzled_box(tiling.rows, tiling.store_columns))
    boxes["w_desc"] = swizzled_box(2, tiling.columns // 2, tiling.block_k)
    if backward:
        boxes["w_desc"] = swizzled_box(1, tiling.block_k, tiling.columns)
    if not saves:
        constants |= dict.fromkeys(SAVED[1:])
    return COMPILED.get(f"hopper dispatch {saves} {backward} {selective}", lambda: compile_gluon(
        kernel, types_of(kernel, boxes, constants), constants, sixteens=("hidden",),
        registers=ROOM_FOR_ANNOUNCEMENTS,
    ))  # fmt: skip


def specialised_combine(*, backward: bool = False, trace: bool = False) -> Machine:
    """Layer 1, warp-specialised."""
    tiling = COMBINE_BACKWARD if backward else COMBINE
    constants: dict[str, object] = {
        "CFG": tiling,
        "TOP_K": 8,
        "MOST_HERE": 8,
        "OPERATOR": 8,
        "PROGRESS": True,
        "TRACE": trace,
        "FOLLOWS": True,
        **columns_at_once(8),
    }
    kernel = hopper_combine.hopper_combine_kernel
    boxes = {
        "h_desc": swizzled_box(COMBINE.rows, COMBINE.block_k), "w_desc": swizzled_box(COMBINE.columns, COMBINE.block_k),
        "y_desc": swizzled_box(COMBINE.rows, COMBINE.store_columns),
    }  # fmt: skip
    if backward:
        boxes["w_desc"] = swizzled_box(1, tiling.block_k, tiling.columns)
    return COMPILED.get(f"hopper combine {backward} {trace}", lambda: compile_gluon(
        kernel, types_of(kernel, boxes, constants), constants, registers=ROOM_FOR_ANNOUNCEMENTS, sixteens=("hidden",)
    ))  # fmt: skip


def of_backward(name: str) -> Machine:
    """A kernel that only a backward has."""
    kernel = getattr(gradient_kernels, name)
    constants: dict[str, object] = {
        "TILE_ROWS": 128, "ROWS": 8, "COLS": 512, "TOP_K": 8, "MOST_HERE": 8, "EXPERTS": 64, "TOKENS": 32, "PAIRS": 128,
        "OPERATOR": 14, "PROGRESS": True, "SELECTIVE": False, "ids_ptr": None,
        "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    warps = 8 if "weight" in name or "gather" in name else 4
    if name == "gather_kernel":
        constants["ROWS"] = 16
    if name == "gates_kernel":
        del constants["ids_ptr"]
    return COMPILED.get(name, lambda: compile_for_hopper(
        kernel, types_of(kernel, OF_BACKWARD, constants), constants, warps=warps, sixteens=SIXTEENS
    ))  # fmt: skip


ALL = {
    "route": route, "dispatch": plain_dispatch, "combine": plain_combine, "hopper dispatch": specialised_dispatch,
    "hopper combine": specialised_combine, "hopper dispatch that saves": lambda: specialised_dispatch(saves=True),
    **{
        f"{name} backward": partial(compiled, backward=True)
        for name, compiled in (
            ("dispatch", plain_dispatch), ("combine", plain_combine), ("hopper dispatch", specialised_dispatch),
            ("hopper combine", specialised_combine),
        )
    },
    "hopper dispatch that chooses": lambda: specialised_dispatch(selective=True),
    **{name: partial(of_backward, name) for name in ("gather_kernel", "gates_kernel")},
}  # fmt: skip

OF_LAYER_1S_BACKWARD = ("combine backward", "hopper combine backward")


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


def test_a_backward_multiplies_and_moves_as_the_forward_does() -> None:
    """The weight comes the other way round by TMA and wgmma reads it so; rows of tokens come as they always do."""
    dispatch = specialised_dispatch(backward=True)

    assert dispatch.sass.count("HGMMA.64x256x16.F32.BF16") == 8
    assert "UTMALDG.3D" in dispatch.sass
    assert dispatch.sass.count("LDGSTS.E.BYPASS.128") == 8
    assert dispatch.spilled_bytes == 0


def test_what_a_backward_needs_leaves_by_tma_as_the_result_does() -> None:
    """Gate, up and result: three boxes where one was, and nothing is spilled for it."""
    saving = specialised_dispatch(saves=True)

    assert saving.spilled_bytes == 0
    assert saving.sass.count("UTMASTG.2D") == 3 * specialised_dispatch().sass.count("UTMASTG.2D")


def test_a_layer_that_chooses_tokens_spills_between_jobs_and_tiles_alone() -> None:
    """A few words, by the producer."""
    assert specialised_dispatch(selective=True).spilled_bytes <= 128


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "saves"])
def test_the_plain_first_layer_of_a_training_hardly_spills(backward: bool) -> None:
    """With the weight the other way round not at all, and four words where gate and up are stored."""
    assert plain_dispatch(saves=not backward, backward=backward).spilled_bytes <= (0 if backward else 16)


def test_what_only_moves_moves_16_bytes_a_thread() -> None:
    """Rows of a backward, loaded and stored; and the weight's gradient is a product by wgmma."""
    for name in ("take_rows_kernel", "gather_kernel", "swiglu_backward_kernel"):
        assert of_backward(name).spilled_bytes == 0, name
        assert "LDG.E.128" in of_backward(name).sass, name
        assert "STG.E.128" in of_backward(name).sass, name
    weight = of_backward("weight_gradient_kernel")
    assert "HGMMA" in weight.sass
    assert weight.spilled_bytes == 0


@pytest.mark.matrix
def test_the_second_layer_s_backward_multiplies_as_its_forward_does() -> None:
    """The weight the other way round, as in the first layer's; the loops of the products are looked at below."""
    machine = specialised_combine(backward=True)

    assert machine.sass.count("HGMMA.64x256x16.F32.BF16") == 8
    assert "UTMALDG.3D" in machine.sass
    assert machine.spilled_bytes <= MOST_SPILLED


def test_results_are_added_up_by_wide_loads() -> None:
    """Layer 1: rows of y come 16 bytes a thread, all of a token's experts before any is added; loops spill nothing."""
    plain, special = plain_combine(), specialised_combine()

    assert plain.spilled_bytes == 0
    assert plain.sass.count("LDG.E.128") >= 8
    assert special.sass.count("LDG.E.128") >= 3 * 8
    assert special.sass.count("HGMMA.64x256x16.F32.BF16") == 8
    # Of half a tile the lower rows of A do not come, and are not expected.
    whole = COMBINE.slot_bytes
    for expected in (whole, whole - COMBINE.rows * COMBINE.block_k * 2):
        assert len(re.findall(rf"mbarrier\.arrive\.expect_tx\S* .*, {expected};", special.ptx)) == 1
    assert special.spilled_bytes <= MOST_SPILLED
    lines = special.sass.splitlines()
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    for first, last in ((products[0], products[3]), (products[4], products[7])):
        assert not any(re.search(r"\b(LDL|STL)", line) for line in lines[first:last])


@pytest.mark.parametrize("backward", wide([False, True], keep=[False]))
def test_a_tile_is_counted_between_two_parts_of_the_next_product(backward: bool) -> None:
    """One loop of K blocks for both parts, run twice: the accumulator stays where it is while a tile is counted."""
    lines = specialised_combine(backward=backward).sass.splitlines()
    products = [number for number, line in enumerate(lines) if "HGMMA.64x256x16.F32.BF16" in line]
    labels = {found[1]: number for number, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}

    assert len(products) == 8
    for first, last in ((products[0], products[3]), (products[4], products[7])):
        rounded = next(number for number, line in enumerate(lines) if number > last and "F2FP.BF16" in line)
        between = lines[last:rounded]
        counted = [number for number, line in enumerate(between) if "ATOMG.E.ADD.STRONG.GPU" in line]
        assert len(counted) == 1
        back = [
            number
            for number, line in enumerate(between)
            if (jump := re.search(r"BRA `\((\.L_x_\d+)\)", line)) and labels[jump[1]] < first
        ]
        assert back[-1] > counted[0]
        # Behind the jump back all parts are multiplied, and what the next tile needs may be looked up.
        assert not any(re.search(r"\bHGMMA|\b(LDL|STL)", line) for line in between[1 : back[-1] + 1])


@pytest.mark.matrix
def test_a_layer_s_sends_and_waits_are_recorded_by_who_multiplies_and_by_who_only_adds_up() -> None:
    """Layer 1: the reducers and the first consumer, which tells of both consumers; without a trace nobody."""
    recorded, silent = specialised_combine(trace=True).ptx, specialised_combine().ptx

    for kind in (NOTIFY, WAIT_BEGIN, WAIT_END):  # a mark's third word is its kind and the peer: one place for each role
        found = [len(re.findall(rf"\bor\.b32 .*, {kind << 16};", ptx)) for ptx in (recorded, silent)]
        assert found == [2, 0], kind


@pytest.mark.parametrize("name", wide(ALL, keep=[name for name in ALL if name not in OF_LAYER_1S_BACKWARD]))
def test_what_orders_ranks_is_there(name: str) -> None:
    """Acquires, the proxy fence behind them, releases; tiles of layer 1 are drained before they are counted."""
    machine = ALL[name]()

    assert re.search(r"(ld|atom)\.global\.sys\.acquire", machine.ptx)
    assert re.search(r"atom\.global\.sys\.release\.exch", machine.ptx)
    assert "fence.proxy.async.global" in machine.ptx
    assert ("cp.async.bulk.wait_group 0" in machine.ptx) == ("combine" in name)
    assert machine.shared_bytes <= SHARED_MEMORY_LIMIT


FOLLOWING = ("route", *(name for name in ALL if name.startswith("hopper") and name not in OF_LAYER_1S_BACKWARD))


@pytest.mark.parametrize("name", FOLLOWING)
def test_nothing_is_touched_before_the_launch_before_has_ended(name: str) -> None:
    """No load, store or atomic of global memory, and no copy of TMA's, stands before the wait for it."""
    machine = ALL[name]()
    before, wait, behind = machine.ptx.partition("griddepcontrol.wait;")

    assert wait
    assert not re.search(r"\b(ld|st|atom|red)(\.\w+)*\.global|cp\.(async|reduce)", before)
    assert behind.lstrip().startswith("mov.u32")
    assert "griddepcontrol" not in behind
    assert machine.sass.count("ACQBULK") == 1


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_a_kernel_that_does_not_follow_runs_on_older_gpus_too(name: str) -> None:
    """Control: plain Triton without it has no such instruction."""
    assert "griddepcontrol" not in ALL[name]().ptx


REACHES = ("combine", "combine backward", "hopper combine", "hopper combine backward", "hopper dispatch that chooses")


@pytest.mark.parametrize("name", wide(REACHES, keep=[name for name in REACHES if "backward" not in name]))
def test_a_peer_s_memory_is_read_and_written_in_words_of_16_bytes(name: str) -> None:
    """Its address was loaded from a table, so what it divides by must be said (`signals.peer_data`)."""
    ptx = ALL[name]().ptx

    assert not re.search(r"\b(ld|st)\.global\S*\.b16\b", ptx)
    assert "st.global.v4.b32" in ptx


IN_SERIES: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "find_ours": ({"chosen_ptr": "*i32", "key_ptr": "*i16"}, {"EXPERTS": 48, "TOP_K": 3, "BLOCK": 1024}),
    "take_rows": (
        {"x_ptr": "*bf16", "order_ptr": "*i64", "place_ptr": "*i32", "out_ptr": "*bf16", "count_ptr": "*i32"},
        {"TOP_K": 3, "PLACES": True, "COLS": 1024},
    ),
    "take_swiglu": ({"both_ptr": "*bf16", "out_ptr": "*bf16", "count_ptr": "*i32"}, {"COLS": 1024}),
    "add_rows": (
        {"y_ptr": "*bf16", "place_ptr": "*i32", "key_ptr": "*i16", "gate_ptr": "*fp32", "out_ptr": "*bf16"},
        {"EXPERTS": 48, "TOP_K": 3, "WEIGHTED": True, "COLS": 1024},
    ),
    "swiglu_backward": (
        {
            **dict.fromkeys(("u_ptr", "both_ptr", "out_ptr"), "*bf16"), "order_ptr": "*i64", "gate_ptr": "*fp32",
            "dgate_ptr": "*fp32", "count_ptr": "*i32",
        },
        {"TOP_K": 3, "COLS": 1024},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_SERIES)
def test_kernels_of_the_serial_path_read_wide_words_and_spill_nothing(name: str) -> None:
    """Rows in words of 16 bytes, where a row is a multiple of them; a pair's experts are looked at one by one."""
    known, constants = IN_SERIES[name]
    kernel = getattr(permutation, name)

    made = COMPILED.get(f"in series {name}", lambda: compile_for_hopper(
        kernel, types_of(kernel, known, constants), constants, warps=4,
        sixteens=(*known, *{"columns", "inner"} & set(kernel.arg_names)),
    ))  # fmt: skip

    assert made.spilled_bytes == 0
    assert ("ld.global.v4.b32" in made.ptx) == (name != "find_ours")
