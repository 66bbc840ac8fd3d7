# SPDX-License-Identifier: Apache-2.0
"""What stands in a slot as a value that may leave: text without its padding, numbers that JSON knows."""

from functools import lru_cache

# 136 years since a boot, or on the wall until 2106: no clock shows more, and its nanoseconds fit into 63 bits.
MOST_S = float(1 << 32)


def finite(seconds: float) -> float:
    """Return a time or duration, or 0 for what can be none: NaN, infinity, and what no clock shows."""
    return seconds if -MOST_S <= seconds <= MOST_S else 0.0


def text(raw: bytes) -> str:
    """Return the characters before the first NUL; what is no UTF-8 is dropped."""
    return raw.partition(b"\0")[0].decode(errors="ignore")


# 1,024 names of communicators, functions and phases: a job has dozens, and each stands in thousands of records.
name_of = lru_cache(maxsize=1024)(text)
