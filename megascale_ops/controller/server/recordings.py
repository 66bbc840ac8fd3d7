# SPDX-License-Identifier: Apache-2.0
"""What was recorded, for people without the controller's disk: which blocks there are, and each as it is.

Cutting one job out, replacing names and replaying takes minutes of a core for a large job, so that is the client's
work; here a thread reads a file. A block has what all jobs sent: a token that sees the whole cluster is asked for, and
who asks which blocks there are is journaled like a change. Their names can't be guessed.
"""

import asyncio
from pathlib import Path

from aiohttp import web

from megascale_ops.controller.loop import Loop
from megascale_ops.controller.recording.recorded_loop import RecordedLoop
from megascale_ops.controller.server.bodies import answer
from megascale_ops.errors import NotFoundError
from megascale_ops.foreign import read
from megascale_ops.schema.recording.blocks import BlockInfo, RecordedBlock, RecordedBlocks
from megascale_ops.schema.recording.entries import BLOCK_SUFFIX

# 64 MB: a block of 12,288 ranks has one.
_MOST_BYTES = 64 * 1024 * 1024


class Recordings:
    """The handlers. ``loop``: one that records has a folder with blocks; any other none."""

    def __init__(self, loop: Loop) -> None:
        self._folder = loop.ring.folder if isinstance(loop, RecordedLoop) else None

    async def show(self, _request: web.Request) -> web.Response:
        """Answer which blocks there are."""
        return answer(RecordedBlocks(tuple(await asyncio.to_thread(_listed, self._recorded()))))

    async def block(self, request: web.Request) -> web.Response:
        """Answer with one block."""
        name = request.match_info["id"]
        data = await asyncio.to_thread(_read, self._recorded(), name)
        if data is None:
            raise NotFoundError(f"there is no block {name!r} of a recording (any more)")
        return answer(RecordedBlock(data))

    def _recorded(self) -> Path:
        if self._folder is None:
            raise NotFoundError(
                "nothing is recorded here: record_mb is 0, or a journal in PostgreSQL has no --record DIR beside it"
            )
        return self._folder


def _listed(folder: Path) -> list[BlockInfo]:
    """Return the blocks of a folder, the earliest first; it is made with the first one."""
    found = []
    for path in sorted(folder.glob(f"*{BLOCK_SUFFIX}")):
        try:
            found.append(BlockInfo(path.name, path.stat().st_size))
        except FileNotFoundError:  # the oldest goes meanwhile
            continue
    return found


def _read(folder: Path, name: str) -> bytes | None:
    """Return a block; None where it is not there. Only what is listed is read, so a name leads nowhere else."""
    if name not in {one.id for one in _listed(folder)}:
        return None
    try:
        return read(folder / name, _MOST_BYTES)
    except FileNotFoundError:
        return None
