# SPDX-License-Identifier: Apache-2.0
"""Manifests and locks in which anything stands are told as damage; nothing but what was sealed is taken."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.checkpoint import latest, lock_files, manifest, storage, writers
from megascale_ops.checkpoint.manifest import FILE_NAME, CheckpointReport, FileEntry, Manifest
from megascale_ops.checkpoint.writers import Process, Seen, Writer
from tests.fakes.checkpoints import sealed
from tests.fakes.mutations import fuzzed, mutated

DIGESTS = ("xxh3_128:" + "ab" * 16, "sha256:" + "ab" * 32, "xxh3_128:" + "00" * 16)
SEALED = manifest.encode(Manifest(120, 2, 1.5, tuple(FileEntry(f"__{n}_0.distcp", n, DIGESTS[n]) for n in range(3))))
OLDER = manifest.encode(Manifest(120, 2, 1.5, (FileEntry("__0_0.distcp", 1, DIGESTS[1]),), version=2))
WRITER = Writer(Process("node", "boot", "pid:[1]", 7, 9), "ab", "node", 0, 1.0, job="demo", job_id="abc", round=2)
LOCK = msgspec.json.encode(WRITER)


def is_one_line(sentence: str) -> bool:
    """Whether a person can read it, also in a terminal."""
    return sentence.isprintable() and len(sentence) < 2000


@fuzzed
@given(raw=mutated([SEALED, OLDER]))
def test_a_manifest_is_exactly_what_was_sealed_or_refused(raw: bytes) -> None:
    """Only the bytes themselves pass."""
    try:
        found = manifest.decode(raw)
    except manifest.ManifestError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert manifest.encode(found) == raw
    assert is_one_line(refusal)


digests = st.one_of(st.text(max_size=70), st.sampled_from(DIGESTS))
entries = st.builds(FileEntry, st.text(max_size=300), st.integers(-(2**63), 2**63), digests)


@fuzzed
@given(files=st.lists(entries, max_size=4), step=st.integers(-5, 10**12), world=st.integers(-1, 2**63))
def test_a_manifest_that_proves_itself_may_still_name_anything(
    tmp_path: Path, files: list[FileEntry], step: int, world: int
) -> None:
    """Names with folders, zeros and endless length, sizes below zero: faults, and nothing outside is read."""
    folder = storage.final_folder(tmp_path, 7)
    folder.mkdir(exist_ok=True)
    written = manifest.encode(Manifest(step, world, 0.0, tuple(files)))
    (folder / FILE_NAME).write_bytes(written)

    report = latest.inspect(folder)

    assert report.ok == (step == 7 and not files)
    assert is_one_line(report.sentence())


@fuzzed
@given(raw=mutated([LOCK]), unchanged_s=st.floats(0, 700), changed=st.booleans())
def test_any_lock_is_judged(raw: bytes, unchanged_s: float, *, changed: bool) -> None:
    """Whatever it holds it holds for ten minutes at most, and who holds it is told in one line."""
    me = msgspec.structs.replace(WRITER, token="me", job_id="other", process=Process("b", "c", "d", 1, 1))  # noqa: S106
    writer = writers.decode(raw)

    answer = writers.judge(Seen(writer, "unknown", unchanged_s, changed), me)
    late = writers.judge(Seen(writer, "unknown", 601.0), me)

    assert is_one_line(answer.reason)
    assert late.verb == "take"


@fuzzed
@given(raw=mutated([LOCK]))
def test_any_lock_file_is_looked_at(tmp_path: Path, raw: bytes) -> None:
    """From the disk, as a newcomer finds it."""
    lock_files.path_of(tmp_path, 3).write_bytes(raw)

    assert lock_files.read_lock(tmp_path).number == 3


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_not_changed_is_taken(tmp_path: Path, number: int) -> None:
    """Negative control."""
    folder = sealed(tmp_path, 10 + number)

    assert isinstance(latest.inspect(folder), CheckpointReport)
    assert latest.inspect(folder).ok
    assert manifest.decode(SEALED).step == 120
    assert writers.decode(LOCK) == WRITER
