# SPDX-License-Identifier: Apache-2.0
"""Real ranks restore what others saved: each byte of storage is read once, and each rank gets what it needs."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megascale_ops.checkpoint import latest, storage
from megascale_ops.checkpoint.manifest import Manifest
from tests.processes.test_checkpoint_ranks import play

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "fixtures" / "checkpoint_loading_rank.py"


class Saved(NamedTuple):
    """What four ranks saved, where, and what they reported of restoring it: all of it, and parts."""

    scratch: Path
    folder: Path
    sizes: dict[str, int]
    whole: list[dict[str, Any]]
    replicated: list[dict[str, Any]]
    hybrid: list[dict[str, Any]]
    at_a_url: list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Four ranks save, and restore with the same layout."""
    scratch = tmp_path_factory.mktemp("loading")
    folder = scratch / "checkpoints"
    told = [(name, folder) for name in ("save", "restore", "restore replicated", "restore hybrid")]
    reports, _ = play(scratch, *told, ("at a url", scratch / "url"), world_size=4, script=SCRIPT)
    sealed = latest.read_manifest(storage.final_folder(folder, 1))
    assert isinstance(sealed, Manifest)
    sizes = {entry.name: entry.size_bytes for entry in sealed.files}
    return Saved(scratch, folder, sizes, *reports[1:])


def read_by_all(reports: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes read of each file by all ranks together."""
    names = {name for report in reports for name in report["read"]}
    return {name: sum(report["read"].get(name, 0) for report in reports) for name in names}


def shards(read: dict[str, int]) -> dict[str, int]:
    """Without the manifest: its size is not in it."""
    return {name: count for name, count in read.items() if name != "manifest.json"}


def test_every_file_is_read_once_by_all_ranks_together(saved: Saved) -> None:
    """Replicated tensors reach every rank and are read by one; the manifest is read again at the end, to compare."""
    assert [(report["step"], report["same"], report["compared"]) for report in saved.whole] == [(1, True, 10)] * 4
    read = read_by_all(saved.whole)
    assert shards(read) == saved.sizes
    assert read["manifest.json"] == 2 * (saved.folder / "step-00000001" / "manifest.json").stat().st_size


def test_the_ranks_share_the_reading_of_what_they_all_need(saved: Saved) -> None:
    """Six tensors of 1.2 MB, held by all four ranks: none reads them all, and what it did not read it received."""
    tensors = [sum(count for name, count in each["read"].items() if ".tensors" in name) for each in saved.replicated]

    assert sum(tensors) == pytest.approx(6 * 1_200_000, rel=0.01)
    assert max(tensors) <= 2 * 1_210_000
    for report, read in zip(saved.replicated, tensors, strict=True):
        assert report["same"]
        assert report["received"] >= 6 * 1_200_000 - read


def test_what_is_not_needed_is_not_read(saved: Saved) -> None:
    """A state with one entry of three reads the files of that entry, and none of the others."""
    read = shards(read_by_all(saved.hybrid))
    tensors = sum(count for name, count in read.items() if ".tensors" in name)

    assert all(report["same"] for report in saved.hybrid)
    assert tensors == pytest.approx(2402 * 300 * 4, rel=0.01)
    assert tensors < 0.4 * sum(saved.sizes.values())


def test_a_place_that_is_a_url_is_read_once_too(saved: Saved) -> None:
    """Each rank sends its files there; each is read by one rank, and all get the same numbers."""
    assert [(report["step"], report["same"]) for report in saved.at_a_url] == [(1, True)] * 4
    (manifest,) = (saved.scratch / "url").glob("step-00000001/*/manifest.json")
    sizes = {path.name: path.stat().st_size for path in manifest.parent.glob("__*")}
    assert read_by_all(saved.at_a_url) == sizes


def test_progress_ends_at_all_of_what_the_rank_needs(saved: Saved) -> None:
    """An observer hears of the same number of bytes done and in all."""
    for report in saved.whole:
        done, total = report["progress"]
        assert done == total > 0


# Onto three ranks the tensors are cut unevenly.
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_another_number_of_ranks_gets_the_same_numbers(saved: Saved, world_size: int) -> None:
    """Tensor-parallel tensors are cut anew, by rows and by columns, onto another mesh; still each byte is read once."""
    (reports,), _ = play(saved.scratch, ("restore", saved.folder), world_size=world_size, script=SCRIPT)

    assert [(report["step"], report["same"]) for report in reports] == [(1, True)] * world_size
    assert shards(read_by_all(reports)) == saved.sizes


def test_a_rank_that_dies_while_all_load_ends_the_restore_of_the_others(saved: Saved) -> None:
    """In one sentence, by the closed connection; nobody waits for its share until a time-out."""
    (reports,), _ = play(
        saved.scratch, ("lose a rank", saved.folder), world_size=3, script=SCRIPT, dying=frozenset({2})
    )

    for report in reports:
        assert report["error"].startswith("restoring step 1 from ")
        assert "the ranks lost each other" in report["error"]
