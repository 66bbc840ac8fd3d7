# SPDX-License-Identifier: Apache-2.0
"""What a whole checkpoint looks like, and how to recognise one that is not.

A checkpoint is a folder of shards. Its last file, ``manifest.json``, names every other file with its size and its
digest, so that a reader can prove that nothing was lost, cut short or flipped. A digest names its algorithm
(``trust.file_digests``). The manifest proves itself too: it carries the SHA-256 of its own body, and only the one
canonical spelling of it is accepted, so a flipped byte anywhere in it, even in white space, is seen.

Digests prove integrity, not origin: a user that may write the folder may write a manifest. Keep the folder yours.

Everything here is judgement: bytes and observations in, a value and a reason out. Reading files is ``storage``'s work.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from megascale_ops.checkpoint.state.layout import Layout
from megascale_ops.checkpoint.trust import file_digests
from megascale_ops.foreign import UNREADABLE

# 3: a digest names its algorithm. 2: all were SHA-256. 1: the plan and all that is not a tensor were pickles; such a
# folder verifies, and is loaded only on request.
VERSION = 3
LAST_SHA256 = 2
LAST_PICKLED = 1
# The same name as schema.environment.CHECKPOINT_ALLOW_PICKLE; schema and checkpoint share a floor.
ALLOW_VARIABLE = "MEGASCALE_CHECKPOINT_ALLOW_PICKLE"
FILE_NAME = "manifest.json"
# 64 MB: 160 bytes a file, so the shards of 400,000 ranks. What is larger is not read.
MOST_BYTES = 64 << 20

# What we and torch.distributed.checkpoint call files, and plainly named ones beside them: nothing that leads out of the
# folder or acts on a terminal.
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
# A detail quotes what stands in a foreign file.
_DETAIL_LENGTH = 200

FaultKind = Literal["missing", "size differs", "digest differs", "unreadable", "malformed", "other version"]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint as it was when the checkpoint was sealed."""

    name: str
    size_bytes: int
    digest: str  # xxh3_128:..., sha256:...


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that was sealed at one step."""

    step: int
    world_size: int
    written_wall_s: float  # wall clock of the rank that sealed it, for display only
    files: tuple[FileEntry, ...]
    version: int = VERSION
    # Of the state, for retention. Where none was given there is no field, so that older manifests read as they did.
    metric: float | msgspec.UnsetType = msgspec.UNSET
    code: str | msgspec.UnsetType = msgspec.UNSET  # the version of this program that saved it
    parent: int | msgspec.UnsetType = msgspec.UNSET  # step of the checkpoint that the training last restored or sealed
    mesh: Layout | msgspec.UnsetType = msgspec.UNSET  # how the ranks that saved it were laid out
    # Of entries of which ranks held other parts: the number of each rank's variant (``state.variants``).
    variants: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET


class FileSeen(msgspec.Struct, frozen=True):
    """What was found where the manifest promised a file."""

    name: str
    size_bytes: int | None = None  # None: there is no such file
    digest: str | None = None  # by the algorithm of its entry; None: not computed, because the size already differs
    error: str = ""  # why it could not be read, in the words of the system


class Fault(msgspec.Struct, frozen=True):
    """One reason not to trust a checkpoint."""

    file: str
    kind: FaultKind
    detail: str = ""

    def sentence(self) -> str:
        """Return it as a sentence for people: ``__0_0.tensors is missing``."""
        verb = "" if self.kind.endswith("differs") else "is "
        text = f"{self.file} {self.kind}" if not verb else f"{self.file} {verb}{self.kind}"
        return f"{text} ({self.detail})" if self.detail else text


class CheckpointReport(msgspec.Struct, frozen=True):
    """One checkpoint folder and everything that is wrong with it; no faults means it verifies."""

    path: str
    step: int
    faults: tuple[Fault, ...] = ()
    manifest: Manifest | None = None

    @property
    def ok(self) -> bool:
        """Whether every file is exactly as it was sealed."""
        return not self.faults

    def sentence(self) -> str:
        """The verdict in one sentence, with the first three faults."""
        if self.ok:
            return f"checkpoint of step {self.step} verifies ({self.path})"
        named = "; ".join(fault.sentence() for fault in self.faults[:3])
        more = f"; and {len(self.faults) - 3} more" if len(self.faults) > 3 else ""
        return f"checkpoint of step {self.step} is damaged: {named}{more} ({self.path})"


class ManifestError(ValueError):
    """A manifest that cannot be believed; ``fault`` is why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.sentence())
        self.fault = fault


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: a manifest and the digest of its canonical JSON."""

    manifest: Manifest
    sha256: str


class _OldEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, as formats up to ``LAST_SHA256`` have it."""

    name: str
    size_bytes: int
    sha256: str


class _OldManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest, as they have it."""

    step: int
    world_size: int
    written_wall_s: float
    files: tuple[_OldEntry, ...]
    version: int
    metric: float | msgspec.UnsetType = msgspec.UNSET


class _OldSealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Their file."""

    manifest: _OldManifest
    sha256: str


class _Outside(msgspec.Struct, frozen=True):
    """The file in any version: a body, whatever is in it, and its digest."""

    manifest: msgspec.Raw
    sha256: str


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class _Outline(msgspec.Struct, frozen=True):
    """As much as every version of the file can be asked for."""

    manifest: _Versioned


def plain(text: str) -> str:
    """A text without what a terminal would act on; for what was read from a file that others may write."""
    return "".join(character if character.isprintable() else "?" for character in text)


def metric_of(manifest: Manifest) -> float | None:
    """What the state was measured by when it was saved; None: nothing was given."""
    return None if isinstance(manifest.metric, msgspec.UnsetType) else manifest.metric


def saved_by(manifest: Manifest) -> str:
    """Who saved it, in words: ``4 ranks (dp=2 tp=2)``."""
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    mesh = mesh_of(manifest)
    return f"{ranks} ({mesh})" if mesh else ranks


def mesh_of(manifest: Manifest) -> str:
    """The dimensions of the mesh by which it was saved: ``dp=2 tp=2``; empty: not known."""
    return "" if isinstance(manifest.mesh, msgspec.UnsetType) else plain(manifest.mesh.spelled())


def variant_of(manifest: Manifest, entry: str, rank: int, world_size: int) -> int | None:
    """Which variant of an entry a rank of a job of that size had saved; None: it was no such job, or had none."""
    numbers = () if isinstance(manifest.variants, msgspec.UnsetType) else manifest.variants.get(entry, ())
    same_job = manifest.world_size == world_size == len(numbers)
    return numbers[rank] if same_job and numbers[rank] >= 0 else None


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes of ``manifest.json``, in the format of its version."""
    written = _to_old(manifest) if manifest.version <= LAST_SHA256 else manifest
    sha256 = hashlib.sha256(msgspec.json.encode(written)).hexdigest()
    sealed = _OldSealed(written, sha256) if isinstance(written, _OldManifest) else _Sealed(written, sha256)
    return msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n"


def decode(raw: bytes) -> Manifest:
    """Read a manifest and prove it.

    Raises:
        ManifestError: it is not JSON, not ours, of another version, or not exactly what was written.
    """
    try:
        version = msgspec.json.decode(raw, type=_Outline).manifest.version
        if not 1 <= version <= VERSION:
            raise ManifestError(_other_version(raw, version))
        if version <= LAST_SHA256:
            manifest = _from_old(msgspec.json.decode(raw, type=_OldSealed).manifest)
        else:
            manifest = msgspec.json.decode(raw, type=_Sealed).manifest
    except UNREADABLE as exc:
        raise ManifestError(Fault(FILE_NAME, "malformed", plain(str(exc))[:_DETAIL_LENGTH])) from exc
    if encode(manifest) != raw:
        raise ManifestError(Fault(FILE_NAME, "digest differs"))
    if not isinstance(manifest.mesh, msgspec.UnsetType) and not manifest.mesh.is_sound():
        raise ManifestError(Fault(FILE_NAME, "malformed", "its mesh can't be one"))
    for entry in manifest.files:
        if not _SHARD_NAME.fullmatch(entry.name) or entry.name in {".", "..", FILE_NAME} or entry.size_bytes < 0:
            said = f"{ascii(entry.name)[:_DETAIL_LENGTH]} is not the name of a shard, or its size is below zero"
            raise ManifestError(Fault(FILE_NAME, "malformed", said))
        if version > LAST_SHA256 and not file_digests.is_spelled(entry.digest):
            raise ManifestError(_other_digest(entry))
    return manifest


def _to_old(manifest: Manifest) -> _OldManifest:
    assert all(entry.digest.startswith("sha256:") for entry in manifest.files), "older formats know no other digest"
    files = tuple(
        _OldEntry(entry.name, entry.size_bytes, entry.digest.removeprefix("sha256:")) for entry in manifest.files
    )
    head = manifest.step, manifest.world_size, manifest.written_wall_s
    return _OldManifest(*head, files, manifest.version, manifest.metric)


def _from_old(old: _OldManifest) -> Manifest:
    files = tuple(FileEntry(entry.name, entry.size_bytes, f"sha256:{entry.sha256}") for entry in old.files)
    return Manifest(old.step, old.world_size, old.written_wall_s, files, old.version, old.metric)


def _other_digest(entry: FileEntry) -> Fault:
    name, _, digits = entry.digest.partition(":")
    if file_digests.is_known(entry.digest) or not digits or not _SHARD_NAME.fullmatch(name):
        return Fault(FILE_NAME, "malformed", f"{entry.name} has no digest")
    return Fault(FILE_NAME, "other version", f"this program knows no digests by {name}")


def _other_version(raw: bytes, version: int) -> Fault:
    """Tell a manifest of a later program from a damaged one: this much of the file stays the same in every version."""
    parts = msgspec.json.decode(raw, type=_Outside)
    body = msgspec.json.encode(msgspec.json.decode(parts.manifest))
    if hashlib.sha256(body).hexdigest() != parts.sha256:
        return Fault(FILE_NAME, "digest differs")
    return Fault(FILE_NAME, "other version", f"its format is {version}, this program reads up to {VERSION}")


def pickle_sentence(folder: str) -> str:
    """What to tell of a checkpoint that is a pickle, where the user did not ask for one."""
    return (
        f"{folder} was written by an older version as a pickle, which runs what its writer wanted: if you trust that, "
        f"load it once with CheckpointManager(allow_pickle=True) or {ALLOW_VARIABLE}=1, and save again"
    )


def seal_of(manifest: Manifest) -> str:
    """What names a checkpoint: the SHA-256 of its manifest, which has the digests of all its files."""
    return hashlib.sha256(encode(manifest)).hexdigest()


def judge_file(entry: FileEntry, seen: FileSeen) -> Fault | None:
    """Compare what was sealed with what was found.

    Returns:
        The fault, or None when the file is exactly as it was sealed.
    """
    if seen.error:
        return Fault(entry.name, "unreadable", seen.error)
    if seen.size_bytes is None:
        return Fault(entry.name, "missing")
    if seen.size_bytes != entry.size_bytes:
        return Fault(entry.name, "size differs", f"{seen.size_bytes} bytes instead of {entry.size_bytes}")
    if seen.digest != entry.digest:
        return Fault(entry.name, "digest differs")
    return None


def judge_step(manifest: Manifest, folder_step: int) -> Fault | None:
    """A folder that was renamed by hand must not pass for another step."""
    if manifest.step == folder_step:
        return None
    return Fault(FILE_NAME, "malformed", f"it is of step {manifest.step}, its folder says {folder_step}")


def merge(reports: Sequence[CheckpointReport]) -> CheckpointReport:
    """One report from several that looked at the same folder, each at its share of the files."""
    faults = {(fault.file, fault.kind): fault for report in reports for fault in report.faults}
    manifest = next((report.manifest for report in reports if report.manifest), None)
    first = reports[0]
    return CheckpointReport(first.path, first.step, tuple(faults[key] for key in sorted(faults)), manifest)
