# SPDX-License-Identifier: Apache-2.0
"""What a manifest promises."""

import msgspec
import pytest

from megascale_ops.checkpoint import manifest
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, FileEntry, FileSeen, Manifest, ManifestError

ENTRY = FileEntry("__0_0.distcp", 3, "xxh3_128:" + "a" * 32)
MANIFEST = Manifest(step=120, world_size=2, written_wall_s=1.5, files=(ENTRY,))


def test_a_manifest_comes_back_as_it_was() -> None:
    """Encoding and decoding change nothing."""
    assert manifest.decode(manifest.encode(MANIFEST)) == MANIFEST


def test_a_manifest_of_another_version_names_both_versions() -> None:
    """Who is told to upgrade must know from what to what."""
    raw = manifest.encode(msgspec.structs.replace(MANIFEST, version=9))

    with pytest.raises(ManifestError, match=r"other version \(its format is 9, this program reads up to 3\)"):
        manifest.decode(raw)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff\xfe", b"null", b'{"manifest":{"version":1}}', b"[" * 5000])
def test_anything_else_is_malformed_and_never_another_exception(raw: bytes) -> None:
    """A reader survives any bytes."""
    with pytest.raises(ManifestError, match="malformed"):
        manifest.decode(raw)


def test_a_manifest_cannot_point_outside_its_folder() -> None:
    """A name with a slash is refused before any file is opened."""
    for name in ("../../etc/passwd", "a/b", "..", "", "manifest.json"):
        raw = manifest.encode(msgspec.structs.replace(MANIFEST, files=(FileEntry(name, 1, ENTRY.digest),)))

        with pytest.raises(ManifestError, match="not the name of a shard"):
            manifest.decode(raw)


def test_the_same_content_spelled_differently_is_refused() -> None:
    """Only the canonical bytes count, so a flipped byte in white space is seen too."""
    with pytest.raises(ManifestError, match="digest differs"):
        manifest.decode(manifest.encode(MANIFEST).replace(b"  ", b" \t", 1))


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (FileSeen(ENTRY.name), "__0_0.distcp is missing"),
        (FileSeen(ENTRY.name, 2), "__0_0.distcp size differs (2 bytes instead of 3)"),
        (FileSeen(ENTRY.name, 3, "bb"), "__0_0.distcp digest differs"),
        (FileSeen(ENTRY.name, error="Permission denied"), "__0_0.distcp is unreadable (Permission denied)"),
    ],
)
def test_each_fault_is_told_in_plain_words(seen: FileSeen, sentence: str) -> None:
    """The kind, the file and the numbers."""
    fault = manifest.judge_file(ENTRY, seen)

    assert fault is not None
    assert fault.sentence() == sentence


def test_a_file_as_it_was_sealed_has_no_fault() -> None:
    """No false alarm."""
    assert manifest.judge_file(ENTRY, FileSeen(ENTRY.name, 3, ENTRY.digest)) is None


def test_a_renamed_folder_does_not_pass_for_another_step() -> None:
    """The manifest's step and the folder's must agree."""
    assert manifest.judge_step(MANIFEST, 120) is None
    assert "it is of step 120, its folder says 130" in str(manifest.judge_step(MANIFEST, 130))


def test_reports_of_shares_merge_into_one_without_repeats() -> None:
    """A missing manifest is seen by every rank and told once."""
    missing, flipped = Fault("manifest.json", "missing"), Fault("a", "digest differs")
    reports = [CheckpointReport("/c", 4, (missing,)), CheckpointReport("/c", 4, (missing, flipped), MANIFEST)]

    merged = manifest.merge(reports)

    assert merged.faults == (flipped, missing)
    assert merged.manifest == MANIFEST
    assert merged.sentence() == "checkpoint of step 4 is damaged: a digest differs; manifest.json is missing (/c)"


def test_a_long_list_of_faults_is_cut_in_its_sentence() -> None:
    """A log line stays a line."""
    report = CheckpointReport("/c", 4, tuple(Fault(f"f{index}", "missing") for index in range(9)))

    assert report.sentence().endswith("f2 is missing; and 6 more (/c)")
    assert CheckpointReport("/c", 4).sentence() == "checkpoint of step 4 verifies (/c)"
