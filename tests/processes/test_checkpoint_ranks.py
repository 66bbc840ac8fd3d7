# SPDX-License-Identifier: Apache-2.0
"""Two real ranks save and restore together, and fail together.

One pair of ranks plays all that needs no new ones, and ranks are forked (`forked.py`): a rank that imports torch itself
is two seconds of CPU time before its first tensor.
"""

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from megascale_ops.checkpoint import newest
from megascale_ops.checkpoint.storage import candidates
from tests.fixtures.forked import outputs
from tests.processes.small_disk import small_disk
from tests.processes.warmed import env_of_programs, play_module

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
RANK_SCRIPT = ROOT / "tests" / "fixtures" / "checkpoint_rank.py"


class Played(NamedTuple):
    """What the ranks reported of each scenario, in its order, and what each of them wrote to stderr."""

    reports: list[list[dict[str, Any]]]
    stderr: list[str]


def play(
    scratch: Path,
    *scenarios: tuple[str, Path],
    world_size: int = 2,
    script: Path = RANK_SCRIPT,
    dying: frozenset[int] = frozenset(),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Played:
    """Run scenarios, each in its folder, on real ranks of a script; those that die report nothing."""
    rendezvous = scratch / f"rendezvous-{len(list(scratch.glob('rendezvous-*')))}"
    told = [f"{name}={folder}" for name, folder in scenarios]
    env = {**env_of_programs(), "MEGASCALE_RECORDER": "0", **environment}
    job = play_module(f"tests.fixtures.{script.stem}", [str(rendezvous), str(world_size), *told], env, deadline_s=400)
    assert job.returncode == 0, job.stderr
    stderr = [outputs(rendezvous, rank)[1].read_text() for rank in range(world_size)]
    for rank, status in enumerate(json.loads(job.stdout)):
        assert status == (-signal.SIGKILL if rank in dying else 0), stderr[rank]
    lines = [outputs(rendezvous, rank)[0].read_text().splitlines() for rank in range(world_size) if rank not in dying]
    by_rank = [json.loads(one[-1]) for one in lines]
    return Played([list(reports) for reports in zip(*by_rank, strict=True)], stderr)


class Saved(NamedTuple):
    """What two ranks left in `folder`, one folder each scenario, and what they reported where saving has to fail."""

    folder: Path
    reports: dict[str, list[dict[str, Any]]]
    left: dict[str, list[str]]  # names of files
    newest: dict[str, int]  # steps


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save, and fail to save: for want of agreement, by a limit of one rank, on a full disk."""
    folder = tmp_path_factory.mktemp("saved")
    names = ["save", "disagree", "limited", "save behind", "limited behind", "save own", "save opaque"]
    with small_disk(folder / "disk full") as is_small:
        names += ["disk full"] if is_small else []
        played = play(folder, *((name, folder / name) for name in names))
        left = {
            name: sorted(path.name for path in (folder / name).iterdir())
            for name in names
            if "limited" in name or "full" in name
        }
        chosen = {name: choice.step for name in left if (choice := newest(folder / name).newest) is not None}
    return Saved(folder, dict(zip(names, played.reports, strict=True)), left, chosen)


class Restored(NamedTuple):
    """What two ranks reported of a sound folder, of a damaged one, and of what each rank had of its own."""

    sound: list[dict[str, Any]]
    damaged: list[dict[str, Any]]
    own: list[dict[str, Any]]
    stderr: list[str]


@pytest.fixture(scope="module")
def restored(saved: Saved) -> Restored:
    """Restore from what was saved, and from a copy with a flipped byte, a missing shard and a torn write."""
    folder = shutil.copytree(saved.folder / "save", saved.folder / "damaged")
    flipped = folder / "step-00000004" / "__0_0.tensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0x10
    flipped.write_bytes(data)
    (folder / "step-00000003" / "__1_0.tensors").unlink()
    torn = folder / "step-00000002" / "__1_0.tensors"
    torn.write_bytes(torn.read_bytes()[:-4096])
    own = ("restore own", saved.folder / "save own")
    reports, stderr = play(saved.folder, ("restore", saved.folder / "save"), ("restore", folder), own)
    return Restored(*reports, stderr)


def test_what_two_ranks_saved_comes_back_bit_for_bit_also_on_another_number_of_ranks(
    saved: Saved, restored: Restored
) -> None:
    """Weights, moments and numbers return exactly, into an optimizer that has never stepped."""
    (on_one,), _ = play(saved.folder, ("restore", saved.folder / "save"), world_size=1)

    reports = restored.sound + on_one
    assert [report["step"] for report in reports] == [4, 4, 4]
    assert all(report["same"] for report in reports)
    assert not any(report["skipped"] for report in reports)


@pytest.mark.matrix
def test_sharded_tensors_come_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    """FSDP on two ranks, restored on three, moments included: each tensor is cut anew."""
    folder = tmp_path / "checkpoints"
    (_, behind), _ = play(tmp_path, ("save sharded", folder), ("save behind sharded", tmp_path / "behind"))

    (reports,), _ = play(tmp_path, ("restore sharded", folder), world_size=3)

    # 4 tensors of the model; for each of them 2 moments and a counter
    assert reports == [{"step": 3, "close": True, "compared": 16}] * 3
    assert [report["same files"] for report in behind] == [[True, True]] * 2


def test_damage_of_every_kind_is_passed_over_by_all_ranks_alike(restored: Restored) -> None:
    """A flipped byte, a missing shard and a torn write: each is named once, and all ranks load the same older step."""
    for report in restored.damaged:
        assert (report["step"], report["same"], report["skipped"]) == (1, True, [4, 3, 2])
        assert report["reasons"] == ["digest differs", "missing", "size differs"]
    assert restored.stderr[0].count("skipped: checkpoint of step") == 3
    assert "skipped" not in restored.stderr[1]


@pytest.mark.parametrize(("scenario", "cause"), [("limited", "on rank 1: File too large"), ("disk full", "No space")])
def test_a_rank_that_cannot_write_fails_every_rank_in_one_sentence(saved: Saved, scenario: str, cause: str) -> None:
    """Nobody hangs, all say the same, the checkpoint before stays valid, and nothing of the new one remains."""
    if scenario not in saved.reports:
        pytest.skip("mounting a small file system needs root")

    errors = [report["error"] for report in saved.reports[scenario]]
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"saving step 2 to {saved.folder / scenario} failed")
    assert cause in errors[0]
    assert "\n" not in errors[0]
    assert saved.left[scenario] == [".writer-00000001.json", "step-00000001"]
    assert saved.newest[scenario] == 1


def test_a_save_in_the_background_gives_the_files_of_one_that_waits(saved: Saved) -> None:
    """Byte for byte, of both ranks: shards, structures, what only one rank has, and the plan."""
    # 2 ranks with a file of tensors and one of structures each, the plan, and what was found
    assert saved.reports["save behind"] == [{"same files": [True, True], "files": 6}] * 2


def test_a_writer_process_that_cannot_write_fails_the_save_on_every_rank(saved: Saved) -> None:
    """All ranks agree about it at the next save, which works; nothing of the failed one remains."""
    reports = saved.reports["limited behind"]

    assert [report["agreed"] for report in reports] == ["the save of step 2 failed on rank 1: File too large"] * 2
    assert [report["error"] for report in reports] == [
        "the save of step 2 failed: on rank 1: File too large",
        "the save of step 2 failed: File too large",
    ]
    assert [report["failed"] for report in reports] == [1, 1]
    assert saved.left["limited behind"] == [".writer-00000001.json", "step-00000001", "step-00000003"]


def test_ranks_that_disagree_about_the_step_save_nothing(saved: Saved) -> None:
    """Shards of different steps never become one checkpoint."""
    assert all("the ranks are at different steps, [5, 6]" in one["error"] for one in saved.reports["disagree"])
    assert candidates(saved.folder / "disagree") == []


def test_what_each_rank_has_of_its_own_comes_back_to_it(saved: Saved, restored: Restored) -> None:
    """Generators, numbers, and an object that was named; where it is not named all ranks refuse with one sentence."""
    reports = restored.own

    assert [(report["step"], report["same"]) for report in reports] == [(3, True)] * 2
    assert reports[0]["error"] == reports[1]["error"]
    assert "rank0.order was pickled" in reports[0]["error"]
    assert len(list((saved.folder / "save own" / "step-00000003").glob("__?_0.pickle"))) == 2


def test_what_is_no_data_on_one_rank_is_refused_on_every_rank(saved: Saved) -> None:
    """Before anything is written, so no rank waits in a save that cannot be."""
    reports = saved.reports["save opaque"]

    assert reports[0] == reports[1]
    assert "on rank 1: state['b']: an object of type Order can't be stored as data" in reports[0]["error"]
    assert candidates(saved.folder / "save opaque") == []
