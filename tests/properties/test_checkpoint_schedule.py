# SPDX-License-Identifier: Apache-2.0
"""Whatever ranks need of whatever files: each file is read once, in bounded company, and all is delivered."""

from collections import Counter, defaultdict
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.checkpoint import plan
from megascale_ops.checkpoint.loading import ranges, schedule
from megascale_ops.checkpoint.loading.landing import Landing, LandingField
from megascale_ops.checkpoint.loading.schedule import Transfer, Unreadable
from tests.matrix import some

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)


@given(RANGES, st.integers(0, 5), st.integers(0, 60), st.integers(0, 60))
def test_joined_ranges_cover_what_the_ranges_cover(drawn: list[ranges.Range], gap: int, start: int, stop: int) -> None:
    """Byte by byte; without a gap nothing more, and a cut takes what lies within."""
    covered = {at for a, b in drawn for at in range(a, b)}
    exact, loose = ranges.joined(drawn), ranges.joined(drawn, gap)

    assert {at for a, b in exact for at in range(a, b)} == covered
    assert ranges.count(exact) == len(covered)
    assert covered <= {at for a, b in loose for at in range(a, b)}
    assert all(left[1] + gap < right[0] for left, right in pairwise(loose))
    assert {at for a, b in ranges.cut(exact, start, stop) for at in range(a, b)} == covered & set(range(start, stop))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], list[dict[int, tuple[ranges.Range, ...]]], list[list[int]] | None]:
    """Files, what each rank needs of them, and who can open them."""
    sizes = draw(st.lists(st.integers(1, 500), min_size=1, max_size=12))
    world_size = draw(st.integers(1, 6))
    needs = []
    for _ in range(world_size):
        files = draw(st.sets(st.integers(0, len(sizes) - 1)))
        wanted = {}
        for file in files:
            whole = draw(st.booleans())
            start = 0 if whole else draw(st.integers(0, sizes[file] - 1))
            stop = sizes[file] if whole else draw(st.integers(start, sizes[file]))
            wanted[file] = ((start, stop),) if stop > start else ()
        needs.append(wanted)
    holders = draw(
        st.none()
        | st.lists(st.lists(st.integers(0, world_size - 1), unique=True), min_size=len(sizes), max_size=len(sizes))
    )
    return sizes, needs, holders


@given(jobs(), st.integers(1, 3), st.integers(1, 100))
@settings(max_examples=some(300), deadline=None)
def test_each_file_is_read_once_by_a_rank_that_can_and_reaches_all_that_need_it(
    job: tuple[list[int], list[dict[int, tuple[ranges.Range, ...]]], list[list[int]] | None],
    at_once: int,
    block_bytes: int,
) -> None:
    """What nobody can open is told; what is not needed is not read; no rank has too many files in hand."""
    sizes, needs, holders = job
    needed = {file for wanted in needs for file, each in wanted.items() if each}

    planned = schedule.plan(sizes, needs, holders, block_bytes=block_bytes, at_once=at_once)

    assert Counter(each.file for each in planned) == Counter(needed)
    busy: defaultdict[tuple[int, int], int] = defaultdict(int)
    for each in planned:
        if isinstance(each, Unreadable):
            assert holders is not None
            assert not holders[each.file]
            continue
        needing = {rank for rank, wanted in enumerate(needs) if wanted.get(each.file)}
        assert set(each.receivers) == needing - {each.reader}
        assert holders is None or each.reader in holders[each.file]
        able = set(range(len(needs))) if holders is None else set(holders[each.file])
        assert each.reader in needing or not needing & able
        if each.to_all:
            assert len({needs[rank].get(each.file) for rank in range(len(needs))}) == 1
        for rank in needing | {each.reader}:
            if rank == each.reader or ranges.count(needs[rank][each.file]) * 16 >= sizes[each.file]:
                for number in each.rounds(sizes[each.file], block_bytes):
                    busy[rank, number] += 1
    assert max(busy.values(), default=0) <= at_once


def test_replicas_share_the_reading_and_a_rank_reads_its_own_shard_at_once() -> None:
    """Four files that all need fall to four readers; four shards of one rank each begin in the first round."""
    whole = ((0, 100),)
    shared = schedule.plan([100] * 4, [dict.fromkeys(range(4), whole)] * 4)
    scalars = [{file: whole if file == rank else ((0, 4),) for file in range(20)} for rank in range(20)]
    sharded = schedule.plan([100] * 20, scalars)

    assert sorted(each.reader for each in shared if isinstance(each, Transfer)) == [0, 1, 2, 3]
    assert all(each.to_all for each in shared if isinstance(each, Transfer))
    assert [(each.reader, each.first_round) for each in sharded if isinstance(each, Transfer)] == [
        (rank, 0) for rank in range(20)
    ]


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 5),
    part=st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 6), st.integers(1, 5)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    transposed=st.booleans(),
    block_bytes=st.integers(1, 40),
)
@settings(max_examples=some(200), deadline=None)
def test_a_part_of_a_tensor_lands_whatever_the_blocks_are(
    *, rows: int, columns: int, part: tuple[int, int, int, int], dtype: torch.dtype, transposed: bool, block_bytes: int
) -> None:
    """Rows, columns, another type, another order in memory; in pieces of any size, behind bytes of others."""
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    first_row, first_column = min(part[0], rows - 1), min(part[1], columns - 1)
    lengths = min(part[2], rows - first_row), min(part[3], columns - first_column)
    target = torch.full(lengths[::-1], -1.0, dtype=dtype).T if transposed else torch.full(lengths, -1.0, dtype=dtype)
    file = torch.cat([torch.zeros(8, dtype=torch.uint8), whole.view(torch.uint8).reshape(-1)])
    chunk = plan.Chunk((0, 0), (rows, columns), 0, 8, whole.numel() * 4)
    landing = Landing(chunk, torch.float32, (first_row, first_column), lengths, target)
    field = LandingField([landing])

    for at in range(0, file.numel(), block_bytes):
        field.put(at, file[at : at + block_bytes])

    expected = whole[first_row : first_row + lengths[0], first_column : first_column + lengths[1]]
    assert torch.equal(target, expected.to(dtype))
