# SPDX-License-Identifier: Apache-2.0
"""What a job has taught about its own silences: where they are, and how long those lasted that ended by themselves.

A script that uploads for ten minutes after every thousandth step does so in the same line, while the others wait in
the same group. So a silence has a *place*: the line of the script in which the rank is that the others wait for,
and the group that they wait in. What moved again by itself there is a habit, and the next silence there gets a
multiple of it. And a restart that was ordered for a silence at a place and was followed by another one there has cured
nothing: it is not ordered again.

Pure: places and seconds in, places and seconds out.
"""

from collections.abc import Mapping, Sequence

# 3 times the longest silence that ended by itself at the same place: uploads and evaluations grow with the run.
HABIT_FACTOR = 3.0
# 64 places: a script has a handful; the shortest is forgotten first.
MOST_PLACES = 64
# A file that keeps its whole path is the script's own; installed ones are named as one imports them (``places.write``).
_OF_THE_SCRIPT = "(/"


def place_of(frames: Sequence[str], group: str) -> str:
    """Return where a silence is, in words that are the same the next time it happens; "" where it is not known.

    Args:
        frames: stack of the rank that the others wait for, innermost first, "function (file:line)".
        group: the process group in which the others wait; "" where none is known. Not which collective: that is known
            by evidence alone, and a place without it must read the same.
    """
    line = line_of_script(frames) or (frames[-1] if frames else "")
    return f"{line}, others in group {group}" if line and group else line


def line_of_script(frames: Sequence[str]) -> str:
    """Return the innermost frame of the script's own, "" where none is known."""
    return next((frame for frame in frames if _OF_THE_SCRIPT in frame), "")


def standing_in(frames: Sequence[str]) -> str:
    """Return the innermost frame, and where that is a library's, the script's line that led there; "" for none."""
    if not frames:
        return ""
    own = line_of_script(frames[1:])
    return f"{frames[0]} from {own}" if own and _OF_THE_SCRIPT not in frames[0] else frames[0]


def learned(habits: Mapping[str, float], place: str, lasted_s: float) -> dict[str, float]:
    """Return the habits with one more silence that ended by itself."""
    if not place or lasted_s <= habits.get(place, 0.0):
        return dict(habits)
    known = {**habits, place: round(lasted_s, 1)}
    kept = sorted(known.items(), key=lambda item: -item[1])[:MOST_PLACES]
    return dict(kept)


def granted_s(habits: Mapping[str, float], place: str) -> float:
    """Return the patience that a place has earned, 0 for one that is not known."""
    return HABIT_FACTOR * habits.get(place, 0.0)
