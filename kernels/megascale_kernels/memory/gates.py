# SPDX-License-Identifier: Apache-2.0
"""Gates at which a stream waits until the host has queued what follows: words in host memory that the GPU polls.

A gate is used once and comes round again thousands of turns later, when no launch that polls it can be queued any more
(a queue holds about a thousand). So nothing has to be reset while the GPU looks.
"""

import ctypes

import torch
from torch import Tensor

GATES = 4096


class Gates:
    """A ring of gates; `words` lie where the GPU can read them."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self._values = (ctypes.c_int32 * words.numel()).from_address(words.data_ptr())
        self._next = 0

    @classmethod
    def of_host(cls) -> "Gates":
        """In pinned memory."""
        return cls(torch.zeros(GATES, dtype=torch.int32, pin_memory=True))

    def close(self) -> int:
        """The next gate, closed."""
        place = self._next
        self._next = (place + 1) % self.words.numel()
        self._values[place] = 0
        return place

    def open(self, place: int) -> None:
        """Let the stream pass."""
        self._values[place] = 1
