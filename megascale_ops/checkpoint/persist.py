# SPDX-License-Identifier: Apache-2.0
"""Write and read one checkpoint folder through torch.distributed.checkpoint (DCP).

Importing this module costs half a second (DCP), so ``manager`` imports it inside its functions.

Writing is collective: DCP plans which rank writes what and every rank writes one file. Reading is not: every rank reads
what it needs by itself, so a rank that fails leaves no other waiting. DCP reads its plan and all that is not a tensor
with pickle; therefore nothing here is called before every digest of the folder was verified.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megascale_ops.checkpoint import contents, storage
from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.ranks import EchoError, Ranks, cause_of
from megascale_ops.errors import CheckpointError

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")  # DCP's name for what rank n wrote


class _Writer(FileSystemWriter):
    """DCP's writer, failing in one sentence: pickled from rank to rank, failures lose what they were raised from."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as exc:  # torch wraps a full disk in a RuntimeError
            raise CheckpointError(cause_of(exc)) from exc

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except (OSError, RuntimeError) as exc:
            raise CheckpointError(cause_of(exc)) from exc


def write(folder: Path, captured: Mapping[str, Any], ranks: Ranks) -> None:
    """Write this rank's share of a state; every rank must call.

    Raises:
        CheckpointError: on every rank, when any rank could not write; on that rank with the cause.
    """
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True)
    try:
        with _quietly():
            state_dict_saver.save(
                contents.take_apart(captured),
                storage_writer=writer,
                process_group=ranks.process_group if ranks.distributed else None,
                no_dist=not ranks.distributed,
            )
    except CheckpointException as exc:  # a BaseException, raised on all ranks for the failures of some
        if ranks.rank not in exc.failures:
            raise EchoError(f"rank {min(exc.failures)} could not write") from exc
        raise CheckpointError(cause_of(exc.failures[ranks.rank][0])) from exc


def digest_own(folder: Path, ranks: Ranks) -> list[FileEntry]:
    """Digest the files that this rank wrote; the leading rank also digests files of no rank (DCP's plan).

    Read back right after writing, so from the page cache of the same host.

    Raises:
        OSError: a file cannot be read.
    """
    own: list[FileEntry] = []
    for path in sorted(folder.iterdir()):
        match = _SHARD.fullmatch(path.name)
        if int(match.group(1)) == ranks.rank if match else ranks.leads:
            own.append(storage.digest(path))
    return own


def read_into(folder: Path, state: dict[str, Any]) -> None:
    """Load a verified checkpoint into a state, in place.

    Args:
        folder: the checkpoint.
        state: as given to ``save``; tensors and stateful objects are loaded in place, other entries are replaced.

    Raises:
        ValueError: the state and the checkpoint do not fit; the text names the entry.
    """
    reader = FileSystemReader(folder)
    plan = reader.read_metadata().state_dict_metadata
    unknown = [name for name in state if contents.structure_key(name) not in plan]
    if unknown:
        raise ValueError(f"it holds {', '.join(contents.names_in(plan))} but not {', '.join(unknown)}")

    def stored(key: str) -> contents.Stored:
        described = plan[key]
        assert isinstance(described, TensorStorageMetadata), f"{key}: a slot stands for a tensor"
        return contents.Stored(tuple(described.size), described.properties.dtype)

    structures: dict[str, Any] = {contents.structure_key(name): None for name in state}
    _load(structures, folder)
    loaded: dict[str, Any] = {}
    for name, value in state.items():
        structure = structures[contents.structure_key(name)]
        try:
            loaded |= contents.targets(value, contents.capture(value), structure, stored)
        except ValueError as exc:
            raise ValueError(f"{name!r} does not fit: {exc}") from exc
    _load(loaded, folder)
    for name, value in state.items():
        whole = contents.put_together(structures[contents.structure_key(name)], loaded)
        if contents.is_stateful(value):
            value.load_state_dict(whole)
        else:
            state[name] = whole


def stored_in(folder: Path) -> dict[str, contents.Stored]:
    """Shape and type of every tensor of a verified checkpoint, by name."""
    plan = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key: contents.Stored(tuple(described.size), described.properties.dtype)
        for key, described in plan.items()
        if isinstance(described, TensorStorageMetadata)
    }


def read_tensors(folder: Path, wanted: Mapping[str, contents.Stored]) -> dict[str, torch.Tensor]:
    """Some tensors of a verified checkpoint, whole and on the CPU."""
    loaded = {key: torch.empty(stored.shape, dtype=stored.dtype) for key, stored in wanted.items()}
    _load(loaded, folder)
    return loaded


def read_structures(folder: Path) -> dict[str, Any]:
    """All that is not a tensor in a verified checkpoint: by entry, with a ``contents.Slot`` where a tensor was."""
    names = contents.names_in(FileSystemReader(folder).read_metadata().state_dict_metadata)
    structures: dict[str, Any] = {contents.structure_key(name): None for name in names}
    _load(structures, folder)
    return {name: structures[contents.structure_key(name)].value for name in names}


def _load(flat: dict[str, Any], folder: Path) -> None:
    """Load exactly these keys, by this rank alone."""
    try:
        with _quietly():
            state_dict_loader.load(flat, storage_reader=FileSystemReader(folder), no_dist=True)
    except CheckpointException as exc:
        failure, _ = next(iter(exc.failures.values()))
        raise CheckpointError(cause_of(failure)) from exc


@contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's warning that a single process is meant: here it always is meant when it is said."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
