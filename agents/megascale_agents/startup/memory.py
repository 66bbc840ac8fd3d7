# SPDX-License-Identifier: Apache-2.0
"""Keep the agent small: 60 MB on a node is what it may take, and NVML alone takes 18.

Three things that cost nothing: no OpenSSL where no TLS is spoken, one arena for all threads, and what start-up needed
is given back. Where the C library has no such calls (musl), nothing happens.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

# From malloc.h, https://man7.org/linux/man-pages/man3/mallopt.3.html
_M_ARENA_MAX = -8


@contextlib.contextmanager
def without_tls() -> Iterator[None]:
    """Import what does without the module ``ssl`` where there is none, as asyncio and urllib3 do: 4 MB.

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


class _StandIn(ModuleType):
    """A module whose names all are there and do nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def load_prometheus_client() -> None:
    """Import prometheus-client: 1 MB in an agent without OpenSSL, with which it would be 6.

    The library imports ``ssl`` for servers and gateways of its own, which are not used here. For these it also imports
    ``urllib.request``, which loads OpenSSL by ``hashlib``, and lacks HTTPSHandler where http.client was imported
    without ``ssl``: the import would fail. So stand-ins take their places while it lasts. Later ``ssl`` and ``hashlib``
    can be imported as ever.
    """
    with contextlib.nullcontext() if "ssl" in sys.modules else _openssl_away():
        import_module("prometheus_client")


@contextlib.contextmanager
def _openssl_away() -> Iterator[None]:
    """Let modules be imported that want OpenSSL and will not use it."""
    modules: Any = sys.modules
    is_hashed = "hashlib" in modules or "_hashlib" in modules
    if not is_hashed:
        modules["_hashlib"] = None  # hashlib then has its algorithms from Python
    try:
        with without_tls():
            request: Any = import_module("urllib.request")
        lacking = not hasattr(request, "HTTPSHandler")
        modules["ssl"] = _StandIn("ssl")
        if lacking:
            request.HTTPSHandler = object  # imported by name, and used to push to gateways alone
        try:
            yield
        finally:
            del modules["ssl"]
            if lacking:
                del request.HTTPSHandler
    finally:
        if not is_hashed:
            del modules["_hashlib"]
            modules.pop("hashlib", None)  # whoever imports it next has it with OpenSSL


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
