# SPDX-License-Identifier: Apache-2.0
"""Write and read one checkpoint folder through torch.distributed.checkpoint (DCP).

Importing this module costs half a second (DCP), so ``manager`` imports it inside its functions.

Writing is collective: DCP plans which rank writes what and every rank writes its files. Reading is not: a rank reads
what it needs by itself, so a rank that fails leaves no other waiting. Nothing is unpickled but what the user has named
(``pickled``, ``allow_pickle``), and that only after every digest of the folder was verified.
"""

import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from megascale_ops.checkpoint import contents, latest, legacy, manifest, plan, storage, values
from megascale_ops.checkpoint.allowed import Allowed, dotted, quoted
from megascale_ops.checkpoint.dcp_storage import Reader, Writer, load_alone, quietly
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.ranks import EchoError, Ranks, cause_of
from megascale_ops.checkpoint.state.capture import capture_all, in_one_line, is_stateful
from megascale_ops.checkpoint.state.variants import World, put_together
from megascale_ops.checkpoint.value_kinds import dtype_named
from megascale_ops.errors import CheckpointError

_OF_RANK = re.compile(r"__(\d+)_\d+\.(tensors|msgpack|pickle)")  # what rank n wrote


class _Folder(Protocol):
    """A checkpoint of either format, as ``read_into`` needs it."""

    @property
    def keys(self) -> frozenset[str]:
        """Everything that is stored."""

    def stored(self, key: str) -> contents.Stored:
        """Shape and type of a tensor."""

    def structures(self, names: list[str]) -> dict[str, contents.Structure]:
        """The structures of these entries."""

    def load(self, flat: dict[str, Any]) -> None:
        """Load exactly these tensors, by this rank alone."""


def write(folder: Path, flat: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write this rank's share of a state; every rank must call.

    Args:
        folder: where to.
        flat: the state, taken apart by ``contents``.
        ranks: who takes part.

    Raises:
        CheckpointError: on every rank, when any rank could not write; on that rank with the cause.
    """
    write_through(Writer(folder, ranks.rank, contents.names_in(flat)), flat, ranks)


def write_through(writer: Writer, flat: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Let DCP plan, and ``writer`` take this rank's share; else as ``write``."""
    try:
        with quietly():
            state_dict_saver.save(
                dict(flat),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=ranks.process_group if ranks.distributed else None,
                no_dist=not ranks.distributed,
            )
    except CheckpointException as exc:  # a BaseException, raised on all ranks for the failures of some
        if ranks.rank not in exc.failures:
            raise EchoError(f"rank {min(exc.failures)} could not write") from exc
        raise CheckpointError(cause_of(exc.failures[ranks.rank][0])) from exc


def digest_own(folder: Path, ranks: Ranks, algorithm: str) -> list[FileEntry]:
    """Digest the files that this rank wrote; the leading rank also digests files of no rank (the plan).

    Read back right after writing, so from the page cache of the same host.

    Raises:
        OSError: a file cannot be read.
    """
    own: list[FileEntry] = []
    for path in sorted(folder.iterdir()):
        match = _OF_RANK.fullmatch(path.name)
        if int(match.group(1)) == ranks.rank if match else ranks.leads:
            own.append(storage.digest(path, algorithm))
    return own


def sealed_of(step: int, world_size: int, world: World, files: tuple[FileEntry, ...]) -> Manifest:
    """The manifest of a save that is over now."""
    return Manifest(step=step, world_size=world_size, written_wall_s=time.time(), files=files, **world.told())


def read_into(folder: Path, sealed: Manifest, state: dict[str, Any], allowed: Allowed) -> None:
    """Load a verified checkpoint of an older format into a state, in place and by this rank alone.

    Of the present format ``loading`` does so.

    Args:
        folder: the checkpoint.
        sealed: its manifest.
        state: as given to ``save``; tensors and stateful objects are loaded in place, other entries are replaced.
        allowed: what may be unpickled, and which types of the user's own may be made.

    Raises:
        CheckpointError: the state and the checkpoint do not fit (the text names the entry), or the folder asks for
            more than is allowed. Then the state is as it was.
    """
    source = _opened(folder, sealed, allowed)
    require_known(state, source.keys)
    structures = source.structures(list(state))
    loaded = targets_of(state, structures, source.stored, allowed)
    source.load(loaded)
    hand_over(state, structures, loaded, allowed)


def require_known(state: Mapping[str, Any], keys: frozenset[str]) -> None:
    """Prove that a checkpoint with these keys holds every entry of a state.

    Raises:
        CheckpointError: it lacks one.
    """
    unknown = [name for name in state if contents.structure_key(name) not in keys]
    if unknown:
        raise CheckpointError(f"it holds {', '.join(contents.names_in(keys))} but not {', '.join(unknown)}")


def targets_of(
    state: Mapping[str, Any],
    structures: Mapping[str, contents.Structure],
    stored: Callable[[str], contents.Stored],
    allowed: Allowed,
) -> dict[str, Any]:
    """The tensors that a whole state is loaded into, by key.

    Raises:
        CheckpointError: the state does not fit; it names the entry.
    """
    found: dict[str, Any] = {}
    captured = capture_all(state)
    for name, value in state.items():
        try:
            found |= contents.targets(value, captured[name], structures[name], stored, allowed)
        except ValueError as exc:
            raise CheckpointError(f"{name!r} does not fit: {exc}") from exc
    return found


def hand_over(
    state: dict[str, Any], structures: Mapping[str, contents.Structure], loaded: Mapping[str, Any], allowed: Allowed
) -> None:
    """Give a state what was loaded: through ``load_state_dict``, or in place of the entry.

    Raises:
        CheckpointError: an entry did not take it.
    """
    for name, value in state.items():
        whole = contents.put_together(structures[name], loaded, allowed)
        if not is_stateful(value):
            state[name] = whole
            continue
        try:
            value.load_state_dict(whole)
        except Exception as exc:  # whatever a user's own object raises
            raise CheckpointError(f"{name!r} did not take what was saved: {in_one_line(exc)}") from exc


def _opened(folder: Path, sealed: Manifest, allowed: Allowed) -> _Folder:
    if sealed.version > manifest.LAST_PICKLED:
        return _NewFolder(folder, sealed, allowed)
    if not allowed.old_pickles:
        raise CheckpointError(manifest.pickle_sentence(folder.name))
    return legacy.OldFolder(folder)


def stored_in(folder: Path) -> dict[str, contents.Stored]:
    """Shape and type of every tensor of a verified checkpoint, by name."""
    source = _looked_at(folder)
    others = (contents.STRUCTURE, contents.PICKLED)
    return {key: source.stored(key) for key in sorted(source.keys) if not key.endswith(others)}


def read_tensors(folder: Path, wanted: Mapping[str, contents.Stored]) -> dict[str, torch.Tensor]:
    """Some tensors of a verified checkpoint, whole and on the CPU."""
    loaded = {key: torch.empty(stored.shape, dtype=stored.dtype) for key, stored in wanted.items()}
    _looked_at(folder).load(loaded)
    return loaded


def read_structures(folder: Path) -> dict[str, Any]:
    """All that is not a tensor in a verified checkpoint: by entry, with a ``contents.Slot`` where a tensor was."""
    source = _looked_at(folder)
    names = contents.names_in(source.keys)
    return {name: structure.value for name, structure in source.structures(names).items()}


def _looked_at(folder: Path) -> _Folder:
    """A verified checkpoint of which nothing is loaded into a state; an older one as the environment allows.

    Raises:
        CheckpointError: it can't be read, or is of a format that is not read without leave.
    """
    sealed = latest.read_manifest(folder)
    if isinstance(sealed, manifest.Fault):
        raise CheckpointError(sealed.sentence())
    old_pickles = os.environ.get(manifest.ALLOW_VARIABLE, "") == "1"
    return _opened(folder, sealed, Allowed(old_pickles=old_pickles))


class _NewFolder:
    """A verified checkpoint of the present format."""

    def __init__(self, folder: Path, sealed: Manifest, allowed: Allowed) -> None:
        self._allowed = allowed
        try:
            self._reader = Reader(folder, {entry.name: entry.size_bytes for entry in sealed.files})
        except ValueError as exc:
            raise CheckpointError(str(exc)) from exc

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._reader.plan.tensors)

    def stored(self, key: str) -> contents.Stored:
        return stored_by(self._reader.plan, key)

    def structures(self, names: list[str]) -> dict[str, contents.Structure]:
        found: dict[str, contents.Structure] = {}
        for name in names:
            try:
                raws = [self._reader.read_bytes(key) for key in contents.structure_keys(name, self.keys)]
                whole = [values.decode(raw, self._allowed) for raw in raws]
            except (ValueError, CheckpointError) as exc:
                raise CheckpointError(f"{name!r} can't be read: {exc}") from exc
            found[name] = contents.Structure(put_together(whole, None, self._allowed))
        return found

    def load(self, flat: dict[str, Any]) -> None:
        load_alone(flat, self._reader, DefaultLoadPlanner(flatten_state_dict=False))


def stored_by(stored: plan.Plan, key: str) -> contents.Stored:
    """Shape and type of a tensor, as a plan has them.

    Raises:
        ValueError: the plan does not have it.
    """
    described = stored.tensors.get(key)
    if described is None:
        raise ValueError(f"its structure speaks of a tensor {ascii(key)[:80]}, its plan does not")
    return contents.Stored(described.size, dtype_named(described.dtype))


def unpickled(key: str, raw: bytes) -> object:
    """What the user has asked to pickle, of a file whose digest was right.

    Raises:
        CheckpointError: it can't be.
    """
    try:
        return pickle.loads(raw)  # noqa: S301  the user has named this value
    except Exception as exc:  # whatever the user's own objects raise when they are made
        raise CheckpointError(f"{key.removesuffix(contents.PICKLED)} can't be unpickled: {exc}") from exc


def pickled_keys(structures: Mapping[str, contents.Structure], allowed: Allowed) -> list[str]:
    """The keys of all pickled values, each of them named by the user.

    Raises:
        CheckpointError: one is not; nothing was unpickled.
    """
    keys: list[str] = []
    for name, structure in structures.items():
        for path, key in contents.pickles_in(structure, allowed).items():
            place = dotted((name, *path))
            if place not in allowed.pickled:
                raise CheckpointError(
                    f"{manifest.plain(place)} was pickled, and loading it runs what its writer wanted: if you trust "
                    f"that, name it in CheckpointManager(pickled=({quoted(place)},))"
                )
            keys.append(key)
    return keys
