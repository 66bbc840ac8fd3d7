# SPDX-License-Identifier: Apache-2.0
"""Which tokens, which keys, which tiles: the arithmetic that the attention kernels stand on, by counting."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.attention import ranges, sdpa  # noqa: E402
from megascale_kernels.attention.launch import Gather, K, V  # noqa: E402
from megascale_kernels.attention.problem import Problem  # noqa: E402
from megascale_kernels.attention.sharding import positions_of, shard_sequence, unshard_sequence  # noqa: E402
from megascale_kernels.attention.tile_walk import bounds_of, key_order, query_order  # noqa: E402
from megascale_kernels.bench.request import UserError  # noqa: E402
from megascale_kernels.bench.sp_attention import figures, requests  # noqa: E402
from megascale_kernels.bench.sp_attention.heads import MODELS, Case, draw  # noqa: E402
from megascale_kernels.errors import Unsupported  # noqa: E402

HERE = torch.device("cpu")
to_and_fro, place_of_tile, place_of_key_tile = (
    ranges.python(function) for function in (ranges.to_and_fro, ranges.place_of_tile, ranges.place_of_key_tile)
)
WORLDS = st.sampled_from([1, 2, 3, 4, 8])


def problem(world_size: int, chunk: int, *, halves: int = 2, causal: bool = True, varlen: bool = False) -> Problem:
    """One sequence, four heads of q, two of k."""
    return Problem(world_size, 1, halves, chunk, 4, 2, 16, causal, varlen, 0.25)


@given(WORLDS, st.integers(1, 9), st.booleans())
def test_every_token_has_one_rank(world_size: int, chunk: int, zigzag: bool) -> None:
    """Cut and put together a sequence is what it was, and positions say where each token stood."""
    sequence = torch.arange(world_size * chunk * (1 + zigzag))[None, :, None]

    shards = torch.stack([shard_sequence(sequence, rank, world_size, zigzag=zigzag) for rank in range(world_size)])

    assert torch.equal(unshard_sequence(shards, zigzag=zigzag), sequence)
    for rank in range(world_size):
        assert torch.equal(shards[rank, 0, :, 0], positions_of(rank, world_size, sequence.shape[1], zigzag=zigzag))


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    """In one sentence."""
    with pytest.raises(Unsupported, match="10 tokens are not 4 equal chunks"):
        positions_of(0, 2, 10)


@given(WORLDS, st.integers(1, 300))
def test_the_zigzag_gives_every_rank_the_same_work(world_size: int, chunk: int) -> None:
    """Under a causal mask all ranks' queries see as many keys."""
    seen = {int((positions_of(rank, world_size, 2 * world_size * chunk) + 1).sum()) for rank in range(world_size)}

    assert len(seen) == 1


@given(st.integers(1, 40), st.integers(0, 200))
def test_every_tile_is_taken_once(programs: int, tiles: int) -> None:
    """Whatever the number of programs; and two rounds of falling lengths even out to within one step."""
    taken = [to_and_fro(place, programs, tiles) for place in range(tiles)]

    assert sorted(taken) == list(range(tiles))
    if tiles == 2 * programs:
        sums = {taken[program] + taken[program + programs] for program in range(programs)}
        assert len(sums) == 1


@given(WORLDS, st.integers(1, 70), st.sampled_from([16, 32]), st.booleans(), st.sampled_from([1, 2]))
def test_tiles_are_walked_by_falling_length(
    world_size: int, chunk: int, block: int, causal: bool, halves: int
) -> None:  # fmt: skip
    """Both orders hold each tile once; queries that see more keys come first, and our own keys before the others'."""
    case = problem(world_size, chunk, halves=halves, causal=causal)
    rank = world_size - 1
    blocks = -(-chunk // block)
    nothing = bounds_of(None, case, HERE)

    queries, keys = (order(case, rank, block, nothing).tolist() for order in (query_order, key_order))

    assert sorted(queries) == list(range(case.q_heads * halves * blocks))
    assert sorted(keys) == list(range(case.kv_heads * world_size * halves * blocks))
    ends = []
    for tile in queries:
        place, half, _, _ = place_of_tile(tile, blocks, case.q_heads, halves)
        start = ranges.python(ranges.chunk_of)(rank, half, world_size) * chunk
        ends.append(start + min((place + 1) * block, chunk) if causal else case.sequence)
    assert ends == sorted(ends, reverse=True)
    parts = [place_of_key_tile(tile, blocks, world_size * halves, case.kv_heads)[1] for tile in keys]
    own = [part < halves for part in parts]
    assert own == sorted(own, reverse=True)


def test_orders_and_bounds_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences have new ones in every call: a number of the host among them would let it wait for the GPU."""
    case = problem(4, 6, varlen=True)
    ends = torch.tensor([0, 5, 9, case.sequence])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("copied from the host")

    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    bounds = bounds_of(ends, case, HERE)
    for rank in range(4):
        query_order(case, rank, 4, bounds)
        key_order(case, rank, 4, bounds)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 7), st.booleans())
def test_stretches_are_what_bounds_say(lengths: list[int], more: int, causal: bool) -> None:
    """The serial path's stretches and the kernels' tables give each query of packed sequences the same keys."""
    total = sum(lengths) + more
    chunk = -(-total // 4)
    case = problem(2, chunk, causal=causal, varlen=True)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    bounds = bounds_of(ends, case, HERE)

    for rank in range(2):
        positions = positions_of(rank, 2, case.sequence).tolist()
        seen = {}
        for row, rows, first, last in sdpa.stretches(case, rank, ends.tolist()):
            for inside in range(rows):
                seen[row + inside] = (first, last - (rows - 1 - inside) if causal else last)
        for row, position in enumerate(positions):
            begin, end = int(bounds.begin[position]), int(bounds.end[position])
            end = min(end, position + 1) if causal else end
            assert seen.get(row, (begin, begin)) == (begin, max(begin, end))


# --- copies --------------------------------------------------------------------------------------------------------


class Addresses(NamedTuple):
    """What `Gather.copies` asks of a workspace, in numbers that tell where they come from."""

    rank: int
    world_size: int
    dtype: torch.dtype = torch.bfloat16

    def need(self, *_: object) -> None:
        """All fits."""

    def data_address(self, rank: int, slot: int) -> int:
        """A million for each rank, half of one for each slot."""
        return 1_000_000 * rank + 500_000 * slot

    def flag_address(self, peer: int, slot: int, channel: int) -> int:
        """Likewise, below zero."""
        return -(1_000_000 * peer + 500_000 * slot + channel + 1)


@given(st.integers(2, 4), st.integers(1, 30), st.integers(1, 5))
def test_the_drivers_copies_fill_the_peers_slots(world_size: int, chunk: int, splits: int) -> None:
    """K and V of each rank lie where the kernel looks for them, every byte once; a flag follows the V of its piece."""
    case = problem(world_size, chunk)
    size = case.rows * case.kv_columns * 2
    for rank in range(world_size):
        workspace: Any = Addresses(rank, world_size)
        gather = Gather(case, workspace, splits)

        copies = gather.copies(1)

        for peer in set(range(world_size)) - {rank}:
            base = workspace.data_address(peer, 1)
            mine = [copy for copy in copies if 0 <= copy[2] - base < 500_000]
            for which, source in enumerate((K, V)):
                pieces = sorted((copy[0], copy[1], copy[2]) for copy in mine if copy[4] == source)
                assert [begin for begin, _, _ in pieces] == [sum(p[1] for p in pieces[:i]) for i in range(len(pieces))]
                assert sum(length for _, length, _ in pieces) == size
                start = base + which * world_size * size + rank * size
                assert all(target == start + begin for begin, _, target in pieces)
            flags = [copy[3] for copy in mine]
            assert flags == [
                flag for unit in range(gather.units) for flag in (0, workspace.flag_address(peer, 1, unit))
            ]  # fmt: skip


# --- the benchmark -------------------------------------------------------------------------------------------------


def test_operations_are_those_of_the_mask() -> None:
    """Counted pair by pair: full, causal, and packed sequences, whose sums over ranks are the whole ones."""
    heads = MODELS[0]
    each = 4 * heads.q_heads * heads.head_dim

    assert figures.flops(Case(heads, 64, causal=False), 2, backward=False) == each * 64 * 64 / 2
    assert figures.flops(Case(heads, 64), 2, backward=False) == each * (64 * 65 / 2) / 2
    packed = Case(heads, 64, segments=(10, 64))
    assert figures.flops(packed, 2, backward=False) == each * (10 * 11 / 2 + 54 * 55 / 2) / 2
    assert figures.flops(packed, 2, backward=True) == 3.5 * figures.flops(packed, 2, backward=False)


def test_drawn_cases_are_the_same_for_a_seed_and_can_be_cut() -> None:
    """And the first ones are the same whatever the count."""
    cases = draw(40, 7, 4)

    assert cases[:10] == draw(10, 7, 4)
    assert cases != draw(40, 8, 4)
    assert all(case.sequence % 8 == 0 for case in cases)
    assert all(case.problem(4).sequence == case.sequence for case in cases)
    assert {case.causal for case in cases} == {True, False}
    assert any(case.segments for case in cases)


@pytest.mark.parametrize(
    ("arguments", "seen", "words"),
    [
        ("--gpus 2", 0, "needs 2 CUDA GPUs, and torch sees 0"),
        ("--gpus 1", 1, "cut over 2 to 8 ranks"),
        ("--gpus 2 --tokens 10", 2, "positive multiples of 4"),
        ("--gpus 2 --tokens x", 2, "whole numbers"),
        ("--gpus 2 --models 9Z", 2, "choose from 8B"),
        ("--gpus 2 --seed 3", 2, "give --random COUNT too"),
        ("--gpus 2 --random 0", 2, "give a positive number"),
        ("--gpus 2 --config rows=3", 2, "choose from block_m"),
        ("--gpus 2 --config block_m=100", 2, "no power of two"),
        ("--gpus 2 --budget-s nan", 2, "must be positive numbers"),
        ("--gpus 2 --out found.csv", 2, "the CSV beside the table has that name"),
    ],
)
def test_requests_that_cannot_be_served_are_said(arguments: str, seen: int, words: str) -> None:
    """In one sentence, before a process is started."""
    with pytest.raises(UserError, match=words):
        requests.read(requests.parser().parse_args(arguments.split()), {}, seen)


def test_a_row_tells_what_follows_from_its_times() -> None:
    """What is hidden, what the gather costs, how we stand to torch; a row that failed tells why."""
    case = Case(MODELS[0], 16384, causal=False)
    row = figures.Timed(case, None, backward=False, ranks=2)._replace(
        ours_s=3.05e-3, local_s=3e-3, copies_s=0.1e-3, comm_s=0.2e-3, serial_s=3.4e-3, torch_s=3.2e-3,
        backend="cudnn",
    )  # fmt: skip

    assert row.hidden == pytest.approx(0.5)
    text = figures.text_row(row)
    assert "cudnn" in text
    assert "1.017" in text  # ours over our kernel alone
    assert "own choice" in text
    assert figures.summary([row])[0].startswith("serial / ours: 1.115")
    assert "failed: why" in figures.text_row(row._replace(note="failed: why"))
    assert figures.summary([row._replace(note="failed")]) == ["nothing was measured"]
    alone = row._replace(backward=True, local_s=float("nan"))
    assert alone.kernel_s == alone.ours_s
    assert len(figures.csv_row(row)) == len(figures.CSV_HEADING)
