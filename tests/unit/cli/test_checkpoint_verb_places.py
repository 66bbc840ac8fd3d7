# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops checkpoint`` at URLs and on a node's folder: as in a folder, and one sentence at a bad PATH."""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, LocalTier, processes
from megascale_ops.checkpoint.readers import renewed
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.checkpoint.tiers.store_readers import StoreReading
from megascale_ops.cli.main import main


def state_of(step: int) -> dict[str, Any]:
    """A tensor of which one element differs from step to step, one that never does, and a number."""
    changed = torch.zeros(100)
    changed[0] = step
    return {"model": {"moves": changed, "stands": torch.ones(300_000)}, "tokens": step}


@pytest.fixture
def url() -> Iterator[str]:
    """Three checkpoints at a URL, of which nothing runs any more."""
    place = f"memory://{uuid.uuid4().hex}/run7"
    manager = CheckpointManager(place, keep=9, freshness=False)
    for step in (10, 20, 30):
        manager.save(step, state_of(step), metric=step / 10)
    manager.close()
    yield place
    filesystem, path = fsspec.core.url_to_fs(place)
    filesystem.rm(path, recursive=True)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The path of a local tier with two sets of one job."""
    manager = CheckpointManager(tmp_path / "shared", local=LocalTier(tmp_path / "node"), shared_every=100)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    manager.close()
    return tmp_path / "node"


def flip(url: str, step: int) -> str:
    """Flip a byte of the largest file of a step; its name."""
    filesystem, path = fsspec.core.url_to_fs(url)
    name = max(filesystem.glob(f"{path}/step-{step:08d}/*/*.tensors"), key=filesystem.size)
    raw = bytearray(filesystem.cat_file(name))
    raw[len(raw) // 2] ^= 1
    filesystem.pipe_file(name, bytes(raw))
    return str(name).rpartition("/")[2]


def steps_at(url: str) -> list[str]:
    """The steps of which there is anything."""
    return [name for name in Store(url).names() if name.startswith("step-")]


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a line; exit code, stdout, stderr."""
    code = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


def numbers(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """Run a line with ``--json``; exit code and what it printed."""
    code, out, _ = said(capsys, *words, "--json")
    return code, json.loads(out)


def test_a_store_is_listed_with_sizes_digests_and_readers(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By manifests and one listing each; a file that is missing is told without reading any."""
    store = Store(url)
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.rm(filesystem.glob(f"{path}/step-00000020/*/plan.msgpack")[0])
    with renewed(StoreReading(store, processes.describe_writer(0, 1))) as reader:
        reader.mark(10)
        code, out, _ = said(capsys, "ls", url)
        _, listed = numbers(capsys, "ls", url)

    assert code == 0
    assert "damaged: plan.msgpack is missing" in out
    assert "sealed, being read" in out
    assert f"3 checkpoints, 3.4 MiB in {url}\n" in out or f" in {url}\n" in out
    assert [(one["step"], one["metric"], len(one["faults"])) for one in listed["checkpoints"]] == [
        (30, 3.0, 0),
        (20, 2.0, 1),
        (10, 1.0, 0),
    ]
    assert listed["checkpoints"][0]["size_bytes"] > 1_200_000
    assert all(one["path"].startswith(f"{url}/step-") for one in listed["checkpoints"])


def test_one_step_of_a_store_is_listed_with_its_files(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By its URL alone; the folder of its save may be named, too."""
    code, out, _ = said(capsys, "ls", f"{url}/step-00000030")
    (_, told) = numbers(capsys, "ls", f"{url}/step-00000030")

    assert code == 0
    assert "__0_0.tensors" in out
    assert "plan.msgpack" in out
    assert numbers(capsys, "ls", told["checkpoints"][0]["path"])[1] == told


def test_verify_reads_all_of_a_store_and_says_what_a_restart_loads(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped byte is found by its digest alone; nothing stays in TMPDIR."""
    name = flip(url, 30)

    assert said(capsys, "ls", url)[1].count("damaged") == 0
    code, out, _ = said(capsys, "verify", url)
    _, told = numbers(capsys, "verify", url)

    assert code == 1
    assert out.splitlines()[:2] == ["step 30: damaged", f"  {name} digest differs"]
    assert out.endswith("2 of 3 whole; a restart loads step 20\n")
    assert [(one["step"], one["ok"]) for one in told["checkpoints"]] == [(30, False), (20, True), (10, True)]


def test_diff_shows_which_tensors_changed_by_how_much_between_url_and_folder(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two newest of a store; one of a store and one of a folder."""
    _, told = numbers(capsys, "diff", url)
    CheckpointManager(tmp_path, freshness=False).save(40, state_of(40))
    code, out, _ = said(capsys, "diff", f"{url}/step-00000010", tmp_path)

    (changed,) = told["changed"]
    assert (changed["name"], changed["largest"], changed["changed"]) == ("model.moves", 10.0, 0.01)
    assert (told["same_tensors"], [one["name"] for one in told["values"]]) == (1, ["tokens"])
    assert told["before"].startswith(f"{url}/step-00000020/")
    assert code == 0
    assert out.startswith(f"from {url}/step-00000010/")
    assert "1 of 2 tensors changed; 1 of 1 values differ" in out


def test_prune_deletes_what_nothing_keeps_and_nothing_under_a_reader(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest that verifies stays, what is damaged and newer too; first it is only said."""
    flip(url, 30)
    _, dry = numbers(capsys, "prune", url, "--keep", 1, "--dry-run")
    assert [(one["step"], bool(one["reasons"])) for one in dry["checkpoints"]] == [(30, True), (20, True), (10, False)]
    assert len(steps_at(url)) == 3

    with renewed(StoreReading(Store(url), processes.describe_writer(0, 1))) as reader:
        reader.mark(10)
        assert "0 of 3 checkpoints" in said(capsys, "prune", url, "--keep", 1)[1]
    code, out, _ = said(capsys, "prune", url, "--keep", 1)

    assert code == 0
    assert "1 of 3 checkpoints" in out
    assert steps_at(url) == ["step-00000020", "step-00000030"]


def test_prune_is_refused_where_a_job_writes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that lives, on this machine."""
    names, other = StoreNames(Store(url)), processes.describe_writer(0, 1)
    here, stat = other.process, processes._read_stat(os.getppid())
    assert stat is not None
    parent = type(here)(here.host, here.boot_id, here.pid_namespace, os.getppid(), stat[3])
    other = msgspec.structs.replace(other, process=parent, token="t" * 32)
    names.create(names.read_lock().number + 1, other)

    code, _, err = said(capsys, "prune", url, "--keep", 1)

    assert code == 1
    assert f"writes to {url} and keeps what its own `keep` says; end it first" in err
    assert len(steps_at(url)) == 3


@pytest.mark.parametrize("verb", ["ls", "verify", "diff", "prune"])
@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("gopher://here/run7", "fsspec knows no gopher://"),
        ("gdrive://here/run7", "need a package that is not installed"),
        ("memory://nothing-here/run7", "no checkpoint is at memory://nothing-here/run7: one is a folder step-00000120"),
        ("http://127.0.0.1:9/run7", "can't be read: "),
        ("file:///nothing/here", "no checkpoint is at file:///nothing/here"),
    ],
)
def test_a_bad_url_is_one_sentence(verb: str, place: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown scheme, a package that lacks, no such bucket, nothing that listens, nothing there."""
    code, out, err = said(capsys, verb, place, *(["--keep", "1"] if verb == "prune" else []))

    assert code != 0
    assert out == ""
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_a_store_that_refuses_is_one_sentence(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys may not list it."""

    def refuse(*_given: object, **_named: object) -> list[str]:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", refuse)
    code, _, err = said(capsys, "ls", url)

    assert code != 0
    assert err.strip().endswith(f"{url} can't be read: Access Denied")


def test_the_folder_of_a_local_tier_is_listed_verified_compared_and_pruned(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the path that the tier was given; what a node has of a set that is spread over nodes is no damage."""
    _, listed = numbers(capsys, "ls", node)
    assert [one["step"] for one in listed["checkpoints"]] == [3, 2]
    _, told = numbers(capsys, "diff", node)
    assert [one["name"] for one in told["changed"]] == ["model.moves"]

    (gone,) = node.glob("*/step-00000003/__0_1.tensors")
    gone.unlink()  # as if it were another node's
    code, out, _ = said(capsys, "verify", node)
    assert (code, out.splitlines()[-1]) == (0, "2 of 2 whole; as far as they are on this node")
    assert "1 files on other nodes" in said(capsys, "ls", node)[1]
    assert numbers(capsys, "ls", node)[1]["checkpoints"][0]["files_elsewhere"] == ["__0_1.tensors"]
    assert "on another node" in said(capsys, "ls", gone.parent)[1]
    _, _, err = said(capsys, "diff", node)
    assert "3 of 4 files, the others are on other nodes" in err

    (damaged,) = node.glob("*/step-00000003/__0_0.tensors")
    damaged.write_bytes(b"X" * damaged.stat().st_size)
    assert said(capsys, "verify", node)[0] == 1
    (whole,) = node.glob("*/step-00000002")
    assert said(capsys, "prune", node, "--keep", 1)[0] == 0
    assert whole.exists()


def test_a_path_with_the_sets_of_several_jobs_asks_which(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each by its folder."""
    other = CheckpointManager(tmp_path / "other", local=LocalTier(node), shared_every=100)
    other.save(1, state_of(1))
    other.close()

    code, _, err = said(capsys, "ls", node)

    assert code != 0
    assert "has the sets of 2 jobs: give one of other-" in err
