# SPDX-License-Identifier: Apache-2.0
"""Keep the agent small: 90 MB on a node is what it may take, and NVML alone takes 18.

Two things that cost nothing: one arena for all threads, and what start-up needed is given back. Where the C
library has no such calls (musl), nothing happens.
"""

import contextlib
import ctypes

# From malloc.h, https://man7.org/linux/man-pages/man3/mallopt.3.html
_M_ARENA_MAX = -8


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
