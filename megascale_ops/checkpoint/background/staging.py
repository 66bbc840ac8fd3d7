# SPDX-License-Identifier: Apache-2.0
"""The foreground stage: this rank's share of a state goes into its host buffer, laid out as its files will be.

torch.distributed.checkpoint (DCP) plans who writes what, as in a save that waits.
So a checkpoint has the same bytes whichever way it was saved, and the writer process needs no torch, no tensors and no
process group: it writes stretches of memory to files.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megascale_ops.checkpoint import dcp_storage
from megascale_ops.checkpoint.background.copying import Copier, Copy
from megascale_ops.checkpoint.background.host_buffer import HostBuffer
from megascale_ops.checkpoint.background.messages import FileImage
from megascale_ops.checkpoint.dcp_storage import Place
from megascale_ops.checkpoint.ranks import cause_of
from megascale_ops.errors import CheckpointError

# 4096: each file begins at a page.
_PAGE_BYTES = 4096


class StagingWriter(dcp_storage.Writer):
    """DCP's storage for one save into a host buffer. Its fields are set by the save.

    Attributes:
        images: this rank's files in the buffer.
        size_bytes: how much of the buffer they take.
        plan: the bytes of ``plan.msgpack``; on the coordinating rank.
        ends: events of copies that still run.
    """

    def __init__(self, rank: int, buffer: HostBuffer, copier: Copier, overwritten_by_steps: frozenset[int]) -> None:
        super().__init__(None, rank)
        self.images: tuple[FileImage, ...] = ()
        self.size_bytes = 0
        self.plan = b""
        self.ends: list[torch.cuda.Event] = []
        self._buffer = buffer
        self._copier = copier
        self._overwritten_by_steps = overwritten_by_steps

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy every chunk that fell to this rank."""
        laid: list[tuple[int, torch.Tensor]] = []
        results: list[WriteResult] = []
        try:
            for name, items in self._by_file(plan.items):
                results += self._lay(name, items, planner, laid)
            self._buffer.reserve(self.size_bytes, pinned=any(tensor.device.type == "cuda" for _, tensor in laid))
            copies = [Copy(tensor, self._buffer.part(at, _size_of(tensor))) for at, tensor in laid]
            self.ends = self._copier.copy(copies, self._overwritten_by_steps)
        except (OSError, RuntimeError) as exc:
            raise CheckpointError(cause_of(exc)) from exc
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _lay(
        self, name: str, items: Iterable[WriteItem], planner: SavePlanner, laid: list[tuple[int, torch.Tensor]]
    ) -> list[WriteResult]:
        """Give each chunk of a file its place, in the file and in the buffer."""
        start = self.size_bytes + -self.size_bytes % _PAGE_BYTES
        aligned, at, results = dcp_storage.alignment_of(name), 0, []
        for item in items:
            tensor: Any = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), f"{item.index.fqn}: contents gives nothing but tensors"
            tensor, size = tensor.detach(), _size_of(tensor)
            at += -at % aligned
            laid.append((start + at, tensor))
            results.append(WriteResult(item.index, size, Place(name, at, size)))
            at += size
        self.images += (FileImage(name, start, at),)
        self.size_bytes = start + at
        return results

    def _store_plan(self, raw: bytes) -> None:
        self.plan = raw


def _size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
