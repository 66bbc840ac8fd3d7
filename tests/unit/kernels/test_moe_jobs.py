# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, N803
# (kernels: their types are Triton's to infer, and compile-time arguments are written in capitals)
"""Who takes which job of layer 1 next: each once, what peers wait for first, and never so that ranks wait in a ring."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import EPOCH, OPERATORS, layout, signature  # noqa: E402
from megascale_kernels.device.primitives import producer_tile_notify  # noqa: E402
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch  # noqa: E402
from megascale_kernels.emulate import Launch, World  # noqa: E402
from megascale_kernels.moe.kernels.combine_kernel import STAGE_DONE, count_jobs, next_job  # noqa: E402
from megascale_kernels.moe.tables import HEAD_WORDS, TOKENS_OF  # noqa: E402

OPERATOR = OPERATORS.index("moe_combine")
TOKENS = 8  # of a job
CHUNKS = 3


@triton.jit
def take_all(
    head, out, done, few, mixes, counts,
    control, peers, status, board, flags, channels, slot, rank, world_size, signature, deadline_us,
    OPERATOR: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, EPOCH: tl.constexpr,
) -> None:  # fmt: skip
    """Take jobs until there is none and write them down; chunks below `done` are multiplied, of `few` none is left.

    With `mixes` every second program takes our own first.
    """
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    publish_launch(channel, 0, 0, 0, 0)
    for chunk in range(done):
        producer_tile_notify(channel, STAGE_DONE + 2 * chunk)
    of_chunk, own, chunks = count_jobs(channel, head, CHUNKS, 1, TOKENS)
    chunks -= few
    here = out + tl.program_id(0) * CHUNKS * of_chunk
    own_first = mixes & (1 - tl.program_id(0) % 2)
    job, sent, added = next_job(channel, head, chunks * 0, chunks * 0, chunks, of_chunk, own, own_first)
    taken = chunks * 0
    while job >= 0:
        tl.store(here + taken, job)
        taken += 1
        job, sent, added = next_job(channel, head, sent, added, chunks, of_chunk, own, own_first)
    tl.store(counts + tl.program_id(0), taken)
    finish_launch(channel, tl.num_programs(0), 0)


def taken(
    tokens: list[int], done: int = 0, *, few: int = 0, mixes: int = 0, programs: int = 1, seed: int = 0
) -> list[list[str]]:
    """By program the jobs that rank 0 takes, as "p0" (a peer's tokens, chunk 0) or "o0" (our own).

    Args:
        tokens: of each rank.
        done: so many chunks are multiplied before the first job is taken, and no other.
        few: so many last chunks are not taken.
        mixes: 1 where the first program and every second takes what is left of our own first.
        programs: that take jobs.
        seed: of the schedule.
    """
    world = World(layout(len(tokens), channels=32, data_bytes=4096), seed=seed)
    head = torch.zeros(HEAD_WORDS, dtype=torch.int32)
    head[TOKENS_OF : TOKENS_OF + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    jobs = [-(-count // TOKENS) for count in tokens]
    own, of_chunk = jobs[0], sum(jobs)
    out = torch.full((programs, CHUNKS * of_chunk), -1, dtype=torch.int32)
    counts = torch.zeros(programs, dtype=torch.int32)
    common = (
        world.words[0], world.peers[0], world.status[0], world.board(0), world.layout.flags(1), world.layout.channels,
        1, 0, len(tokens), signature(OPERATOR, 1, 0, 0, 0), world.deadline_us,
    )  # fmt: skip
    constants = {"OPERATOR": OPERATOR, "CHUNKS": CHUNKS, "TOKENS": TOKENS, "EPOCH": EPOCH}
    world.launch([Launch(0, take_all, programs, (head, out, done, few, mixes, counts, *common), constants)])

    def name(job: int) -> str:
        chunk, inner = divmod(job, of_chunk)
        return f"{'p' if inner < of_chunk - own else 'o'}{chunk}"

    numbers = [row[:count].tolist() for row, count in zip(out, counts.tolist(), strict=True)]
    assert sorted(job for row in numbers for job in row) == list(range((CHUNKS - few) * of_chunk))  # each once
    return [[name(job) for job in row] for row in numbers]


def runs(names: list[str]) -> list[str]:
    """The same without repetitions."""
    return [name for at, name in enumerate(names) if not at or names[at - 1] != name]


@pytest.mark.parametrize(
    ("done", "order"),
    [
        # Nothing beyond a chunk is there: what is left of our own comes before a wait for the next chunk's tiles.
        (1, ["p0", "o0", "p1", "o1", "p2", "o2"]),
        (2, ["p0", "p1", "o0", "o1", "p2", "o2"]),
        # All is multiplied: what peers wait for first.
        (3, ["p0", "p1", "p2", "o0", "o1", "o2"]),
    ],
)
def test_what_peers_wait_for_comes_first_where_its_tiles_are_done(done: int, order: list[str]) -> None:
    """And while they are not our own tokens' earlier chunks are added up."""
    assert runs(*taken([20, 30], done)) == order


def test_our_own_come_first_where_it_is_asked_for() -> None:
    """As soon as all jobs of their chunk's peers are taken, whatever is multiplied."""
    for done in range(1, CHUNKS + 1):
        assert runs(*taken([20, 30], done, mixes=1)) == ["p0", "o0", "p1", "o1", "p2", "o2"]


def test_the_last_chunk_is_left_to_others() -> None:
    """Who is slow takes none of it."""
    assert runs(*taken([20, 30], 3, few=1)) == ["p0", "p1", "o0", "o1"]
    assert taken([20, 30], 3, few=3) == [[]]


def test_a_rank_by_itself_and_one_without_tokens() -> None:
    """A queue that holds nothing is passed over, and its counter stays."""
    assert runs(*taken([20], 3)) == ["o0", "o1", "o2"]
    assert runs(*taken([0, 9], 1)) == ["p0", "p1", "p2"]
    assert runs(*taken([9, 0, 0], 1)) == ["o0", "o1", "o2"]
    assert taken([0, 0], 3) == [[]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mixes", [0, 1])
def test_programs_share_them_and_take_no_own_job_before_the_peers_of_its_chunk(seed: int, mixes: int) -> None:
    """By any schedule: no two ranks wait for each other with all that they have."""
    for names in taken([33, 20, 41], seed % (CHUNKS + 1), mixes=mixes, programs=4, seed=seed):
        for chunk in range(CHUNKS):
            own = [at for at, name in enumerate(names) if name == f"o{chunk}"]
            peers = [at for at, name in enumerate(names) if name == f"p{chunk}"]
            assert not own or not peers or max(peers) < min(own)
