# SPDX-License-Identifier: Apache-2.0
"""Four real ranks, each a node with a folder of its own: any one node may be lost, and a pair costs the shared step."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.processes.test_checkpoint_ranks import play

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "fixtures" / "checkpoint_tiers_rank.py"
NODES = 4


class Saved(NamedTuple):
    """How a job of six steps has saved, where, and what more jobs reported."""

    mode: str
    scratch: Path
    others: list[list[dict[str, Any]]]
    stderr: str


class Restored(NamedTuple):
    """What four ranks reported of each disaster, and what the leading one wrote to its log."""

    reports: dict[str, list[dict[str, Any]]]
    stderr: str


def sets_of(folder: Path, node: int) -> list[Path]:
    """The sets on a node, the oldest first."""
    return sorted((folder / f"node{node}").glob("*/step-*"))


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def lose(folder: Path, *nodes: int) -> None:
    """A node is lost with its memory; another one comes in its place, with an empty folder."""
    for node in nodes:
        shutil.rmtree(folder / f"node{node}")


# A save that waits goes the same way to the nodes, but for the writer process.
@pytest.fixture(scope="module", params=[pytest.param("sync", marks=pytest.mark.matrix), "async"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What a job of six steps has left, and what more jobs reported; the training waits for saves, or it does not."""
    mode, scratch = request.param, tmp_path_factory.mktemp("tiers")
    names = ["save", "one node", "clear", "full", *(["killed"] if mode == "async" else [])]
    told = [(f"{mode}:{name}", scratch / name) for name in names]
    played = play(scratch, *told, world_size=NODES, script=SCRIPT)
    return Saved(mode, scratch, played.reports[1:], played.stderr[0])


@pytest.fixture(scope="module")
def restored(saved: Saved) -> Restored:
    """Each disaster happens to a copy of what was left."""
    scratch = saved.scratch
    names = ["all there", "one lost", "a pair lost", "two of two pairs lost", "flipped"]
    folders = {name: shutil.copytree(scratch / "save", scratch / name) for name in names}
    lose(folders["one lost"], 2)
    lose(folders["a pair lost"], 0, 1)
    lose(folders["two of two pairs lost"], 1, 2)
    for node in (
        1,
        3,
    ):  # of one of them another rank may read the copy, for what all ranks need lies in one of the files
        flip(sets_of(folders["flipped"], node)[-1] / f"__{node}_0.tensors")
    played = play(
        scratch, *((f"{saved.mode}:restore", folders[name]) for name in names), world_size=NODES, script=SCRIPT
    )
    return Restored(dict(zip(names, played.reports, strict=True)), played.stderr[0])


def test_each_node_keeps_the_newest_two_sets_with_its_buddys_files(saved: Saved) -> None:
    """Its own shards and those of one other, never a third's; the shared folder has the first and every fourth step."""
    folder = saved.scratch / "save"

    assert sorted(path.name for path in (folder / "shared").glob("step-*")) == ["step-00000001", "step-00000004"]
    for node in range(NODES):
        sets = sets_of(folder, node)
        assert [path.name for path in sets] == ["step-00000005", "step-00000006"]
        owners = {path.name.split("_")[2] for path in sets[-1].glob("__*")}
        assert owners == {str(node), str(node ^ 1)}


def test_the_newest_set_is_taken_whatever_one_node_loses(restored: Restored) -> None:
    """Step 6 of the nodes, not step 4 of the shared folder; bit for bit, with none, one, or one of each pair lost."""
    for name, tier in (("all there", "node"), ("one lost", "buddy"), ("two of two pairs lost", "buddy")):
        assert restored.reports[name] == [{"step": 6, "same": True, "skipped": [], "from": [tier]}] * NODES, name


def test_the_loss_of_a_node_and_its_buddy_falls_back_to_the_shared_folder(restored: Restored) -> None:
    """Steps 6 and 5 are not whole any more, which is told; step 4 comes back bit for bit."""
    reports = restored.reports["a pair lost"]

    assert [(report["step"], report["same"], report["from"]) for report in reports] == [(4, True, ["shared"])] * NODES
    assert [step for step, _ in reports[0]["skipped"]] == [6, 5]
    assert "skipped: the local checkpoint of step 6 is not whole: __0_0." in restored.stderr


def test_a_file_that_is_damaged_on_its_node_is_read_on_the_buddy(restored: Restored) -> None:
    """Found by its digest while it is loaded; all ranks load the set again, with the copy."""
    assert restored.reports["flipped"] == [{"step": 6, "same": True, "skipped": [], "from": ["buddy"]}] * NODES
    assert "digest differs on the node of rank" in restored.stderr


def test_a_buddy_on_one_node_is_refused_in_one_sentence(saved: Saved) -> None:
    """By every rank alike."""
    errors = {report["error"] for report in saved.others[0]}

    assert len(errors) == 1
    assert "LocalTier(buddy=True) needs two nodes, and all 4 ranks share" in errors.pop()


def test_a_job_that_is_over_leaves_nothing_on_the_nodes(saved: Saved) -> None:
    """Where it was asked to."""
    assert [report["left"] for report in saved.others[1]] == [[]] * NODES


def test_a_node_without_room_costs_the_local_set_and_nothing_else(saved: Saved) -> None:
    """No half of a set is left anywhere, and the shared checkpoint is written all the same."""
    for report in saved.others[2]:
        assert report == {"left": [], "shared": ["step-00000004"]}


def test_a_writer_process_that_is_killed_costs_its_set_and_no_other(saved: Saved) -> None:
    """On no node a part of it is left, which is told once; it is no failed save, and the next set is saved."""
    if saved.mode == "sync":
        pytest.skip("a save that waits has no writer process")

    report = {"left": ["step-00000001", "step-00000002"], "step": 5, "tokens": 500, "failed": 0, "sealed": 5}
    assert saved.others[3] == [report] * NODES
    assert "step 3 is not saved on the nodes: on rank 1: the writer process" in saved.stderr
    assert "was killed by signal 9" in saved.stderr
