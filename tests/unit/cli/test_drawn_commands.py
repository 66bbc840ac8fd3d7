# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed wrongly, wherever: one sentence, an exit code, no traceback, and nothing that lives on.

Lines are drawn for all verbs from what they declare (`tests.fakes.drawn_commands`), typed in forks of one process.
``--seed N`` draws others, ``python -m tests.fixtures.command_player --seed N --draws 50`` more of them.
"""

import subprocess
import sys
from pathlib import Path
from random import Random

import click
import pytest

from megascale_ops.cli.main import VERBS
from tests.fakes.drawn_commands import Answer, Line, Weather, commands, complaints, drawn, drawn_lines

ROOT = Path(__file__).parents[3]
EACH = 1
LINE, WRONG, FINE = Line(("status",), is_wrong=False), Line(("jobs", "--limit=x"), is_wrong=True), Weather()
SAID = "megascale-ops: no such thing\n"


@pytest.mark.timeout(600)
def test_whatever_is_typed_gets_one_sentence(pytestconfig: pytest.Config) -> None:
    """One line of each verb, in any weather."""
    seed = pytestconfig.getoption("seed")

    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.command_player", f"--seed={seed}", f"--draws={EACH}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert f"{EACH * len(list(commands()))} commands of seed {seed}, 0 ended badly" in done.stdout


@pytest.mark.parametrize(
    ("line", "weather", "answer", "wrong"),
    [
        (LINE, FINE, Answer(1, err=SAID), []),
        (LINE, FINE, Answer(0, out="fine"), []),
        (LINE, FINE, Answer(77, has_begun=True), []),
        (LINE, Weather("full"), Answer(1), []),
        (WRONG, FINE, Answer(2, err=SAID), []),
        (LINE, FINE, Answer(1, err="Traceback (most recent call last)"), ["a traceback"]),
        (LINE, FINE, Answer(3, err=SAID), ["exit code 3"]),
        (LINE, FINE, Answer(-11, err=SAID), ["exit code -11"]),
        (WRONG, FINE, Answer(0, out="fine"), ["taken (0), though a value is none of its type"]),
        (LINE, FINE, Answer(1), ["no sentence"]),
        (LINE, FINE, Answer(1, err=SAID * 2), ["2 sentences"]),
        (LINE, FINE, Answer(1, err="megascale-ops: \x1b[31m"), ["control characters"]),
        (LINE, FINE, Answer(1, err=f"megascale-ops: {'x' * 3000}"), ["a sentence without end"]),
        (LINE, FINE, Answer(1, err=SAID, has_left=True), ["a process left behind"]),
        (LINE, FINE, Answer(-9, is_late=True), ["has not ended"]),
    ],
)
def test_what_ends_badly_is_told_from_what_ends_well(
    line: Line, weather: Weather, answer: Answer, wrong: list[str]
) -> None:
    """Negative control: each complaint is made of one answer, and none of those that are well."""
    assert complaints(line, weather, answer) == wrong


def test_every_verb_is_drawn() -> None:
    """All of the table, and the words behind each group."""
    paths = [path for path, _ in commands()]

    assert {path[0] for path in paths} == set(VERBS)
    assert ("checkpoint", "prune") in paths


def test_a_seed_draws_the_same_again() -> None:
    """What failed is typed again by its seed alone."""
    assert list(drawn_lines(Random(5), 1)) == list(drawn_lines(Random(5), 1))  # noqa: S311  no secret
    assert list(drawn_lines(Random(5), 1)) != list(drawn_lines(Random(6), 1))  # noqa: S311  no secret


def test_every_parameter_is_drawn_and_known_wrong_values_are_called_so() -> None:
    """An option that a verb declares comes up, with values of its type and with others."""
    verb = click.Command("verb", params=[click.Option(["--many"], type=click.IntRange(1, 9)), click.Argument(["name"])])
    draw = Random(0)  # noqa: S311  no secret

    lines = [drawn(("verb",), verb, draw) for _ in range(200)]

    assert Line(("verb", "--many=9", "gpt"), is_wrong=False) in [
        line._replace(words=(*line.words[:2], "gpt")) for line in lines if not line.is_wrong
    ]
    assert any(line.is_wrong and "--many=nan" in line.words for line in lines)
