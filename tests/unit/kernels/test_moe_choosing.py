# SPDX-License-Identifier: Apache-2.0
"""How a MoE layer runs is chosen: the same on all ranks, remembered in a file, steady under skew, repeatable."""

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.autotune import choosing, moe_choosing, moe_tuning, store  # noqa: E402 - after the skips
from megascale_kernels.autotune.moe_choosing import (  # noqa: E402
    FILE,
    choose_moe,
    moe_contenders,
    moe_key,
    open_moe_table,
    read_moe_config,
)
from megascale_kernels.autotune.moe_tuning import complaint, parser, sizes_of, steadiest, tune_moe  # noqa: E402
from megascale_kernels.autotune.store import Entry  # noqa: E402
from megascale_kernels.autotune.timing import Measured  # noqa: E402
from megascale_kernels.dispatch import moe_path  # noqa: E402
from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.memory.planned import Planned  # noqa: E402
from megascale_kernels.moe import experts, sync_free  # noqa: E402
from megascale_kernels.moe.assignment import (  # noqa: E402
    MOST_WAYS,
    busiest_rows,
    by_model,
    even_shares,
    flags_of,
    layer_s,
    likely_ways,
    mean_s,
    wanted_share,
    ways,
)
from megascale_kernels.moe.moe_config import MoeConfig  # noqa: E402
from megascale_kernels.moe.skewed import SKEWS  # noqa: E402
from megascale_kernels.moe.tables import Sizes  # noqa: E402

from tests.fakes.ranks import FakeGroup, together, workspaces  # noqa: E402

H200 = ("NVIDIA H200", 132)
DEEPSEEK = Sizes(2, 4096, 6, 32, 2048, 1408)
MIXTRAL = Sizes(2, 8192, 2, 4, 4096, 14336)
ODD = MoeConfig(chunks=3, lead_rows=77, splits=2)


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCALE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (choosing, moe_choosing):
        monkeypatch.setattr(module, "describe", lambda _device: H200)
    monkeypatch.setattr(sync_free, "why_not", lambda sizes, rank: sync_free.why_sizes_cannot(sizes, rank.dtype))


def remember(sizes: Sizes, config: MoeConfig | None) -> None:
    """Put a choice into the file."""
    environment = store.environment_key(*H200, sizes.world_size, "bfloat16")
    store.write(store.cache_file(FILE), environment, moe_key(sizes), Entry(config, 1.0, 2.0))


def test_shares_have_the_skew_that_is_asked_for() -> None:
    """COMET's three, without a draw; a rank's busiest experts have more rows the more uneven, and none is lost."""
    for std in SKEWS:
        share = even_shares(64, std)
        assert sum(share) == pytest.approx(1)
        assert torch.tensor(share).double().std(correction=0) == pytest.approx(std, abs=1e-3)
    rows = [sum(busiest_rows(DEEPSEEK, std)) for std in SKEWS]
    assert rows[0] == pytest.approx(DEEPSEEK.pairs / 2)
    assert rows == sorted(rows)


def test_the_model_knows_what_costs_what() -> None:
    """One chunk hides no sums and many cost; skew costs; programs that only add up are missing where tiles are."""
    default = MoeConfig().resolved(MIXTRAL)
    assert layer_s(MIXTRAL, default, 0.0) < layer_s(MIXTRAL, default._replace(chunks=1), 0.0)
    assert layer_s(DEEPSEEK, MoeConfig(chunks=2).resolved(DEEPSEEK), 0.0) < layer_s(
        DEEPSEEK, MoeConfig(chunks=8).resolved(DEEPSEEK), 0.0
    )
    assert layer_s(MIXTRAL, default, 0.05) > layer_s(MIXTRAL, default, 0.0)
    plain = MoeConfig(kernel="triton").resolved(MIXTRAL)
    times = {count: layer_s(MIXTRAL, plain._replace(reducers=count), 0.0) for count in (0, 8, 64)}
    assert times[8] < times[64]
    # What was measured on two H200 (moe_2gpu_h200.txt): layer 0 and 1 took 4.47 and 10.07 ms, the model 4.8 and 9.5.
    assert layer_s(MIXTRAL, default, 0.0) == pytest.approx(10.07e-3, rel=0.15)


@pytest.mark.parametrize("name", ["shifted", "cut", "staggered"])
def test_how_tiles_are_dealt_and_counted_may_be_asked_for(name: str) -> None:
    """Unless they are told not to, by False or a command's 0; what plain Triton does not have is refused there."""
    assert getattr(MoeConfig().resolved(DEEPSEEK), name) is True
    for no in (False, 0):
        assert getattr(MoeConfig(**{name: no}).resolved(DEEPSEEK), name) is False  # type: ignore[arg-type]
    plain = MoeConfig(kernel="triton")
    assert getattr(plain.resolved(DEEPSEEK), name) is (name == "shifted")
    plain.resolved(DEEPSEEK).check()
    if name != "shifted":
        with pytest.raises(Unsupported, match=f"{name}=True"):
            plain._replace(**{name: True}).check()


@pytest.mark.parametrize("name", ["follows", "early"])
def test_how_launches_meet_may_be_asked_for(name: str) -> None:
    """With the warp-specialised kernels unless they are told not to; with plain Triton only if they are told to."""
    assert getattr(MoeConfig().resolved(DEEPSEEK), name) is True
    for no in (False, 0):
        assert getattr(MoeConfig(**{name: no}).resolved(DEEPSEEK), name) is False  # type: ignore[arg-type]
    plain = MoeConfig(kernel="triton")
    assert getattr(plain.resolved(DEEPSEEK), name) is False
    asked = plain._replace(**{name: True}).resolved(DEEPSEEK)
    asked.check()
    assert getattr(asked, name) is True


# Of two H200 (moe_ways_small_2gpu_h200.txt), sizes; whether one unit was faster than four by more than 1 %, one chunk
# than two, and no lead at all than what covers the whole transfer.
SMALL = {
    "T 6,624": (Sizes(2, 3312, 2, 8, 2352, 1200), True, False, False),
    "T 9,000": (Sizes(2, 4500, 2, 8, 1392, 816), True, True, False),
    "T 3,058": (Sizes(2, 1529, 2, 8, 1200, 2096), True, True, True),
    "T 1,396": (Sizes(2, 698, 2, 8, 1600, 656), True, True, True),
    "T 12,000": (Sizes(2, 6000, 2, 8, 3264, 1536), True, False, False),
    "T 3,368": (Sizes(2, 1684, 2, 8, 4064, 2848), False, False, None),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_layers_between_two_ranks_run_as_was_faster(name: str) -> None:
    """By the model, not by a list: its defaults are what their table says."""
    sizes, one_unit, one_chunk, no_lead = SMALL[name]
    before = MoeConfig(early=False, splits=4, chunks=2).resolved(sizes)

    found = MoeConfig().resolved(sizes)

    assert found.splits == (1 if one_unit else 4)
    assert found.chunks == (1 if one_chunk else 2)
    assert 0 <= found.lead_rows < before.lead_rows  # copies that begin early need less of it
    assert no_lead is None or (found.lead_rows < 0.1 * sizes.pairs / 2) == no_lead


def test_early_copies_shorten_a_lead_between_two_ranks_alone() -> None:
    """Among four it was not measured: the lead covers the whole transfer there, and with plain Triton, too."""
    four = Sizes(4, 2048, 6, 16, 2048, 1408)
    for sizes, config, shortens in (
        (DEEPSEEK, MoeConfig(), True), (four, MoeConfig(), False), (DEEPSEEK, MoeConfig(kernel="triton"), False),
    ):  # fmt: skip
        found, late = (config._replace(early=early).resolved(sizes).lead_rows for early in (config.early, False))
        assert (found < late) == shortens, (sizes, config)
        assert found > 0


@pytest.mark.parametrize("sizes", [DEEPSEEK, MIXTRAL, Sizes(1, 100, 1, 1, 16, 16), Sizes(8, 64, 8, 16, 7168, 2048)])
@pytest.mark.parametrize("base", [None, MoeConfig(kernel="triton")])
def test_ways_are_few_and_can_run(sizes: Sizes, base: MoeConfig | None) -> None:
    """All pass the kernels' check, none comes twice, the default is first; the model's own is one of them."""
    found = likely_ways(sizes, base)

    assert 1 <= len(found) <= MOST_WAYS
    assert len(set(found)) == len(found)
    assert found[0] == (base or MoeConfig()).resolved(sizes)
    assert by_model(sizes, base) in found
    for way in ways(sizes, base):
        way.check()
        assert mean_s(sizes, way) > 0


FOUR = {  # of four H200 (moe_ways_4gpu_h200.txt): sizes, the fastest number of units, and whether what is wanted
    # alone was as fast or faster
    "Mixtral 8x7B": (Sizes(4, 2048, 2, 2, 4096, 14336), 4, False),
    "Mixtral 8x7B, twice the tokens": (Sizes(4, 4096, 2, 2, 4096, 14336), 4, False),
    "Mixtral 8x7B, half the tokens": (Sizes(4, 1024, 2, 2, 4096, 14336), 1, False),
    "Phi-3.5": (Sizes(4, 2048, 2, 4, 4096, 6400), 1, False),
    "Phi-3.5, half the tokens": (Sizes(4, 1024, 2, 4, 4096, 6400), 1, False),
    "Qwen2-MoE 2.7B": (Sizes(4, 2048, 4, 16, 2048, 1408), 1, True),
    "Qwen2-MoE 2.7B, half the tokens": (Sizes(4, 1024, 4, 16, 2048, 1408), 1, True),
    "Qwen2-MoE 2.7B, twice the tokens": (Sizes(4, 4096, 4, 16, 2048, 1408), 1, False),
    "Qwen3-30B-A3B, twice the tokens": (Sizes(4, 4096, 8, 32, 2048, 768), 1, False),
    "Mixtral 8x7B, each cut in two": (Sizes(4, 2048, 4, 4, 4096, 7168, shards=2), 4, False),
}


@pytest.mark.parametrize("name", FOUR)
def test_among_four_as_few_copies_are_made_and_sent_as_was_fastest(name: str) -> None:
    """As it was measured among four; who asks for one of both gets it, and a contest tries both."""
    sizes, units, alone = FOUR[name]

    found = MoeConfig().resolved(sizes)
    assert (found.splits, found.selective) == (units, alone)
    asked = MoeConfig(selective=not alone, splits=3).resolved(sizes)
    assert (asked.splits, asked.selective) == (3, not alone)
    first, second, *_ = likely_ways(sizes)
    assert (first.selective, second.selective) == (alone, not alone)
    assert first._replace(selective=second.selective) == second


@pytest.mark.parametrize("name", FOUR)
def test_between_two_ranks_all_tokens_are_sent(name: str) -> None:
    """In four units, in one where these would be waited for; what is wanted alone was not measured there."""
    sizes = FOUR[name][0]._replace(world_size=2, shards=1)

    shown = name in ("Qwen2-MoE 2.7B", "Qwen2-MoE 2.7B, half the tokens")
    assert MoeConfig().resolved(sizes).splits == (1 if shown else 4)
    assert MoeConfig().resolved(sizes).selective is False
    assert not any(way.selective for way in ways(sizes))
    assert MoeConfig(selective=True).resolved(sizes._replace(world_size=1)).selective is False


def test_two_ranks_with_other_units_are_told_apart() -> None:
    """The number that they compare holds the units, said or not."""
    assert MoeConfig(splits=2).code != MoeConfig().code == MoeConfig(splits=MoeConfig().units).code
    with pytest.raises(Unsupported, match=r"splits=0\): 1 or more"):
        MoeConfig(splits=0).check()


def test_a_rank_wants_a_share_of_another_s_tokens() -> None:
    """All of them where each expert is cut among all ranks; more the more experts a token has."""
    assert wanted_share(Sizes(4, 8, 4, 2, 16, 16, shards=4)) == 1
    assert wanted_share(Sizes(4, 8, 2, 2, 16, 16)) == pytest.approx(1 - (3 / 4) ** 2)
    assert wanted_share(Sizes(4, 8, 4, 2, 16, 16, shards=2)) == pytest.approx(1 - (1 / 2) ** 2)


def test_all_ranks_choose_what_rank_0_remembers() -> None:
    """The file is read by rank 0; what it holds and what it does not is answered alike; a tuning is not contested."""
    remember(DEEPSEEK, ODD)
    remember(MIXTRAL, None)
    other = DEEPSEEK._replace(hidden=4096)
    ranks = workspaces(2)

    answers = together([
        partial(lambda rank: [choose_moe(sizes, rank) for sizes in (DEEPSEEK, MIXTRAL, other)], rank) for rank in ranks
    ])  # fmt: skip

    assert answers[0] == answers[1] == [ODD, None, by_model(other)]
    assert moe_contenders(DEEPSEEK, ranks[0]) == [ODD]
    assert moe_contenders(other, ranks[0]) == moe_contenders(other, ranks[1])
    assert 1 < len(moe_contenders(other, ranks[0])) <= MOST_WAYS
    assert choose_moe(DEEPSEEK._replace(pitch=4000), ranks[1]) == ODD  # of the same bucket of tokens


def test_a_workspace_with_few_flags_gets_what_fits() -> None:
    """More chunks take more flags; what a larger workspace was tuned with is not taken, nor tried."""
    remember(DEEPSEEK, MoeConfig(chunks=8, lead_rows=1))
    rank = workspaces(2)[0]
    rank.layout.channels = flags_of(DEEPSEEK, MoeConfig(chunks=2))

    assert choose_moe(DEEPSEEK, rank) == MoeConfig().resolved(DEEPSEEK)
    found = moe_contenders(MIXTRAL._replace(pitch=4096), rank, serial=False)
    assert found
    assert all(way is not None and way.chunks <= 2 for way in found)


def test_a_rank_s_own_file_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stands on a host with another memory: it hears rank 0's."""
    remember(DEEPSEEK, ODD)
    first, second = workspaces(2)
    before = together([partial(choose_moe, DEEPSEEK, first), partial(choose_moe, DEEPSEEK, second)])
    monkeypatch.setenv("MEGASCALE_KERNEL_CACHE", str(tmp_path / "elsewhere"))
    remember(DEEPSEEK, MoeConfig(chunks=1))

    assert before == [ODD, ODD]
    assert choose_moe(DEEPSEEK, second) == ODD


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 9, "environments": {}}',
        '{"format": 1, "environments": {"%s": {"%s": {"config": {"chunks": 1}}}}}',
    ],
)
def test_a_broken_file_is_told_and_ignored(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the path; the model answers, and the next tuning mends it."""
    environment = store.environment_key(*H200, 2, "bfloat16")
    (tmp_path / FILE).write_text(text % (environment, moe_key(DEEPSEEK)) if "%s" in text else text)
    ranks = workspaces(2)

    with caplog.at_level(logging.WARNING, "megascale_kernels.autotune"):
        answers = together([partial(choose_moe, DEEPSEEK, rank) for rank in ranks])

    assert answers == [by_model(DEEPSEEK)] * 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert str(tmp_path / FILE) in told[0]
    remember(DEEPSEEK, ODD)
    assert choose_moe(DEEPSEEK, workspaces(1)[0]) != ODD  # of one rank: another environment
    assert together([partial(choose_moe, DEEPSEEK, rank) for rank in workspaces(2)]) == [ODD, ODD]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"chunks": 99}, "1 to 8"), ({"colour": 1}, "fields"), ({"splits": "2"}, "splits is"), ({"kernel": "x"}, "kernel"),
     ({"lead_rows": -1}, "too small"), ({"stages": True}, "stages is")],
)  # fmt: skip
def test_a_configuration_that_cannot_be_is_not_read(change: dict[str, Any], said: str) -> None:
    """A sentence, and ValueError, which the file's reader tells and passes over."""
    assert read_moe_config(json.loads(json.dumps(ODD._asdict()))) == ODD
    with pytest.raises(ValueError, match=said):
        read_moe_config({**ODD._asdict(), **change})


def test_the_steadiest_way_is_kept() -> None:
    """Fastest when even and slow when not loses against never far behind; one that failed under any skew is out."""
    inf = float("inf")
    one, two, three = MoeConfig(chunks=1), MoeConfig(chunks=2), MoeConfig(chunks=4)

    assert steadiest({one: [1.0, 1.4, 1.6], two: [1.05, 1.1, 1.2], None: [3.0, 3.0, 3.0]}) == two
    assert steadiest({one: [0.5, inf], two: [1.0, 1.0], None: [0.9, 2.0]}) == two
    assert steadiest({three: [2.0, 2.0], None: [1.0, 1.0]}) is None
    assert steadiest({three: [inf]}) is None


class GpuWorkspace:
    """What tuning asks of a workspace on a GPU that is only claimed."""

    def __init__(self, rank: int, group: FakeGroup) -> None:
        self.rank, self.group, self.world_size, self.dtype = rank, group, 2, torch.bfloat16
        self.device = torch.device("cuda")
        self.layout, self.forgotten = SimpleNamespace(channels=1 << 16), 0

    def check(self) -> None:
        """Nothing is broken."""

    def forget_plans(self) -> None:
        """Counted."""
        self.forgotten += 1


def test_a_tuning_is_remembered_by_this_process_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """All skews are measured; what rank 0 measured decides, on both ranks; a later workspace finds it in the file."""
    candidates = likely_ways(DEEPSEEK)
    asked: list[float] = []

    def compare(_: Sizes, found: list[MoeConfig], std: float, workspace: GpuWorkspace, __: int) -> dict[Any, float]:
        asked.append(std)
        best = 2 if workspace.rank == 0 else 1  # clocks differ
        return {None: 9.0, **{way: 1.0 if place == best else 2.0 for place, way in enumerate(found)}}

    monkeypatch.setattr(moe_tuning, "_compare", compare)
    monkeypatch.setattr(moe_tuning, "_over", lambda *_, **__: False)
    ranks = [GpuWorkspace(rank, workspace.group) for rank, workspace in enumerate(workspaces(2))]

    tuned = together([partial(tune_moe, DEEPSEEK, rank) for rank in ranks])

    assert [one.config for one in tuned] == [candidates[2]] * 2
    assert sorted(set(asked)) == sorted(SKEWS)
    assert [choose_moe(DEEPSEEK, rank) for rank in ranks] == [candidates[2]] * 2
    assert [rank.forgotten for rank in ranks] == [1, 1]
    assert together([partial(choose_moe, DEEPSEEK, rank) for rank in workspaces(2)]) == [candidates[2]] * 2
    with pytest.raises(ValueError, match="positive number of seconds"):
        tune_moe(DEEPSEEK, ranks[0], budget_s=0)
    ranks[0].device = torch.device("cpu")
    with pytest.raises(ValueError, match="without CUDA nothing is measured"):
        tune_moe(DEEPSEEK, ranks[0])


def test_a_wrong_tuning_request_gets_one_sentence() -> None:
    """What makes no sense, and what this machine cannot serve."""
    right = ["--tokens", "8", "--experts", "4", "--top-k", "2", "--hidden", "16", "--inner", "16"]
    two = {"RANK": "0", "WORLD_SIZE": "2"}

    def said(*more: str, environment: dict[str, str] = two, gpus: int = 2) -> str | None:
        return complaint(parser().parse_args([*right, *more]), environment, gpus)

    assert said() is None
    for told, words in (
        (said("--tokens", "0"), "positive"), (said("--top-k", "5"), "at most all experts"),
        (said(environment={}), "no ranks"), (said(gpus=1), "want a GPU each"),
        (said("--experts", "3"), "--experts 3 does not divide among 2 ranks"),
        (said("--tokens", "7"), "--tokens 7 does not divide"),
        (said("--inner", "24"), "nothing to tune: H 16 or I 24 is no multiple of 16"),
        (said("--tensor-parallel", "0"), "positive"),
        (said("--tensor-parallel", "3"), "2 ranks cannot be divided into groups of 3"),
        (said("--tensor-parallel", "2", "--inner", "17"), "--inner 17 cannot be cut into 2 shards"),
        # Sixteen elements of I in all are eight on each of two ranks.
        (said("--tensor-parallel", "2"), "nothing to tune: H 16 or I 8 is no multiple of 16"),
    ):  # fmt: skip
        assert told is not None
        assert words in told
    four = {"RANK": "0", "WORLD_SIZE": "4"}
    told = said("--tensor-parallel", "2", "--experts", "3", "--inner", "32", environment=four, gpus=4)
    assert told == "--experts 3 does not divide among 2 groups of 2 ranks"


def test_a_layer_whose_experts_are_cut_is_tuned_as_calls_have_it() -> None:
    """The sizes of a request are those that `moe_experts` looks up, so its tuning is found; whole ones are others."""
    asked = ["--tokens", "64", "--experts", "6", "--top-k", "3", "--hidden", "48", "--inner", "96"]
    workspace = SimpleNamespace(world_size=4, max_rows=64)
    ids = torch.zeros(16, 3, dtype=torch.int32)

    cut = sizes_of(parser().parse_args([*asked, "--tensor-parallel", "2"]), 4)
    assert cut == experts.sizes_of(ids, torch.zeros(3, 2, 48, 48), workspace, 2)  # 6 experts in 2 groups, I / 2

    half = [*asked[:3], "4", *asked[4:]]
    whole = sizes_of(parser().parse_args(half), 4)
    assert whole == experts.sizes_of(ids, torch.zeros(1, 2, 96, 48), workspace)
    assert moe_key(cut) != moe_key(whole)


GIVEN = SimpleNamespace(grad_fn=None)


class Calls:
    """A workspace on which calls of a layer are timed, and what ran on it."""

    def __init__(self, *, adaptive: bool) -> None:
        self.rank, self.world_size, self.group, self.dtype = 0, 1, None, torch.bfloat16
        self.device, self.max_rows, self.adaptive, self.native = torch.device("cuda"), 8192, adaptive, object()
        self.deadline_s = 30.0
        self.planned, self.layout = Planned(), SimpleNamespace(channels=1 << 16)
        self.plan = self.planned.get


@pytest.mark.parametrize("adaptive", [True, False])
def test_calls_are_a_contest_unless_the_same_is_asked_for(adaptive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way has its turns; `adaptive=False` and torch's deterministic mode take the model's; a caller's stays."""
    ran: list[MoeConfig | None] = []
    sizes = DEEPSEEK._replace(world_size=1, pitch=8192, experts=64)

    class Held:
        def __init__(self, found: list[MoeConfig], _: object, **__: object) -> None:
            self.found, self.turn = found, 0

        def begin(self) -> MoeConfig:
            return self.found[self.turn % len(self.found)]

        def end(self, _: object) -> None:
            self.turn += 1

    monkeypatch.setattr("megascale_kernels.autotune.contest.Contest", Held)
    monkeypatch.setattr(moe_path.experts, "serves", lambda *_: True)
    monkeypatch.setattr(moe_path.experts, "sizes_of", lambda *_: sizes)
    monkeypatch.setattr(moe_path.experts, "moe_experts", lambda *_, config, **__: ran.append(config) or GIVEN)
    workspace = Calls(adaptive=adaptive)
    nothing = (None,) * 5

    for _ in range(8):
        moe_path.moe_experts(*nothing, workspace)
    moe_path.moe_experts(*nothing, workspace, config=ODD)
    torch.use_deterministic_algorithms(mode=True)
    try:
        moe_path.moe_experts(*nothing, workspace)
    finally:
        torch.use_deterministic_algorithms(mode=False)

    expected = likely_ways(sizes) if adaptive else [by_model(sizes)]
    assert set(ran[:8]) == set(expected)
    assert ran[8:] == [ODD, by_model(sizes)]
    assert len(workspace.planned.contests) == int(adaptive)


def test_a_tuning_may_choose_the_serial_path_and_a_caller_may_not_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in the file is the serial path; `fused=True` takes our kernels all the same."""
    ran: list[tuple[MoeConfig | None, bool | None]] = []
    workspace = Calls(adaptive=True)
    open_moe_table(workspace).learn(MIXTRAL, None)
    monkeypatch.setattr(moe_path.experts, "serves", lambda *_: True)
    monkeypatch.setattr(moe_path.experts, "sizes_of", lambda *_: MIXTRAL)
    monkeypatch.setattr(moe_path.experts, "moe_experts", lambda *_, config, fused, **__: ran.append((config, fused)))

    moe_path.moe_experts(*(None,) * 5, workspace)
    moe_path.moe_experts(*(None,) * 5, workspace, fused=True)

    assert ran == [(None, False), (None, True)]


def test_a_layer_whose_experts_are_cut_is_another_layer() -> None:
    """It has a name of its own among tunings, and its busiest rank the rows of all shards that tokens chose."""
    cut = MIXTRAL._replace(top_k=4, experts=8, shards=2)

    assert moe_key(cut) != moe_key(cut._replace(shards=1))
    assert sum(busiest_rows(cut, 0.0)) == pytest.approx(cut.pitch * cut.top_k)


def test_measured_times_become_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way and the serial path are timed on one routing; after a failure the workspace is made usable again."""
    found = likely_ways(DEEPSEEK)[:2]
    workspace = workspaces(1)[0]
    monkeypatch.setattr(moe_tuning, "_operands", lambda *_: (None,) * 5)
    monkeypatch.setattr(
        moe_tuning, "measure", lambda calls, **_: Measured(dict(zip(calls, (3.0, 1.0, float("inf")), strict=True)), {})
    )

    assert moe_tuning._compare(DEEPSEEK, found, 0.0, workspace, 0) == {None: 3.0, found[0]: 1.0, found[1]: float("inf")}
    assert workspace.resets == 1
