# SPDX-License-Identifier: Apache-2.0
"""The ways to SwiGLU behind a product and to its gradient; on GPUs: `kernel_gated_promises`."""

from collections.abc import Iterator
from importlib import import_module

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.autotune.contest import MOST_WAYS  # noqa: E402
from megascale_kernels.dispatch import gated  # noqa: E402
from megascale_kernels.dispatch.gated import Way, ways_of  # noqa: E402
from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.swiglu import silu_times_value  # noqa: E402

WIDE, NARROW = (Config(128, columns, kernel="hopper", planned=True) for columns in (256, 128))
PIECES, TWO = Config(kernel="cublas", pieces=1), Config(kernel="cublas", pieces=2)


def fused(config: Config) -> Way:
    """The gradient taken inside this product."""
    return Way(config, is_fused=True)


def apart(config: Config) -> Way:
    """A kernel behind it."""
    return Way(config, is_fused=False)


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    """A workspace of a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Workspace(max_rows=64, max_gather_cols=32, max_scatter_cols=32, dtype=torch.float32, device="cpu")
    dist.destroy_process_group()


def test_our_kernels_fuse_it_and_the_best_of_them_does_not_have_to() -> None:
    """Each way of the product is one; the model's choice stays first, and no more take part than a contest holds."""
    configs = [WIDE, TWO, NARROW, None, PIECES]

    ways = ways_of(configs, can_fuse=True)

    assert ways == [fused(WIDE), apart(WIDE), apart(TWO), fused(NARROW), None, apart(PIECES)]
    assert len(ways) <= MOST_WAYS
    assert ways_of([TWO, WIDE], can_fuse=True) == [apart(TWO), fused(WIDE), apart(WIDE)]


def test_where_nothing_can_be_fused_the_ways_are_those_of_the_product() -> None:
    """A kernel behind each of them; the serial path stays what a contest knows by None."""
    assert ways_of([WIDE, None], can_fuse=False) == [apart(WIDE), None]
    assert ways_of([None], can_fuse=True) == [None]


def test_one_way_is_fused_where_the_model_decides() -> None:
    """Without a contest there is one way: what the model chose, fused where that is our kernel."""
    assert ways_of([NARROW], can_fuse=True) == [fused(NARROW)]
    assert ways_of([TWO], can_fuse=True) == [apart(TWO)]


@pytest.mark.parametrize(
    "wide", [torch.ones(4, 5), torch.ones(3, 6), torch.ones(4, 6, dtype=torch.float64), torch.ones(6, 4).T]
)
def test_gates_and_values_that_cannot_be_are_refused(workspace: Workspace, wide: torch.Tensor) -> None:
    """The message says what they must be, before anything is gathered."""
    with pytest.raises(Unsupported, match=r"wide must be a contiguous \[4, 6\] of torch.float32"):
        gated.gradient_in_place(torch.ones(4, 5), torch.ones(5, 3), wide, workspace)


def test_another_layout_of_the_same_call_is_planned_anew(workspace: Workspace) -> None:
    """What passed its checks is not looked at again; what differs in strides is."""
    dout, w = torch.randn(4, 5), torch.randn(5, 3)
    wide = torch.randn(4, 6)

    first, rows = gated.gradient_in_place(dout, w, wide, workspace)
    again, _ = gated.gradient_in_place(dout, w.T.contiguous().T, wide, workspace)

    torch.testing.assert_close(first, again)
    assert torch.equal(rows, dout)
    with pytest.raises(Unsupported, match="contiguous"):
        gated.gradient_in_place(dout, w, wide.T.contiguous().T, workspace)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_wanted_behind_a_product_comes_and_nothing_else(workspace: Workspace, *, keeps: bool) -> None:
    """swiglu(x w + bias), and gates, values and gathered rows where they are to be kept."""
    x, w, bias = torch.randn(4, 5), torch.randn(5, 6), torch.randn(6)

    found = gated.product_and_swiglu(x, w, bias, workspace, keeps_wide=keeps, gathered=keeps)

    torch.testing.assert_close(found.act, silu_times_value(x @ w + bias))
    assert (found.wide is not None, found.rows is not None) == (keeps, keeps)
    if found.wide is not None and found.rows is not None:
        torch.testing.assert_close(found.wide, x @ w + bias)
        assert torch.equal(found.rows, x)


def test_a_product_that_is_no_pairs_is_refused(workspace: Workspace) -> None:
    """The message says what its weight must be."""
    with pytest.raises(Unsupported, match=r"must be \[K, 2 F\], columns of gates and then of values, got \(5, 7\)"):
        gated.product_and_swiglu(torch.ones(4, 5), torch.ones(5, 7), None, workspace, keeps_wide=False, gathered=False)


class Launched:
    """A launch that computes what our kernel would, and notes what it was given."""

    has_own = False

    def __init__(self, *given: object, own: bool) -> None:
        self.given, self.own = given, own

    def run(
        self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, bias: torch.Tensor, wide: torch.Tensor | None
    ) -> int:
        """Store gates and values where there is room for them, and swiglu of them."""
        product = x @ matrix.T + bias
        out.copy_(silu_times_value(product))
        if wide is not None:
            wide.copy_(product)
        return 1

    def gathered(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        """The rows, ours missing."""
        assert slot == 1
        return torch.zeros(1, *x.shape)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_fused_way_gives_what_the_ways_apart_give(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, *, keeps: bool
) -> None:
    """Our kernel is told where to store gates and values, or that nobody wants them; our own rows are filled in."""
    made: list[Launched] = []

    def planned(*given: object, own: bool) -> Launched:
        made.append(Launched(*given, own=own))
        return made[-1]

    monkeypatch.setattr(import_module("megascale_kernels.ag_gemm.launch"), "planned_swiglu", planned)
    x, w, bias = torch.randn(4, 8), torch.randn(16, 8).T, torch.randn(16)
    apart_found = gated.product_and_swiglu(x, w, bias, workspace, keeps_wide=keeps, gathered=keeps)
    assert not made
    plans = workspace.planned.plans
    keys = [key for key in plans if isinstance(key, tuple) and key[0] == "ag_gemm, swiglu" and x.shape in key]
    for key in keys:
        monkeypatch.setitem(plans, key, plans[key]._replace(way=fused(WIDE)))

    found = gated.product_and_swiglu(x, w, bias, workspace, keeps_wide=keeps, gathered=keeps)

    assert made[0].own == keeps
    assert (made[0].given[3] is None) != keeps
    for one, other in zip(found, apart_found, strict=True):
        torch.testing.assert_close(one, other)
