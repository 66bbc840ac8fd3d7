# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (DCP) writes and reads our files: its planner, our storage.

DCP decides who writes which part of which tensor and, at a restore, which parts a rank needs; that knowledge of
DTensors and their meshes is what it is for. Its own storage keeps the plan and what is not a tensor as pickles. Ours,
behind the same public interfaces (``StorageWriter``, ``StorageReader``), keeps the plan as data and tensors as bytes:

    plan.msgpack        where each part of each tensor lies (``plan``)
    __3_0.tensors       what rank 3 wrote of tensors, each as it lies in memory, at a multiple of 64 bytes; tensors of a
                        megabyte and more stand by entry of the state in files of their own, __3_1.tensors and so on
    __3_0.msgpack       structures that fell to rank 3 (``values``), one after the other
    __3_0.pickle        a value that the user asked to pickle; the next one is __3_1.pickle

Nothing here unpickles: DCP does so only for entries that are not tensors, and a plan of ours has none.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megascale_ops import foreign
from megascale_ops.checkpoint import contents, plan
from megascale_ops.checkpoint.ranks import cause_of
from megascale_ops.checkpoint.value_kinds import dtype_named
from megascale_ops.errors import CheckpointError
from megascale_ops.whole_file import write_whole

# A multiple of every element's size and of a cache line, so that a file may be mapped and its tensors used in place.
_ALIGNED_BYTES = 64
# A digest is of a whole file, so a file is what is read at once. An evaluation that needs the model reads no file of
# moments; 1 GB: the ranks of a replica group share what one rank wrote, and digest it side by side.
_FULL_BYTES = 1 << 30
# Below 1 MB a file of its own costs more than reading a tensor that is not needed.
_SMALL_BYTES = 1 << 20
# How files of tensors end.
TENSORS = ".tensors"


class Place(NamedTuple):
    """Where a chunk lies."""

    file: str
    start: int
    length: int


# -- writing --------------------------------------------------------------------------------------------------------


class Writer(StorageWriter):
    """Writes this rank's chunks, and on the coordinating rank the plan; all synced.

    Fails in one sentence: pickled from rank to rank, failures lose what they were raised from.
    """

    def __init__(self, folder: Path | None, rank: int, entries: Iterable[str] = ()) -> None:
        super().__init__()
        self._folder = folder or Path()  # None: a subclass stores elsewhere
        self._rank = rank
        self._entries = sorted(entries, key=len, reverse=True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  DCP's signature
        """Nothing to prepare: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are: each rank knows its files by its number."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003  same
        """Any folder will do."""
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every chunk that fell to this rank."""
        try:
            results = [each for name, items in self._by_file(plan.items) for each in self._write(name, items, planner)]
        except (OSError, RuntimeError) as exc:
            raise CheckpointError(cause_of(exc)) from exc
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the plan; on the coordinating rank."""
        places = {each.index: each.storage_data for share in results for each in share}
        files = sorted({place.file for place in places.values()})
        numbers = {name: number for number, name in enumerate(files)}
        tensors: dict[str, plan.Tensor] = {}
        for key, described in metadata.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata), f"{key}: contents gives nothing but tensors"
            chunks = []
            for chunk in described.chunks:
                place = places[MetadataIndex(key, chunk.offsets)]
                lies = numbers[place.file], place.start, place.length
                chunks.append(plan.Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *lies))
            tensors[key] = plan.Tensor(str(described.properties.dtype), tuple(described.size), tuple(chunks))
        try:
            self._store_plan(plan.Plan(tuple(files), tensors))
        except OSError as exc:
            raise CheckpointError(cause_of(exc)) from exc

    def _store_plan(self, made: plan.Plan) -> None:
        write_whole(self._folder / plan.FILE_NAME, plan.encode(made), durably=True)

    def _by_file(self, items: Iterable[WriteItem]) -> list[tuple[str, list[WriteItem]]]:
        tensors: list[WriteItem] = []
        structures: list[WriteItem] = []
        pickles: list[WriteItem] = []
        for item in items:
            key = item.index.fqn
            kind = structures if key.endswith(contents.STRUCTURE) else tensors
            (pickles if key.endswith(contents.PICKLED) else kind).append(item)
        files = [(f"__{self._rank}_{number}{TENSORS}", share) for number, share in enumerate(self._shares(tensors))]
        files += [(f"__{self._rank}_0.msgpack", structures)] if structures else []
        files += [(f"__{self._rank}_{number}.pickle", [item]) for number, item in enumerate(pickles)]
        return files

    def _shares(self, items: Iterable[WriteItem]) -> list[list[WriteItem]]:
        """Tensors by file: all small ones together, then each entry of the state in files of its own."""
        small: list[WriteItem] = []
        large: dict[str, list[list[WriteItem]]] = {}
        filled: dict[str, int] = {}
        for item in items:
            size = _size_of(item)
            if size < _SMALL_BYTES:
                small.append(item)
                continue
            entry = self._entry_of(item.index.fqn)
            if entry not in large or filled[entry] + size > _FULL_BYTES:
                large.setdefault(entry, []).append([])
                filled[entry] = 0
            large[entry][-1].append(item)
            filled[entry] += size
        return [share for share in (small, *(share for files in large.values() for share in files)) if share]

    def _entry_of(self, key: str) -> str:
        return next((name for name in self._entries if key == name or key.startswith(f"{name}.")), "")

    def _write(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        aligned = alignment_of(name)
        with (self._folder / name).open("wb", buffering=0) as file:
            at = 0
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor), f"{item.index.fqn}: contents gives nothing but tensors"
                data = _bytes_of(tensor)
                padding = -at % aligned
                _write_all(file.fileno(), memoryview(bytes(padding)))
                _write_all(file.fileno(), data)
                at += padding + len(data)
                results.append(WriteResult(item.index, len(data), Place(name, at - len(data), len(data))))
            os.fsync(file.fileno())
        return results


def _size_of(item: WriteItem) -> int:
    assert item.tensor_data is not None, f"{item.index.fqn}: contents gives nothing but tensors"
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def alignment_of(name: str) -> int:
    """At which multiples of bytes the parts of a file begin."""
    return _ALIGNED_BYTES if name.endswith(TENSORS) else 1


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements as they lie in memory, last dimension fastest; without a copy where they already lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _memory(plain)


def _write_all(handle: int, data: memoryview) -> None:
    """Written in full: a single write takes at most 2 GiB, and Lustre has been seen to take less than it was given."""
    while len(data):
        data = data[os.write(handle, data) :]


# -- reading --------------------------------------------------------------------------------------------------------


class Planned(StorageReader):
    """What DCP's planner asks of a checkpoint, answered from its plan; what is read is left to subclasses."""

    def __init__(self, stored: plan.Plan) -> None:
        super().__init__()
        self.plan = stored
        self._chunks: dict[MetadataIndex, plan.Chunk] = {
            MetadataIndex(key, chunk.offsets): chunk for key, each in self.plan.tensors.items() for chunk in each.chunks
        }

    def chunk_of(self, item: ReadItem) -> plan.Chunk:
        """Where what an item asks for lies."""
        return self._chunks[item.storage_index]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads but the plan."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401, ARG002  same
        """The plan as DCP's planner asks for it."""
        described: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=dtype_named(each.dtype)),
                torch.Size(each.size),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in each.chunks],
            )
            for key, each in self.plan.tensors.items()
        }
        return Metadata(described, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  same
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003  same
        """Any folder will do."""
        return True


def decoded_plan(raw: bytes, sizes: Mapping[str, int]) -> plan.Plan:
    """A plan, checked against the sizes of its files.

    Raises:
        ValueError: it is not one of these files.
    """
    return plan.decode(raw, sizes, lambda name: dtype_named(name).itemsize)


class Reader(Planned):
    """Reads a verified folder by its plan.

    Args:
        folder: the checkpoint.
        sizes: bytes of every file in it, as its manifest says.

    Raises:
        ValueError: the plan is not one of these files.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        if plan.FILE_NAME not in sizes:
            raise ValueError(f"{plan.FILE_NAME} is not among its files")
        self._folder = folder
        super().__init__(decoded_plan(foreign.read(folder / plan.FILE_NAME, sizes[plan.FILE_NAME]), sizes))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, file by file and each from front to back."""
        wanted = sorted(((self.chunk_of(item), item) for item in plan.items), key=_where)
        with _Files(self._folder) as files:
            for chunk, item in wanted:
                target = planner.resolve_tensor(item).detach()
                dtype = dtype_named(self.plan.tensors[item.storage_index.fqn].dtype)
                _fill(target, dtype, chunk, item, files.handle(self.plan.files[chunk.file]))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_bytes(self, key: str) -> bytes:
        """What was stored as bytes under a key.

        Raises:
            ValueError: the key is of something else.
            OSError: it cannot be read.
        """
        described = self.plan.tensors.get(key)
        if described is None or described.dtype != str(torch.uint8) or len(described.chunks) != 1:
            raise ValueError(f"{ascii(key)[:80]} is not stored as bytes")
        (chunk,) = described.chunks
        with _Files(self._folder) as files:
            into = bytearray(chunk.length)
            _read_all(files.handle(self.plan.files[chunk.file]), memoryview(into), chunk.start)
        return bytes(into)


class _Files:
    """Files of one folder, each opened once, none a link or a device."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[str, Any, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def handle(self, name: str) -> int:
        """A handle to read the file by; the one before is closed."""
        if self._open is None or self._open[0] != name:
            self._close()
            context = foreign.opened(self._folder / name)
            self._open = name, context, context.__enter__()
        return self._open[2]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None


def _where(read: tuple[plan.Chunk, ReadItem]) -> tuple[int, int]:
    return read[0].file, read[0].start


def _fill(target: torch.Tensor, dtype: torch.dtype, chunk: plan.Chunk, item: ReadItem, handle: int) -> None:
    """Copy the part of a chunk that an item asks for into its target."""
    rows, first, count = chunk.sizes[:1] or (1,), (*item.storage_offsets, 0)[0], (*item.lengths, 1)[0]
    row_bytes = chunk.length // rows[0] if rows[0] else 0
    whole_rows = tuple(item.lengths)[1:] == chunk.sizes[1:]
    fits = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous() and not is_lazy(target)
    if whole_rows and fits:
        _read_all(handle, _memory(target), chunk.start + first * row_bytes)
        return
    read = torch.empty((count, *chunk.sizes[1:]), dtype=dtype)
    _read_all(handle, _memory(read), chunk.start + first * row_bytes)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets[1:], item.lengths[1:], strict=True), start=1):
        read = read.narrow(dim, offset, length)
    target.copy_(read.reshape(target.shape))


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the elements in memory are to be read as their conjugates or negatives."""
    return tensor.is_conj() or tensor.is_neg()


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, to read or to write. Of one element, it may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _read_all(handle: int, into: memoryview, start: int) -> None:
    while len(into):
        count = os.preadv(handle, [into], start)
        if not count:
            raise OSError("a file of the checkpoint ends too early")
        into, start = into[count:], start + count


# -- calling DCP ----------------------------------------------------------------------------------------------------


def load_alone(flat: dict[str, Any], reader: StorageReader, planner: LoadPlanner) -> None:
    """Load exactly these keys, by this rank alone.

    Raises:
        CheckpointError: they cannot be loaded.
    """
    try:
        with quietly():
            state_dict_loader.load(flat, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as exc:
        failure, _ = next(iter(exc.failures.values()))
        raise CheckpointError(cause_of(failure)) from exc


@contextmanager
def quietly() -> Iterator[None]:
    """Without DCP's warning that a single process is meant: here it always is meant when it is said."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
