# SPDX-License-Identifier: Apache-2.0
"""Two real ranks save and restore together, and fail together."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megascale_ops.checkpoint import newest
from megascale_ops.checkpoint.storage import candidates

pytestmark = pytest.mark.processes

RANK_SCRIPT = Path(__file__).parents[1] / "fixtures" / "checkpoint_rank.py"


def play(scenario: str, folder: Path, scratch: Path, world_size: int = 2) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a scenario on real ranks; their reports and their stderr."""
    rendezvous = scratch / f"rendezvous-{scenario}-{world_size}".replace(" ", "-")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT), scenario, str(folder), str(rendezvous), str(rank), str(world_size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=10)
    for rank, (_, stderr) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, stderr
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs], [stderr for _, stderr in outputs]


def test_what_two_ranks_saved_comes_back_bit_for_bit_also_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Weights, moments and numbers return exactly, into an optimizer that has never stepped."""
    folder = tmp_path / "checkpoints"
    play("save", folder, tmp_path)

    on_two, _ = play("restore", folder, tmp_path)
    on_one, _ = play("restore", folder, tmp_path, world_size=1)

    assert [report["step"] for report in on_two + on_one] == [4, 4, 4]
    assert all(report["same"] for report in on_two + on_one)
    assert not any(report["skipped"] for report in on_two + on_one)


def test_sharded_tensors_come_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    """FSDP on two ranks, restored on three, moments included: each tensor is cut anew."""
    folder = tmp_path / "checkpoints"
    play("save sharded", folder, tmp_path)

    reports, _ = play("restore sharded", folder, tmp_path, world_size=3)

    # 4 tensors of the model; for each of them 2 moments and a counter
    assert reports == [{"step": 3, "close": True, "compared": 16}] * 3


def test_damage_of_every_kind_is_passed_over_by_all_ranks_alike(tmp_path: Path) -> None:
    """A flipped byte, a missing shard and a torn write: each is named once, and all ranks load the same older step."""
    folder = tmp_path / "checkpoints"
    play("save", folder, tmp_path)
    flipped = folder / "step-00000004" / "__0_0.tensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0x10
    flipped.write_bytes(data)
    (folder / "step-00000003" / "__1_0.tensors").unlink()
    torn = folder / "step-00000002" / "__1_0.tensors"
    torn.write_bytes(torn.read_bytes()[:-4096])

    reports, stderr = play("restore", folder, tmp_path)

    for report in reports:
        assert (report["step"], report["same"], report["skipped"]) == (1, True, [4, 3, 2])
        assert report["reasons"] == ["digest differs", "missing", "size differs"]
    assert stderr[0].count("skipped: checkpoint of step") == 3
    assert "skipped" not in stderr[1]


@pytest.mark.parametrize(("scenario", "cause"), [("limited", "on rank 1: File too large"), ("disk full", "No space")])
def test_a_rank_that_cannot_write_fails_every_rank_in_one_sentence(tmp_path: Path, scenario: str, cause: str) -> None:
    """Nobody hangs, all say the same, the checkpoint before stays valid, and nothing of the new one remains."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if scenario == "disk full":
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
        )
        if mounted.returncode:
            pytest.skip("mounting a small file system needs root")

    try:
        reports, _ = play(scenario, folder, tmp_path)
        left, before = sorted(path.name for path in folder.iterdir()), newest(folder)
    finally:
        if scenario == "disk full":
            subprocess.run(["umount", str(folder)], check=True, timeout=30)

    assert reports[0]["error"] == reports[1]["error"]
    assert reports[0]["error"].startswith(f"saving step 2 to {folder} failed")
    assert cause in reports[0]["error"]
    assert "\n" not in reports[0]["error"]
    assert left == [".writer-00000001.json", "step-00000001"]
    assert before.newest is not None
    assert before.newest.step == 1


def test_ranks_that_disagree_about_the_step_save_nothing(tmp_path: Path) -> None:
    """Shards of different steps never become one checkpoint."""
    reports, _ = play("disagree", tmp_path / "checkpoints", tmp_path)

    assert all("the ranks are at different steps, [5, 6]" in report["error"] for report in reports)
    assert candidates(tmp_path / "checkpoints") == []


def test_what_each_rank_has_of_its_own_comes_back_to_it(tmp_path: Path) -> None:
    """Generators, numbers, and an object that was named; where it is not named all ranks refuse with one sentence."""
    folder = tmp_path / "checkpoints"
    play("save own", folder, tmp_path)

    reports, _ = play("restore own", folder, tmp_path)

    assert [(report["step"], report["same"]) for report in reports] == [(3, True)] * 2
    assert reports[0]["error"] == reports[1]["error"]
    assert "rank0.order was pickled" in reports[0]["error"]
    assert len(list((folder / "step-00000003").glob("__?_0.pickle"))) == 2


def test_what_is_no_data_on_one_rank_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Before anything is written, so nobody waits in a save that cannot be."""
    reports, _ = play("save opaque", tmp_path / "checkpoints", tmp_path)

    assert reports[0] == reports[1]
    assert "on rank 1: state['b']: an object of type Order can't be stored as data" in reports[0]["error"]
    assert candidates(tmp_path / "checkpoints") == []
