# SPDX-License-Identifier: Apache-2.0
"""Describe a progress board in words, for a person who has one minute.

132 CTAs that wait are one piece of news, not 132: roles that wait for the same rank are folded into one line with
ranges of CTAs, flags and tiles.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megascale_kernels.progress.board_format import ROLES
from megascale_kernels.progress.view import BoardView, RoleView, Wait

MOST_RANGES = 6  # of one list; more would push the next line out of sight
# A GPU's clock reads as Unix time where it was set at start-up; a difference beyond these bounds means that it was not.
NEAR_FUTURE_NS = 60 * 10**9
LONG_AGO_NS = 30 * 86400 * 10**9

DOES = {"running": "run", "waiting": "wait", "gave up": "gave up", "done": "done"}
SHARDED = ("ag_gemm", "gemm_rs", "all_gather")  # operators whose M is that of one rank


class Fold(NamedTuple):
    """Roles that wait for the same rank, or gave up on it.

    Attributes:
        role: "compute" or "communicate".
        state: "waiting" or "gave up".
        peer: the rank.
        ctas: the CTAs that wait.
        waits: what for, in the order of CTAs.
    """

    role: str
    state: str
    peer: int
    ctas: tuple[int, ...]
    waits: tuple[Wait, ...]

    @property
    def since_ns(self) -> int:
        """When the first of these waits began."""
        return min(wait.since_ns for wait in self.waits)


def folds(view: BoardView) -> list[Fold]:
    """Waits and timeouts folded by role and peer; most waiting CTAs first."""
    groups: dict[tuple[str, str, int], list[RoleView]] = {}
    for role in view.current:
        if role.wait is not None:
            groups.setdefault((role.role, role.state, role.wait.peer), []).append(role)
    found = [
        Fold(*key, tuple(role.cta for role in roles), tuple(role.wait for role in roles if role.wait is not None))
        for key, roles in groups.items()
    ]
    return sorted(found, key=lambda fold: (-len(fold.ctas), fold.peer, fold.role, fold.state))


def tiles_done(view: BoardView) -> int | None:
    """Tiles whose product is finished, from the tile that each CTA has in hand.

    The CTAs that compute take every n-th tile, n being their number; the lowest CTAs may be set apart for copying.
    None when the board does not fit that pattern (the operator has no tiles, or a CTA has not shown its role yet).
    """
    if view.operator not in ("ag_gemm", "gemm_rs", "gemm_ar", "attention", "attention_backward"):
        return None
    computing = [role for role in view.current if role.role == "compute"]
    copying = {role.cta for role in view.current if role.role == "communicate"} - {role.cta for role in computing}
    stride = view.ctas - len(copying)
    if stride < 1 or copying != set(range(len(copying))):
        return None
    done = 0
    for role in computing:
        mine = range(role.cta - len(copying), view.tiles, stride)
        # In an all-reduce every tile is multiplied before the first wait.
        stopped = role.wait.tile if role.wait is not None and role.tile is None else role.tile
        if role.state == "done" or (role.wait is not None and view.operator == "gemm_ar"):
            done += len(mine)
        elif stopped is not None and stopped in mine:
            done += mine.index(stopped)
        else:
            return None
    return done


def describe(view: BoardView, now_ns: int | None = None, *, writer_alive: bool | None = None) -> str:
    """A board in a few lines: what runs, how far it is, and which CTAs wait for which rank.

    Args:
        view: the board.
        now_ns: Unix time, nanoseconds, to show how long ago a wait began.
        writer_alive: whether the process that made the board still runs, when that is known.
    """
    title = f"rank {view.rank} of {view.world_size}: {_launch(view)}"
    if writer_alive is False:
        title += f" (its process {view.pid} is gone: this is the last it showed)"
    if view.launch == 0:
        return title
    lines = [title, f"  tiles: {_tiles(view)}"]
    lines += [f"  {role}: {_states(view, role)}" for role in ROLES if _states(view, role)]
    lines += [f"  {_wait_line(fold, view, now_ns)}" for fold in folds(view)]
    return "\n".join(lines)


def shows(view: BoardView) -> str:
    """The last sign of a rank: "tile 17 of ag_gemm launch 41"."""
    if view.launch == 0:
        return "no launch yet"
    what = f"{view.operator} launch {view.launch}"
    computing = [role for role in view.current if role.role == "compute"]
    in_hand = [role.tile for role in computing if role.tile is not None]
    if in_hand:
        return f"tile {max(in_hand)} of {what}"
    if computing and all(role.state == "done" for role in computing):
        return f"the end of {what}"
    return what


def _launch(view: BoardView) -> str:
    if view.launch == 0:
        return "no launch yet"
    rows = "M per rank" if view.operator in SHARDED else "M"
    sizes = f", {rows} {view.m}, N {view.n}, K {view.k}" if view.n else ""
    return f"{view.operator} launch {view.launch}{sizes}, slot {view.slot}"


def _tiles(view: BoardView) -> str:
    computing = [role for role in view.current if role.role == "compute"]
    in_hand = sum(role.tile is not None for role in computing)
    done = tiles_done(view)
    return f"{'?' if done is None else done} of {view.tiles} done, {in_hand} in hand"


def _states(view: BoardView, role: str) -> str:
    here = [one for one in view.current if one.role == role]
    states = [one.state for one in here]
    parts = [f"{states.count(state)} {verb}" for state, verb in DOES.items() if state in states]
    if role == "communicate" and view.operator == "ag_gemm" and view.ctas > 1 and states == ["running"]:
        # The copy engine announces in the line of CTA 0 and shows no end: its last announcement stays.
        parts = [f"unit {here[0].tile} announced"]
    # A CTA that computes shows it at its first tile; only those that copy never do.
    if role == "compute" and view.operator != "meet":
        missing = view.ctas - len({one.cta for one in view.current})
        parts += [f"{missing} not begun"] if missing else []
    ahead = [one.cta for one in view.roles if one.role == role and one.state == "later launch"]
    parts += [f"CTAs {ranges(ahead)} show a later launch"] if ahead else []
    return ", ".join(parts)


def _wait_line(fold: Fold, view: BoardView, now_ns: int | None) -> str:
    verb = "wait for" if fold.state == "waiting" else "gave up on"
    is_own = fold.peer == view.rank
    flag = "part" if is_own else "unit" if view.operator in ("ag_gemm", "all_gather") else "flag"
    whom = "this rank's own CTAs" if is_own else f"rank {fold.peer}"
    who = "CTA" if len(fold.ctas) == 1 else "CTAs"
    what = _counted(flag, (wait.channel for wait in fold.waits))
    tiles = _counted("tile", (wait.tile for wait in fold.waits))
    seen = {"nothing" if wait.seen == 0 else f"launch {wait.seen}" for wait in fold.waits}
    news = f"need launch {fold.waits[0].needed}, saw {' and '.join(sorted(seen))}"
    if any(wait.mismatch for wait in fold.waits):
        news += " of another operator or other sizes"
    text = f"{who} {ranges(fold.ctas)}: {verb} {whom}, {what} ({tiles}); {news}"
    return text + _ago(fold.since_ns, now_ns)


def _ago(since_ns: int, now_ns: int | None) -> str:
    if now_ns is None or not -NEAR_FUTURE_NS < now_ns - since_ns < LONG_AGO_NS:
        return ""
    return f"; began {max(now_ns - since_ns, 0) / 1e9:.1f} s ago"


def _counted(noun: str, numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return f"{noun}{'' if len(found) == 1 else 's'} {ranges(found)}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: "0-17,40"; a long list is cut, with the number of its entries."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found[:MOST_RANGES]]
    if len(found) > MOST_RANGES:
        texts.append(f"... {len(set(numbers))} in all")
    return ",".join(texts)


def printable(text: str) -> str:
    """Text that any terminal takes: the bytes of a file's name that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
