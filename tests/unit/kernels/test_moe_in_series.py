# SPDX-License-Identifier: Apache-2.0
"""A MoE layer may run in series: where that is tried, what the path cannot run, and that the times decide."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.autotune import moe_choosing, store  # noqa: E402 - after the skips
from megascale_kernels.autotune.handout import from_rank_zero, least_of_ranks  # noqa: E402
from megascale_kernels.autotune.moe_choosing import FILE, moe_contenders, moe_key  # noqa: E402
from megascale_kernels.autotune.store import Entry  # noqa: E402
from megascale_kernels.dispatch import moe_path  # noqa: E402
from megascale_kernels.errors import KernelError  # noqa: E402
from megascale_kernels.memory.planned import Planned  # noqa: E402
from megascale_kernels.moe import sync_free  # noqa: E402
from megascale_kernels.moe.assignment import MOST_WAYS, by_model, may_be_serial  # noqa: E402
from megascale_kernels.moe.moe_config import MoeConfig  # noqa: E402
from megascale_kernels.moe.tables import Sizes  # noqa: E402

from tests.fakes.ranks import together, workspaces  # noqa: E402
from tests.gpu import moe_choice_promises  # noqa: E402

H200 = ("NVIDIA H200", 132)
DEEPSEEK = Sizes(2, 4096, 6, 32, 2048, 1408)
GIB = 1 << 30
FREE_BYTES = sync_free.free_bytes
GIVEN = SimpleNamespace(grad_fn=None)  # what a layer gives


@pytest.fixture(autouse=True)
def _gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(moe_choosing, "describe", lambda _device: H200)
    monkeypatch.setattr(moe_choosing, "from_rank_zero", lambda _group, _rank, _world, said, _what: said)
    monkeypatch.setattr(sync_free, "free_bytes", lambda _device: 100 * GIB)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sync_free, "why_not", lambda sizes, rank: sync_free.why_sizes_cannot(sizes, rank.dtype))


# Of two H200 (moe_random_2gpu_h200_52711.txt): experts with 425 tokens each, 0.94 and 0.92 of the serial path.
PADDED = {"E96": Sizes(2, 6787, 3, 48, 2704, 3680), "E64": Sizes(2, 6803, 2, 32, 3200, 6800)}


@pytest.mark.parametrize("name", PADDED)
def test_layers_of_padded_tiles_are_tried_in_series(name: str) -> None:
    """As one of six ways; not where the caller insists on our kernels, nor where no grouped product serves."""
    sizes, rank = PADDED[name], workspaces(1)[0]

    found = moe_contenders(sizes, rank)
    assert found[0] == by_model(sizes)
    assert found.count(None) == 1
    assert len(found) <= MOST_WAYS
    assert None not in moe_contenders(sizes, rank, serial=False)
    rank.dtype = torch.float16
    assert None not in moe_contenders(sizes, rank)


def report(
    monkeypatch: pytest.MonkeyPatch, free: list[int], held: tuple[tuple[int, tuple[int, int], int, int], ...] = ()
) -> None:
    """Let the GPU of each rank report so many free bytes of 140 GiB, and torch's allocator what it holds.

    Args:
        monkeypatch: pytest's.
        free: bytes, by device.
        held: of each segment its device, its pool, GiB in all and in use.
    """
    total = 140 * GIB
    names = ("device", "segment_pool_id", "total_size", "active_size")
    segments = [
        dict(zip(names, (device, pool, size * GIB, used * GIB), strict=True)) for device, pool, size, used in held
    ]
    monkeypatch.setattr(sync_free, "free_bytes", FREE_BYTES)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], total))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(
        torch.cuda, "memory_reserved",
        lambda index: sum(each["total_size"] for each in segments if each["device"] == index),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)


@pytest.mark.parametrize(
    ("least", "tried"), [(100 * GIB, True), (12 * GIB, True), (10 * GIB, False), (GIB, False), (0, False)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_try_takes_a_share_of_what_is_free_on_every_rank(
    least: int, tried: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of 2.8 GiB is tried where each rank has four times as much; ranks that differ come to the same."""
    sizes, ranks = PADDED["E64"]._replace(pitch=3 * 6803), workspaces(2)
    free = [100 * GIB, 100 * GIB]
    free[rank] = least
    for each in ranks:
        each.device = torch.device("cuda", each.rank)
    report(monkeypatch, free)
    monkeypatch.setattr(moe_choosing, "from_rank_zero", from_rank_zero)
    assert 2.7 * GIB < sync_free.bytes_of(sizes) < 2.9 * GIB

    found = together([partial(moe_contenders, sizes, each) for each in ranks])

    assert found[0] == found[1]
    assert (None in found[0]) == tried
    assert ranks[0].group.store.num_keys() == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_layer_of_the_promises_on_gpus_may_run_in_series(ranks: int) -> None:
    """Among both numbers of ranks, so that a change of the model does not leave the promises without a contest."""
    on_two = moe_choice_promises.PADDED
    sizes = on_two._replace(world_size=ranks, experts=on_two.experts * on_two.world_size // ranks)

    assert may_be_serial(sizes)


def test_free_is_what_torch_holds_unused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole segments, not what is left of those in use, nor a graph's or another GPU's; no more than it may take."""
    device = torch.device("cuda", 0)
    report(monkeypatch, [GIB], ((0, (0, 0), 27, 0), (0, (0, 0), 10, 7), (0, (0, 3), 13, 0), (1, (0, 0), 50, 0)))

    assert sync_free.free_bytes(device) == 28 * GIB
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.25)
    assert sync_free.free_bytes(device) == 12 * GIB
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.1)
    assert sync_free.free_bytes(device) == 0
    report(monkeypatch, [GIB])
    assert sync_free.free_bytes(device) == GIB


def test_what_is_free_is_asked_of_the_current_gpu_where_none_is_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace on "cuda" means the current GPU, and torch tells free memory by number alone."""
    report(monkeypatch, [GIB, 3 * GIB])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    assert sync_free.free_bytes(torch.device("cuda")) == 3 * GIB


def test_a_rank_that_does_not_say_what_is_free_is_named() -> None:
    """The wait ends with a sentence; the ranks that came are not in it."""
    ranks = workspaces(3)

    with pytest.raises(KernelError, match="rank 0 waited 0 s for every rank's free memory: 1, 2 has not come"):
        least_of_ranks(ranks[0].group, 0, 3, GIB, "free memory", deadline_s=0.05)
    with pytest.raises(KernelError, match="rank 2 waited 0 s for every rank's free memory: 1 has not come"):
        least_of_ranks(ranks[2].group, 2, 3, GIB, "free memory", deadline_s=0.05)


def test_a_capture_begins_no_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the model's choice without a question to the other ranks; the first call outside of one asks."""
    asked: list[int] = []
    sizes, workspace = PADDED["E64"], workspaces(1)[0]
    workspace.adaptive, workspace.native, workspace.planned = True, object(), Planned()
    monkeypatch.setattr(sync_free, "free_bytes", lambda _: asked.append(1) or 100 * GIB)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert moe_path._contest(sizes, workspace, serial=True) is None
    assert asked == []
    assert workspace.planned.contests == {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    held = moe_path._contest(sizes, workspace, serial=True)
    assert held is not None
    assert None in held.ways
    assert asked == [1]


def test_what_a_tuning_has_found_is_not_contested() -> None:
    """Neither by the serial path where a tuning kept our kernels, nor by them where it kept that path."""
    kept = MoeConfig(chunks=1)
    for sizes, way in ((PADDED["E96"], kept), (PADDED["E64"], None)):
        environment = store.environment_key(*H200, 2, "bfloat16")
        store.write(store.cache_file(FILE), environment, moe_key(sizes), Entry(way, 1.0, 2.0))

    rank = workspaces(2)[0]
    assert moe_contenders(PADDED["E96"], rank) == [kept]
    assert moe_contenders(PADDED["E64"], rank) == [None]


@pytest.mark.parametrize(
    "sizes",
    [DEEPSEEK, Sizes(2, 4096, 8, 64, 2048, 768), Sizes(4, 2048, 4, 16, 2048, 1408), Sizes(2, 698, 1, 4, 1600, 656)],
)
def test_layers_with_a_sure_lead_are_not_tried_in_series(sizes: Sizes) -> None:
    """Measured leads of 1.16 to 1.64: a turn of the serial path would be lost."""
    assert not may_be_serial(sizes)
    assert None not in moe_contenders(sizes, workspaces(1)[0])


def test_the_serial_path_says_what_it_cannot_run() -> None:
    """Types, widths and numbers that its kernels don't take, and rows for which there would be no room."""
    sizes = PADDED["E64"]

    assert sync_free.why_sizes_cannot(sizes, torch.bfloat16) == ""
    assert sync_free.bytes_of(sizes) == 2 * 13606 * 3200 + 2 * 27212 * (3200 + 2 * 6800)
    for changed, dtype, words in (
        (sizes, torch.float16, "takes bfloat16"), (sizes._replace(hidden=3204), torch.bfloat16, "H 3204"),
        (sizes._replace(inner=12), torch.bfloat16, "I 12"), (sizes._replace(pitch=0), torch.bfloat16, "no token"),
        (sizes._replace(experts=1 << 15), torch.bfloat16, "32768 experts"),
        (sizes._replace(top_k=65), torch.bfloat16, "a token 65"),
        (sizes._replace(pitch=10 * sizes.pitch), torch.bfloat16, "are the most allowed"),
    ):  # fmt: skip
        assert words in sync_free.why_sizes_cannot(changed, dtype)


@pytest.mark.parametrize("best", [None, "kernels"])
def test_a_layer_goes_the_way_that_its_contest_found(best: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In series when times say so, on our kernels when they don't; `fused=True` has a contest without that way."""
    ran: list[tuple[bool, bool | None]] = []
    held: list[list[MoeConfig | None]] = []
    sizes = PADDED["E64"]._replace(world_size=1, pitch=13606, experts=64)

    class Held:
        def __init__(self, found: list[MoeConfig | None], _: object, **__: object) -> None:
            held.append(found)
            self.best = None if best is None and None in found else found[0]

        def begin(self) -> MoeConfig | None:
            return self.best

        def end(self, node: object) -> None:
            assert node is None

    def run(*_: object, config: MoeConfig | None, fused: bool | None, **__: object) -> SimpleNamespace:
        ran.append((config is None, fused))
        return GIVEN

    monkeypatch.setattr("megascale_kernels.autotune.contest.Contest", Held)
    monkeypatch.setattr(moe_path.experts, "serves", lambda *_: True)
    monkeypatch.setattr(moe_path.experts, "sizes_of", lambda *_: sizes)
    monkeypatch.setattr(moe_path.experts, "moe_experts", run)
    workspace = workspaces(1)[0]
    workspace.adaptive, workspace.native, workspace.planned = True, object(), Planned()

    for fused in (None, True, None):
        moe_path.moe_experts(*(None,) * 5, workspace, fused=fused)

    ours = (True, False) if best is None else (False, None)
    assert ran == [ours, (False, True), ours]
    assert [None in found for found in held] == [True, False]
