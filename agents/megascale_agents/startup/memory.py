# SPDX-License-Identifier: Apache-2.0
"""Keep the agent small: 60 MB on a node is what it may take, and NVML alone takes 18.

Three things that cost nothing: no TLS where none is used, one arena for all threads, and what start-up needed is
given back. Where the C library has no such calls (musl), nothing happens.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

# From malloc.h, https://man7.org/linux/man-pages/man3/mallopt.3.html
_M_ARENA_MAX = -8


@contextlib.contextmanager
def without_tls() -> Iterator[None]:
    """Import what does without the module ``ssl`` where there is none, as asyncio and http.client do: 4 MB.

    Later it can be imported as ever, but those two keep doing without.
    """
    if "ssl" in sys.modules:
        yield
        return
    modules: Any = sys.modules
    modules["ssl"] = None  # not to be found: https://docs.python.org/3/reference/import.html#the-module-cache
    try:
        yield
    finally:
        del modules["ssl"]


def take_one_arena() -> None:
    """Let all threads allocate from one heap; before there are any.

    glibc gives each thread one of its own, up to eight a core, and what NVML leaves free in one is of no use in
    another: 3.6 MB with two GPUs. Threads of Python wait for each other anyway.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return to the system what has been freed since the start, from the middle of the heap too; 1 ms."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
