# SPDX-License-Identifier: Apache-2.0
"""A plan is made at the first call of a kind and serves exactly the calls of that kind."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels import reference  # noqa: E402
from megascale_kernels.dispatch import collectives, dispatch, serial  # noqa: E402
from megascale_kernels.errors import KernelError, Unsupported, WorkspaceTooSmall  # noqa: E402
from megascale_kernels.launching.native import Launcher  # noqa: E402
from megascale_kernels.memory import planned  # noqa: E402
from megascale_kernels.memory import workspace as workspaces  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.torch_api.operators import ag_gemm, gemm_ar, gemm_rs  # noqa: E402

X, W, BIAS = torch.ones(4, 8), torch.ones(6, 8).T, torch.ones(6)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def workspace() -> Workspace:
    """Room for 16 rows of 8 elements."""
    return Workspace(max_rows=16, max_gather_cols=8, max_scatter_cols=8, dtype=torch.float32, device="cpu")


def routes(workspace: Workspace) -> int:
    """How many kinds of calls a workspace has planned for."""
    return len(workspace.planned.plans)


def test_calls_of_a_kind_are_checked_and_planned_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passed a check once has passed it: another tensor of the same kind asks nothing again."""
    checked = []
    check = dispatch._checked
    monkeypatch.setattr(dispatch, "_checked", lambda *given: checked.append(given[-1]) or check(*given))

    for _ in range(3):
        ag_gemm(torch.randn(4, 8), torch.randn(6, 8).T, workspace)

    assert checked == ["ag_gemm"]
    assert routes(workspace) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(5, 8)}, {"w": torch.ones(7, 8).T}, {"w": torch.ones(8, 6)}, {"bias": BIAS},
        {"config": Config(block_m=64)}, {"return_gathered": True},
    ],
    ids=["rows", "columns", "layout", "bias", "configuration", "gathered rows"],
)  # fmt: skip
def test_a_call_of_another_kind_has_a_plan_of_its_own(workspace: Workspace, other: dict[str, object]) -> None:
    """Whatever a plan depends on tells kinds apart, and each gives its own right result."""
    ag_gemm(X, W, workspace)

    given = {"x": X, "w": W, **other}
    out = ag_gemm(given.pop("x"), given.pop("w"), workspace, **given)  # type: ignore[arg-type]  # of the right kinds

    assert routes(workspace) == 2
    result = out[0] if isinstance(out, tuple) else out
    assert torch.equal(result, torch.full_like(result, 9.0 if "bias" in other else 8.0))


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.ones(8, 4).T, W, "x of shape .4, 8. has strides .1, 4.: call .contiguous"),
        (X, torch.ones(6, 16)[:, ::2].T, "neither it nor its transpose is contiguous"),
        (X.double(), W.double(), "x is torch.float64, the workspace was made for torch.float32"),
        (X, W.double(), "w is torch.float64"),
        (X, torch.ones(7, 6), "x has 8 columns, so w must be .8, N."),
    ],
)
def test_a_plan_does_not_serve_what_no_longer_fits(
    workspace: Workspace, x: torch.Tensor, w: torch.Tensor, message: str
) -> None:
    """Sizes that passed before, with other strides or another type, are refused as at a first call."""
    ag_gemm(X, W, workspace)

    with pytest.raises(Unsupported, match=message):
        ag_gemm(x, w, workspace)
    assert routes(workspace) == 1


def test_a_plan_belongs_to_one_workspace() -> None:
    """A smaller workspace refuses what a larger one has planned for."""
    large, small = (
        Workspace(max_rows=rows, max_gather_cols=columns, dtype=torch.float32, device="cpu")
        for rows, columns in ((2048, 8), (2, 1))
    )
    x = torch.ones(2048, 8)
    ag_gemm(x, W, large)

    with pytest.raises(WorkspaceTooSmall, match="make it with max_rows=2048"):
        ag_gemm(x, W, small)
    assert (routes(large), routes(small)) == (1, 0)


def test_a_server_whose_rows_take_every_value_does_not_grow_for_ever(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many plans all are forgotten, and made again when they are needed."""
    monkeypatch.setattr(planned, "MOST_PLANS", 3)

    for rows in (1, 2, 3, 4, 1):
        assert ag_gemm(torch.ones(rows, 8), W, workspace).shape == (rows, 6)

    assert routes(workspace) == 2


def test_what_plans_were_made_of_can_be_forgotten(workspace: Workspace) -> None:
    """After a tuning, for one: contests begin anew as well."""
    ag_gemm(X, W, workspace)
    workspace.planned.contests["a shape"] = None
    workspace.planned.free_clocks.clear()

    workspace.forget_plans()

    assert routes(workspace) == 0
    assert not workspace.planned.contests
    assert workspace.planned.free_clocks


def test_a_reset_begins_contests_anew(workspace: Workspace) -> None:
    """Ranks that met a fault at different calls have counted differently, and would not decide at the same call."""
    ag_gemm(X, W, workspace)
    workspace.planned.contests["a shape"] = None

    workspace.reset()

    assert not workspace.planned.contests
    assert routes(workspace) == 0


ROAD = ["torch_api/operators", "torch_api/autograd", "dispatch/dispatch", "{}/launch"]
AT_ITS_END = {"memory/workspace", "memory/planned"}


@pytest.mark.parametrize("operator", [ag_gemm, gemm_rs])
def test_a_call_that_is_planned_walks_down_six_files(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, operator: Callable[..., torch.Tensor]
) -> None:
    """From the operator to the driver, none of them in a room that plans, and none twice on the way."""
    launched: list[object] = []
    launch = importlib.import_module(f"megascale_kernels.{operator.__name__}.launch")
    plan = object.__new__(launch.GatherLaunch if operator is ag_gemm else launch.ScatterLaunch)
    plan.workspace, plan.stamp, plan.by_copy_engine, plan.has_own = workspace, 1, False, False
    plan.ready = ["made", "made"]
    monkeypatch.setattr(workspace, "native", Launcher(list, lambda *given: launched.append(given), list))
    monkeypatch.setattr(workspace, "_device_index", 0, raising=False)
    monkeypatch.setattr(workspace, "_side", (2, 3, 4), raising=False)
    monkeypatch.setattr(workspaces, "_stream_of", lambda _: 1)
    monkeypatch.setattr(dispatch, "overlapped", lambda *_: Config())
    key = (operator.__name__, 4, 8, 6, 8, 6, True, True) + ((True,) if operator is gemm_rs else ())
    monkeypatch.setattr(launch, "tma_can_read", lambda _: True, raising=False)
    key += (Config(), workspace.deadline_s) + (() if operator is gemm_rs else (False,))
    workspace.plan(key, lambda: plan)
    operator(X, W, workspace)
    visited: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        room = frame.f_code.co_filename.rpartition("/megascale_kernels/")[2].removesuffix(".py")
        if event == "call" and "/megascale_kernels/" in frame.f_code.co_filename and room not in visited:
            visited.append(room)

    sys.setprofile(note)
    try:
        operator(X, W, workspace)
    finally:
        sys.setprofile(None)

    assert len(launched) == 2
    assert [room for room in visited if room not in AT_ITS_END] == [file.format(operator.__name__) for file in ROAD]


def functions_called(call: Callable[[], object]) -> list[str]:
    """The functions of this package in Python that a call enters, in their order."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and "/megascale_kernels/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def no_group(collective: collectives.Collective, _group: object, name: str) -> None:
    """A collective that moves nothing."""
    collective.name, collective.own, collective.options = name, getattr(dist, name), None

    def direct(out: torch.Tensor, _rows: torch.Tensor, _options: object) -> None:
        out.zero_()

    collective.direct = direct


@pytest.mark.parametrize("name", [reference.GATHER, reference.SCATTER])
def test_a_collective_goes_straight_to_the_group_unless_someone_wants_to_see_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A recorder that has replaced torch's function, before or after the plan was made, sees each call."""
    seen: list[str] = []
    public = getattr(dist, name)
    collective = collectives.Collective(dist.group.WORLD, name)
    rows, out = torch.arange(6.0).view(3, 2), torch.zeros(3, 2)

    def noted(*given: object, **options: object) -> None:
        seen.append(name)
        public(*given, **options)

    collective(out, rows)
    assert torch.equal(out, rows)
    assert seen == []

    monkeypatch.setattr(dist, name, noted)
    for late in (collective, collectives.Collective(dist.group.WORLD, name)):
        late(out.zero_(), rows)
        assert torch.equal(out, rows)
    assert seen == [name, name]


class Settled:
    """A contest that the serial path has won."""

    decided, best = True, None


@pytest.mark.parametrize("settled", [None, Settled()], ids=["by the model", "by a contest"])
@pytest.mark.parametrize(("operator", "most"), [(ag_gemm, 10), (gemm_rs, 9), (gemm_ar, 9)])
def test_a_serial_call_on_a_gpu_is_few_steps_more_than_its_collective_and_product(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, operator: Callable[..., torch.Tensor], most: int,
    settled: Settled | None,
) -> None:  # fmt: skip
    """Where serial wins each step counts: with 25 a call took the host 1.4 to 1.5 of NCCL and cuBLAS by hand."""
    for name in ("gather_rows", "_scatter_sums"):
        monkeypatch.setattr(reference, name, lambda out, _rows, group: out.zero_())  # noqa: ARG005 - as torch's
    monkeypatch.setattr(collectives.Collective, "__init__", no_group)
    monkeypatch.setattr(dist, "all_reduce", lambda out, group: out.zero_())  # noqa: ARG005 - as torch's
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(workspace, "device", torch.device("cuda"))
    monkeypatch.setattr(workspace, "world_size", 2)
    monkeypatch.setattr(dispatch, "overlapped", lambda *_: None)
    monkeypatch.setattr(dispatch, "contest_of", lambda *_: settled)
    monkeypatch.setattr(serial, "Board", None)  # there is none to write
    plain = getattr(reference, operator.__name__)
    operator(X, W, workspace)

    steps = functions_called(lambda: operator(X, W, workspace))

    assert len(steps) <= most, steps
    assert len(steps) - len(functions_called(lambda: plain(X, W, workspace.group))) <= 7
    workspace.broken = KernelError("an earlier call failed")
    with pytest.raises(KernelError, match="an earlier call failed"):
        operator(X, W, workspace)


def test_new_code_is_compiled_once_and_ranks_meet_after_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that still compiles would let the others run into their deadline."""
    done: list[str] = []
    monkeypatch.setattr(workspace, "meet", lambda deadline_s: done.append(f"met within {deadline_s:g} s"))

    for _ in range(2):
        workspace.compile("a kernel", lambda: done.append("compiled"))

    assert done == ["compiled", "met within 600 s"]


def test_a_fault_of_the_gather_beside_is_raised_too(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather of a backward has a workspace of its own; what failed there ends calls that launch nothing."""
    beside = Workspace(max_rows=16, max_gather_cols=8, dtype=torch.float32, device="cpu")
    monkeypatch.setattr(workspace, "_beside", beside)
    workspace.raise_earlier()

    beside.broken = KernelError("a gather failed")

    with pytest.raises(KernelError, match="a gather failed"):
        workspace.raise_earlier()
