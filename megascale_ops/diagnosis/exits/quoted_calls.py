# SPDX-License-Identifier: Apache-2.0
"""Ranks that brought different things to one collective, where a library has compared them and reports it.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares what all ranks bring before each collective, and each rank prints
what it runs and what the first other one that differs runs. accelerate and DDP compare shapes. One such sentence names
two ranks and blames neither; the sentences of all together show what most of them ran.

Pure: texts in, what each rank ran and the odd ranks out.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

# 3: of two ranks that differ, nothing shows which one is wrong.
_FEWEST = 3
_CALL_CHARACTERS = 200
_TORCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d{1,9}) is running (?:inconsistent )?collective: "
    r"(.{1,600}?), but Rank (\d{1,9}) is running (?:inconsistent )?collective: (.{1,600}?)"
    r"(?:\.?\s*Collectives differ|\n|\.\s|$)",
)
# Older torch prints each rank's own and nothing of the other's.
_ALONE = re.compile(r"Rank (\d{1,9}) is running inconsistent collective: ([^\n]{1,600})")
_PRINTED = re.compile(r"CollectiveFingerPrint\(")
_DDP = re.compile(r"Rank (\d{1,9}) has (\d{1,9}) params, while rank (\d{1,9}) has inconsistent (\d{1,9}) params")
_VERSIONS = re.compile(
    r"Mismatched NCCL version detected : rank (\d{1,9}) version (\d{1,9}) rank (\d{1,9}) version (\d{1,9})"
)
_ACCELERATE = re.compile(r"Process (\d{1,9}): (\[[\d, \[\]]{0,200}\])")


class Quoted(NamedTuple):
    """What ranks ran, by rank, and those that differ from more than half."""

    calls: dict[int, str]
    odd: tuple[int, ...]
    text: str


def quoted_in(texts: Iterable[str]) -> Quoted | None:
    """Return what ranks brought, as their texts quote it; None where none does."""
    calls: dict[int, str] = {}
    for text in texts:
        for found in _TORCH.finditer(text):
            calls.setdefault(int(found[1]), _call(found[2]))
            calls.setdefault(int(found[3]), _call(found[4]))
        for found in () if _TORCH.search(text) else _ALONE.finditer(text):
            calls.setdefault(int(found[1]), _call(found[2]))
        for found in _DDP.finditer(text):
            calls.setdefault(int(found[1]), f"{found[2]} parameters")
            calls.setdefault(int(found[3]), f"{found[4]} parameters")
        if "shape mismatches" in text:
            for found in _ACCELERATE.finditer(text):
                calls.setdefault(int(found[1]), f"shape {found[2]}")
    return _compared(calls)


def versions_in(texts: Iterable[str]) -> Quoted | None:
    """Return which version of NCCL ranks run, by NCCL's check of them (init.cc); None without its message."""
    versions: dict[int, str] = {}
    for found in (found for text in texts for found in _VERSIONS.finditer(text)):
        versions.setdefault(int(found[1]), f"NCCL {found[2]}")
        versions.setdefault(int(found[3]), f"NCCL {found[4]}")
    return _compared(versions)


def _compared(calls: dict[int, str]) -> Quoted | None:
    """Return the ranks that differ from the majority of the quoted ranks."""
    if len(set(calls.values())) < 2:
        return None
    (usual, times), *_ = Counter(calls.values()).most_common(1)
    odd = tuple(sorted(rank for rank, call in calls.items() if call != usual))
    is_clear = len(calls) >= _FEWEST and 2 * times > len(calls)
    shown = list(dict.fromkeys(calls.values()))[:3]
    text = "; ".join(f"rank {next(rank for rank, call in calls.items() if call == one)} ran {one}" for one in shown)
    return Quoted(calls, odd if is_clear else (), text)


def _call(text: str) -> str:
    return _PRINTED.sub("", text, count=1)[:_CALL_CHARACTERS].rstrip("). ")
