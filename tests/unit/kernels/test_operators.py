# SPDX-License-Identifier: Apache-2.0
"""The operators' public face: what loads, what is refused and how, which path a call takes."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import megascale_kernels  # noqa: E402 - after the skips
import torch.distributed as dist  # noqa: E402
from megascale_kernels.dispatch import dispatch  # noqa: E402
from megascale_kernels.dispatch.serial import Call  # noqa: E402
from megascale_kernels.errors import MissingDependency, Unsupported, WorkspaceTooSmall  # noqa: E402
from megascale_kernels.memory.operands import Weight, check_config  # noqa: E402
from megascale_kernels.memory.planned import Planned  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.progress import board_format  # noqa: E402
from megascale_kernels.torch_api.operators import ag_gemm, gemm_ar, gemm_rs  # noqa: E402


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def workspace(group: None) -> Workspace:  # noqa: ARG001 - it must be there
    """Room for 64 rows of 32 elements."""
    return Workspace(max_rows=64, max_gather_cols=32, max_scatter_cols=32, dtype=torch.float32, device="cpu")


# --- what loads ----------------------------------------------------------------------------------------------------


def test_importing_the_package_is_instant() -> None:
    """Neither torch nor Triton is loaded before a name is used."""
    probe = "import sys, megascale_kernels; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"

    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    """`__all__` and `dir` tell the truth, and no other name is invented."""
    assert all(getattr(megascale_kernels, name) is not None for name in megascale_kernels.__all__)
    assert set(megascale_kernels.__all__) <= set(dir(megascale_kernels))
    with pytest.raises(AttributeError, match="no attribute 'gemm_xy'"):
        _ = megascale_kernels.gemm_xy


@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_an_operator_is_not_hidden_by_the_file_of_its_kernel(name: str) -> None:
    """Loading the room `megascale_kernels/ag_gemm` leaves `megascale_kernels.ag_gemm` the function."""
    file = importlib.import_module(f"megascale_kernels.{name}")

    setattr(megascale_kernels, name, file)  # what Python does when it loads a submodule

    assert getattr(megascale_kernels, name) is getattr(
        importlib.import_module("megascale_kernels.torch_api.operators"), name
    )


@pytest.mark.parametrize("missing", ["torch", "triton.language"])
def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without torch or Triton there is one error that says what to install."""

    def fail(_: str) -> object:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.delattr(megascale_kernels, "Workspace", raising=False)
    monkeypatch.setattr(importlib, "import_module", fail)

    with pytest.raises(MissingDependency, match=f"needs {missing.partition('.')[0]}.*pip install"):
        _ = megascale_kernels.Workspace


# --- what is refused -----------------------------------------------------------------------------------------------


def ones(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the workspace's type."""
    return torch.ones(*shape, dtype=dtype or torch.float32)


BAD = {
    "one dimension": (lambda: (ones(8), ones(8, 4), None), Unsupported, "x must be .rows, K."),
    "other type": (lambda: (ones(4, 8, dtype=torch.float16), ones(8, 4), None), Unsupported, "float16.*convert"),
    "other device": (lambda: (ones(4, 8).to("meta"), ones(8, 4), None), Unsupported, "x is on meta"),
    "strided x": (lambda: (ones(8, 4).T, ones(8, 4), None), Unsupported, "strides .*call .contiguous"),
    "strided 3-d x": (lambda: (ones(4, 2, 8).transpose(0, 1), ones(8, 4), None), Unsupported, "call .contiguous"),
    "w does not fit": (lambda: (ones(4, 8), ones(4, 8), None), Unsupported, r"w must be \[8, N\]; got \(4, 8\)"),
    "w of other type": (lambda: (ones(4, 8), ones(8, 4, dtype=torch.float64), None), Unsupported, "make them equal"),
    "strided w": (lambda: (ones(4, 8), ones(8, 8)[:, ::2], None), Unsupported, "neither it nor its transpose"),
    "bias of other size": (lambda: (ones(4, 8), ones(8, 4), ones(5)), Unsupported, r"bias must be \[4\]"),
}


@pytest.mark.parametrize("operator", [ag_gemm, gemm_rs, gemm_ar])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_by_name(workspace: Workspace, operator: Callable[..., Any], case: str) -> None:
    """One error that says which argument is wrong, what it is and what it should be."""
    make, kind, message = BAD[case]
    x, w, bias = make()

    with pytest.raises(kind, match=message):
        operator(x, w, workspace, bias=bias)


@pytest.mark.parametrize("operator", [ag_gemm, gemm_rs, gemm_ar])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"block_m": 128}, "must be a megascale_kernels.Config or None, got dict"),
        (Config(kernel="hoper"), "kernel is 'hoper'"),
        (Config(block_n="256"), "block_n is '256'"),
        (Config(stages=0), "a size below one"),
        (Config(block_m=100), "block_m is 100, no power of two"),
        (Config(block_k=8), "block_k is 8, no power of two from 16 on"),
        (Config(lead=-1), "lead is -1, below zero"),
        (Config(splits=[]), "a field of the wrong kind"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    workspace: Workspace, operator: Callable[..., Any], config: object, words: str
) -> None:
    """Before anything is compiled or waited for, and on the CPU as on a GPU, so that a slip shows where it is made."""
    with pytest.raises(Unsupported, match=f"{operator.__name__}: .*{words}"):
        operator(ones(4, 8), ones(8, 4), workspace, config=config)


def test_a_gather_that_nobody_would_multiply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs set apart for copying are some, but not all of the multiprocessors; a scatter has no use for them."""
    monkeypatch.setattr("megascale_kernels.memory.operands.processors", lambda _: 132)
    check_config(Config(carrier="sm", comm_ctas=131), FarAway(), "ag_gemm")

    check_config(Config(carrier="sm"), FarAway(), "gemm_rs")

    with pytest.raises(Unsupported, match="comm_ctas=132 leaves none of the 132 multiprocessors"):
        check_config(Config(carrier="sm", comm_ctas=132), FarAway(), "ag_gemm")
    with pytest.raises(Unsupported, match="comm_ctas=0 has nobody who carries"):
        check_config(Config(carrier="sm"), FarAway(), "ag_gemm")


def test_a_workspace_that_is_too_small_says_which_size_is_needed(workspace: Workspace) -> None:
    """The message holds the arguments with which to make a larger one."""
    with pytest.raises(WorkspaceTooSmall, match="make it with max_rows=4096, max_gather_cols=33"):
        ag_gemm(ones(4096, 33), ones(33, 4), workspace)


def test_rows_that_cannot_be_dealt_out_are_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gemm_rs` wants M to be a multiple of the number of ranks."""
    monkeypatch.setattr(workspace, "world_size", 4)

    with pytest.raises(Unsupported, match=r"6 of \(6, 8\).*4 ranks: pad it to a multiple of 4"):
        gemm_rs(ones(6, 8), ones(8, 4), workspace)


# --- results on one rank -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [ag_gemm, gemm_rs, gemm_ar])
def test_one_rank_multiplies(workspace: Workspace, operator: Callable[..., Any]) -> None:
    """With one rank all operators are x @ w + bias, leading dimensions restored."""
    x, w, bias = torch.randn(4, 3, 8), torch.randn(5, 8).T, torch.randn(5)

    out = operator(x, w, workspace, bias=bias)

    assert out.shape == (4, 3, 5)
    torch.testing.assert_close(out, x @ w + bias)


@pytest.mark.parametrize("operator", [ag_gemm, gemm_rs, gemm_ar])
@pytest.mark.parametrize("progress", [False, True])
def test_autocast_changes_nothing(group: None, operator: Callable[..., Any], *, progress: bool) -> None:  # noqa: ARG001 - it must be there
    """On every path the result and the gradients are of the operands' type and precision, as the kernels' are."""
    exact = Workspace(
        max_rows=64, max_gather_cols=32, max_scatter_cols=32, dtype=torch.float32, device="cpu", progress=progress
    )
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    expected = torch.autograd.grad((x @ w + bias).square().sum(), (x, w, bias))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = operator(x, w, exact, bias=bias)
        gradients = torch.autograd.grad(out.square().sum(), (x, w, bias))

    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x @ w + bias)
    torch.testing.assert_close(gradients, expected)


def test_gathered_rows_are_a_copy(workspace: Workspace) -> None:
    """Writing into what was gathered does not write into x."""
    x = torch.randn(4, 3, 8)

    _, gathered = ag_gemm(x, torch.randn(8, 5), workspace, return_gathered=True)

    torch.testing.assert_close(gathered, x)
    assert gathered.data_ptr() != x.data_ptr()


def test_progress_off_writes_nothing(group: None) -> None:  # noqa: ARG001 - it must be there
    """A workspace without progress leaves its board alone."""
    quiet = Workspace(max_rows=8, max_gather_cols=8, dtype=torch.float32, device="cpu", progress=False)

    ag_gemm(ones(4, 8), ones(8, 4), quiet)

    assert not quiet.board.any()


def test_the_board_of_the_caller_is_written(group: None) -> None:  # noqa: ARG001 - it must be there
    """A board that the caller gave holds the header of the last call."""
    board = torch.zeros(board_format.PROGRESS_WORDS, dtype=torch.int32)
    shown = Workspace(max_rows=8, max_scatter_cols=8, dtype=torch.float32, device="cpu", progress=board)

    gemm_rs(ones(4, 8), ones(8, 4), shown)

    assert board[0] == board_format.PROGRESS_MAGIC
    assert board_format.OPERATORS[int(board[3])] == "gemm_rs"


# --- which path ----------------------------------------------------------------------------------------------------


class FarAway:
    """What the choice of a path looks at, of a workspace on a GPU that is not here."""

    device = torch.device("cuda", 0)
    world_size, rank = 4, 1
    dtype = torch.bfloat16
    memory = torch.zeros(1, dtype=torch.int32)  # tensors are compared with where this lies
    deadline_s = 30.0
    planned = Planned()

    def plan(self, _key: object, make: Callable[[], object]) -> object:
        """Nothing is kept."""
        return make()

    class layout:  # noqa: N801 - an attribute of the workspace
        """Room for anything."""

        data_bytes = 2**40


WHY = {
    (16, 8, 8): ((9, 0), None),
    (0, 8, 8): ((9, 0), "nothing to multiply"),
    (16, 8, 12): ((9, 0), "gemm_ar: rows of x have 12 elements, which is no multiple of 16 bytes"),
    (16, 12, 8): ((9, 0), "gemm_ar: rows of w have 12 elements"),
    (32, 8, 8): ((8, 0), "compute capability 8.0 and the kernels need 9.0"),
}


@pytest.mark.parametrize("operator", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("shape", WHY)
def test_the_serial_path_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], operator: str
) -> None:
    """What the kernels cannot serve is known from what all ranks share; two operators widen such rows."""
    capability, reason = WHY[shape]
    only, _, words = (reason or "").rpartition(": ")
    reason = words if only in ("", operator) else ""
    m, n, k = shape
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = Weight(torch.empty(k, n, device="meta"), is_nk=False, k_size=k, n_size=n)

    why = dispatch._why_serial(Call(operator, m, n, k), weight, FarAway())

    assert reason in why if reason else why is None


def test_rows_that_end_badly_are_widened_by_zeros() -> None:
    """The TMA unit reads rows of whole 16 bytes; a product with zeros is what it was."""
    matrix = torch.randn(3, 13).bfloat16()

    wide = dispatch.readable(matrix, FarAway())

    assert wide.shape == (3, 16)
    assert torch.equal(wide[:, :13], matrix)
    assert not wide[:, 13:].any()


def test_rows_that_grow_beyond_the_workspace_stay_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that was made for the rows as they are has no room for wider ones."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(FarAway.layout, "data_bytes", 16 * 13 * 2)
    weight = Weight(torch.empty(13, 8, device="meta"), is_nk=False, k_size=13, n_size=8)

    why = dispatch._why_serial(Call("ag_gemm", 16, 8, 13), weight, FarAway())

    assert why == "rows of x, widened to 16 elements, do not fit into the workspace"


def test_the_reason_is_said_once_at_debug_level(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each shape and reason, however often it is called."""
    dispatch._say_once.cache_clear()
    caplog.set_level(logging.DEBUG, "megascale_kernels")

    for _ in range(3):
        ag_gemm(ones(4, 8), ones(8, 4), workspace)
    gemm_rs(ones(4, 8), ones(8, 4), workspace)

    assert caplog.messages == [
        "ag_gemm(M 4, N 4, K 8): serial path because the tensors are on the cpu",
        "gemm_rs(M 4, N 4, K 8): serial path because the tensors are on the cpu",
    ]


@pytest.mark.parametrize("has_own", [False, True])
def test_a_kernel_gets_what_it_can_read(monkeypatch: pytest.MonkeyPatch, *, has_own: bool) -> None:
    """A tensor that begins off a 16-byte boundary is moved; the gathered rows are copied out, own rows filled in.

    Where the launch brought its own rows among the others, they are not written a second time.
    """
    seen: dict[str, Any] = {}

    class Planned:
        """A launch that notes what it is given."""

        has_own: bool

        def run(self, x: torch.Tensor, matrix: torch.Tensor, *_: object) -> int:
            """Nothing runs."""
            seen.update(x=x, matrix=matrix)
            return 0

        def gathered(self, x: torch.Tensor, _slot: int) -> torch.Tensor:
            """What a gather of nothing leaves."""
            return torch.zeros(FarAway.world_size, *x.shape, dtype=x.dtype)

    def planned(_x: torch.Tensor, weight: Weight, *_: object, own: bool) -> Planned:
        seen.update(is_nk=weight.is_nk, own=own)
        return Planned()

    Planned.has_own = has_own
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(importlib.import_module("megascale_kernels.ag_gemm.launch"), "planned", planned)
    x = torch.arange(33, dtype=torch.bfloat16)[1:].view(4, 8)
    w = torch.ones(8, 8, dtype=torch.bfloat16)

    out, gathered = dispatch.ag_gemm(x, w.T, FarAway(), None, Config(), gathered=True)

    assert out.shape == (16, 8)
    assert seen["x"].data_ptr() % 16 == 0
    assert torch.equal(seen["x"], x)
    assert seen["is_nk"]
    assert seen["matrix"].is_contiguous()
    assert seen["own"]
    assert torch.equal(gathered[4:8], torch.zeros_like(x) if has_own else x)
    assert not gathered[:4].any()
