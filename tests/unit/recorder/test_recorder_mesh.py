# SPDX-License-Identifier: Apache-2.0
"""A rank's place in the device mesh, from the names that the script gives its dimensions."""

from pathlib import Path

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.mesh import coordinates
from megascale_ops.schema.identity import Mesh


@pytest.mark.parametrize(
    ("names", "place", "sizes", "found"),
    [
        (("dp", "tp"), (3, 1), (4, 2), {"dp": 3, "tp": 1}),
        (("pp", "dp_replicate", "dp_shard", "tp"), (1, 1, 2, 0), (2, 2, 4, 8), {"pp": 1, "dp": 6, "tp": 0}),
        (("Pipeline", "Data", "Tensor"), (0, 1, 2), (1, 2, 4), {"pp": 0, "dp": 1, "tp": 2}),
        (("cp", "ep"), (1, 3), (2, 4), {"ep": 3}),
        (("x",), (5,), (8,), {}),
        ((), (), (), {}),
    ],
)
def test_names_of_the_field_are_understood(
    names: tuple[str, ...], place: tuple[int, ...], sizes: tuple[int, ...], found: dict[str, int]
) -> None:
    """Hybrid sharding's two dimensions are one place; an unused name means nothing."""
    assert coordinates(names, place, sizes) == found


def test_what_is_known_of_an_axis_stays_and_the_rest_is_added(tmp_path: Path) -> None:
    """Slices and flattened meshes come after the mesh; another axis may come later, from another mesh."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    recording = Recording(BoxWriter.create(tmp_path, identity))
    box = BoxReader(tmp_path / "0.box")
    before = box.identity().mesh

    recording.place({"dp": 3, "tp": 1})
    recording.place({"tp": 0})
    recording.place({"ep": 2})

    assert before == Mesh()
    assert box.identity().mesh == Mesh(dp=3, tp=1, ep=2)


def test_a_child_of_a_fork_says_nothing(tmp_path: Path) -> None:
    """It shares the parent's box."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    recording = Recording(BoxWriter.create(tmp_path, identity))
    recording.leave()

    recording.place({"dp": 3})

    assert BoxReader(tmp_path / "0.box").identity().mesh == Mesh()
