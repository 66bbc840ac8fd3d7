# SPDX-License-Identifier: Apache-2.0
"""Where each chunk of a rank's share lies, in its file and in the host buffer; and when a plan can be used again.

torch.distributed.checkpoint (DCP) plans 100 us a tensor, of which the copy of 10 GB in thousands of tensors is the
smaller part. But a state rarely changes its shape: as long as every rank's tensors are cut as they were, the plan is
the one before but for the structures, whose bytes get more or fewer.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from megascale_ops.checkpoint import contents, dcp_storage, plan
from megascale_ops.checkpoint.background.messages import FileImage
from megascale_ops.checkpoint.dcp_storage import Place

# 4096: each file begins at a page.
_PAGE_BYTES = 4096

Files = list[tuple[str, list[WriteItem]]]


class ShareLayout:
    """This rank's share of one save.

    Attributes:
        images: its files in the buffer.
        size_bytes: how much of the buffer they take.
        chunks: what lies where in the buffer.
        results: what lies where in the files.
    """

    def __init__(self, files: Files, planner: SavePlanner) -> None:
        self.images: tuple[FileImage, ...] = ()
        self.size_bytes = 0
        self.chunks: list[tuple[int, torch.Tensor]] = []
        self.results: list[WriteResult] = []
        for name, items in files:
            self._add(name, items, planner)

    def _add(self, name: str, items: Iterable[WriteItem], planner: SavePlanner) -> None:
        start = self.size_bytes + -self.size_bytes % _PAGE_BYTES
        aligned, at = dcp_storage.alignment_of(name), 0
        for item in items:
            tensor: Any = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), f"{item.index.fqn}: contents gives nothing but tensors"
            tensor = tensor.detach()
            size = tensor.numel() * tensor.element_size()
            at += -at % aligned
            self.chunks.append((start + at, tensor))
            self.results.append(WriteResult(item.index, size, Place(name, at, size)))
            at += size
        self.images += (FileImage(name, start, at),)
        self.size_bytes = start + at

    def bytes_places(self) -> tuple[tuple[str, Place], ...]:
        """Where what is no tensor lies, by key."""
        return tuple((each.index.fqn, each.storage_data) for each in self.results if _is_bytes(each.index.fqn))


class Known(NamedTuple):
    """The last plan on this rank, and what it was made of."""

    place: tuple[int, int]  # rank and world size
    signature: dict[str, object]  # of the tensors
    keys: frozenset[str]  # of everything
    has_gpu: bool  # some of it lies on a GPU
    files: Files
    plan: plan.Plan | None  # on the coordinating rank


def signature_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, object] | None:
    """How the tensors are cut; equal ones are planned alike. None: there is a kind of which that is not known."""
    signature: dict[str, object] = {}
    for key, tensor in tensors.items():
        if _is_bytes(key):
            continue
        if isinstance(tensor, DTensor):
            local = tensor.to_local().shape
            signature[key] = tensor.dtype, tensor.shape, local, tensor.placements, tensor.device_mesh
        elif type(tensor) in {torch.Tensor, torch.nn.Parameter}:
            signature[key] = tensor.dtype, tensor.shape
        else:
            return None
    return signature


def replanned(known: plan.Plan, places: Sequence[tuple[tuple[str, Place], ...]]) -> bytes:
    """The bytes of the next ``plan.msgpack``.

    Args:
        known: the plan before.
        places: of every rank, where what is no tensor lies now.
    """
    numbers = {name: number for number, name in enumerate(known.files)}
    tensors = dict(known.tensors)
    for key, place in (each for share in places for each in share):
        chunk = plan.Chunk((0,), (place.length,), numbers[place.file], place.start, place.length)
        tensors[key] = msgspec.structs.replace(tensors[key], size=(place.length,), chunks=(chunk,))
    return plan.encode(plan.Plan(known.files, tensors))


def _is_bytes(key: str) -> bool:
    return key.endswith((contents.STRUCTURE, contents.PICKLED))
