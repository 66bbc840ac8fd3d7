# SPDX-License-Identifier: Apache-2.0
"""What the assembler makes of the kernels, checked without a GPU: matrix instructions, fences, registers, no spills.

Triton compiles for compute capability 9.0 on any machine, and its wheel brings the disassembler. What is missing in
the machine code is missing on the GPU.
"""

import re
from itertools import product
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("torch")

from megascale_kernels.ag_gemm.hopper import BY_SHARD, GRADIENTS, SWIGLU, SWIGLU_AND_WIDE  # noqa: E402
from megascale_kernels.device import hopper_gemm as device  # noqa: E402
from megascale_kernels.device import signals  # noqa: E402
from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.gemm_rs import hopper as gemm_rs_hopper  # noqa: E402
from megascale_kernels.gemm_rs.decomposed import BLOCK, OPTIONS  # noqa: E402
from megascale_kernels.launching.parameters import lay_out  # noqa: E402
from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.planning.stream_k import pairs_quarters, tiling_of  # noqa: E402
from megascale_kernels.planning.tiling import (  # noqa: E402
    EVEN,
    PARTIAL_PIECES,
    PARTIAL_WIDTH,
    SHARED_MEMORY_LIMIT,
    SPLIT_K,
    STREAM_K,
    WHOLE,
    Tiling,
    cut_last_wave,
)  # fmt: skip

from tests.fakes.arguments import arguments_of  # noqa: E402
from tests.fakes.ptx_paths import Paths  # noqa: E402
from tests.fixtures.hopper_variants import (  # noqa: E402
    COMPILED,
    NARROW,
    WIDE,
    adding,
    announcement,
    hopper,
    plain,
    plain_ag,
    plain_ar,
    plain_rs,
)
from tests.fixtures.made_once import shared_folder  # noqa: E402
from tests.matrix import wide  # noqa: E402

OPERATORS = ("hopper_ag", "hopper_rs")
REGISTERS_OF_A_QUARTER = 16384  # a multiprocessor has four quarters, warps are dealt out in turn
LANES = 32
# Twelve warps: four for each consumer, four for the producer, the sender and two that do nothing.
WARPS_OF_A_QUARTER = 3

ACQUIRE = r"(ld|atom)\.global\.sys\.acquire"
RELEASE = r"atom\.global\.sys\.release\.exch"
FENCE = r"fence\.proxy\.async\.global"
DRAIN = r"cp\.async\.bulk\.wait_group 0"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared"
TMA_STORE = r"cp\.async\.bulk\.tensor\.2d\.global"
NOTHING = "no instruction reads like this"
BARRIER = r"bar\.(warp\.)?sync"
# In machine code: the unconditional end of a warp, and a shuffle that moves no data: all lanes get what lane 0 has.
END = "/                   EXIT ;"
FROM_LANE_0 = r"SHFL\.IDX PT, R\d+, R\d+, RZ, 0x1f"
# Words of 4 bytes that cut or traced variants may keep out of registers, a few addresses: Triton's assembler up to 3.7
# keeps 16 at most, that of 3.8 18 and that of 3.9 24.
MOST_SPILLED = 64 if triton.__version__ < "3.8" else 96


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    COMPILED.folder = shared_folder(tmp_path_factory)


WAITING = {
    "ag_gemm": plain_ag,
    "gemm_rs": plain_rs,
    "gemm_ar": plain_ar,
    "meet": lambda: plain("device.barrier", "barrier_kernel", warps=1),
    "all_gather": lambda: plain("ag_gemm.all_gather", "all_gather_kernel", warps=1),
    "ag_gemm in pieces": lambda: plain("ag_gemm.decomposed", "await_shards_kernel", warps=1),
    "gemm_rs in pieces": lambda: adding(2),
    "hopper_ag": lambda: hopper("hopper_ag"),
    "hopper_rs": lambda: hopper("hopper_rs"),
    "hopper_rs, pairs": lambda: hopper("hopper_rs", pairs_quarters=True),
    "hopper_ag, shares": lambda: hopper("hopper_ag", cut=STREAM_K),
    "hopper_rs, shares": lambda: hopper("hopper_rs", cut=STREAM_K),
}
COPIED = ("all_gather", "ag_gemm in pieces", "gemm_rs in pieces", "hopper_ag")  # what copy engines carry they announce
NOTIFYING = {name: WAITING[name] for name in WAITING if name not in COPIED}
NOTIFYING |= {"announce": announcement, "hopper_ag, parts": lambda: hopper("hopper_ag", cut=SPLIT_K)}
# A weight that lies the other way round is loaded otherwise, by either operator: what is done with partials stays.
EITHER_WEIGHT = wide([True, False], keep=[True])
# A last wave of narrow tiles is halved rather than dealt out (`test_the_last_wave_is_cut_only_where_that_wins`).
DEALT_OUT = wide(product(OPERATORS, (WIDE, NARROW)), keep=[(OPERATORS[0], WIDE)])
EITHER_WIDTH = wide([pytest.param(WIDE, id="wide"), pytest.param(NARROW, id="narrow")], keep=["wide"])
# What shares of tiles are stored and fetched by is one function of both operators.
NOT_DEALT_OUT = "hopper_rs, shares"


@pytest.mark.parametrize(
    ("operator", "is_nk"),
    wide(
        product(OPERATORS, (True, False)),
        keep=[("hopper_ag", True), ("hopper_ag", False), ("hopper_rs", True)],
    ),
)
def test_two_consumers_run_wide_wgmma_without_spilling(operator: str, is_nk: bool) -> None:
    """Either consumer's loop is four 64x256x16 wgmma fed by TMA, one in flight; nothing goes to local memory."""
    machine = hopper(operator, is_nk=is_nk)

    assert machine.sass.count("HGMMA.64x256x16.F32.BF16") == 8
    assert not re.search(r"\bHMMA", machine.sass)
    assert machine.sass.count("WARPGROUP.DEPBAR.LE gsb0, 0x1") == 2
    assert machine.sass.count("UTMALDG.2D") >= 3
    assert machine.sass.count("UTMASTG.2D") >= 8
    assert machine.spilled_bytes == 0
    assert not re.search(r"\b(LDL|STL)", machine.sass)


@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_a_peer_s_memory_is_read_and_written_in_words_of_16_bytes(name: str) -> None:
    """Threads of plain kernels push rows and read partials: eight elements each, where a row is a multiple of them."""
    ptx = WAITING[name]().ptx

    assert not re.search(r"\b(ld|st)\.global\S*\.b16\b", ptx)
    assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize("is_nk", EITHER_WEIGHT, ids=["NK", "KN"])
@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_partials_that_share_a_slot_need_no_more_of_anything(config: Config, is_nk: bool) -> None:
    """Three peers' boxes lie over A and B of the ring: no shared memory more, nothing spilled (six words by 3.9)."""
    alone, shared = (hopper("hopper_rs", config, is_nk=is_nk, fills_slots=fills) for fills in (False, True))

    assert shared.shared_bytes == alone.shared_bytes
    assert shared.spilled_bytes <= (0 if triton.__version__ < "3.9" else 24)
    assert shared.sass.count("LDSM") > alone.sass.count("LDSM")


@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_fewer_stages_are_fewer_slots_and_nothing_else(config: Config) -> None:
    """An all-gather's ring is a slot shorter; what the kernel does with a slot stays as it was."""
    full, shallow = (hopper("hopper_ag", config._replace(stages=stages)) for stages in (4, 3))

    tiling = tiling_of(config, is_nk=True)
    assert (full.shared_bytes - shallow.shared_bytes) // tiling.slot_bytes == 1
    assert shallow.spilled_bytes == 0
    for instruction in (f"HGMMA.64x{config.block_n}x16.F32.BF16", "UTMALDG.2D", "UTMASTG.2D"):
        assert shallow.sass.count(instruction) == full.sass.count(instruction) > 0
    assert tiling_of(config._replace(stages=6), is_nk=True) == tiling
    assert tiling_of(config._replace(stages=3), is_nk=True, keeps_tiles=True) == tiling_of(
        config, is_nk=True, keeps_tiles=True
    )


def test_a_ring_of_one_slot_is_refused() -> None:
    """It could not turn: the error says how many stages it takes."""
    with pytest.raises(Unsupported, match=r"stages=1 has a ring of 1 slots.*take stages=4 or 3"):
        tiling_of(WIDE._replace(stages=1), is_nk=True)


@pytest.mark.parametrize("is_nk", EITHER_WEIGHT, ids=["NK", "KN"])
@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_two_quarters_of_a_lone_peer_share_a_slot(config: Config, is_nk: bool) -> None:
    """A tile takes half as many slots, each told the bytes of both quarters; nothing else grows, nothing spills."""
    alone, paired = (hopper("hopper_rs", config, is_nk=is_nk, pairs_quarters=pairs) for pairs in (False, True))

    tiling = tiling_of(config, is_nk=is_nk, keeps_tiles=True, pairs_quarters=True)
    paths = Paths(paired.ptx)
    expected = paths.where(rf"expect_tx.*, {2 * tiling.box_bytes};", function=gemm_rs_hopper.fetch_pairs)
    boxes = paths.where(TMA_LOAD, function=gemm_rs_hopper.fetch_pairs)
    assert len(expected) == tiling.columns // 128
    assert len(expected) == len(paths.where("expect_tx", function=gemm_rs_hopper.fetch_pairs))
    assert len(expected) * 2 * tiling.box_bytes == len(boxes) * tiling.rows * tiling.store_columns * 2
    assert paired.shared_bytes == alone.shared_bytes
    assert paired.spilled_bytes == 0
    assert not re.search(r"\b(LDL|STL)", paired.sass)
    for instruction in (f"HGMMA.64x{config.block_n}x16.F32.BF16", "LDSM", "UTMALDG.2D", "UTMASTG.2D"):
        assert paired.sass.count(instruction) == alone.sass.count(instruction) > 0


@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "pairs"])
@pytest.mark.parametrize("config", EITHER_WIDTH)
def test_a_slot_with_partials_is_handed_back_when_all_have_read_it(config: Config, pairs: bool) -> None:
    """Between a warpgroup's reads of a slot and its arrival on `empty` its threads meet; once a slot."""
    paths = Paths(hopper("hopper_rs", config, pairs_quarters=pairs).ptx)

    reads = paths.where("ldmatrix")
    handed_back = paths.where(r"mbarrier\.arrive", function=gemm_rs_hopper.reduce_and_store)
    quarters = config.block_n // 64
    assert len(handed_back) == 2 * (quarters // 2 if pairs else quarters)
    assert paths.leads(reads, handed_back, past=NOTHING) != []
    assert paths.leads(reads, handed_back, past=BARRIER) == []


def test_narrow_tiles_run_narrow_wgmma() -> None:
    """Tiles of 128 x 128: the same with 128 columns."""
    machine = hopper("hopper_ag", NARROW)

    assert machine.sass.count("HGMMA.64x128x16.F32.BF16") == 8
    assert machine.spilled_bytes == 0


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {}, "parts": {"cut": SPLIT_K}, "shares": {"cut": STREAM_K}, "traced": {"trace": True},
    "KN": {"is_nk": False},
}  # fmt: skip
# What an operator adds of its own stays, and each variant with one operator.
PROGRAMS = wide(
    [
        *(pytest.param(name, what, id=f"{name}-{id_}") for name in OPERATORS for id_, what in VARIANTS.items()),
        pytest.param("hopper_rs", {"pairs_quarters": True}, id="hopper_rs-pairs"),
        pytest.param("hopper_rs", {"pairs_quarters": True, "cut": STREAM_K}, id="hopper_rs-pairs-cut"),
        pytest.param("hopper_ag", {"tall": True}, id="hopper_ag-tall"),
        pytest.param("hopper_ag", {"tall": True, "cut": STREAM_K}, id="hopper_ag-tall-cut"),
    ],
    keep=[*(f"hopper_ag-{id_}" for id_ in VARIANTS), "hopper_ag-tall", "hopper_rs-whole", "hopper_rs-pairs"],
)


@pytest.mark.parametrize(("operator", "variant"), PROGRAMS)
def test_a_program_fits_into_a_multiprocessor(operator: str, variant: dict[str, Any]) -> None:
    """Within the 227 KB of shared memory, about as `Tiling` predicted; cut or traced, a few spilled words at most."""
    machine = hopper(operator, **variant)

    tiling = tiling_of(WIDE, is_nk=True, keeps_tiles=operator == "hopper_rs")
    assert machine.shared_bytes <= SHARED_MEMORY_LIMIT
    assert 0 <= machine.shared_bytes - tiling.shared_bytes < 1024
    assert machine.spilled_bytes <= MOST_SPILLED


@pytest.mark.parametrize(("operator", "variant"), PROGRAMS)
def test_an_announcement_fits_beside_it(operator: str, variant: dict[str, Any]) -> None:
    """In each quarter of the registers three warps of ours and one of the announcement: it never waits for our end."""
    machine = hopper(operator, **variant)

    announcing = announcement()
    assert machine.registers == ROOM_FOR_ANNOUNCEMENTS
    assert announcing.registers <= LANES
    assert WARPS_OF_A_QUARTER * machine.registers * LANES + announcing.registers * LANES <= REGISTERS_OF_A_QUARTER
    assert machine.shared_bytes + announcing.shared_bytes <= SHARED_MEMORY_LIMIT


@pytest.mark.parametrize("world_size", wide([2, 4, 8], keep=[2]))
def test_a_sum_in_pieces_reads_wide_words_and_leaves_room(world_size: int) -> None:
    """Sixteen bytes at a time, all ranks' terms under way at once, and beside its CTA a graph's announcement."""
    machine, announcing = adding(world_size), announcement()

    wide = len(re.findall(r"\bld\.global\.v4\.b32", machine.ptx))
    assert wide == world_size * BLOCK * 2 // (OPTIONS["num_warps"] * LANES) // 16
    assert not re.findall(r"\b(ld|st)\.global\.b16", machine.ptx)
    assert re.findall(r"\b(ld|st)\.global\.b16", adding(2, even=False).ptx)
    assert machine.spilled_bytes <= 16
    warps = OPTIONS["num_warps"] // 4
    assert (warps * machine.registers + announcing.registers) * LANES <= REGISTERS_OF_A_QUARTER


@pytest.mark.parametrize("name", ["ag_gemm in pieces", "gemm_rs in pieces"])
def test_the_driver_can_launch_what_waits_between_products(name: str) -> None:
    """The layout of its parameters is the one that this compiler declares."""
    machine = WAITING[name]()

    laid = lay_out(machine.signature, arguments_of(machine.signature), machine.descriptors, {"out_ptr": 2}, machine.ptx)

    assert [source for source, _, _ in laid.moves] == ([2] if "rs" in name else [])


def highest_of(code: str) -> int:
    """The highest register that machine code names, 0 where it names none."""
    return max((int(register) for register in re.findall(r"\bR(\d+)\b", code)), default=0)


@pytest.mark.parametrize(("operator", "variant"), PROGRAMS)
def test_roles_use_no_more_registers_than_they_asked_for(operator: str, variant: dict[str, Any]) -> None:
    """`setmaxnreg` moves registers to the consumers: each role's code stays below its bound, and their sum is ours."""
    machine = hopper(operator, **variant)

    tiling = tiling_of(WIDE, is_nk=True)
    assert 2 * tiling.consumer_registers + tiling.producer_registers <= WARPS_OF_A_QUARTER * machine.registers
    chunks = re.split(r"USETMAXREG\.\w+\.CTAPOOL (?:UP\d, )?0x([0-9a-f]+)", machine.sass)
    used: dict[int, int] = {}
    for bound, code in zip(chunks[1::2], chunks[2::2], strict=True):
        # Behind its end stand blocks that the assembler moved there: other roles jump to them, with their own bounds.
        ours, _, moved = code.partition(END)
        used[int(bound, 16)] = max(used.get(int(bound, 16), 0), highest_of(ours))
        assert highest_of(moved) < tiling.consumer_registers
    assert all(highest < bound for bound, highest in used.items()), used
    assert used[tiling.consumer_registers] >= 128  # the accumulator alone
    loads = [bound for bound, code in zip(chunks[1::2], chunks[2::2], strict=True) if "UTMALDG" in code]
    assert {int(bound, 16) for bound in loads} == {tiling.producer_registers}


def test_plain_kernels_run_wgmma_and_hardly_spill() -> None:
    """64x256x16 wgmma, operands and results by TMA, no local memory but for a few words of the reduction."""
    for machine in (plain_ag(), plain_rs(), plain_ar()):
        assert machine.sass.count("HGMMA.64x256x16.F32.BF16") >= 4
        assert machine.sass.count("UTMALDG.2D") >= 2
        assert machine.shared_bytes <= SHARED_MEMORY_LIMIT
    assert plain_ag().spilled_bytes == plain_ar().spilled_bytes == 0
    # At 255 registers the reduction of so large a tile keeps up to 32 words elsewhere; its twin on Hopper keeps none.
    assert plain_rs().spilled_bytes <= 128
    assert plain_rs().sass.count("UTMASTG.2D") >= 8


@pytest.mark.parametrize("name", wide(NOTIFYING, keep=NOTIFYING.keys() - {NOT_DEALT_OUT}))
def test_a_flag_is_released_to_the_system_after_a_barrier(name: str) -> None:
    """Whatever way leads from a store to a flag, all threads meet on it; the release is of system scope."""
    paths = Paths(NOTIFYING[name]().ptx)

    flags = paths.where(RELEASE, function=signals.publish)
    assert flags
    stores = paths.where(r"\bst\.global") + paths.where(DRAIN)
    assert paths.leads(stores, flags, past=BARRIER) == []
    if name != "announce":  # that one stores nothing itself; in the others there are such ways
        assert paths.leads(stores, flags, past=NOTHING) != []
    assert flags == paths.where(r"\.exch", function=signals.publish)


@pytest.mark.parametrize("name", ["gemm_rs", "hopper_rs", "hopper_rs, pairs"])
def test_tma_stores_are_drained_before_their_flag_is_released(name: str) -> None:
    """On every way from a TMA store to a flag stands `wait_group 0` without `.read`: the stores have been written."""
    paths = Paths(NOTIFYING[name]().ptx)

    stores, flags = paths.where(TMA_STORE), paths.where(RELEASE, function=signals.publish)
    assert stores
    assert flags
    assert paths.leads(stores, flags, past=DRAIN) == []
    # The control: the form with `.read` stands there too, and would not be enough.
    if name != "gemm_rs" or not triton.__version__.startswith(
        ("3.8.", "3.9.")
    ):  # these write none into the plain kernel
        assert paths.where(r"cp\.async\.bulk\.wait_group\.read")
    assert paths.leads(stores, flags, past=r"cp\.async\.bulk\.wait_group 1") != []


@pytest.mark.parametrize("name", wide(WAITING, keep=WAITING.keys() - {NOT_DEALT_OUT}))
def test_what_was_acquired_is_fenced_before_tma_reads_it(name: str) -> None:
    """Flags are acquired at system scope, and no way leads from there to a TMA load but over a proxy fence."""
    paths = Paths(WAITING[name]().ptx)

    acquires, loads = paths.where(ACQUIRE), paths.where(TMA_LOAD)
    assert acquires
    assert paths.where(FENCE)
    assert paths.leads(acquires, loads, past=FENCE) == []
    if name == "ag_gemm" or name.startswith("hopper"):
        assert paths.leads(acquires, loads, past=NOTHING) != []


@pytest.mark.parametrize("name", ["hopper_ag", "hopper_ag, swiglu", "hopper_rs", "hopper_rs, pairs"])
def test_shared_memory_is_fenced_before_tma_reads_it(name: str) -> None:
    """Between the threads' writes of a tile and the TMA store stand a proxy fence and a barrier of the warpgroup."""
    machine = hopper("hopper_ag", store=SWIGLU_AND_WIDE.value) if name.endswith("swiglu") else WAITING[name]()
    paths = Paths(machine.ptx)

    writes, stores = paths.where("stmatrix"), paths.where(TMA_STORE.replace("2d", "[234]d"))
    assert writes
    assert stores
    handed_over = stores + paths.where(r"mbarrier\.arrive")
    assert paths.leads(writes, handed_over, past=NOTHING) != []
    assert paths.leads(writes, handed_over, past=r"fence\.proxy\.async\.shared") == []
    assert paths.leads(paths.where(r"fence\.proxy\.async\.shared"), handed_over, past=BARRIER) == []


@pytest.mark.parametrize("cut", [SPLIT_K, STREAM_K], ids=["parts", "shares"])
def test_an_uncut_kernel_pays_nothing_for_cutting(cut: int) -> None:
    """Without cut tiles nobody waits for sums of others or fetches them; the consumers never do."""
    whole, parted = Paths(hopper("hopper_ag").ptx), Paths(hopper("hopper_ag", cut=cut).ptx)

    assert not whole.where(ACQUIRE, caller="hopper_gemm.py")
    assert parted.where(ACQUIRE, caller="hopper_gemm.py")
    assert len(parted.where(TMA_LOAD)) == len(whole.where(TMA_LOAD)) + 2 * PARTIAL_PIECES
    assert parted.where(TMA_LOAD, function=device.fetch_split_partials)
    assert not whole.where(r"ld\.global\.v")
    assert not parted.where(r"ld\.global\.v")


@pytest.mark.parametrize(("operator", "config"), DEALT_OUT)
def test_partials_are_stored_by_16_bytes_a_thread_and_nothing_moves_for_it(operator: str, config: Config) -> None:
    """Each consumer stores its accumulator in whole lines; neither storing nor adding shuffles registers."""
    whole, shares = (hopper(operator, config, cut=cut) for cut in (WHOLE, STREAM_K))

    stores = Paths(shares.ptx).where(r"st\.global\.v4", function=device.store_split_partial)
    assert len(stores) == 2 * config.block_m * config.block_n // 2 // 128 // 4
    moved = [machine.sass.count("SHFL") - len(re.findall(FROM_LANE_0, machine.sass)) for machine in (whole, shares)]
    assert moved[1] - moved[0] <= 4
    assert shares.shared_bytes - whole.shared_bytes <= 32


@pytest.mark.parametrize(("operator", "config"), DEALT_OUT)
def test_a_slot_with_lent_sums_is_handed_back_when_all_have_read_it(operator: str, config: Config) -> None:
    """Between a warpgroup's reads of a slot and its arrival on `empty` its threads meet; once a quarter."""
    paths = Paths(hopper(operator, config, cut=STREAM_K).ptx)

    reads = paths.where(r"ld\.shared\.v4")
    handed_back = paths.where(r"mbarrier\.arrive", function=device.add_split_partials)
    assert len(handed_back) == 2 * PARTIAL_PIECES
    assert paths.leads(reads, handed_back, past=NOTHING) != []
    assert paths.leads(reads, handed_back, past=BARRIER) == []


def test_a_quarter_of_both_consumers_sums_fits_over_b() -> None:
    """What a slot brings of partials is no more than the B that lies there otherwise."""
    for config in (WIDE, NARROW):
        tiling = tiling_of(config, is_nk=True)
        assert tiling.partial_bytes == tiling.columns * tiling.block_k * 2
        assert PARTIAL_PIECES * tiling.partial_rows * PARTIAL_WIDTH == tiling.rows * tiling.columns


def test_the_last_wave_is_cut_only_where_that_wins() -> None:
    """Full waves and nearly full ones stay whole; what is between is dealt out, or halved where tiles are narrow."""
    assert cut_last_wave(264, 132, 128) == (264, 1)
    assert cut_last_wave(512, 132, 112) == (512, 1)
    assert cut_last_wave(448, 132, 128) == (396, EVEN)
    assert cut_last_wave(448, 132, 128, columns=128) == (396, 2)
    assert cut_last_wave(448, 132, 128, height=2) == (396, 2)
    assert cut_last_wave(1536, 132, 96, peers=1) == (1452, EVEN)
    assert cut_last_wave(1536, 132, 96, peers=3) == (1536, 1)
    assert cut_last_wave(448, 132, 128, split=1) == (448, 1)
    assert cut_last_wave(7, 132, 1) == (7, 1)
    assert cut_last_wave(7, 132, 1, split=EVEN) == (7, 1)


def test_a_tiling_that_cannot_be_is_refused() -> None:
    """Too much shared memory, a strange number of rows or of consumers: the error says which."""
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Tiling(slots=5)
    with pytest.raises(ValueError, match="multiple of 64 rows"):
        Tiling(rows=32)
    with pytest.raises(ValueError, match="two consumers, not 4"):
        Tiling(consumers=4)
    with pytest.raises(ValueError, match="several peers, or two quarters of a lone peer's, not both"):
        Tiling(slots=3, fills_slots=True, pairs_quarters=True)
    with pytest.raises(ValueError, match="64 columns cannot come 64 and 64 a slot"):
        Tiling(columns=64, pairs_quarters=True)


def test_quarters_are_paired_between_two_ranks_alone() -> None:
    """One peer cannot fill a slot in any other way; several peers can, and none has no partials."""
    assert [ranks for ranks in range(1, 9) if pairs_quarters(ranks)] == [2]


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["wide", "narrow"])
def test_what_shares_a_slot_has_room_there(config: Config) -> None:
    """Three peers' boxes fill a slot of wide tiles and two a slot of narrow ones; two quarters fit into either."""
    filled = tiling_of(config, is_nk=True, keeps_tiles=True, fills_slots=True)
    paired = tiling_of(config, is_nk=True, keeps_tiles=True, pairs_quarters=True)

    assert filled.partials_a_slot * filled.box_bytes == filled.slot_bytes
    assert 2 * paired.box_bytes <= paired.slot_bytes
    assert paired.partials_a_slot == 1
    assert paired.shared_bytes == filled.shared_bytes


@pytest.mark.parametrize(
    "config", [Config(64, 128, kernel="hopper"), Config(carrier="sm", comm_ctas=8, kernel="hopper")]
)
def test_a_configuration_these_kernels_do_not_have_is_refused(config: Config) -> None:
    """Other tiles would be laid out in one way and announced in another."""
    with pytest.raises(Unsupported, match="kernel='hopper' has tiles of 128 x 256 x 64 and 128 x 128 x 64"):
        tiling_of(config, is_nk=True)


@pytest.mark.parametrize(
    ("operator", "store"),
    [(OPERATORS[0], store) for store in (1, 2, 3, 4, 5)] + [(OPERATORS[1], 1)],
)
def test_the_driver_can_launch_what_comes_out(operator: str, store: int) -> None:
    """The layout of parameters that we make ourselves is the one that this compiler declares."""
    machine = hopper(operator, store=store)

    laid = lay_out(machine.signature, arguments_of(machine.signature), machine.descriptors, {"x_desc": 0}, machine.ptx)

    assert laid.moves == ((0, 0, True),)
    assert len(laid.maps) == len(machine.descriptors)
    by_shard, by_half = (BY_SHARD.value, SWIGLU.value, SWIGLU_AND_WIDE.value), (GRADIENTS.value, SWIGLU_AND_WIDE.value)
    assert (r"tensor.3d.global" in machine.ptx) == (store in by_shard)
    assert (r"tensor.4d.global" in machine.ptx) == (store in by_half)
