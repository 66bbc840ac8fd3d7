# SPDX-License-Identifier: Apache-2.0
"""Distinguish one CUDA-graph capture from another.

Everything launched between the beginning and the end of a capture becomes one graph, and each graph must begin with a
barrier of the ranks (see `workspace.py`). torch reports whether a stream is being captured, not which capture it is;
the
driver does: `cuStreamGetCaptureInfo` gives every capture of a process a number of its own.
"""

import ctypes
from collections.abc import Callable
from functools import cache

ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@cache
def _driver_call() -> Callable[..., int] | None:
    """The driver's function; its later versions only append outputs, which may all be null."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for name in ("cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo"):
        if hasattr(driver, name):
            call: Callable[..., int] = getattr(driver, name)
            return call
    return None


def capture_number(stream: int) -> int | None:
    """The number of the capture that a stream (its handle) takes part in.

    Returns:
        None when the stream is not being captured, and where no driver is there to ask.
    """
    call = _driver_call()
    if call is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    nothing = ctypes.c_void_p(None)
    # Behind the number come up to four outputs that we do not want: graph, dependencies, their edges, their count.
    failed = call(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), nothing, nothing, nothing, nothing
    )
    return number.value if failed == 0 and status.value == ACTIVE else None
