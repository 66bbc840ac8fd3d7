# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay, and why; all others go.

Five reasons to stay, and one checkpoint may have several:

- it is one of the newest whole ones: what a restart loads, and what it falls back to;
- it is the first whole one at or after a multiple of ``keep_every`` steps: the long history. At or after, because a
  script that saves by the clock hits no multiple;
- its metric is one of the best;
- a restore reads it;
- it is not ours to judge: of a later step than the newest one of this attempt, or damaged and newer than the oldest of
  the newest that are kept, where a person may want to see what became of it.

A damaged one never counts towards a number, so it pushes no whole one out; and while fewer whole ones are known than
``keep`` asks for, nothing is deleted at all. Pure: what stands there goes in, a decision with its reasons comes out.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megascale_ops.errors import UsageError

# 600 s: sixty renewals. A mark of another machine is dated by clocks that may differ by minutes.
MARK_LASTS_S = 600.0


class Rule(NamedTuple):
    """What the owner of a folder wants to keep.

    Attributes:
        keep: so many of the newest whole ones, 1 at least.
        keep_every: the first at or after every multiple of so many steps; 0: none for that reason.
        keep_best: so many of those with the best metric; 0: none for that reason.
        higher_is_better: of the metric; a loss is better when it is lower.
    """

    keep: int = 3
    keep_every: int = 0
    keep_best: int = 0
    higher_is_better: bool = False

    def checked(self) -> "Rule":
        """This rule.

        Raises:
            UsageError: a number is too small.
        """
        if self.keep < 1:
            raise UsageError(f"keep is {self.keep}; at least one checkpoint must be kept")
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; 0 keeps none for that reason")
        return self


class Standing(NamedTuple):
    """One checkpoint folder as it stands. ``metric`` None: saved without; ``readers``: who restores from it now."""

    step: int
    path: str
    metric: float | None = None
    is_damaged: bool = False
    readers: tuple[str, ...] = ()


class Decision(NamedTuple):
    """What becomes of one folder; it stays for each of ``reasons``, and goes when there are none."""

    step: int
    path: str
    reasons: tuple[str, ...]

    @property
    def stays(self) -> bool:
        """Whether it is kept."""
        return bool(self.reasons)


def decide(standing: Iterable[Standing], rule: Rule, newest_step: int | None = None) -> list[Decision]:
    """What becomes of each checkpoint, newest first.

    Args:
        standing: all of a folder; of two of one step the one that restores prefer comes first.
        rule: what its owner wants.
        newest_step: the newest step of this attempt; later ones are another's. None: there is no other attempt.
    """
    ordered = sorted(standing, key=lambda one: -one.step)
    ours = [one for one in ordered if newest_step is None or one.step <= newest_step]
    whole = [one for one in ours if not one.is_damaged]
    reasons: dict[str, list[str]] = {one.path: [] for one in ordered}
    for one in ordered[: len(ordered) - len(ours)]:
        reasons[one.path].append(f"later than step {newest_step}: of another attempt")
    for place, one in enumerate(whole[: rule.keep]):
        reasons[one.path].append("the newest" if not place else f"one of the {rule.keep} newest")
    for one in _firsts(whole, rule.keep_every):
        reasons[one.path].append(f"the first from step {one.step // rule.keep_every * rule.keep_every} on")
    for place, one in enumerate(_best(whole, rule)):
        named = "the best" if not place else f"one of the {rule.keep_best} best"
        reasons[one.path].append(f"{named}: {one.metric:.6g}")
    for one in ordered:
        reasons[one.path] += [f"read by {who}" for who in one.readers]
    for one in ours:
        if not reasons[one.path]:
            reasons[one.path] += _not_yet(one, whole, rule)
    return [Decision(one.step, one.path, tuple(reasons[one.path])) for one in ordered]


def _firsts(whole: Sequence[Standing], every: int) -> list[Standing]:
    """The first at or after each multiple of so many steps that there is."""
    firsts = {one.step // every: one for one in whole if one.step >= every} if every else {}
    return list(firsts.values())  # newest first, so what stays under a key is the oldest


def _best(whole: Sequence[Standing], rule: Rule) -> list[Standing]:
    """The best by their metric, the best first; of equal ones the newer."""
    sign = -1.0 if rule.higher_is_better else 1.0
    measured = [(sign * one.metric, -one.step, one) for one in whole if one.metric is not None]
    return [one for _, _, one in sorted(measured, key=lambda each: each[:2])[: rule.keep_best]]


def _not_yet(one: Standing, whole: Sequence[Standing], rule: Rule) -> list[str]:
    """Why one that nothing else keeps stays all the same."""
    if len(whole) < rule.keep:
        return [f"fewer than {rule.keep} whole ones are there"]
    if one.is_damaged and one.step >= whole[rule.keep - 1].step:
        return ["damaged, and newer than the oldest of those that are kept"]
    return []


def still_reads(life: str, age_s: float) -> bool:
    """Whether the reader whose mark this is may still read.

    Args:
        life: what this machine's kernel knows of its process; ``unknown`` of another machine's.
        age_s: since its mark was renewed, by the time stamps of the file system; below 0 where clocks differ.
    """
    if life == "unknown":
        return age_s < MARK_LASTS_S
    return life == "alive"
