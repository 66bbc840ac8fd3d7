# SPDX-License-Identifier: Apache-2.0
"""What can follow what in a kernel's PTX: its instructions as a graph, and the ways through it.

Assembly is not in the order of the source: a compiler moves blocks. So "the fence comes before the load" is asked as
"is there a way from the acquire to the load that does not pass the fence?".
"""

import re
from functools import cached_property
from pathlib import PurePath
from typing import Any

# Roles of a warp-specialised kernel begin and end with a change of registers; no way of one warp crosses it.
ROLE_EDGE = r"setmaxnreg"
_LABEL = re.compile(r"^(\$L\w+):")
_BRANCH = re.compile(r"^(@!?%p\d+ )?bra(\.uni)?\s+(\$L\w+);")
_PLACE = re.compile(r"^\.loc\s+(\d+ \d+ \d+)(?:.*?inlined_at (\d+ \d+ \d+))?.*?//\s*(.*)")


class Paths:
    """The ways through a kernel.

    Args:
        ptx: text of one kernel.
    """

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index("{") :].splitlines()
        self.lines: list[str] = []
        self.places: list[str] = []
        self._labels: dict[str, int] = {}
        place, callers = "", {}
        for raw in body:
            line = raw.strip()
            if found := _PLACE.match(line):
                own, caller, place = found.groups()
                # Triton 3.6 writes all callers behind a place, later ones where the caller stands, which came before.
                place += f" @[ {callers.get(caller, '')} ]" if caller and "@[" not in place else ""
                callers[own] = place
            elif found := _LABEL.match(line):
                self._labels[found.group(1)] = len(self.lines)
            elif line and not line.startswith(("//", ".")):
                self.lines.append(line)
                self.places.append(place)

    @cached_property
    def _following(self) -> list[list[int]]:
        following = []
        for at, line in enumerate(self.lines):
            found = _BRANCH.match(line)
            targets = [self._labels[found.group(3)]] if found else []
            falls = not line.startswith("ret") and not (found and found.group(1) is None)
            if falls and at + 1 < len(self.lines):
                targets.append(at + 1)
            following.append(targets)
        return following

    def where(self, pattern: str, *, function: Any = None, caller: str = "") -> list[int]:  # noqa: ANN401 (Triton's)
        """Instructions that match, perhaps only those of one jit function, or called from some file."""
        return [
            at
            for at, (line, place) in enumerate(zip(self.lines, self.places, strict=True))
            if re.search(pattern, line) and caller in place and (function is None or _stands_in(place, function))
        ]

    def leads(self, first: list[int], then: list[int], *, past: str) -> list[str]:
        """Instructions of `then` that can follow one of `first` without a match of `past` in between."""
        avoid = re.compile(f"{past}|{ROLE_EDGE}")
        goals, seen = set(then), set()
        todo = [following for at in first for following in self._following[at]]
        reached = []
        while todo:
            at = todo.pop()
            if at in seen or avoid.search(self.lines[at]):
                continue
            seen.add(at)
            if at in goals:
                reached.append(self.lines[at])
            todo.extend(self._following[at])
        return reached


def _stands_in(place: str, function: Any) -> bool:  # noqa: ANN401 (Triton has no types)
    """Whether a place ("signals.py:134:29 @[ tiles.py:54...") begins in a jit function."""
    file, line = place.split(":")[:2]
    first = function.starting_line_number
    ours = PurePath(function.fn.__code__.co_filename).name
    return file == ours and first <= int(line) < first + len(function.raw_src)
