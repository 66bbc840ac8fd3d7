# SPDX-License-Identifier: Apache-2.0
"""Whatever one change does to the newest checkpoint, it is seen, and the one before is chosen."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.checkpoint import latest, manifest
from megascale_ops.checkpoint.manifest import FileEntry, Manifest, ManifestError
from tests.fakes.checkpoints import SHARDS, sealed
from tests.matrix import some

FILES = [*SHARDS, manifest.FILE_NAME]


def chosen_after(name: str, change: "Change") -> latest.Choice:
    """Seal two checkpoints, change one file of the newer, ask for the newest."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        sealed(root, 10)
        path = sealed(root, 20) / name
        changed = change.applied(path.read_bytes())
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        return latest.newest(root)


class Change:
    """One change to a file, scaled to its length."""

    def __init__(self, kind: str, where: float, mask: int) -> None:
        self.kind, self.where, self.mask = kind, where, mask

    def __repr__(self) -> str:
        return f"{self.kind} at {self.where} with {self.mask}"

    def applied(self, data: bytes) -> bytes | None:
        """The file afterwards; None when it is gone."""
        place = int(self.where * len(data))
        if self.kind == "gone":
            return None
        if self.kind == "cut":
            return data[:place]
        if self.kind == "longer":
            return data + bytes([self.mask])
        return data[:place] + bytes([data[place] ^ self.mask]) + data[place + 1 :]


CHANGES = st.builds(
    Change,
    st.sampled_from(["flipped", "flipped", "cut", "longer", "gone"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)
DIGESTS = st.from_regex(r"(xxh3_128:[0-9a-f]{32}|sha256:[0-9a-f]{64})", fullmatch=True)


@given(st.sampled_from(FILES), CHANGES)
@settings(max_examples=some(300), deadline=None)
def test_any_change_to_any_file_is_seen_and_the_older_checkpoint_is_chosen(name: str, change: Change) -> None:
    """A flipped bit, a cut, a byte more, a file that is gone: in a shard, in the plan, in the manifest itself."""
    choice = chosen_after(name, change)

    assert choice.newest is not None
    assert choice.newest.step == 10
    assert [report.step for report in choice.skipped] == [20]
    assert choice.skipped[0].faults[0].file == name


@given(
    st.builds(
        Manifest,
        step=st.integers(0, 2**53),
        world_size=st.integers(1, 2**20),
        written_wall_s=st.floats(0, 1e12),
        files=st.lists(
            st.builds(FileEntry, st.from_regex(r"__[0-9]{1,5}_0\.distcp", fullmatch=True), st.integers(0), DIGESTS),
            max_size=4,
        ).map(tuple),
    )
)
def test_any_manifest_comes_back_as_it_was(written: Manifest) -> None:
    """Encoding loses nothing."""
    assert manifest.decode(manifest.encode(written)) == written


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_raise_anything_else(raw: bytes) -> None:
    """Garbage is a fault, never a crash."""
    try:
        manifest.decode(raw)
    except ManifestError as exc:
        assert exc.fault.file == manifest.FILE_NAME  # noqa: PT017  the only exception allowed
