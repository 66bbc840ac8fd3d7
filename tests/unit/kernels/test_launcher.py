# SPDX-License-Identifier: Apache-2.0
"""The launcher in C, built for real, over a driver that writes down what it is asked (`tests/fakes/libcuda`)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.imported import Imported, imported

triton = pytest.importorskip("triton", minversion="3.6")

FAKE = Path(__file__).parents[2] / "fakes" / "libcuda" / "libcuda.c"
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
# A kernel of two parameters, an address of x and a number, behind copies of two pieces of x.
PRELUDE = """
import struct
from megascale_kernels.launching.native import launcher
made, launch, _ = launcher()
block = struct.pack("QI", 1, 7)
def plain(copies=(), moves=((0, 0, False),), maps=(), block=block, offsets=(0, 8), grid=3):
    return made(900, grid, 384, 1000, block, offsets, moves, maps, copies)
def go(it, join=True, x=4096, w=8192):
    launch(it, 1, 2, 31, 32, 77, join, x, w, 0, 0)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{INCLUDE}", "-o", str(folder / "libcuda.so.1"), str(FAKE)]
    subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def warm(driver: Path) -> Iterator[Imported]:
    """A process that has loaded the launcher."""
    with imported(PRELUDE, {**os.environ, "LD_LIBRARY_PATH": str(driver)}) as process:
        yield process


def asked(warm: Imported, tmp_path: Path, program: str, fails: str = "", error: str = "") -> list[str]:
    """What the driver was asked by a program; `error` is the last line that the program ends with, if it fails."""
    log = tmp_path / "calls"
    log.touch()
    env = {"FAKE_CUDA": str(log), "FAKE_CUDA_FAILS": fails}
    status, said = warm.ran(PRELUDE + program, env, tmp_path / "said")
    assert (status != 0) == bool(error), said
    assert error in said.splitlines()[-1] if error else not said
    return log.read_text().splitlines()


def test_copies_go_first_each_is_announced_and_the_stream_waits_for_them(warm: Imported, tmp_path: Path) -> None:
    """Behind the caller's work on a stream of their own; the kernel does not wait for them, what follows does."""
    calls = asked(warm, tmp_path, "go(plain(copies=((0, 64, 5000, 6000), (64, 32, 5064, 0))))")

    assert calls == [
        "record 31 on 1",
        "wait on 2 for 31",
        "copy 5000 <- 4096, 64 bytes, stream 2",
        "write 6000 = 77, stream 2",
        "copy 5064 <- 4160, 32 bytes, stream 2",
        "record 32 on 2",
        "launch 900 grid 3 threads 384 shared 1000 stream 1: 4096 7",
        "wait on 1 for 32",
    ]


def test_copies_may_read_any_of_a_calls_tensors(warm: Imported, tmp_path: Path) -> None:
    """K and V of an attention are two tensors whose copies take turns; addresses left out are none."""
    calls = asked(
        warm,
        tmp_path,
        "launch(plain(copies=((8, 64, 5000, 0, 1), (0, 32, 6000, 0))), 1, 2, 31, 32, 77, 1, 4096, 8192)",
    )

    assert [call for call in calls if call.startswith("copy")] == [
        "copy 5000 <- 8200, 64 bytes, stream 2",
        "copy 6000 <- 4096, 32 bytes, stream 2",
    ]


def test_without_copies_there_is_one_call(warm: Imported, tmp_path: Path) -> None:
    """No event, no wait: a launch is a launch."""
    calls = asked(warm, tmp_path, "go(plain(), join=False)")

    assert calls == ["launch 900 grid 3 threads 384 shared 1000 stream 1: 4096 7"]


def test_copies_alone_launch_nothing(warm: Imported, tmp_path: Path) -> None:
    """A gather begins with copies, and its kernel comes later."""
    calls = asked(warm, tmp_path, "go(plain(copies=((0, 64, 5000, 6000),), grid=0), join=False)")

    assert not [call for call in calls if call.startswith(("launch", "wait on 1"))]


GATED = "made(900, 3, 384, 1000, block, (0, 8), ((0, 0, False),), (), ((0, 64, 5000, 6000),), False, True, 7000, 8000)"


def test_copies_with_a_gate_stand_between_no_two_kernels(warm: Imported, tmp_path: Path) -> None:
    """The side stream waits for a word to come to the number before this launch's; no event, and the kernel follows."""
    calls = asked(warm, tmp_path, f"launch({GATED}, 1, 2, 31, 32, (5 << 12) + (3 << 32) + 9, 0, 4096)")

    assert calls == [
        f"hold 2 until 7000 >= {4 + (3 << 20)}",
        "copy 5000 <- 4096, 64 bytes, stream 2",
        f"write 6000 = {(5 << 12) + 9}, stream 2",
        f"write 8000 = {(5 << 12) + 9}, stream 2",
        "record 32 on 2",
        "attribute 6 of 1",
        "launch 900 grid 3 threads 384 shared 1000 stream 1: 4096 7",
    ]


def test_copies_with_a_gate_may_be_told_to_wait_for_the_stream(warm: Imported, tmp_path: Path) -> None:
    """Where the launch before is not the one whose number the gate shows; and a launch may join them yet."""
    for how in (2, 3):
        calls = asked(warm, tmp_path, f"launch({GATED}, 1, 2, 31, 32, 77, {how}, 4096)")

        assert calls[:2] == ["record 31 on 1", "wait on 2 for 31"]
        assert not [call for call in calls if call.startswith("hold")]
        assert (calls[-1] == "wait on 1 for 32") == (how == 3)
        (tmp_path / "calls").unlink()


def test_a_map_is_aimed_anew_only_when_its_tensor_has_moved(warm: Imported, tmp_path: Path) -> None:
    """Encoded once, sizes innermost first; aimed at the first call, and where an address is another than before."""
    program = """
maps = ((0, 9, 2, 3, 4096, (100, 64), (64, 1), (64, 64)),)
it = plain(moves=((1, 0, True),), maps=maps, block=bytes(132), offsets=(0, 128))
for w in (8192, 8192, 12288):
    go(it, join=False, w=w)
"""
    calls = asked(warm, tmp_path, program)

    assert calls[0] == "encode type 9 swizzle 3 aligned 1 64/64*128 100/640"
    aimed = [call.partition(": ")[2] or call for call in calls[1:]]
    assert aimed == ["aim 8192", "8192 0", "8192 0", "aim 12288", "12288 0"]


@pytest.mark.parametrize("call", ["record", "wait", "copy", "write", "launch", "hold"])
def test_what_the_driver_refuses_is_named(warm: Imported, tmp_path: Path, call: str) -> None:
    """The driver's function and its error; nothing comes after it."""
    names = {
        "record": "cuEventRecord", "wait": "cuStreamWaitEvent", "copy": "cuMemcpyDtoDAsync",
        "write": "cuStreamWriteValue32", "launch": "cuLaunchKernel", "hold": "cuStreamWaitValue32",
    }  # fmt: skip

    calls = asked(
        warm, tmp_path, f"go({GATED}, join=False)" if call == "hold" else "go(plain(copies=((0, 64, 5000, 6000),)))",
        fails=call,
        error=f"RuntimeError: {names[call]}: CUDA_ERROR_INVALID_VALUE (1)",
    )  # fmt: skip

    assert calls[-1].startswith(call)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("plain(offsets=(0, 99))", "parameter 1 begins at byte 99 of 12"),
        ("plain(moves=((0, 8, False),))", "source 0 at byte 8 of 12"),
        ("plain(moves=((8, 0, False),))", "source 8 at byte 0 of 12"),
        ("plain(copies=((0, 64, 5000, 0, 8),))", "copy 0 reads source 8 of 8"),
        ("plain(maps=((0, 9, 2, 3, 4096, (1, 1), (1, 1), (1, 1)),))", "a tensor map has one to five axes"),
        ("plain(moves=((0, 0, False),) * 17)", "17 addresses differ between calls, at most 16"),
        ("launch(plain())", "launch takes 7 to 15 arguments, not 1"),
    ],
)
def test_what_does_not_lie_in_the_block_is_refused(warm: Imported, tmp_path: Path, program: str, error: str) -> None:
    """A mistake in laying out parameters ends in a sentence, not in another's memory."""
    assert asked(warm, tmp_path, program, error=error) == []


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    """The module loads on any machine; only making a launch needs libcuda."""
    ended = subprocess.run(
        [sys.executable, "-c", PRELUDE + "plain()"], check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert ended.stderr.splitlines()[-1] == "OSError: libcuda.so.1 cannot be loaded"
