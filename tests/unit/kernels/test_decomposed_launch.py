# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401, ARG002
# (Triton has no types; who stands for another takes its arguments)
"""What an operator in pieces hands to the driver: copies before or behind products, waits, and one join at the end."""

from importlib import import_module
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.launching.native import Launcher  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks, EmulatedWorkspace  # noqa: E402
from tests.fakes.launched import prepared  # noqa: E402
from tests.fakes.products import Case  # noqa: E402

RANK, ITEM = 1, 2  # bytes of an element


class Made(NamedTuple):
    """Copies, a kernel with its arguments by name, or a product of cuBLAS's with its operands."""

    copies: tuple[tuple[int, int, int, int], ...] = ()
    kernel: str = ""
    given: Any = None
    here: bool = False
    shape: Any = None


class Planned:
    """A cuBLAS that plans every product."""

    def product(self, shape: Any, x: Any, w: Any, out: Any, bias: int = -1) -> Made:
        """Write it down."""
        return Made(shape=shape, given=(x, w, out, bias))


class Driven(EmulatedWorkspace):
    """A workspace whose launches the driver makes: they are written down, and so are products."""

    def __init__(self, ranks: EmulatedRanks, rank: int) -> None:
        super().__init__(ranks, rank)
        self.native = Launcher(list, lambda *_: None, list)
        self.done: list[Any] = []
        self.calls = 0

    def next_slot(self) -> int:
        """The other one."""
        self.slot ^= 1
        self.launches += 1
        return self.slot

    def launch_at(self, made: Any, signature: int, *addresses: int, join: bool) -> None:
        """Write down each; the join comes behind the last."""
        assert isinstance(made, tuple)
        for number, one in enumerate(made):
            self.done.append((one, addresses, join and number == len(made) - 1))
        self.calls += 1

    def data_address(self, rank: int, slot: int) -> int:
        """Ranks and slots lie far apart."""
        return (rank * 2 + slot + 1) << 20

    def flag_address(self, peer: int, slot: int, channel: int) -> int:
        """Small numbers are flags."""
        return peer * 100 + slot * 10 + channel


def driven(
    operator: str, case: Case, monkeypatch: pytest.MonkeyPatch, *, planned: bool = False, **options: bool
) -> tuple[Driven, Any, Any]:
    """One launch of rank 1 with its operands and output; `planned`: cuBLAS plans its products; options of the plan."""
    room = import_module(f"megascale_kernels.{operator}.decomposed")
    workspace: Any = Driven(EmulatedRanks(case.ranks, case.dtype), RANK)
    workspace.products = Planned() if planned else None

    def ready(_native: Any, kernel: Any, arguments: Any, _constants: Any, _grid: Any, _sources: Any) -> Made:
        return Made(kernel=kernel.__name__, given=dict(zip(kernel.arg_names, arguments, strict=False)))

    def multiply(out: Any, x: Any, w: Any, bias: Any = None) -> None:
        workspace.done.append(("product", x.shape[0]))
        torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)

    monkeypatch.setattr(room, "ready", ready)
    monkeypatch.setattr(room, "copies_alone", lambda _native, copies, here=False: Made(copies=tuple(copies), here=here))
    monkeypatch.setattr(room, "matmul_into", multiply)
    monkeypatch.setattr(room, "processors", lambda _: 3, raising=False)
    given, outs = prepared(operator, case, seed=1)
    mine, out = given[RANK], outs[RANK]
    launch = import_module(f"megascale_kernels.{operator}.launch")
    launch.planned(mine.x, mine.weight, out, mine.bias, workspace, case.config, **options).run(
        mine.x, mine.weight.matrix, out, mine.bias
    )
    return workspace, mine, out


def steps(workspace: Driven) -> list[str]:
    """What was done, in words."""
    words = []
    for one in workspace.done:
        if one[0] == "product":
            words.append(f"{one[1]} rows")
            continue
        made, _, join = one
        if made.shape is not None:
            what = f"{made.shape.m} rows planned"
        elif made.copies:
            what = "own rows" if made.here else f"{len(made.copies)} copies"
        else:
            what = made.kernel.partition("_")[0]
        words.append(f"{what}, join" if join else what)
    return words


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (None, ["3 copies", "20 rows", "await", "20 rows", "await", "20 rows", "await, join", "20 rows"]),
        (2, ["3 copies", "20 rows", "await, join", "40 rows", "20 rows"]),
        (1, ["3 copies", "own rows", "await, join", "80 rows"]),
    ],
)
def test_a_gather_multiplies_what_is_there(
    pieces: int | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of four: its rows go out first; two runs of rows where the others' pass the last rank."""
    case = Case(4, 20, 40, 24, config=Config(kernel="cublas", pieces=pieces))

    workspace, mine, out = driven("ag_gemm", case, monkeypatch)

    assert steps(workspace) == expected
    copies = workspace.done[0][0].copies
    size = 20 * 24 * ITEM
    assert copies == tuple(
        (0, size, workspace.data_address(peer, 1) + RANK * size, workspace.flag_address(peer, 1, 0))
        for peer in (0, 3, 2)  # the nearest reader first
    )
    waits = [one[0].given for one in workspace.done if one[0] != "product" and one[0].kernel]
    covered = [step for wait in waits for step in range(wait["first"], wait["last"])]
    assert covered == [1, 2, 3]
    own = out[RANK * 20 : RANK * 20 + 20]
    if pieces != 1:
        assert torch.equal(own, mine.x @ mine.weight.matrix.T)


@pytest.mark.parametrize("pieces", [None, 2, 1])
def test_a_gather_whose_rows_are_kept_brings_its_own_behind_the_peers(
    pieces: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy more, which nothing announces; with one piece they are there anyway."""
    case = Case(4, 20, 40, 24, config=Config(kernel="cublas", pieces=pieces))
    without, _, _ = driven("ag_gemm", case, monkeypatch)

    workspace, _, _ = driven("ag_gemm", case, monkeypatch, own=True)

    size = 20 * 24 * ITEM
    more = () if pieces == 1 else ((0, size, workspace.data_address(RANK, 1) + RANK * size, 0),)
    own = workspace.local(1, (4, 20, 24))[RANK].data_ptr()
    copies = [(*copy[:2], workspace.data_address(RANK, 1) + RANK * size if copy[2] == own else copy[2], copy[3])
              for copy in workspace.done[0][0].copies]  # fmt: skip
    assert tuple(copies) == (*without.done[0][0].copies, *more)
    assert steps(workspace)[1:] == steps(without)[1:]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (None, ["20 rows", "1 copies", "20 rows", "1 copies", "20 rows", "1 copies", "20 rows", "add, join"]),
        (2, ["40 rows", "2 copies", "20 rows", "1 copies", "20 rows", "add, join"]),
        (1, ["80 rows", "3 copies", "add, join"]),
    ],
)
def test_a_scatter_sends_what_it_owes_before_its_own_rows(
    pieces: int | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of four: every peer gets its rows into the slot that is rank 1's there, and the sum comes last."""
    case = Case(4, 20, 40, 24, config=Config(kernel="cublas", pieces=pieces))

    workspace, _, out = driven("gemm_rs", case, monkeypatch)

    assert steps(workspace) == expected
    copies = [copy for one in workspace.done if one[0] != "product" for copy in one[0].copies]
    size, pitch = 20 * 40 * ITEM, 832 * ITEM  # 800 elements, from one multiple of 64 to the next
    assert sorted(copies, key=lambda copy: copy[3]) == sorted(
        (
            (first, size, workspace.data_address(owner, 1) + (RANK - owner - 1) % 4 * pitch, owner * 100 + 10)
            for owner, first in zip(
                (2, 3, 0), [2 * size, 3 * size, 0] if pieces == 1 else [0, size, 2 * size], strict=True
            )
        ),
        key=lambda copy: copy[3],
    )
    made, (partial, own, target, *_), _ = workspace.done[-1]
    assert target == out.data_ptr()
    assert own == (partial + RANK * size if pieces == 1 else target)
    assert made.given["slot_elements"] * ITEM == pitch
    assert made.given["size"] == 800


@pytest.mark.parametrize("pieces", [None, 2, 1])
def test_planned_products_make_a_gather_one_call(pieces: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps in the same order, all the driver's, and the join behind them; each product reads what came."""
    case = Case(4, 20, 40, 24, config=Config(kernel="cublas", pieces=pieces))
    told, _, _ = driven("ag_gemm", case, monkeypatch)

    workspace, mine, out = driven("ag_gemm", case, monkeypatch, planned=True)

    planned = [word.replace(" planned", "") for word in steps(workspace)]
    assert [word.replace(", join", "") for word in planned] == [word.replace(", join", "") for word in steps(told)]
    assert workspace.calls == 1
    assert [word.endswith("join") for word in planned] == [False] * (len(planned) - 1) + [True]
    assert workspace.done[0][1] == (mine.x.data_ptr(), mine.weight.matrix.data_ptr(), out.data_ptr(), 0)
    gathered = workspace.local(1, (4 * 20, 24)).data_ptr()
    products = [one[0] for one in workspace.done if one[0].shape is not None]
    rows = []
    for made in products:
        x, w, into, bias = made.given
        assert (w.source, w.first, bias, into.source) == (1, 0, -1, 2)
        begin = into.first // (40 * ITEM)
        rows += range(begin, begin + made.shape.m)
        mine_alone = x.source == 0
        assert x.first == (0 if mine_alone else gathered + begin * 24 * ITEM)
        assert mine_alone == (pieces != 1 and begin == RANK * 20)
    assert sorted(rows) == list(range(80))


@pytest.mark.parametrize("pieces", [None, 2, 1])
def test_planned_products_make_a_scatter_one_call(pieces: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise; what a peer is owed lies where the copies read, and our own rows where the sum reads."""
    case = Case(4, 20, 40, 24, config=Config(kernel="cublas", pieces=pieces))
    told, _, _ = driven("gemm_rs", case, monkeypatch)

    workspace, mine, out = driven("gemm_rs", case, monkeypatch, planned=True)

    assert [word.replace(" planned", "") for word in steps(workspace)] == steps(told)
    assert workspace.calls == 1
    _, (partial, own, target, bias, x_at, w_at), _ = workspace.done[-1]
    assert (target, bias, x_at, w_at) == (out.data_ptr(), 0, mine.x.data_ptr(), mine.weight.matrix.data_ptr())
    assert own == (partial + RANK * 20 * 40 * ITEM if pieces == 1 else target)
    covered = []
    for made in (one[0] for one in workspace.done if one[0].shape is not None):
        x, w, into, _ = made.given
        assert (x.source, w.source) == (4, 5)
        begin = x.first // (24 * ITEM)
        covered += range(begin, begin + made.shape.m)
        assert into.source == (2 if begin == RANK * 20 and pieces != 1 else 0)
    assert sorted(covered) == list(range(80))
