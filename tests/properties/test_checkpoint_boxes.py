# SPDX-License-Identifier: Apache-2.0
"""However a tensor was cut when it was saved, any part of it is read as it was, into any kind of memory."""

import itertools
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megascale_ops.checkpoint import plan
from megascale_ops.checkpoint.dcp_storage import Reader
from tests.matrix import some

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], Box]:
    """A shape, boxes that fill it (cut along every dimension), and a box that is wanted."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes: list[Box] = [((), ())]
    for along in edges:
        spans = list(itertools.pairwise(along))
        boxes = [((*offsets, low), (*sizes, high - low)) for offsets, sizes in boxes for low, high in spans]
    low = [draw(st.integers(0, size - 1)) for size in shape]
    wanted = tuple(low), tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, low, strict=True))
    return shape, boxes, wanted


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements in a box."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


class Into(DefaultLoadPlanner):
    """Gives the memory to read into."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__(flatten_state_dict=False)
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the target that an item fills."""
        return part(self.target, (tuple(read_item.dest_offsets), tuple(read_item.lengths)))


@given(cuts(), st.sampled_from(["as saved", "other layout", "other type"]))
@settings(max_examples=some(150))
def test_any_part_of_a_tensor_is_read_as_it_was(cut: tuple[tuple[int, ...], list[Box], Box], memory: str) -> None:
    """Whole rows, columns, corners that lie in several files; contiguous or not, with or without a conversion."""
    shape, boxes, wanted = cut
    tensor = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    sizes = wanted[1]
    target = torch.zeros(sizes, dtype=torch.float64 if memory == "other type" else torch.int32)
    if memory == "other layout":
        target = torch.zeros((*sizes, 2), dtype=torch.int32)[..., 0]

    with tempfile.TemporaryDirectory() as scratch:
        reader = written(Path(scratch), tensor, boxes)
        described = reader.read_metadata().state_dict_metadata["t"]
        assert isinstance(described, TensorStorageMetadata)
        local = ChunkStorageMetadata(torch.Size(wanted[0]), torch.Size(sizes))
        items = create_read_items_for_chunk_list("t", described, [local])
        reader.read_data(LoadPlan(items), Into(target)).wait()

    assert torch.equal(target, part(tensor, wanted).to(target.dtype))


def written(folder: Path, tensor: torch.Tensor, boxes: list[Box]) -> Reader:
    """A folder in which the boxes lie in two files, and its reader."""
    data = [b"padding", b""]
    chunks = []
    for number, box in enumerate(boxes):
        raw = part(tensor, box).contiguous().numpy().tobytes()
        chunks.append(plan.Chunk(*box, number % 2, len(data[number % 2]), len(raw)))
        data[number % 2] += raw
    whole = plan.Plan(("a", "b"), {"t": plan.Tensor("torch.int32", tuple(tensor.shape), tuple(chunks))})
    for name, content in (*zip("ab", data, strict=True), (plan.FILE_NAME, plan.encode(whole))):
        (folder / name).write_bytes(content)
    return Reader(folder, {path.name: path.stat().st_size for path in folder.iterdir()})
