# SPDX-License-Identifier: Apache-2.0
"""Digests of files name their algorithm; what was sealed by one is verified by it, in this format and in older ones."""

import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from megascale_ops.checkpoint import CheckpointManager, deletion, differences, latest, manifest, storage
from megascale_ops.checkpoint.manifest import FileEntry, Manifest, ManifestError
from megascale_ops.checkpoint.trust.file_digests import Algorithm, FileDigest, algorithm_of, digest_of, is_spelled
from megascale_ops.errors import CheckpointError, UsageError

FORMAT_2 = Path(__file__).parents[2] / "fixtures" / "checkpoints" / "format-2"
# Of no bytes at all: xxhash's own test vector and FIPS 180-4's.
OF_NOTHING = {
    "xxh3_128": "xxh3_128:99aa06d3014798d86001c324468d497f",
    "sha256": "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}
ALGORITHMS: tuple[Algorithm, ...] = ("xxh3_128", "sha256")
MEGABYTE = 1 << 20


def state_of(value: float) -> dict[str, Any]:
    """A state with a tensor that has a file of its own, small ones and data."""
    return {"w": torch.full((MEGABYTE,), value), "model": nn.Linear(3, 2), "notes": {"value": value}}


def manifest_of(root: Path, step: int) -> Manifest:
    """What was sealed."""
    found = latest.read_manifest(storage.final_folder(root, step))
    assert isinstance(found, Manifest)
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_digest_is_the_one_that_others_compute(algorithm: Algorithm) -> None:
    """In one piece or in many, and it names by what."""
    raw, pieces = bytes(range(256)) * 50, FileDigest(algorithm)
    for start in range(0, len(raw), 777):
        pieces.update(raw[start : start + 777])

    assert digest_of(b"", algorithm) == OF_NOTHING[algorithm]
    assert pieces.text() == digest_of(raw, OF_NOTHING[algorithm])
    assert digest_of(raw, algorithm) != digest_of(raw[:-1] + b"\0", algorithm)
    assert algorithm_of(pieces.text()) == algorithm
    assert is_spelled(pieces.text())
    assert not is_spelled(pieces.text()[:-1])


def test_an_algorithm_that_is_not_there_is_told() -> None:
    """By its name, with those that there are."""
    with pytest.raises(ValueError, match="'md5' is no digest: it is one of xxh3_128, sha256"):
        FileDigest("md5:ab")


def test_without_its_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And SHA-256 goes on without it."""
    monkeypatch.setitem(sys.modules, "xxhash", None)

    with pytest.raises(CheckpointError, match="the package xxhash has to be installed"):
        FileDigest("xxh3_128")
    assert digest_of(b"", "sha256") == OF_NOTHING["sha256"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_manager_seals_by_the_algorithm_that_it_was_given(tmp_path: Path, algorithm: Algorithm) -> None:
    """The manifest names it for each file; a manager that seals by the other one restores it, and sees what flips."""
    CheckpointManager(tmp_path, digests=algorithm).save(1, state_of(1.0))
    CheckpointManager(tmp_path, digests=algorithm).save(2, state_of(2.0))
    files = manifest_of(tmp_path, 2).files
    large = storage.final_folder(tmp_path, 2) / max(files, key=lambda entry: entry.size_bytes).name
    other = CheckpointManager(tmp_path, digests=ALGORITHMS[1 - ALGORITHMS.index(algorithm)])
    state = state_of(0.0)

    assert {algorithm_of(entry.digest) for entry in files} == {algorithm}
    assert other.restore(state) == 2
    assert state["w"].eq(2.0).all()
    with large.open("r+b") as file:
        file.seek(MEGABYTE + 5)
        file.write(b"\x55")
    assert other.restore(state) == 1
    assert state["w"].eq(1.0).all()
    assert [fault.sentence() for fault in other.skipped[0].faults] == [f"{large.name} digest differs"]


def test_digests_by_another_word_are_refused(tmp_path: Path) -> None:
    """When the manager is made, with what there is."""
    word: Any = "md5"
    with pytest.raises(UsageError, match="digests='md5' means nothing: it is one of xxh3_128, sha256"):
        CheckpointManager(tmp_path, digests=word)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder of checkpoints that the program before format 3 wrote."""
    return Path(shutil.copytree(FORMAT_2, tmp_path / "older"))


def older_state() -> dict[str, Any]:
    """What it is restored into."""
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "mean": torch.zeros(2), "notes": {}}


def test_a_folder_of_format_2_goes_on(older: Path) -> None:
    """Verified by its own digests, listed, restored; the next save is of the present format, and they are compared."""
    sealed = manifest_of(older, 12)
    raw = (storage.final_folder(older, 12) / manifest.FILE_NAME).read_bytes()
    state, manager = older_state(), CheckpointManager(older)

    assert (sealed.version, {algorithm_of(entry.digest) for entry in sealed.files}) == (2, {"sha256"})
    assert manifest.encode(sealed) == raw
    assert latest.inspect(storage.final_folder(older, 12)).ok
    assert deletion.glance(storage.final_folder(older, 12)).ok
    assert manager.restore(state) == 12
    assert state["mean"].tolist() == [1, 1]
    assert state["notes"] == {1: (2, 3), "epoch": 4}
    manager.save(13, state)
    assert manifest_of(older, 13).version == manifest.VERSION
    found = differences.compare(storage.final_folder(older, 12), storage.final_folder(older, 13))
    assert (found.changed, found.values) == ((), ())


@pytest.mark.parametrize("name", ["__0_0.tensors", "__0_0.msgpack", "plan.msgpack", "manifest.json"])
def test_a_flipped_bit_in_a_folder_of_format_2_is_found(older: Path, name: str) -> None:
    """Its own algorithm finds it, by ``verify`` and by a restore."""
    path = storage.final_folder(older, 12) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    assert not latest.inspect(storage.final_folder(older, 12)).ok
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        CheckpointManager(older).restore(older_state())


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        ("", "malformed (__0_0.tensors has no digest)"),
        ("ab" * 16, "malformed (__0_0.tensors has no digest)"),
        ("xxh3_128:ab", "malformed (__0_0.tensors has no digest)"),
        ("sha256:" + "AB" * 32, "malformed (__0_0.tensors has no digest)"),
        ("\x1b[2J:ab", "malformed (__0_0.tensors has no digest)"),
        ("blake4:" + "ab" * 16, "other version (this program knows no digests by blake4)"),
    ],
)
def test_a_digest_of_another_kind_is_told(digest: str, said: str) -> None:
    """Damage as damage; an algorithm of a later program as that, so that a restore does not fall back behind it."""
    raw = manifest.encode(Manifest(1, 1, 0.0, (FileEntry("__0_0.tensors", 1, digest),)))

    with pytest.raises(ManifestError) as raised:
        manifest.decode(raw)

    assert str(raised.value) == f"manifest.json is {said}"


def test_a_digest_of_a_later_program_ends_a_restore(tmp_path: Path) -> None:
    """Its algorithm is not known, so nothing says that the checkpoint is damaged."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    manager.save(2, {"a": 2})
    sealed = manifest_of(tmp_path, 2)
    files = tuple(msgspec.structs.replace(entry, digest="blake4:" + "ab" * 16) for entry in sealed.files)
    raw = manifest.encode(msgspec.structs.replace(sealed, files=files))
    (storage.final_folder(tmp_path, 2) / manifest.FILE_NAME).write_bytes(raw)

    with pytest.raises(CheckpointError, match=r"of a later version \(this program knows no digests by blake4\)"):
        manager.restore({"a": 0})
