# SPDX-License-Identifier: Apache-2.0
"""The cluster in signs: one for each rank, folded until it fits the terminal.

With room, each node has its name before its ranks. With less, nodes stand beside each other without names, and the
first rank of each line is named. When even that is too much, one sign stands for several neighbouring ranks and shows
the worst of them, so that one bad rank among 12,288 is still seen.

Pure: numbers and a size in, lines out. What a rank is shows in the sign, not only in its colour.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from megascale_ops.schema.live import JUDGED, UNKNOWN
from megascale_ops.schema.wording import printable

# By place in JUDGED. Those of bad ranks have more ink than those of good ones.
SIGNS = ("·", "~", "?", "X", "-", " ", "o")
ASCII_SIGNS = (".", "~", "?", "X", "-", " ", "o")
STYLES = ("green", "bold yellow", "bold yellow", "bold red", "bold red", "", "cyan")
# One that starts is between those that are well and those that are not; what is not known yet is worst.
_WORSE = {JUDGED.index("starting"): 0.5}
# 24 characters: longer names of nodes show their end, which distinguishes them.
MOST_NAME = 24


class Cluster(NamedTuple):
    """Ranks in the order of their numbers: what each is, and its node as a place in ``names``."""

    judged: Sequence[int]
    node: Sequence[int]
    names: Sequence[str]


class Drawn(NamedTuple):
    """Lines, and how many ranks one sign stands for."""

    lines: list[Text]
    fold: int


def draw(cluster: Cluster, width: int, most_lines: int, *, ascii_only: bool = False) -> Drawn:
    """Draw all ranks on at most ``most_lines`` lines of ``width`` columns, as little folded as that allows."""
    if not cluster.judged or most_lines < 1:
        return Drawn([], 1)
    signs = ASCII_SIGNS if ascii_only else SIGNS
    groups = _by_node(cluster)
    return (
        _with_names(cluster, groups, signs, (width, most_lines))
        or _side_by_side(cluster, groups, signs, (width, most_lines))
        or _folded(cluster, groups, signs, (width, most_lines))
    )


def legend(cluster: Cluster, fold: int, *, ascii_only: bool = False) -> Text:
    """Return what the signs mean that are there, and how many ranks each of them stands for."""
    signs = ASCII_SIGNS if ascii_only else SIGNS
    text = Text()
    for place, ranks in sorted(Counter(cluster.judged).items()):
        if place < len(JUDGED):
            text.append(f"{signs[place].replace(' ', '(blank)')} ", style=STYLES[place])
            text.append(f"{JUDGED[place]} {ranks:,}   ", style="dim")
    if fold > 1:
        text.append(f"one sign: the worst of {fold:,} ranks", style="dim")
    return text


def _with_names(cluster: Cluster, groups: list[list[int]], signs: Sequence[str], size: tuple[int, int]) -> Drawn | None:
    width, most_lines = size
    if not cluster.names or any(cluster.node[group[0]] >= len(cluster.names) for group in groups):
        return None
    names = [printable(cluster.names[cluster.node[group[0]]])[-MOST_NAME:] for group in groups]
    longest = max(map(len, names))
    cell = longest + 1 + max(map(len, groups)) + 3
    a_line = max(1, (width + 3) // cell)
    if cell - 3 > width or -(-len(groups) // a_line) > most_lines:
        return None
    lines = []
    for first in range(0, len(groups), a_line):
        line = Text()
        for at in range(first, min(first + a_line, len(groups))):
            line.append(f"{names[at]:<{longest}} ", style="dim")
            _signs(line, [cluster.judged[rank] for rank in groups[at]], signs)
            line.append(" " * (cell - longest - 1 - len(groups[at])))
        lines.append(line)
    return Drawn(lines, 1)


def _side_by_side(
    cluster: Cluster, groups: list[list[int]], signs: Sequence[str], size: tuple[int, int]
) -> Drawn | None:
    width, most_lines = size
    label = len(f"{len(cluster.judged):,}") + 1
    cell = max(map(len, groups)) + 1
    a_line = (width - label) // cell
    if a_line < 1 or -(-len(groups) // a_line) > most_lines:
        return None
    lines = []
    for first in range(0, len(groups), a_line):
        line = Text().append(f"{groups[first][0]:>{label - 1},} ", style="dim")
        for group in groups[first : first + a_line]:
            _signs(line, [cluster.judged[rank] for rank in group], signs)
            line.append(" ")
        lines.append(line)
    return Drawn(lines, 1)


def _folded(cluster: Cluster, groups: list[list[int]], signs: Sequence[str], size: tuple[int, int]) -> Drawn:
    """Let one sign stand for as few ranks as will do: whole nodes, where they are of equal size."""
    width, most_lines = size
    ranks = len(cluster.judged)
    label = len(f"{ranks:,}") + 1
    a_line = max(1, width - label)
    fold = max(1, -(-ranks // (a_line * most_lines)))
    per_node = len(groups[0])
    if fold > 1 and all(len(group) == per_node for group in groups[:-1]):
        fold = -(-fold // per_node) * per_node
    worst = [max(cluster.judged[at : at + fold], key=_badness) for at in range(0, ranks, fold)]
    lines = []
    for first in range(0, len(worst), a_line):
        line = Text().append(f"{first * fold:>{label - 1},} ", style="dim")
        _signs(line, worst[first : first + a_line], signs)
        lines.append(line)
    return Drawn(lines, fold)


def _badness(judged: int) -> float:
    return _WORSE.get(judged, judged)


def _by_node(cluster: Cluster) -> list[list[int]]:
    """Return ranks by node, in the order of each node's first rank; ranks of no known node are one group each 8."""
    found: dict[int, list[int]] = {}
    for rank in range(len(cluster.judged)):
        node = cluster.node[rank] if rank < len(cluster.node) else UNKNOWN
        found.setdefault(node if node != UNKNOWN else UNKNOWN + 1 + rank // 8, []).append(rank)
    return list(found.values())


def _signs(line: Text, judged: Sequence[int], signs: Sequence[str]) -> None:
    """Append signs, a stretch of equal ones at a time."""
    at = 0
    while at < len(judged):
        until = at
        while until < len(judged) and judged[until] == judged[at]:
            until += 1
        place = min(judged[at], len(signs) - 1)
        line.append(signs[place] * (until - at), style=STYLES[place])
        at = until
