# SPDX-License-Identifier: Apache-2.0
"""The foreground stage: this rank's share of a state goes into its host buffer, laid out as its files will be.

torch.distributed.checkpoint (DCP) plans who writes what, as in a save that waits. So a checkpoint has the same bytes
whichever way it was saved, and the writer process needs no torch, no tensors and no process group: it writes stretches
of memory to files.

Planning takes 40 us a tensor, which is a fifth of what the copy of 10 GB takes. But a state rarely changes its shape:
so a later save starts its GPU copies where the last plan had them, plans while they run, and copies again only when
the plan has become another one.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megascale_ops.checkpoint import dcp_storage
from megascale_ops.checkpoint.background.copying import Copier, Copy, Started
from megascale_ops.checkpoint.background.host_buffer import HostBuffer
from megascale_ops.checkpoint.background.messages import FileImage
from megascale_ops.checkpoint.dcp_storage import Place
from megascale_ops.checkpoint.ranks import cause_of
from megascale_ops.errors import CheckpointError

# 4096: each file begins at a page.
_PAGE_BYTES = 4096


class Stretch(NamedTuple):
    """Where in the buffer a chunk lies, and which memory it is a copy of, read how. Equal ones have equal bytes."""

    at: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    is_lazy: tuple[bool, bool]  # to be read as conjugates, or as negatives
    dtype: torch.dtype


class Stager:
    """Stages the saves of one rank, one at a time.

    Args:
        buffer: where to.
        copier: who copies.
    """

    def __init__(self, buffer: HostBuffer, copier: Copier) -> None:
        self.buffer = buffer
        self.copier = copier
        self._items: list[tuple[WriteItem, int]] = []  # of the last plan: GPU tensors, and where in the buffer
        self._early: tuple[Started, list[Stretch]] | None = None

    def start(self, flat: Mapping[str, torch.Tensor], overwritten_by_steps: frozenset[int]) -> None:
        """Start the GPU copies if they will probably be as those of the last save. Nothing depends on it.

        Args:
            flat: tensors by key, as ``contents`` takes a state apart.
            overwritten_by_steps: see ``Copier.start``.
        """
        if not self._items:
            return
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(flat))
        laid: list[tuple[int, torch.Tensor]] = []
        for item, at in self._items:
            if item.index.fqn not in flat:
                return
            tensor: Any = planner.resolve_data(item)
            laid.append((at, tensor.detach()))
        if not all(_is_on_gpu(tensor) and at + _size_of(tensor) <= self.buffer.size_bytes for at, tensor in laid):
            return
        started = self.copier.start(self._copies(laid), overwritten_by_steps)
        self._early = started, _stretches(laid)

    def copy(self, laid: list[tuple[WriteItem, int, torch.Tensor]], size_bytes: int, steps: frozenset[int]) -> None:
        """Copy what a plan has laid out, but for what was copied early; return as ``Copier.finish`` does.

        Raises:
            CheckpointError: there is no memory for it.
        """
        on_gpu = [(item, at, tensor) for item, at, tensor in laid if _is_on_gpu(tensor)]
        others = [(at, tensor) for _, at, tensor in laid if not _is_on_gpu(tensor)]
        placed = [(at, tensor) for _, at, tensor in on_gpu]
        early, self._early = self._early, None
        is_right = early is not None and early[1] == _stretches(placed) and size_bytes <= self.buffer.size_bytes
        if early is not None and not is_right:
            self.copier.end(early[0])
        self.buffer.reserve(size_bytes, pinned=bool(placed))
        started = early[0] if early and is_right else self.copier.start(self._copies(placed), steps)
        self.copier.copy_now(self._copies(others))
        self.copier.finish(started)
        self._items = [(item, at) for item, at, _ in on_gpu]

    def drop(self) -> None:
        """A save that was started will not be: its copies end before another one's begin."""
        early, self._early = self._early, None
        if early is not None:
            self.copier.end(early[0])

    def _copies(self, laid: Iterable[tuple[int, torch.Tensor]]) -> list[Copy]:
        return [Copy(tensor, self.buffer.part(at, _size_of(tensor))) for at, tensor in laid]


class StagingWriter(dcp_storage.Writer):
    """DCP's storage for one save into a host buffer. Its fields are set by the save.

    Attributes:
        images: this rank's files in the buffer.
        size_bytes: how much of the buffer they take.
        plan: the bytes of ``plan.msgpack``; on the coordinating rank.
    """

    def __init__(self, rank: int, stager: Stager, overwritten_by_steps: frozenset[int]) -> None:
        super().__init__(None, rank)
        self.images: tuple[FileImage, ...] = ()
        self.size_bytes = 0
        self.plan = b""
        self._stager = stager
        self._overwritten_by_steps = overwritten_by_steps

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy every chunk that fell to this rank."""
        laid: list[tuple[WriteItem, int, torch.Tensor]] = []
        results: list[WriteResult] = []
        try:
            for name, items in self._by_file(plan.items):
                results += self._lay(name, items, planner, laid)
            self._stager.copy(laid, self.size_bytes, self._overwritten_by_steps)
        except (OSError, RuntimeError) as exc:
            raise CheckpointError(cause_of(exc)) from exc
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _lay(
        self,
        name: str,
        items: Iterable[WriteItem],
        planner: SavePlanner,
        laid: list[tuple[WriteItem, int, torch.Tensor]],
    ) -> list[WriteResult]:
        """Give each chunk of a file its place, in the file and in the buffer."""
        start = self.size_bytes + -self.size_bytes % _PAGE_BYTES
        aligned, at, results = dcp_storage.alignment_of(name), 0, []
        for item in items:
            tensor: Any = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), f"{item.index.fqn}: contents gives nothing but tensors"
            tensor, size = tensor.detach(), _size_of(tensor)
            at += -at % aligned
            laid.append((item, start + at, tensor))
            results.append(WriteResult(item.index, size, Place(name, at, size)))
            at += size
        self.images += (FileImage(name, start, at),)
        self.size_bytes = start + at
        return results

    def _store_plan(self, raw: bytes) -> None:
        self.plan = raw


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stretches(laid: Iterable[tuple[int, torch.Tensor]]) -> list[Stretch]:
    return [
        Stretch(
            at,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            (tensor.is_conj(), tensor.is_neg()),
            tensor.dtype,
        )
        for at, tensor in laid
    ]
