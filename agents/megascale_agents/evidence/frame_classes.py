# SPDX-License-Identifier: Apache-2.0
"""Where a main thread is, in one word: a table of patterns over its frames.

The innermost frame that the table knows decides: a checkpoint that waits in a barrier is in a collective. Only forming
a process group is looked for on the whole stack, because it goes through the same files as a collective.

Python frames don't show what C++ waits for: the all-reduces of DDP's backward leave none, nor does a ``Work.wait()``
that the recorder has not wrapped. Those are known by native frames, where py-spy brought them.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

MOST_FRAMES = 24  # the limit of schema.messages.EvidenceItem
_MOST_CHARACTERS = 120  # of a frame; C++ names are kilobytes long
_MOST_FUNCTION = 70
_OURS = "megascale_ops/recorder/"  # hooks of the recorder: correct, but of no use in a diagnosis


class Frame(NamedTuple):
    """One frame of a stack."""

    function: str
    file: str
    line: int
    native: bool = False


class Place(NamedTuple):
    """A row: frames whose file and function match are there."""

    mark: str
    file: str
    function: str = ""


FORMING = (
    Place(
        "in_rendezvous",
        r"torch/distributed/distributed_c10d\.py$",
        r"^(init_process_group|new_group|new_subgroups\w*|split_group|_new_group_with_tag|_new_process_group_helper"
        r"|_store_based_barrier)$",
    ),
    Place("in_rendezvous", r"torch/distributed/(rendezvous\.py$|elastic/rendezvous/|elastic/utils/store\.py$)"),
    Place("in_rendezvous", "", r"^c10d::(TCP|File|Hash|Prefix)?Store::|ncclCommInitRank|connectFullMesh"),
)
# Ranks that meet before an overlapped kernel's collective poll a store for each other, as in forming a group: one that
# waits there waits for a peer.
_KERNELS_MEET = Place("in_collective", r"(^|/)megascale_kernels/(agreement|serial)\.py$")
TABLE = (
    _KERNELS_MEET,
    Place("in_collective", r"torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py$"),
    Place(
        "in_collective",
        r"\.so[.\d]*$",
        r"^c10d::(\w*Work\w*(::\w+)*::(wait|synchronize)|Reducer::|ProcessGroup|ops::)|^gloo::|^nccl[A-Z]",
    ),
    Place("in_collective", r"megascale_ops/recorder/(torch_hooks/)?waits\.py$", r"^timed$"),  # around Work.wait()
    Place("in_data_loader", r"torch/utils/data/|torchdata/"),
    Place("in_storage", r"torch/(serialization\.py$|distributed/checkpoint/)|safetensors/|megascale_ops/checkpoint/"),
    Place("in_storage", r"(^|/)(shutil|zipfile|tarfile|gzip)\.py$|fsspec/|s3fs/|numpy/lib/(_?npyio|_?format)\w*\.py$"),
    Place("in_storage", r"(^|/)pathlib\.py$", r"^(open|read_\w+|write_\w+|touch|mkdir|replace|rename|unlink)$"),
    Place("in_storage", r"(^|/)os\.py$|<frozen os>", r"^(makedirs|walk|fdopen|renames)$"),
    Place("in_native", r"torch/cuda/(__init__|streams|graphs)\.py$", r"^(synchronize|wait_\w+|query)$"),
)


def place_of(frames: Sequence[Frame]) -> str:
    """Return the mark of where a stack is, "" when the table knows none of its frames (innermost first)."""
    forming = () if any(re.search(_KERNELS_MEET.file, frame.file) for frame in frames) else FORMING
    for rows in (forming, TABLE):
        for frame in frames:
            for row in rows:
                if re.search(row.file, frame.file) and re.search(row.function, frame.function):
                    return row.mark
    return ""


def write(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Write frames as "function (file:line)", innermost first, without our own and without what has no name."""
    named = [frame for frame in frames if not frame.function.startswith("0x") and _OURS not in frame.file]
    return tuple(_write(frame) for frame in named[:MOST_FRAMES])


def _write(frame: Frame) -> str:
    function = frame.function if len(frame.function) <= _MOST_FUNCTION else frame.function[: _MOST_FUNCTION - 3] + "..."
    where = f"{_short(frame)}:{frame.line}"
    return f"{function} ({where[-(_MOST_CHARACTERS - len(function) - 3) :]})"


def _short(frame: Frame) -> str:
    """Name a file as one would import it; a script of the user's keeps its path."""
    if frame.native:
        return frame.file.rpartition("/")[2]
    return re.sub(r"^.*/(site-packages|dist-packages|lib/python3\.\d+)/", "", frame.file)
