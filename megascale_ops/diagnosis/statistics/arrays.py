# SPDX-License-Identifier: Apache-2.0
"""NumPy for what is reckoned over thousands of ranks, where it is installed: loaded beside the work, not in its way.

Loading it takes 0.1 to 0.2 s and 30 MB, so small jobs never ask for it, and large ones get it from a thread; until it
is there, and where it is not installed, plain Python reckons the same.
"""

import contextlib
import importlib
import threading

# 1,024: below, making arrays of lists costs what NumPy saves.
LARGE = 1_024
_loaded = threading.Event()
_loading = threading.Lock()  # taken by the first who asks, and never given back


def are_fast(ranks: int) -> bool:
    """Say whether NumPy is worth it for so many ranks, and there; the first who asks has it loaded."""
    return ranks >= LARGE and is_ready()


def is_ready() -> bool:
    """Say whether NumPy is loaded; if nobody has asked before, have it loaded."""
    if not _loaded.is_set() and _loading.acquire(blocking=False):
        # It ends by itself, and whoever leaves meanwhile need not wait for it.
        threading.Thread(target=_load, name="numpy", daemon=True).start()
    return _loaded.is_set()


def _load() -> None:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("numpy")
        _loaded.set()
