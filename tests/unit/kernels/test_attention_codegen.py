# SPDX-License-Identifier: Apache-2.0
"""What the assembler makes of attention, checked without a GPU: matrix instructions, order, fences, registers."""

import re

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("torch")

from megascale_kernels.attention.launch import EIGHT_WARPS, SOURCES  # noqa: E402
from megascale_kernels.attention.tiling_hopper import AttentionTiling  # noqa: E402
from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.launching.parameters import lay_out  # noqa: E402
from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS  # noqa: E402

from tests.fakes.arguments import arguments_of  # noqa: E402
from tests.fixtures.attention_variants import inner_loops, plain, specialised, specialised_pass  # noqa: E402
from tests.fixtures.hopper_variants import COMPILED  # noqa: E402
from tests.fixtures.made_once import shared_folder  # noqa: E402
from tests.matrix import wide  # noqa: E402

REGISTERS_OF_A_QUARTER = 16384  # a multiprocessor has four quarters, warps are dealt out in turn
LANES = 32
ANNOUNCEMENT = 1024  # registers of a quarter that a kernel of one warp needs beside
# Both sizes of heads are the same lines; at 128 there are fewer registers to spare.
EITHER_HEAD = wide([64, 128], keep=[128])


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    COMPILED.folder = shared_folder(tmp_path_factory)


@pytest.mark.parametrize("head_dim", EITHER_HEAD)
@pytest.mark.parametrize("which", ["forward", "keys", "queries"])
def test_plain_kernels_run_wgmma_and_keep_their_loops_in_registers(which: str, head_dim: int) -> None:
    """Every product is a wgmma, and the loops over blocks (with a mask and without) hardly touch local memory."""
    machine = plain(which, head_dim)

    loops = [loop for loop in inner_loops(machine) if any("MUFU.EX2" in line for line in loop)]
    assert len(loops) >= 2
    assert not re.search(r"\bHMMA", machine.sass)
    spilled = [sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop) for loop in loops]
    assert sorted(spilled)[1] <= (12 if which == "keys" else 0)


@pytest.mark.parametrize("machine", ["triton", "hopper"])
def test_the_driver_gets_what_the_compiler_declares(machine: str) -> None:
    """The layout of parameters that we make ourselves is the one that this compiler declares, for either forward."""
    compiled = plain("forward") if machine == "triton" else specialised()

    sources = {name: place for name, place in SOURCES.items() if name in compiled.signature}
    laid = lay_out(compiled.signature, arguments_of(compiled.signature), compiled.descriptors, sources, compiled.ptx)

    assert len(laid.maps) == len(compiled.descriptors) == 6
    assert len(laid.moves) == len(sources)


@pytest.mark.parametrize("head_dim", EITHER_HEAD)
def test_the_plain_forward_spills_nothing(head_dim: int) -> None:
    """Within the registers that leave room for announcements, and its waits acquire and fence."""
    machine = plain("forward", head_dim)

    assert machine.spilled_bytes == 0
    assert machine.registers <= EIGHT_WARPS
    assert 2 * LANES * machine.registers + ANNOUNCEMENT <= REGISTERS_OF_A_QUARTER
    assert re.search(r"(ld|atom)\.global\.sys\.acquire", machine.ptx)
    assert "fence.proxy.async.global" in machine.ptx


@pytest.mark.parametrize("head_dim", EITHER_HEAD)
def test_kernels_that_wait_leave_room_for_announcements(head_dim: int) -> None:
    """A captured graph's announcement, a kernel of one warp, can be resident beside the backward's first pass."""
    machine = plain("keys", head_dim)

    assert 2 * LANES * machine.registers + ANNOUNCEMENT <= REGISTERS_OF_A_QUARTER


@pytest.mark.parametrize(
    ("head_dim", "slots", "causal"),
    wide([(64, 3, True), (128, 2, True), (128, 2, False), (64, 3, False)], keep=[(128, 2, True)]),
)
def test_the_softmax_runs_while_values_are_multiplied(head_dim: int, slots: int, causal: bool) -> None:
    """In the loop over whole blocks two products are started, and all powers come before the wait for the second."""
    machine = specialised(head_dim, slots, causal=causal)

    pipelined = [loop for loop in inner_loops(machine) if any("gsb0, 0x1" in line for line in loop)]
    assert len(pipelined) == 2  # one a consumer
    for loop in pipelined:
        marks = [line for line in loop if re.search(r"DEPBAR|MUFU\.EX2|HGMMA", line)]
        first = next(i for i, line in enumerate(marks) if "gsb0, 0x1" in line)
        second = next(i for i, line in enumerate(marks) if "gsb0, 0x0" in line)
        assert sum("HGMMA" in line for line in marks[:first]) == 2 * 8 if head_dim == 128 else 4 + 8
        assert sum("MUFU.EX2" in line for line in marks[first:second]) == 66  # 64 weights, two rows' fading
        assert not any("MUFU.EX2" in line for line in marks[second:])
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in loop)


@pytest.mark.parametrize(("head_dim", "slots"), wide([(64, 3), (128, 2)], keep=[(128, 2)]))
def test_warp_specialised_products_are_not_serialised(head_dim: int, slots: int) -> None:
    """The assembler waits once for each product of matrices, not for each of its instructions."""
    machine = specialised(head_dim, slots)

    # Eight products a consumer: two of whole blocks before and one behind the loop, two in it, ... of masked ones.
    assert machine.sass.count("WARPGROUP.DEPBAR") == 16
    assert machine.sass.count("HGMMA") == (128 if head_dim == 128 else 96)
    assert machine.registers <= ROOM_FOR_ANNOUNCEMENTS
    assert re.search(r"(ld|atom)\.global\.sys\.acquire", machine.ptx)
    assert "fence.proxy.async.global" in machine.ptx
    assert machine.shared_bytes <= AttentionTiling(head_dim, 128, slots).shared_bytes + 1024


@pytest.mark.parametrize("head_dim", EITHER_HEAD)
@pytest.mark.parametrize(("which", "waits"), [("keys", 14), ("queries", 12)])
def test_the_backward_in_gluon_is_not_serialised(which: str, waits: int, head_dim: int) -> None:
    """One wait for each product or two that belong together; the powers come while products are under way."""
    machine = specialised_pass(which, head_dim)

    assert machine.sass.count("WARPGROUP.DEPBAR") == waits
    assert machine.registers <= ROOM_FOR_ANNOUNCEMENTS
    first = "gsb0, 0x2" if which == "keys" else "gsb0, 0x1"
    pipelined = [loop for loop in inner_loops(machine) if any(first in line for line in loop)]
    assert len(pipelined) >= 2  # one a consumer, and what jumps into it
    for loop in pipelined:
        marks = [line for line in loop if re.search(r"DEPBAR|MUFU\.EX2", line)]
        begin = next(i for i, line in enumerate(marks) if first in line)
        end = next(i for i, line in enumerate(marks) if "gsb0, 0x0" in line)
        assert sum("MUFU.EX2" in line for line in marks[begin:end]) == 32
    if which == "queries":
        assert machine.spilled_bytes == 0


def test_blocks_that_do_not_fit_are_refused() -> None:
    """In one sentence, with the numbers."""
    with pytest.raises(Unsupported, match=r"\d+ bytes of shared memory.*fewer stages"):
        AttentionTiling(128, 128, 3)
    with pytest.raises(Unsupported, match="two stages or more, not 128 and 1"):
        AttentionTiling(128, 128, 1)
    with pytest.raises(Unsupported, match="64, 128 or 256 keys"):
        AttentionTiling(64, 32, 2)
