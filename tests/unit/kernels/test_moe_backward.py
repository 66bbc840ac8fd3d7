# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ARG001
# (who stands for a kernel's function takes its arguments)
"""The overlapped backward of a MoE layer on emulated ranks: right for any routing, ordered, the same in every run."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.device.layout import EXPIRED, MAX_CTAS, OPERATORS  # noqa: E402
from megascale_kernels.emulate import RACE, UNDRAINED  # noqa: E402
from megascale_kernels.errors import WorkspaceTooSmall  # noqa: E402
from megascale_kernels.moe import gradient_launch  # noqa: E402
from megascale_kernels.moe.layer_steps import Step  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.moe_backwards import RanBackward, ran_backward  # noqa: E402
from tests.fakes.moe_cases import SMALL, Layer, given  # noqa: E402
from tests.matrix import wide  # noqa: E402
from tests.unit.kernels.test_moe_emulated import do_not_drain, publish_relaxed  # noqa: E402

ANEW = SMALL._replace(keep=False)
CASES = {
    "two ranks": Layer(),
    "gate and up computed anew": Layer(config=ANEW),
    "bf16, remainders everywhere": Layer((13, 21), 3, 3, 72, 40, dtype=torch.bfloat16),
    "all tokens to one expert": Layer((20, 15), 2, 2, routing="all to one"),
    "no token leaves its rank": Layer((20, 15), 2, 2, routing="ours alone", config=ANEW._replace(lead_rows=1000)),
    "pairs dropped": Layer((20, 15), 4, 3, routing="dropped"),
    "an expert twice": Layer((20, 15), 3, 3, routing="twice"),
    "experts without a token": Layer((30, 11), 2, 4, routing="few"),
    "a rank without a token": Layer((0, 17), 1, 2),
    "nobody has a token": Layer((0, 0), 1, 2, config=ANEW),
    "four ranks": Layer((6, 11, 0, 9), 2, 2, 64, 16),
    "one rank": Layer((31,), 2, 4),
    "only what is wanted": Layer((33, 6), 1, 2, config=SMALL._replace(selective=True)),
    "only what is wanted, anew": Layer((6, 17, 0, 9), 2, 2, 64, 16, "dropped", ANEW._replace(selective=True)),
    "experts cut in two": Layer((7, 5, 0, 9), 2, 2, 64, 16, "dropped", shards=2),
    "one group of three cuts all": Layer((8, 0, 11), 3, 4, 40, 24, shards=3),
}
# A second launch meets what the first has left behind. How it does is the configuration's and the ranks', who may be a
# launch ahead: these differ from others in their routing, their type or how experts are cut, and the second launch goes
# through no branch that the first has not.
ONCE = {
    "no token leaves its rank", "pairs dropped", "an expert twice", "experts without a token", "four ranks", "one rank",
    "bf16, remainders everywhere", "experts cut in two",
}  # fmt: skip
# Each road of the kernels and of the host once, by the smallest case that goes it.
EACH_ROAD = (
    "two ranks", "bf16, remainders everywhere", "no token leaves its rank", "pairs dropped", "an expert twice",
    "experts without a token", "a rank without a token", "nobody has a token", "one rank", "only what is wanted",
    "experts cut in two",
)  # fmt: skip
SCHEDULES = ("random", "round_robin", "eager")
LARGE = 1 << 16


@pytest.mark.parametrize(
    ("name", "seed"), wide([pytest.param(name, seed, id=name) for seed, name in enumerate(CASES)], keep=EACH_ROAD)
)
def test_gradients_of_any_routing_are_right_and_ordered(name: str, seed: int) -> None:
    """Layers with their backwards, two in a row, over poisoned memory: all four gradients, no unordered access."""
    launches = 1 if name in ONCE else 2
    done = ran_backward(CASES[name], launches=launches, seed=seed, schedule=SCHEDULES[seed % 3], data_bytes=LARGE)

    assert not any(done.ranks.faults())
    assert max(done.worst.values()) <= 1, done.worst
    assert done.ranks.world.findings == ()


def test_a_straggler_changes_nothing() -> None:
    """A rank that is a hundred times slower is waited for, and gradients stay right, also as captured graphs do it."""
    done = ran_backward(CASES["two ranks"], stragglers={1: 100.0}, schedule="round_robin", launches=1, counted=True)

    assert max(done.worst.values()) <= 1
    assert done.ranks.world.findings == ()


def test_bits_do_not_depend_on_the_schedule_nor_on_what_is_kept() -> None:
    """Gradients are the same, bit for bit, whoever was fast, however many programs there were.

    Gate and up are rounded once on their way through memory, kept or computed anew. In two of three runs copies are
    announced by kernels, and the device counts the launches, as in a captured graph.
    """
    layer = CASES["pairs dropped"]
    kept, other = SMALL, {"route_programs": 3, "reducers": 0}

    first = ran_backward(layer._replace(config=kept), seed=3, launches=1)
    others = [
        ran_backward(layer._replace(config=config._replace(**other)), seed=seed, launches=1, ctas=5, counted=True)
        for config, seed in ((kept, 8), (ANEW, 9))
    ]

    assert SMALL.keep
    for second in others:
        for one, other_rank in zip(first.found[0], second.found[0], strict=True):
            assert all(torch.equal(one[name], other_rank[name]) for name in one)


@pytest.mark.parametrize("operator", ["moe_dispatch_backward", "moe_gather"])
def test_lost_tokens_are_named(operator: str) -> None:
    """Who waits gives up after the deadline and says for whom and in which launch; all ranks stop."""
    order = ("moe_route", "moe_dispatch", "moe_combine", "moe_dispatch_backward", "moe_combine_backward", "moe_gates",
             "moe_gather")  # fmt: skip
    launch = 1 + order.index(operator)
    drops = {"left": 1}

    def drop(notify) -> bool:
        is_it = (notify.target, notify.source, notify.stamp >> 12) == (1, 0, launch) and notify.channel == 1
        lost = is_it and drops["left"] > 0
        drops["left"] -= lost
        return bool(lost)

    done = ran_backward(CASES["all tokens to one expert"], launches=1, drop=drop, data_bytes=LARGE)

    faults = done.ranks.faults()
    assert faults[1]["code"] == EXPIRED.value
    assert faults[1]["peer"] == 0
    assert OPERATORS[faults[1]["operator"]] == operator
    is_last = operator == order[-1]  # whoever has got all of it has ended, and is told at its next launch
    assert is_last or faults[0], "the other rank was not told"


@triton.jit
def await_nothing(channel, known, needed, units, role, tile):
    """`walk.await_units` that does not wait."""
    return 0, needed


@triton.jit
def take_it_as_come(channel, index, source, role, tile):
    """`primitives.consumer_tile_wait` that does not wait."""
    return 0


def kinds(done: RanBackward) -> set[str]:
    """The kinds of findings."""
    return {finding.kind for finding in done.ranks.world.findings}


@pytest.mark.parametrize(
    ("place", "name", "broken", "kind"),
    [
        ("moe.kernels.gradient_kernels", "await_units", await_nothing, RACE),
        ("moe.kernels.gradient_kernels", "consumer_tile_wait", take_it_as_come, RACE),
        ("device.primitives", "publish", publish_relaxed, RACE),
        ("moe.kernels.combine_kernel", "drain_tma_stores", do_not_drain, UNDRAINED),
    ],
)  # fmt: skip
def test_broken_synchronisation_is_found(place, name, broken, kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the race detector sees backwards that do not wait, release or drain."""
    monkeypatch.setattr(f"megascale_kernels.{place}.{name}", broken)

    assert kind in kinds(ran_backward(CASES["two ranks"], launches=1, seed=2))


@pytest.mark.parametrize("counted", [True, False])
def test_tokens_are_gathered_again_behind_their_announcements(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels announce copies none may have to run beside programs that fill the device; products run beside."""
    order: list[str] = []
    monkeypatch.setattr(EmulatedRanks, "run", lambda ranks: order.extend(ranks.called(0)))
    ran_backward(CASES["two ranks"], launches=1, counted=counted)

    joins = {name: order[order.index(name) - 1] == "join" for name in ("gather_kernel", "dispatch_kernel")}

    assert joins == {"gather_kernel": counted, "dispatch_kernel": False}
    assert order.count("join") == 3  # of the forward's dispatch, the backward's, and the gather
    assert order.count("announce_kernel") == (3 * SMALL.splits if counted else 0)


def test_programs_that_talk_to_ranks_have_a_line_of_the_board() -> None:
    """Also on a device with more multiprocessors than a board has lines for twice of them."""
    ranks = EmulatedRanks(1, torch.float16, data_bytes=LARGE, channels=300, ctas=148)
    layer = Layer((31,), 2, 4)
    mine = given(layer, 0)[0]

    def host(workspace) -> list[int]:
        start = gradient_launch.Given(*mine, mine.x)
        back = gradient_launch.planned_backward(start, mine.x, mine.gates, layer.sizes, workspace, layer.config)
        return [step.grid for step in vars(back).values() if isinstance(step, Step) and step.operator]

    grids = ranks.call(host)[0]
    assert len(grids) == 4
    assert max(grids) == MAX_CTAS


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is launched, with the sizes."""
    with pytest.raises(WorkspaceTooSmall, match="2 x 60 tokens"):
        ran_backward(Layer((60, 60)), launches=1, data_bytes=4096)
