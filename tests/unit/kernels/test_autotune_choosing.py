# SPDX-License-Identifier: Apache-2.0
"""Choosing: cheap, the same on all ranks, and serial where nothing better is known."""

from functools import partial
from pathlib import Path

import pytest
from megascale_kernels.autotune import choosing, store
from megascale_kernels.autotune.choosing import Question, choose, open_table
from megascale_kernels.autotune.handout import from_rank_zero
from megascale_kernels.autotune.store import Entry
from megascale_kernels.errors import KernelError
from megascale_kernels.planning import cost_model
from megascale_kernels.planning.config import Config

from tests.fakes.ranks import together, workspaces

H200 = ("NVIDIA H200", 132)


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(choosing, "describe", lambda _device: H200)


def remember(operator: str, m: int, n: int, k: int, config: Config | None, world_size: int = 4) -> None:
    """Put a choice into the file."""
    environment = store.environment_key(*H200, world_size, "bfloat16")
    store.write(store.cache_file(), environment, store.entry_key(operator, m, n, k), Entry(config, 1.0, 2.0))


def test_all_ranks_choose_what_rank_0_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read by rank 0 alone; what it holds, and what it does not, is answered alike everywhere."""
    tuned = Config(block_n=128, stages=3)
    remember("ag_gemm", 8192, 7168, 8192, tuned)
    remember("gemm_rs", 8192, 8192, 7168, None)
    reads: list[str] = []
    monkeypatch.setattr(
        store, "read", lambda path, environment, real=store.read: reads.append(environment) or real(path, environment)
    )
    ranks = workspaces(4)

    answers = together([
        partial(lambda rank: [choose("ag_gemm", 8192, 7168, 8192, rank), choose("gemm_rs", 8192, 8192, 7168, rank),
                              choose("ag_gemm", 4096, 7168, 8192, rank)], rank)
        for rank in ranks
    ])  # fmt: skip

    assert all(answer == answers[0] for answer in answers)
    assert answers[0][:2] == [tuned, None]
    assert answers[0][2] is not None
    assert len(reads) == 1


def test_a_choice_holds_for_its_bucket_of_rows() -> None:
    """What was tuned at M 8192 serves M 7000, not M 6000."""
    tuned = Config(block_n=128, stages=3)
    remember("ag_gemm", 8192, 7168, 8192, tuned, world_size=2)
    first, second = workspaces(2)

    answers = together([partial(choose, "ag_gemm", 7000, 7168, 8192, rank) for rank in (first, second)])

    assert answers == [tuned, tuned]
    assert choose("ag_gemm", 6000, 7168, 8192, first) != tuned


def test_the_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes later does not split ranks that have begun."""
    first, second = workspaces(2)
    before = together([partial(choose, "ag_gemm", 8192, 7168, 8192, rank) for rank in (first, second)])

    remember("ag_gemm", 8192, 7168, 8192, Config(block_m=64), world_size=2)
    remember("ag_gemm", 64, 7168, 8192, Config(block_m=64), world_size=2)

    assert choose("ag_gemm", 8192, 7168, 8192, first) == before[0]
    assert choose("ag_gemm", 64, 7168, 8192, first) == choose("ag_gemm", 64, 7168, 8192, second)
    monkeypatch.setattr(choosing, "default", lambda *_: pytest.fail("asked the model again"))
    choose("ag_gemm", 64, 7168, 8192, first)


def test_a_later_call_is_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the path of every operator: nothing is opened, asked or decided again, no key is spelt."""
    first, second = workspaces(2)
    decided, _ = together([partial(choose, "ag_gemm", 8192, 7168, 8192, rank) for rank in (first, second)])

    for place, name in ((choosing, "open_table"), (choosing.Table, "decide"), (store, "entry_key")):
        monkeypatch.setattr(place, name, lambda *_, name=name: pytest.fail(f"{name} was called"))

    assert choose("ag_gemm", 8192, 7168, 8192, first) is decided


def test_an_unknown_gpu_takes_the_serial_path_unless_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody measured it, so nothing is promised; a tuning is believed."""
    monkeypatch.setattr(choosing, "describe", lambda _device: ("NVIDIA X1", 99))
    first, second = workspaces(2)

    assert together([partial(choose, "ag_gemm", 8192, 7168, 8192, rank) for rank in (first, second)]) == [None, None]
    open_table(first).learn(Question("ag_gemm", 8192, 7168, 8192), Config())
    assert choose("ag_gemm", 8192, 7168, 8192, first) == Config()


def test_one_rank_has_nothing_to_overlap() -> None:
    """Alone, the product is cuBLAS's."""
    assert choose("ag_gemm", 8192, 7168, 8192, workspaces(1)[0]) is None


def test_large_products_overlap_by_default() -> None:
    """Where the model promises a gain on a known GPU, the kernels run without any tuning."""
    first, second = workspaces(2)

    answers = together([partial(choose, "gemm_rs", 8192, 8192, 14336, rank) for rank in (first, second)])

    assert answers[0] is not None
    assert answers[0] == answers[1]


def test_few_rows_on_a_rank_take_the_serial_path() -> None:
    """256 rows on a rank pay, on two ranks as on four; with fewer, communication is latency alone."""
    assert choosing.default("gemm_rs", 512, 8192, 3584, 2, cost_model.H200) is not None
    assert choosing.default("ag_gemm", 512, 14336, 8192, 2, cost_model.H200) is not None
    assert choosing.default("ag_gemm", 1024, 7168, 8192, 4, cost_model.H200) is not None

    assert choosing.default("gemm_rs", 508, 8192, 3584, 2, cost_model.H200) is None
    assert choosing.default("ag_gemm", 512, 7168, 8192, 4, cost_model.H200) is None


@pytest.mark.parametrize(
    ("ranks", "m", "n", "k", "columns"),
    [(2, 1024, 1376, 4096, 128), (2, 8192, 1376, 4096, 128), (2, 512, 14336, 8192, 128), (2, 2048, 6144, 12288, 256),
     (2, 4096, 3696, 8192, 256), (2, 512, 14784, 8192, 256), (2, 8192, 5504, 4096, 256), (2, 8192, 26624, 16384, 256),
     (4, 2048, 3584, 4096, 128), (4, 4096, 1792, 4096, 128), (4, 2048, 3696, 8192, 128), (4, 8192, 2752, 4096, 256),
     (4, 2048, 7168, 8192, 256), (4, 8192, 3584, 8192, 256)],
)  # fmt: skip
def test_a_gather_follows_its_timetable(ranks: int, m: int, n: int, k: int, columns: int) -> None:
    """With the tile that was the faster one there by two percent at least, or an equal; among four in rehearsal."""
    best = choosing.default("ag_gemm", m, n, k, ranks, cost_model.H200)

    assert best is not None
    assert best.planned
    assert best.block_n == columns


def test_short_gathers_among_four_ranks_are_doubted() -> None:
    """7B and 8B at TP8's size, M 1024: foretold 64 us, rehearsed 70; the serial path took 68 and 71."""
    for n in (1376, 1792):
        assert choosing.default("ag_gemm", 1024, n, 4096, 4, cost_model.H200) is None
    assert choosing.default("ag_gemm", 2048, 1376, 4096, 4, cost_model.H200) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [(512, 4096, 1376, 128), (1024, 4096, 1792, 128), (512, 12288, 6144, 128), (1024, 8192, 3584, 128),
     (4096, 4096, 1376, 128), (2048, 8192, 3584, 256), (512, 8192, 14336, 256), (8192, 4096, 1792, 256)],
)  # fmt: skip
def test_between_two_ranks_a_short_scatter_has_narrow_tiles(m: int, n: int, k: int, columns: int) -> None:
    """The faster of the two where they were measured, also where the serial path was the choice before."""
    best = choosing.default("gemm_rs", m, n, k, 2, cost_model.H200)

    assert best is not None
    assert best.block_n == columns


@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [(512, 4096, 1376, 128), (2048, 4096, 1376, 128), (4096, 4096, 1376, 128), (1024, 8192, 3584, 128),
     (512, 12288, 6144, 128), (4480, 4096, 1792, 128), (2048, 8192, 3584, 256), (4096, 12288, 6144, 256),
     (640, 8192, 11264, 256), (608, 16384, 6656, 256), (15360, 5120, 2176, 256)],
)  # fmt: skip
def test_among_four_ranks_a_short_scatter_has_narrow_tiles(m: int, n: int, k: int, columns: int) -> None:
    """The faster of the two where they were measured (beside_gemm_rs_4gpu_h200.txt, random_gemm_rs_4gpu_h200_*)."""
    assert choosing.likely("gemm_rs", m, n, k, 4, cost_model.H200).block_n == columns


def test_a_short_scatter_in_narrow_tiles_among_four_ranks_is_little_doubted() -> None:
    """Measured on four H200: 0.094 ms for serial's 0.113, 0.045 for 0.066; in the other two serial was faster."""
    for m, n, k in ((1024, 5120, 4352), (1024, 4096, 1376)):
        best = choosing.default("gemm_rs", m, n, k, 4, cost_model.H200)
        assert best is not None
        assert best.block_n == 128
    for m, n, k in ((1152, 8192, 6144), (1320, 8192, 24576)):
        assert choosing.default("gemm_rs", m, n, k, 4, cost_model.H200) is None


def test_a_shard_that_comes_in_parts_is_walked_part_by_part() -> None:
    """7B at TP8's size, M 4096: halves in groups of eight row blocks took 93 us where the whole took 103."""
    best = choosing.default("ag_gemm", 4096, 1376, 4096, 2, cost_model.H200)

    assert best is not None
    assert (best.block_n, best.splits, best.group_m) == (128, 2, 8)


def test_only_gathers_have_a_timetable() -> None:
    """On any number of ranks; a scatter has none."""
    for operator, ranks, is_planned in (("ag_gemm", 8, True), ("gemm_rs", 2, False), ("gemm_rs", 8, False)):
        best = choosing.default(operator, 8192, 3584, 8192, ranks, cost_model.H200)
        assert best is not None
        assert best.planned == is_planned


def test_a_rank_0_that_does_not_come_is_named() -> None:
    """The wait ends with a sentence, not with the job."""
    late = workspaces(2)[1]

    with pytest.raises(KernelError, match="rank 1 waited 0 s for rank 0's choice of kernels"):
        from_rank_zero(late.group, 1, 2, "", "choice of kernels", deadline_s=0.05)


def test_what_was_handed_round_is_cleared_away() -> None:
    """After the last rank has read, the store holds nothing of it; the next text has a name of its own."""
    ranks = workspaces(3)
    for text in ("one", "two"):
        said = [text, "", ""]
        heard = together([
            partial(from_rank_zero, rank.group, rank.rank, 3, said[rank.rank], "choice") for rank in ranks
        ])  # fmt: skip

        assert heard == [text] * 3
    assert ranks[0].group.store.num_keys() == 0


def test_the_memory_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose M takes every value does not grow for ever."""
    monkeypatch.setattr(choosing, "MOST_REMEMBERED", 10)
    workspace = workspaces(1)[0]

    for m in range(1, 50):
        choose("ag_gemm", m, 7168, 8192, workspace)

    assert len(open_table(workspace).answers) <= 10
