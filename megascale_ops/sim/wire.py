# SPDX-License-Identifier: Apache-2.0
"""The wire: what is said goes through JSON and the schema's types, as it would over HTTP.

Every join, leave and piece of evidence does, and every so-many-th heartbeat: all of them would double the time that a
simulation takes, and they are all made by one function.
"""

from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from megascale_ops.schema.messages import MAX_BODY_BYTES, Heartbeat

T = TypeVar("T")

# Each 997th, a prime, so that all nodes and all moments come in turn.
EVERY = 997


class Wire:
    """What travels, checked."""

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._decoders: dict[type, msgspec.json.Decoder[object]] = {}
        self._count = 0
        self._together = {"ranks": 0, "": 0}  # by what they tell of

    def checked(self, message: T, kind: type[T]) -> T:
        """Return a message as its receiver decodes it."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        body = self._encode(message)
        assert len(body) <= MAX_BODY_BYTES, f"{kind.__name__}: {len(body)} bytes"
        received = decoder.decode(body)
        assert isinstance(received, kind)
        return received

    def samples(self, count: int, what: str = "ranks") -> npt.NDArray[np.intp]:
        """Return which of so many heartbeats that could be handed in together are sent by themselves: each 997th.

        ``what`` they tell of: those of nodes without ranks ("") are counted for themselves.
        """
        before = self._together[what]
        numbers = np.arange(before + 1, before + 1 + count)
        self._together[what] += count
        return np.flatnonzero(numbers % EVERY == 0)

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return a heartbeat, of a sample as its receiver decodes it."""
        self._count += 1
        return heartbeat if self._count % EVERY else self.checked(heartbeat, Heartbeat)
