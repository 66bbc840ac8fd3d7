# SPDX-License-Identifier: Apache-2.0
"""Products that are planned once, over a cuBLAS that multiplies on the host (`tests/fakes/libcuda/libcublasLt.c`)."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fixtures.imported import Imported, imported

pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

FAKES = Path(__file__).parents[2] / "fakes" / "libcuda"
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
IMPORTS = """
import torch
import megascale_kernels.launching.products, megascale_kernels.launching.ready
from megascale_kernels.launching.native import launcher
assert launcher()
"""
# A product of given sizes whose operands lie inside wider matrices, beside what torch says of it.
PRELUDE = """
import ctypes, itertools, logging, os, sys, torch
logging.basicConfig(format="%(message)s", level=logging.INFO)
if os.environ.get("FAKE_CUBLAS"):
    ctypes.CDLL(os.environ["FAKE_CUBLAS"])
from megascale_kernels.launching.native import launcher
from megascale_kernels.launching.products import Operand, Products, Shape
from megascale_kernels.launching.ready import ABSENT, BIAS, OUT, W, X
native = launcher()
products = Products(native, torch.device("cpu"), torch.bfloat16)
def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
def placed(m, n, k, is_nk, wider, bias, fixed=False):
    x, w, out = drawn(m + 2, k + wider), drawn(*((n, k + wider) if is_nk else (k, n + wider))), drawn(m + 3, n)
    row = drawn(n)
    source, first = (ABSENT, x.data_ptr()) if fixed else (X, 0)
    made = products.product(
        Shape(m, n, k, is_nk), Operand(source, first, k + wider).at(2 * (k + wider) * 2), Operand(W, 0, w.shape[1]),
        Operand(OUT, 0, n).at(3 * n * 2), BIAS if bias else -1,
    )
    logical = (w.T if is_nk else w)[:k, :n]
    expected = x[2:, :k].float() @ logical.float() + (row.float() if bias else 0)
    before = out[:3].clone()
    addresses = (0 if fixed else x.data_ptr(), w.data_ptr(), out.data_ptr(), row.data_ptr())
    return made, addresses, x, w, row, out, expected, before
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libraries' folder."""
    folder = tmp_path_factory.mktemp("cublas")
    for source, name in (("libcublasLt.c", "libcublasLt.so.13"), ("libcuda.c", "libcuda.so.1")):
        command = ["gcc", "-shared", "-fPIC", "-w", f"-I{INCLUDE}", "-o", str(folder / name), str(FAKES / source)]
        subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def warm(library: Path) -> Iterator[Imported]:
    """A process that has torch and the launcher."""
    with imported(IMPORTS, {**os.environ, "LD_LIBRARY_PATH": str(library)}) as process:
        yield process


class Ended(NamedTuple):
    """How a program ended."""

    returncode: int
    stderr: str


class Asking(NamedTuple):
    """Runs programs over the fake libraries."""

    warm: Imported
    library: Path
    folder: Path

    def __call__(self, program: str, *, fails: str = "", there: bool = True) -> tuple[list[str], Ended]:
        """What the libraries were asked by a program, and how it ended."""
        log = self.folder / "calls"
        log.touch()
        library = str(self.library / "libcublasLt.so.13") if there else ""
        env = {"FAKE_CUDA": str(log), "FAKE_CUDA_FAILS": fails, "FAKE_CUBLAS": library}
        ended = Ended(*self.warm.ran(PRELUDE + program, env, self.folder / "said"))
        return log.read_text().splitlines(), ended


@pytest.fixture
def asked(warm: Imported, library: Path, tmp_path: Path) -> Asking:
    """Runs programs of one test."""
    return Asking(warm, library, tmp_path)


def test_what_is_multiplied_is_what_torch_multiplies(asked: Asking) -> None:
    """Both layouts of the weight, operands inside wider ones, a bias, rows that stay where they are; no row beside."""
    program = """
for m, n, k in ((1, 1, 1), (5, 8, 16), (7, 3, 24), (16, 40, 8)):
    for is_nk, wider, bias, fixed in itertools.product((False, True), (0, 8), (False, True), (False, True)):
        made, addresses, x, w, row, out, expected, before = placed(m, n, k, is_nk, wider, bias, fixed)
        native.launch(made, 9, 2, 31, 32, 77, False, *addresses)
        assert torch.equal(out[:3], before)
        error = (out[3:].float() - expected).abs().max() / expected.abs().max()
        assert error < 0.01, (m, n, k, is_nk, wider, bias, fixed, error)
"""
    calls, ended = asked(program)

    assert ended.returncode == 0, ended.stderr
    assert calls.count(f"multiply 5 x 8 x 16 on 9, scratch {32 << 20}") == 16


def test_what_no_call_may_assume_is_not_preferred(asked: Asking) -> None:
    """Alignments are those that every call keeps: of tensors 16 bytes, less where a part begins at an odd row."""
    calls, _ = asked("placed(4, 5, 8, True, 0, False)")

    alignments = [call.partition(": ")[2] for call in calls if call.startswith("prefer") and call[7] in "5678"]
    assert alignments == ["16", "16", "2", "2"]  # weight, x, and the fourth row of five columns, twice
    assert "prefer 3: 2" in calls  # partial sums in fp32


def test_a_plan_goes_with_its_product(asked: Asking) -> None:
    """A server whose sizes take every value plans for ever."""
    calls, ended = asked("made = placed(4, 5, 8, True, 0, False)[0]\nprint('made')\ndel made")

    assert ended.returncode == 0, ended.stderr
    assert [call for call in calls if call.startswith("alive")] == [
        "alive 4",
        "alive 3",
        "alive 2",
        "alive 1",
        "alive 0",
    ]


def test_several_launches_are_one_call_in_their_order(asked: Asking) -> None:
    """Copies on the stream of the call are no one's to wait for; the join comes behind all."""
    program = """
made, addresses, *_ = placed(2, 3, 4, True, 0, False)
aside = native.make(0, 0, 0, 0, b"", (), (), (), ((0, 64, 5000, 6000),))
here = native.make(0, 0, 0, 0, b"", (), (), (), ((8, 16, 7000, 0),), True)
native.launch((aside, here, made), 1, 2, 31, 32, 77, True, 4096, *addresses[1:])
"""
    calls, ended = asked(program.replace("placed(2, 3, 4, True, 0, False)", "placed(2, 3, 4, True, 0, False, True)"))

    assert ended.returncode == 0, ended.stderr
    assert [call for call in calls if not call.startswith(("alive", "prefer"))] == [
        "record 31 on 1",
        "wait on 2 for 31",
        "copy 5000 <- 4096, 64 bytes, stream 2",
        "write 6000 = 77, stream 2",
        "record 32 on 2",
        "copy 7000 <- 4104, 16 bytes, stream 1",
        f"multiply 2 x 3 x 4 on 1, scratch {32 << 20}",
        "wait on 1 for 32",
    ]


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("create", "cublasLtCreate: status 1"),
        ("describe", "cublasLtMatmulDescSetAttribute: status 7"),
        ("algorithm", "no algorithm"),
    ],
)
def test_where_cublas_refuses_torch_multiplies(asked: Asking, fails: str, reason: str) -> None:
    """There is no product then, it is said once, and nothing is left behind."""
    calls, ended = asked("assert placed(4, 5, 8, True, 0, False)[0] is None", fails=fails)

    assert ended.returncode == 0, ended.stderr
    assert reason in ended.stderr
    assert ended.stderr.count("torch multiplies") == 1
    assert [call for call in calls if call.startswith("alive")][-1:] in ([], ["alive 0"])


def test_without_the_library_torch_multiplies(asked: Asking) -> None:
    """A torch for the CPU has none, and needs none."""
    _, ended = asked("assert placed(4, 5, 8, True, 0, False)[0] is None", there=False)

    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr


def test_a_product_that_fails_is_named(asked: Asking) -> None:
    """The status of cuBLAS; nothing comes after it."""
    program = """
made, addresses, *_ = placed(2, 3, 4, True, 0, False)
native.launch((made, made), 1, 2, 31, 32, 77, True, *addresses)
"""
    calls, ended = asked(program, fails="multiply")

    assert ended.stderr.splitlines()[-1] == "RuntimeError: cublasLtMatmul: status 13"
    assert not [call for call in calls if call.startswith("wait")]
