# SPDX-License-Identifier: Apache-2.0
"""Long work in pieces: a generator that yields wherever something else may be done, and returns what it has found.

The controller's tick looks at everything; where that takes longer than a few milliseconds, heartbeats are answered
between two pieces. A caller without other work (a test, a small job) runs through them.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Pieces = Generator[None, None, T]


def run_through(pieces: Pieces[T]) -> T:
    """Do all pieces at once; return what they have found."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: T = end.value
            return found
