# SPDX-License-Identifier: Apache-2.0
"""What stands in a slot as a value that may leave: text without its padding, numbers that JSON knows."""

import math
from functools import lru_cache


def finite(number: float) -> float:
    """Return ``number``, or 0 for what is no number: JSON knows neither NaN nor infinity."""
    return number if math.isfinite(number) else 0.0


def text(raw: bytes) -> str:
    """Return the characters before the first NUL; what is no UTF-8 is dropped."""
    return raw.partition(b"\0")[0].decode(errors="ignore")


# 1,024 names of communicators, functions and phases: a job has dozens, and each stands in thousands of records.
name_of = lru_cache(maxsize=1024)(text)
