# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: the data of each, out of a stream of bytes that comes in whatever pieces."""

from collections.abc import AsyncIterator

from megascale_ops.errors import ControllerUnreachableError

# 64 MB: a hundred times the first frame of 12,288 ranks.
_MOST_EVENT_BYTES = 64_000_000


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; the rest of an event is ignored."""
    rest = b""
    async for chunk in chunks:
        # Only what is new can hold the end, but for its first byte: a frame of 12,288 ranks comes in many pieces.
        searched = max(0, len(rest) - 1)
        rest += chunk
        while (end := rest.find(b"\n\n", searched)) >= 0:
            lines = rest[:end].split(b"\n")
            data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
            rest, searched = rest[end + 2 :], 0
            if data:
                yield data
        if len(rest) > _MOST_EVENT_BYTES:
            raise ControllerUnreachableError("an event of the live view has no end")
