# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ARG001
# (kernels: their types are Triton's to infer; who stands for another takes its arguments)
"""A mixture of experts on emulated ranks: right for any routing, ordered by more than luck, whatever the schedule."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device import signals  # noqa: E402
from megascale_kernels.device.layout import EXPIRED, OPERATORS  # noqa: E402
from megascale_kernels.emulate import RACE, UNDRAINED, events  # noqa: E402
from megascale_kernels.errors import Unsupported, WorkspaceTooSmall  # noqa: E402
from megascale_kernels.moe import tables  # noqa: E402
from megascale_kernels.moe.moe_config import MoeConfig  # noqa: E402

from tests.fakes.moe_cases import SMALL, TILE_ROWS, Given, Layer  # noqa: E402
from tests.fakes.moe_layers import Ran, ran  # noqa: E402
from tests.matrix import wide  # noqa: E402

CASES = {
    "two ranks": Layer(),
    "bf16, remainders everywhere": Layer((13, 21), 3, 3, 72, 40, dtype=torch.bfloat16),
    "all tokens to one expert": Layer((20, 15), 2, 2, routing="all to one"),
    "no token leaves its rank": Layer((20, 15), 2, 2, routing="ours alone", config=SMALL._replace(lead_rows=1000)),
    "pairs dropped": Layer((20, 15), 4, 3, routing="dropped"),
    "an expert twice": Layer((20, 15), 3, 3, routing="twice"),
    "experts without a token": Layer((30, 11), 2, 4, routing="few"),
    "a rank without a token": Layer((0, 17), 1, 2),
    "nobody has a token": Layer((0, 0), 1, 2),
    "eight experts of a token": Layer((12, 11), 8, 4),
    "four ranks": Layer((6, 11, 0, 9), 2, 2, 64, 16),
    "columns in chunks, no reducer": Layer((12, 31), 2, 2, 200, 16, config=SMALL._replace(chunks=3, reducers=0)),
    "our own before what peers wait for": Layer((12, 31), 2, 2, 200, 16, config=SMALL._replace(chunks=3, mixes=True)),
    "one rank": Layer((31,), 2, 4),
    "only what is wanted": Layer((33, 18), 1, 2, config=SMALL._replace(selective=True)),
    "one unit, four ranks": Layer((6, 17, 0, 9), 2, 2, 64, 16, "dropped", SMALL._replace(splits=None)),
    "only what is wanted, four ranks": Layer((6, 17, 0, 9), 2, 2, 64, 16, "dropped", SMALL._replace(selective=True)),
    "experts cut in two": Layer((7, 5, 0, 9), 2, 2, 64, 16, "dropped", shards=2),
    "one group of three cuts all": Layer((8, 0, 11), 3, 4, 40, 24, shards=3),
}
# Each road of the two launches once, by the smallest case that goes it. Gradients (`test_moe_backward`) begin with the
# same launches, and are wrong where these have put a token elsewhere: other routings are left to them.
EACH_ROAD = (
    "two ranks", "no token leaves its rank", "pairs dropped", "nobody has a token", "columns in chunks, no reducer",
    "our own before what peers wait for",
    "only what is wanted", "one unit, four ranks", "experts cut in two",
)  # fmt: skip
SCHEDULES = ("random", "round_robin", "eager")
LARGE = 1 << 16


@pytest.mark.parametrize(
    ("name", "seed"),
    wide([pytest.param(name, seed, id=name) for seed, name in enumerate(CASES)], keep=EACH_ROAD),
)
def test_any_routing_is_right_and_ordered(name: str, seed: int) -> None:
    """Two layers in a row over poisoned memory: every element right, no unordered access, no fault."""
    done = ran(CASES[name], seed=seed, schedule=SCHEDULES[seed % 3], data_bytes=LARGE)

    assert not any(done.ranks.faults())
    assert done.worst <= 1
    assert done.ranks.world.findings == ()


def test_a_straggler_changes_nothing() -> None:
    """A rank that is a hundred times slower is waited for, and the numbers stay right."""
    done = ran(CASES["two ranks"], stragglers={1: 100.0}, schedule="round_robin")

    assert done.worst <= 1
    assert done.ranks.world.findings == ()


def test_bits_do_not_depend_on_the_schedule() -> None:
    """Tables and outputs are the same, bit for bit, whoever was fast and however many programs there were."""
    config = SMALL._replace(half_rows=0)  # which row tiles come last is meant to depend on the number of programs
    layer = CASES["pairs dropped"]._replace(config=config)

    first = ran(layer, seed=3, launches=1)
    second = ran(layer._replace(config=config._replace(route_programs=3, reducers=0)), seed=8, launches=1, ctas=5)

    for one, other in zip(first.outs[0], second.outs[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(first.launches[0], second.launches[0], strict=True):
        for table in ("rows", "pair_row", "pair_gate", "tiles"):
            assert torch.equal(getattr(one.buffers.routing, table), getattr(other.buffers.routing, table))


def wanted_rows(given: list[Given], layer: Layer, rank: int) -> list[list[int]]:
    """The pairs of each of a rank's experts, as source * pitch + token, in the order that tables promise."""
    pitch, ranks = layer.sizes.pitch, len(layer.tokens)
    rows: list[list[int]] = [[] for _ in range(layer.experts)]
    for step in range(ranks):
        source = (rank + step) % ranks
        for token, chosen in enumerate(given[source].ids.tolist()):
            for expert in chosen:
                if expert // layer.experts == rank and expert >= 0:
                    rows[expert % layer.experts].append(source * pitch + token)
    return rows


@pytest.mark.parametrize(
    "name",
    wide(
        ["bf16, remainders everywhere", "pairs dropped", "four ranks", "all tokens to one expert"],
        keep=["pairs dropped", "all tokens to one expert"],
    ),
)
def test_tables_say_what_they_promise(name: str) -> None:
    """Rows by expert, rank and token; padding; tiles of an expert in the lead or behind it, each row in one tile."""
    layer = CASES[name]
    done = ran(layer, launches=1, data_bytes=LARGE)

    for rank, plan in enumerate(done.launches[0]):
        routing = plan.buffers.routing
        count, lead = routing.head[: tables.LEAD_TILES + 1].tolist()
        found: dict[int, list[int]] = {expert: [] for expert in range(layer.experts)}
        listed = [
            (expert, row + (place - first) * TILE_ROWS, end)
            for place, (expert, row, end, first, *_) in enumerate(routing.tiles[:count].tolist())
        ]
        listed = [(expert, row, min(end - row, TILE_ROWS)) for expert, row, end in listed]
        for expert, row, valid in sorted(listed, key=lambda tile: tile[1]):
            here = routing.rows[row : row + TILE_ROWS].tolist()
            assert row % TILE_ROWS == 0
            assert here[valid:] == [-1] * (TILE_ROWS - valid)
            found[expert] += here[:valid]
        assert list(found.values()) == wanted_rows(done.given[0], layer, rank)
        sources = [
            {token // layer.sizes.pitch for token in routing.rows[row : row + valid].tolist()}
            for _, row, valid in listed[:lead]
        ]
        assert all(source == {rank} for source in sources)
        few = [valid <= layer.config.half_rows for _, _, valid in listed]
        columns = -(-layer.inner // layer.config.block_n)
        wanted = -(-(count * columns % plan.dispatch.grid) // columns)
        late = wanted if wanted <= sum(few[lead:]) else 0
        assert all(few[count - late :])
        assert [expert for expert, *_ in listed[lead : count - late]] == sorted(
            expert for expert, *_ in listed[lead : count - late]
        )
        stretches = Counter(tile[3] for tile in routing.tiles[:count].tolist())
        assert all(routing.tiles[first, 4] == height for first, height in stretches.items())


def test_no_program_waits_for_tokens_that_it_does_not_need() -> None:
    """Where no token leaves its rank, layer 0 waits for units of no peer: only for its having begun."""
    done = ran(CASES["no token leaves its rank"], launches=1, data_bytes=LARGE)

    dispatched = [event for event in done.ranks.world.events if event.what == events.WAIT and event.channel in (1, 2)]
    names = {event.peer for event in dispatched if event.value >> 12 == 2 and event.peer != event.who.rank}
    assert names == set()


def test_only_tokens_that_are_wanted_are_sent() -> None:
    """Of a rank's tokens a peer's memory gets those that have an expert there; the others' places stay as they were."""
    layer = Layer((40, 25), 1, 2, config=SMALL._replace(selective=True))
    done = ran(layer, launches=1, data_bytes=LARGE)

    for rank, peer in ((0, 1), (1, 0)):
        mine = done.given[0][peer]
        slot = done.ranks.world.data(rank, 0, (2, layer.sizes.pitch, layer.hidden), layer.dtype, 0)[peer]
        arrived = (slot[: len(mine.x)] == mine.x).all(dim=1)
        assert torch.equal(arrived, (mine.ids // layer.experts == rank).any(dim=1))


def test_a_lost_announcement_of_tokens_is_named() -> None:
    """The program that waits gives up after the deadline and says for whom; all ranks stop, none is left waiting."""
    drops = {"left": 1}

    def drop(notify) -> bool:
        lost = (notify.channel, notify.target, notify.source, notify.stamp >> 12) == (1, 1, 0, 2) and drops["left"] > 0
        drops["left"] -= lost
        return bool(lost)

    done = ran(CASES["all tokens to one expert"], launches=1, drop=drop)

    faults = done.ranks.faults()
    assert faults[1]["code"] == EXPIRED.value
    assert faults[1]["peer"] == 0
    assert OPERATORS[faults[1]["operator"]] == "moe_dispatch"
    assert faults[0], "the other rank was not told"


@triton.jit
def do_not_wait(channel, flag_ptr, role, tile, peer, index):
    """`signals.wait_for` that looks, and goes on whatever it saw."""
    tl.atomic_add(flag_ptr, 0, sem="relaxed", scope="sys")
    return 0


@triton.jit
def do_not_drain():
    """`signals.drain_tma_stores` that does nothing."""


@triton.jit
def publish_relaxed(channel, flag_ptr):
    """`signals.publish` without the release."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="relaxed", scope="sys")


def kinds(done: Ran) -> set[str]:
    """The kinds of findings."""
    return {finding.kind for finding in done.ranks.world.findings}


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the race detector sees layers that do not wait."""
    from megascale_kernels.device import primitives

    monkeypatch.setattr(primitives, "wait_for", do_not_wait)

    assert RACE in kinds(ran(CASES["two ranks"], launches=1, seed=2))


def test_a_missing_release_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: and layers whose flags release nothing."""
    from megascale_kernels.device import primitives

    monkeypatch.setattr(primitives, "publish", publish_relaxed)

    assert RACE in kinds(ran(CASES["two ranks"], launches=1, seed=2))


def test_a_missing_drain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: and tiles that are counted before TMA has written them."""
    from megascale_kernels.moe.kernels import combine_kernel

    monkeypatch.setattr(combine_kernel, "drain_tma_stores", do_not_drain)

    assert UNDRAINED in kinds(ran(CASES["two ranks"], launches=1, seed=2))


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is launched, with the sizes."""
    with pytest.raises(WorkspaceTooSmall, match="2 x 60 tokens"):
        ran(Layer((60, 60)), launches=1, data_bytes=4096)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chunks": 0}, "chunks=0"), ({"block_n": 48}, "block_n=48"), ({"reducers": -1}, "reducers=-1"),
        ({"kernel": "cuda"}, "'triton' or 'hopper'"), ({"kernel": "hopper", "block_n": 64}, "kernel='hopper'"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_run_is_named(wrong: dict[str, object], said: str) -> None:
    """The message names the field."""
    with pytest.raises(Unsupported, match=said):
        MoeConfig(**wrong).check()  # type: ignore[arg-type]


def test_the_lead_covers_the_transfer() -> None:
    """No lead for one rank; a longer one for more tokens; as told where it is told."""
    sizes = tables.Sizes(2, 4096, 8, 64, 2048, 768)

    def lead(sizes: tables.Sizes, config: MoeConfig = MoeConfig()) -> int:  # noqa: B008 (it is immutable)
        rows = config.resolved(sizes).lead_rows
        assert rows is not None
        return rows

    assert lead(sizes._replace(world_size=1)) == 0
    assert lead(sizes) < lead(sizes._replace(pitch=8192))
    assert lead(sizes, MoeConfig(lead_rows=5)) == 5
    assert MoeConfig().resolved(sizes).chunks == 2


def test_signals_are_what_is_mutated() -> None:
    """The controls above replace names that the kernels really call."""
    from megascale_kernels.device import primitives
    from megascale_kernels.moe.kernels import combine_kernel

    assert primitives.wait_for is signals.wait_for
    assert primitives.publish is signals.publish
    assert combine_kernel.drain_tma_stores is signals.drain_tma_stores
