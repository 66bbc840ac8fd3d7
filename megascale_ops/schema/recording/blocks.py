# SPDX-License-Identifier: Apache-2.0
"""The blocks of a controller's recordings, as they are asked for over HTTP."""

import msgspec

from megascale_ops.schema.ranges import Count, Word


class BlockInfo(msgspec.Struct, frozen=True):
    """One block: ``id`` is its file's name, ``bytes`` what it has compressed. The earliest comes first."""

    id: Word
    bytes: Count


class RecordedBlocks(msgspec.Struct, frozen=True):
    """Answer to ``GET /v1/recordings``: what is kept now; the oldest goes as time passes."""

    blocks: tuple[BlockInfo, ...]


class RecordedBlock(msgspec.Struct, frozen=True):
    """Answer to ``GET /v1/recordings/ID``: the block's file, lines of JSON compressed by gzip."""

    data: bytes
