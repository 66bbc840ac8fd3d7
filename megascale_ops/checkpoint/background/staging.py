# SPDX-License-Identifier: Apache-2.0
"""The foreground stage: this rank's share of a state goes into its host buffer, laid out as its files will be.

torch.distributed.checkpoint (DCP) plans who writes what, as in a save that waits. So a checkpoint has the same bytes
whichever way it was saved, and the writer process needs no torch, no tensors and no process group: it writes stretches
of memory to files.

A later save of a state that is cut as before starts its GPU copies at once, where the last plan had them, and uses that
plan again when all ranks can (``share_layout``). When one can't, all plan anew, and what has become another chunk is
copied again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megascale_ops.checkpoint import contents, dcp_storage, persist, plan
from megascale_ops.checkpoint.background.copying import Copier, Copy, Started
from megascale_ops.checkpoint.background.host_buffer import HostBuffer
from megascale_ops.checkpoint.background.messages import FileImage
from megascale_ops.checkpoint.background.share_layout import Files, Known, ShareLayout, replanned, signature_of
from megascale_ops.checkpoint.dcp_storage import Place
from megascale_ops.checkpoint.ranks import Ranks, cause_of
from megascale_ops.errors import CheckpointError

Outline = tuple[tuple[str, Place], ...]
"""Where on a rank what is no tensor lies, by key; what the plan of a state that is cut as before still needs."""


class Stretch(NamedTuple):
    """Where in the buffer a chunk lies, and which memory it is a copy of, read how. Equal ones have equal bytes."""

    at: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    is_lazy: tuple[bool, bool]  # to be read as conjugates, or as negatives
    dtype: torch.dtype


class Staged(NamedTuple):
    """A share in the host buffer: its files, how much they take, and the plan where this rank coordinates."""

    images: tuple[FileImage, ...]
    size_bytes: int
    plan: bytes


class _Begun(NamedTuple):
    """A save that has been started: how its tensors are cut, copies that run, and where all lies by the last plan."""

    signature: dict[str, object] | None
    early: tuple[Started, list[Stretch]] | None = None
    layout: ShareLayout | None = None


class Stager:
    """Stages the saves of one rank, one at a time: ``start``, ``outline``, then ``stage`` or ``stage_again``.

    Args:
        buffer: where to.
        copier: who copies.
    """

    def __init__(self, buffer: HostBuffer, copier: Copier) -> None:
        self._buffer = buffer
        self._copier = copier
        self._known: Known | None = None
        self._begun: _Begun | None = None

    def start(self, tensors: Mapping[str, torch.Tensor], overwritten_by_steps: frozenset[int]) -> None:
        """Start the GPU copies if the state is cut as at the last save.

        Args:
            tensors: by key, as ``contents`` takes a state apart; what is no tensor may still be missing.
            overwritten_by_steps: see ``Copier.start``.
        """
        self.drop()
        known, signature, early = self._known, signature_of(tensors), None
        if known is not None and known.has_gpu and signature == known.signature:
            files = [(name, items) for name, items in known.files if name.endswith(dcp_storage.TENSORS)]
            chunks = [chunk for chunk in ShareLayout(files, _planner_of(tensors)).chunks if _is_on_gpu(chunk[1])]
            early = self._copier.start(self._copies(chunks), overwritten_by_steps), _stretches(chunks)
        self._begun = _Begun(signature, early)

    def outline(self, flat: Mapping[str, torch.Tensor], ranks: Ranks) -> Outline | None:
        """What the others need to know of this rank, if the last plan can be used again as far as it knows.

        Args:
            flat: the whole state, which has been started.
            ranks: who takes part.
        """
        known, begun = self._known, self._begun
        if known is None or begun is None or known.place != (ranks.rank, ranks.world_size):
            return None
        if begun.signature != known.signature or flat.keys() != known.keys:
            return None
        layout = ShareLayout(known.files, _planner_of(flat))
        self._begun = begun._replace(layout=layout)
        return layout.bytes_places()

    def stage_again(self, outlines: Sequence[Outline], overwritten_by_steps: frozenset[int]) -> Staged:
        """Copy by the last plan, which all ranks can use again; of this rank alone.

        Raises:
            CheckpointError: there is no memory for it, or a copy failed.
        """
        known, begun = self._known, self._begun
        assert known is not None
        assert begun is not None
        assert begun.layout is not None
        encoded = replanned(known.plan, outlines) if known.plan is not None else b""
        self._copy(begun.layout, overwritten_by_steps)
        return Staged(begun.layout.images, begun.layout.size_bytes, encoded)

    def stage(self, flat: Mapping[str, torch.Tensor], ranks: Ranks, overwritten_by_steps: frozenset[int]) -> Staged:
        """Plan and copy; collective.

        Raises:
            CheckpointError: on every rank, when any rank could not copy.
        """
        self._known = None
        writer = _StagingWriter(ranks.rank, contents.names_in(flat), partial(self._copy, steps=overwritten_by_steps))
        persist.write_through(writer, flat, ranks)
        assert writer.layout is not None, "DCP has planned nothing"
        signature = signature_of(flat)
        if signature is not None:
            has_gpu = any(_is_on_gpu(tensor) for _, tensor in writer.layout.chunks)
            place = ranks.rank, ranks.world_size
            self._known = Known(place, signature, frozenset(flat), has_gpu, writer.files, writer.plan)
        encoded = plan.encode(writer.plan) if writer.plan is not None else b""
        return Staged(writer.layout.images, writer.layout.size_bytes, encoded)

    def drop(self) -> None:
        """A save that was started will not be: its copies end before another one's begin."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.early is not None:
            self._copier.end(begun.early[0])

    def _copy(self, layout: ShareLayout, steps: frozenset[int]) -> None:
        """Copy what was laid out, but for what was copied early; returns as ``Copier.finish`` does.

        Raises:
            CheckpointError: there is no memory for it, or a copy failed.
        """
        begun, self._begun = self._begun, None  # it would keep the tensors
        early = begun.early if begun is not None else None
        try:
            on_gpu = [chunk for chunk in layout.chunks if _is_on_gpu(chunk[1])]
            others = [chunk for chunk in layout.chunks if not _is_on_gpu(chunk[1])]
            fits = layout.size_bytes <= self._buffer.size_bytes
            is_right = early is not None and fits and early[1] == _stretches(on_gpu)
            if early is not None and not is_right:
                self._copier.end(early[0])
            self._buffer.reserve(layout.size_bytes, pinned=bool(on_gpu))
            started = early[0] if early and is_right else self._copier.start(self._copies(on_gpu), steps)
            self._copier.copy_now(self._copies(others))
            self._copier.finish(started)
        except (OSError, RuntimeError) as exc:
            raise CheckpointError(cause_of(exc)) from exc

    def _copies(self, chunks: Iterable[tuple[int, torch.Tensor]]) -> list[Copy]:
        return [Copy(tensor, self._buffer.part(at, tensor.numel() * tensor.element_size())) for at, tensor in chunks]


class _StagingWriter(dcp_storage.Writer):
    """DCP's storage for one save into a host buffer. Its fields are set by the save."""

    def __init__(self, rank: int, entries: Iterable[str], copy: Callable[[ShareLayout], None]) -> None:
        super().__init__(None, rank, entries)
        self.files: Files = []
        self.layout: ShareLayout | None = None
        self.plan: plan.Plan | None = None  # on the coordinating rank
        self._copy = copy

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy every chunk that fell to this rank."""
        self.files = self._by_file(plan.items)
        self.layout = ShareLayout(self.files, planner)
        self._copy(self.layout)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.layout.results)
        return done

    def _store_plan(self, made: plan.Plan) -> None:
        self.plan = made


def _planner_of(tensors: Mapping[str, torch.Tensor]) -> DefaultSavePlanner:
    """DCP's planner, to look up chunks of a state."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return planner


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _stretches(chunks: Iterable[tuple[int, torch.Tensor]]) -> list[Stretch]:
    return [
        Stretch(
            at,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            (tensor.is_conj(), tensor.is_neg()),
            tensor.dtype,
        )
        for at, tensor in chunks
    ]
