# SPDX-License-Identifier: Apache-2.0
"""The controller's event loop: uvloop's where it is installed (the extra ``fast``), asyncio's own elsewhere.

Reading and writing of 1,536 heartbeats a second is then libuv's work, not Python's. Both answer alike.
"""

import asyncio
from importlib.util import find_spec


def event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
