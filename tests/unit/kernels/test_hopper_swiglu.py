# SPDX-License-Identifier: Apache-2.0
"""What the assembler makes of SwiGLU inside a product, both ways; as `test_hopper_codegen`, without a GPU."""

import math
import re
from collections import Counter

import pytest

pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("torch")

from megascale_kernels.ag_gemm import hopper_gated, hopper_swiglu
from megascale_kernels.ag_gemm.hopper import GRADIENTS, SWIGLU, SWIGLU_AND_WIDE
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.stream_k import tiling_of
from megascale_kernels.planning.tiling import STREAM_K, WHOLE, swizzled
from megascale_kernels.swiglu import swiglu_kernel

from tests.fakes.ptx_paths import Paths
from tests.fixtures.codegen import compile_for_hopper
from tests.fixtures.hopper_variants import COMPILED, NARROW, WIDE, hopper
from tests.fixtures.made_once import shared_folder
from tests.matrix import wide

LANES = 32
MOST_SPILLED = 96  # bytes that a variant with cut tiles may keep out of registers (`test_hopper_codegen`)
NOTHING = "no instruction reads like this"
BARRIER = r"bar\.(warp\.)?sync"
# A weight that lies the other way round is loaded otherwise, and stored alike.
EITHER_WEIGHT = wide([True, False], keep=[True])
# Of narrow tiles each consumer has half as many columns; wide ones have the fewest registers to spare.
EITHER_WIDTH = wide([pytest.param(WIDE, id="wide"), pytest.param(NARROW, id="narrow")], keep=["wide"])
EITHER_CUT = wide([WHOLE, STREAM_K], keep=[WHOLE])


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    COMPILED.folder = shared_folder(tmp_path_factory)


@pytest.mark.parametrize("cut", EITHER_CUT)
@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_gradients_of_pairs_come_from_the_ring_and_leave_in_halves(config: Config, cut: int) -> None:
    """Two matrices read and two results by TMA for a slice; two special instructions an element; nothing spilled."""
    plain, gated = (hopper("hopper_ag", config, cut=cut, store=store) for store in (1, GRADIENTS.value))

    slices = config.block_n // 64
    elements = 2 * 64 * config.block_n // LANES // 4
    more = {name: gated.sass.count(name) - plain.sass.count(name) for name in ("UTMALDG.4D", "UTMASTG.4D", "MUFU")}
    assert more == {"UTMALDG.4D": 4 * slices, "UTMASTG.4D": 4 * slices, "MUFU": 2 * elements}
    assert gated.sass.count("UTMASTG") == 4 * slices
    assert gated.sass.count("LDSM") - plain.sass.count("LDSM") == elements // 4  # four words of pairs each
    assert gated.shared_bytes - plain.shared_bytes <= 16
    assert gated.spilled_bytes <= (0 if cut == WHOLE else MOST_SPILLED)


@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_a_slot_with_gates_is_handed_back_when_all_have_read_it(config: Config) -> None:
    """Between a warpgroup's reads of a slot and its arrival on `empty` its threads meet; once a slice."""
    paths = Paths(hopper("hopper_ag", config, store=GRADIENTS.value).ptx)

    reads = paths.where("ldmatrix")
    handed_back = paths.where(r"mbarrier\.arrive", function=hopper_gated.store_gradients)
    assert len(handed_back) == 2 * config.block_n // 64
    assert paths.leads(reads, handed_back, past=NOTHING) != []
    assert paths.leads(reads, handed_back, past=BARRIER) == []


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["wide", "narrow"])
def test_gates_and_values_fit_over_the_operands(config: Config) -> None:
    """A box of either for each consumer, in the same bytes that a K block of A and of B has."""
    tiling = tiling_of(config, is_nk=True)

    assert min(tiling.boxes_in_a, tiling.boxes_in_b) >= tiling.consumers
    assert 2 * tiling.box_bytes * tiling.across_n <= tiling.slot_bytes


@pytest.mark.parametrize("is_nk", EITHER_WEIGHT, ids=["NK", "KN"])
@pytest.mark.parametrize("cut", EITHER_CUT)
@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_swiglu_of_pairs_leaves_with_them_or_alone(config: Config, cut: int, *, is_nk: bool) -> None:
    """The same products; one box of the weight becomes two; act leaves by TMA, gates and values only where kept.

    Two special instructions for a pair of sums, and no spill where nothing is cut.
    """
    plain, alone, kept = (
        hopper("hopper_ag", config, is_nk=is_nk, cut=cut, store=store)
        for store in (1, SWIGLU.value, SWIGLU_AND_WIDE.value)
    )

    slices = config.block_n // 64 // 2
    pairs = 64 * config.block_n // 2 // LANES // 4
    for machine, halves in ((alone, 0), (kept, 2)):
        assert machine.sass.count(f"HGMMA.64x{config.block_n}x16.F32.BF16") == 8
        assert machine.sass.count("MUFU") - plain.sass.count("MUFU") == 2 * 2 * pairs
        assert machine.sass.count("UTMASTG.3D") == 2 * slices
        assert machine.sass.count("UTMASTG.4D") == halves * 2 * slices
        assert machine.sass.count("UTMASTG") == (1 + halves) * 2 * slices
        assert machine.sass.count("LDSM") == plain.sass.count("LDSM")
        assert machine.shared_bytes - plain.shared_bytes <= 16
        assert machine.spilled_bytes <= (0 if cut == WHOLE else MOST_SPILLED)


@pytest.mark.parametrize("is_nk", EITHER_WEIGHT, ids=["NK", "KN"])
@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_two_boxes_of_the_weight_fill_what_one_fills(config: Config, *, is_nk: bool) -> None:
    """Half of the columns each, in the same bytes and swizzle, so that one wgmma reads both; a slot expects both."""
    tiling = tiling_of(config, is_nk=is_nk)

    assert 2 * math.prod(tiling.half_b_block) == math.prod(tiling.b_block)
    assert swizzled(tiling.half_b_block[1]) == swizzled(tiling.b_block[1])
    # Columns lie in runs of 64, one below the other: the second box begins where the second half of the runs does.
    assert tiling.half_b_block[0 if is_nk else 1] % 64 == 0
    paths = Paths(hopper("hopper_ag", config, is_nk=is_nk, store=SWIGLU.value).ptx)
    expected = paths.where(rf"expect_tx.*, {tiling.slot_bytes};", function=hopper_swiglu.fetch_halves)
    assert len(expected) == len(paths.where("expect_tx", function=hopper_swiglu.fetch_halves)) == 1


def test_swiglu_of_sums_is_computed_as_the_kernel_behind_a_product_does() -> None:
    """The same arithmetic instruction by instruction, so the same bits; the gradient's is other arithmetic."""
    types = {"wide_ptr": "*bf16", "out_ptr": "*bf16", "columns": "i32"}
    behind = compile_for_hopper(swiglu_kernel, types, {"BLOCK": 1024}, warps=4, sixteens=tuple(types)).ptx
    operation = r"^\s*((?:ex2|div|add|sub|mul|neg|fma|rcp)\.\S*f32)\s.*?(0f\w+)?;"

    def arithmetic(ptx: str) -> Counter[tuple[str, str]]:
        return Counter(re.findall(operation, ptx, re.MULTILINE))

    def inside(store: int) -> dict[tuple[str, str], float]:
        more = arithmetic(hopper("hopper_ag", store=store).ptx)
        more.subtract(arithmetic(hopper("hopper_ag").ptx))
        pairs = 2 * 64 * 128 // 4 // LANES  # of a thread of either consumer
        return {key: count / pairs for key, count in more.items() if count}

    elements = 1024 // 4 // LANES
    each = {key: count / elements for key, count in arithmetic(behind).items()}
    assert {name for name, _ in each} == {"mul.f32", "sub.f32", "ex2.approx.f32", "add.f32", "div.full.f32"}
    assert each == inside(SWIGLU.value) == inside(SWIGLU_AND_WIDE.value)
    assert each != inside(GRADIENTS.value)
