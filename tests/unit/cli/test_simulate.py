# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops simulate`` as a user meets it: lines, JSON, a picture, and mistakes."""

import json
import logging
from pathlib import Path

import pytest

from megascale_ops.cli.main import main

# Six minutes of 8 ranks on two nodes: half a second.
SMALL = (
    *("--ranks", "8", "--ranks-per-node", "4", "--hours", "0.1", "--step-s", "2", "--start-s", "5", "--load-s", "5"),
    *("--pp", "1", "--faults", "none"),
)


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave logging as it is."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)


def run(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    """Run one command line; return exit code, stdout and stderr."""
    code = main(["simulate", *line])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_crash_is_told_with_what_it_cost_and_what_became_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Lines for people, and a picture beside them; what the controller logs meanwhile is of no real moment."""
    before = logging.getLogger("megascale_ops.controller").level

    code, out, err = run(capsys, *SMALL, "--fault", "segfault@0.05:0.3", "--plot", str(tmp_path / "day.svg"))

    assert (code, err) == (0, "")
    assert "8 ranks on 2 nodes" in out
    assert "effective training time ratio" in out
    assert "segfault of rank 2 on node-00000 (named): named rightly by simulated-1" in out
    assert "recall 100.00% (1 of 1)" in out
    assert (tmp_path / "day.svg").read_text(encoding="utf-8").startswith("<svg")
    assert logging.getLogger("megascale_ops.controller").level == before


def test_programs_get_json_with_the_price_of_another_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """The run, and the same one under each policy that is to be compared."""
    code, out, _ = run(capsys, *SMALL, "--seed", "3", "--compare", "silence_floor_s=10", "--json")

    told = json.loads(out)
    assert code == 0
    assert told["run"]["seed"] == 3
    assert told["run"]["incidents"] == []
    assert [(one["setting"], one["saved_s"]) for one in told["choices"]] == [("silence_floor_s=10", 0.0)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--faults", "lama3"), "there is no law of faults 'lama3'"),
        (("--ranks", "12"), "12 ranks can't be spread over nodes of 8"),
        (("--hours", "-1"), "hours -1 can't be simulated"),
        (("--hours", "nan"), "no finite number"),
        (("--fault", "hang"), "give KIND@HOURS"),
        (("--fault", "hang@99"), "would come after the end"),
        (("--policy", "patience=3"), "patience"),
        (("--compare", "silence_floor_s=x"), "a number is needed"),
        (("--plot", "/nowhere/day.svg"), "/nowhere/day.svg"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], line: tuple[str, ...], said: str) -> None:
    """What was wrong and what to do; nothing is simulated, no traceback."""
    code, out, err = run(capsys, *line)

    assert code in (1, 2)
    assert out == ""
    assert said in err
    assert "Traceback" not in err
