# SPDX-License-Identifier: Apache-2.0
"""Which bytes an access touches is exact to the byte, wherever its addresses lie and whatever was asked before."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import itertools

import numpy as np
from megascale_kernels.emulate import spans


def touched(addresses: list[int], width: int) -> set[int]:
    """Every byte, one by one."""
    return {address + byte for address in addresses for byte in range(width)}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("first", [0, 4096, 1 << 47])
@pytest.mark.parametrize(
    "offsets",
    [[0], [0, 2, 4, 6], [0, 8, 16], [0, 4, 64, 68, 72, 200], [64, 0, 4], [8, 8, 8], [0, 1, 2, 3]],
    ids=["one", "a row", "wide apart", "a tile", "in any order", "one by all", "bytes"],
)
def test_every_byte_and_no_other(offsets: list[int], first: int, width: int) -> None:
    """Asked twice, the second time from what was kept: of the same offsets at another place, and of another width."""
    for place in (first, first + 12):
        addresses = [place + offset for offset in offsets]
        found = spans.span_of(np.array(addresses, np.uint64), width)

        runs = list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))
        assert {byte for start, end in runs for byte in range(start, end)} == touched(addresses, width)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(runs))
        assert (found.lo, found.hi) == (min(addresses), max(addresses) + width)


def test_no_more_kinds_of_tiles_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are gathered have as many kinds as there are routings."""
    monkeypatch.setattr(spans, "MOST_PATTERNS", 4)
    monkeypatch.setattr(spans, "_patterns", {})

    for gap in range(10, 20):
        assert spans.span_of(np.array([0, gap]), 2).starts.tolist() == [0, gap]

    assert len(spans._patterns) <= 4
