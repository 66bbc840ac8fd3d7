# SPDX-License-Identifier: Apache-2.0
"""Bytes that are nearly right: what a disk, a torn write, another version or an attacker makes of valid ones.

Random bytes never come past the first check of a reader. So a whole, valid file is drawn from a corpus and changed in
a few places. The seed is drawn anew in each run; hypothesis prints the example that failed, and the line by which it
is made again. ``make fuzz`` draws 200 times as many.
"""

import os
import struct
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# 60 of each kind take seconds; MEGASCALE_FUZZ_EXAMPLES sets how many a longer run draws.
EXAMPLES = int(os.environ.get("MEGASCALE_FUZZ_EXAMPLES", "60"))

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    derandomize=False,  # also where CI is set, which would draw the same for ever
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

# Where readers go wrong: the edges of every width, not-a-number, infinity, the largest float.
_EDGES = [
    *(number.to_bytes(width, "little") for width in (1, 2, 4, 8) for number in (0, 1, (1 << 8 * width) - 1)),
    *(
        number.to_bytes(width, "little")
        for width in (4, 8)
        for number in (1 << 8 * width - 1, (1 << 8 * width - 1) - 1)
    ),
    *(struct.pack("<d", number) for number in (float("nan"), float("inf"), -float("inf"), 1.7e308, -0.0)),
]
# Where texts go wrong: depth, length, numbers without measure, signs that act on a terminal.
_TEXTS = [
    *(b"[" * 5000, b'{"a":' * 5000, b"(" * 5000, b"9" * 5000, b"-1", b"1e999", b"NaN", b"0x", b"null", b"true"),
    *(b"\x00", b"\x1b[2J", b"\r", b"\n\n", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"\\u0000", b"%s", b"A" * 5000),
    "\N{ARABIC-INDIC DIGIT THREE}\N{SUPERSCRIPT TWO}".encode(),
]


@st.composite
def mutated(draw: st.DrawFn, corpus: Sequence[bytes], places: Sequence[int] = (), most: int = 8) -> bytes:
    """One of a corpus, changed up to ``most`` times.

    Args:
        draw: hypothesis's.
        corpus: what is valid.
        places: offsets that are worth more than others, such as those of fields.
        most: how many changes.
    """
    data = bytearray(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(0, most))):
        anywhere = st.integers(0, max(0, len(data) - 1))
        at = draw(st.sampled_from(places) | anywhere if places else anywhere)
        kind = draw(st.sampled_from(("store", "store", "store", "flip", "cut", "insert", "drop", "repeat")))
        if kind == "store":
            value = draw(st.sampled_from(_EDGES) | st.binary(min_size=1, max_size=8))
            data[at : at + len(value)] = value
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.sampled_from(_TEXTS) | st.binary(max_size=40))
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
    return bytes(data)


@st.composite
def stored(draw: st.DrawFn, whole: bytes, places: Sequence[int], most: int = 12) -> bytes:
    """A file of fixed layout in which some fields hold something else; its length stays."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.sampled_from(places))
        value = draw(st.sampled_from(_EDGES) | st.binary(min_size=1, max_size=8))
        data[at : at + len(value)] = value
    return bytes(data[: len(whole)])
