# SPDX-License-Identifier: Apache-2.0
"""Where a silence is, and what is remembered of places."""

from megascale_ops.diagnosis.hangs.habits import HABIT_FACTOR, MOST_PLACES, granted_s, learned, place_of

STACK = ("wait (subprocess.py:1264)", "upload (/home/u/train.py:40)", "main (/home/u/train.py:90)")


def test_a_place_is_the_scripts_innermost_line_and_the_group() -> None:
    """Library lines that it passed through change from version to version and from moment to moment."""
    polling = ("sleep (time.py:3)", "poll (selectors.py:415)", *STACK[1:])

    assert place_of(STACK, "0") == place_of(polling, "0") == "upload (/home/u/train.py:40), others in group 0"
    assert place_of(STACK, "0") != place_of(STACK, "1")
    assert place_of(("wait (threading.py:1)", "run (torch/x.py:2)"), "") == "run (torch/x.py:2)"
    assert place_of((), "0") == ""


def test_the_longest_silence_of_a_place_counts_and_the_shortest_is_forgotten_first() -> None:
    """Bounded: a script that is silent everywhere costs 64 places."""
    habits: dict[str, float] = {}
    for number in range(MOST_PLACES + 10):
        habits = learned(habits, f"line {number}", 10.0 + number)
    habits = learned(habits, "line 70", 5.0)

    assert len(habits) == MOST_PLACES
    assert granted_s(habits, "line 70") == HABIT_FACTOR * 80.0
    assert granted_s(habits, "line 0") == 0.0
    assert learned({}, "", 100.0) == {}
