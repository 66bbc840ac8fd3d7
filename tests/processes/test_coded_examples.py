# SPDX-License-Identifier: Apache-2.0
"""The guide to coded computation, command by command: a slow rank costs no step its sum, and is named all the same.

Ranks of NumPy alone, 0.2 s of CPU each; their work is sleeping, so that five on two cores do not slow each other down.
What is compared is what was computed and who was named, never how long it took.
"""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megascale_ops.coded import GradientCode
from tests.fixtures.script_module import script_module
from tests.processes.guides import ROOT, commands
from tests.processes.launch import Launch, acted_upon

pytestmark = pytest.mark.processes

GUIDES = ("docs/how-to/coded-computation.md",)
CODED, MULTI, ADMM, SIMULATED = commands(GUIDES[0])


def train(launch: Launch, command: str, *more: str) -> str:
    """Run a command of the guide to its end, and return what it printed."""
    words = [word if not word.startswith("examples/") else str(ROOT / word) for word in shlex.split(command)[1:]]
    run = launch.spawn(*words, *more, log="coded.log")
    assert launch.finish(run) == 0, launch.output("coded.log")
    return launch.output("coded.log")


def uncoded(monkeypatch: pytest.MonkeyPatch, command: str) -> np.ndarray:
    """Return the parameters that the example's own steps come to in one process, without any code."""
    example = script_module(ROOT / "examples/train_coded.py")
    monkeypatch.setattr("sys.argv", shlex.split(command.partition(" -- ")[2]))
    options = example.read_arguments()
    data = example.Data(options, 4)
    weights = np.zeros(options.features)
    velocity = np.zeros(options.features)
    for _ in range(options.steps):
        ahead = weights + options.momentum * velocity
        total = sum(example.gradient(*data[partition], ahead) for partition in range(4))
        velocity = options.momentum * velocity - options.learning_rate / options.samples * total
        weights = weights + velocity
    return weights


def test_a_slow_rank_is_done_without_and_still_named(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 takes five times as long: nearly all steps close without it, the sum is whole, and it is a straggler."""
    out = launch.tmp_path / "weights.npy"

    said = train(launch, CODED, f"--out={out}")

    record = json.loads((launch.run_dir("coded") / "coded.json").read_text())
    late = {worker: one["late"] for worker, one in record["by_worker"].items()}
    assert re.search(r"coded: step \d+: \d+ of the last \d+ without worker 2\n", said)
    assert (record["steps"], record["approximate_steps"], record["load"]) == (300, 0, 2)
    assert late["2"] > 150
    assert late["2"] > max(late[other] for other in "013")
    assert np.abs(np.load(out) - uncoded(monkeypatch, CODED)).max() < 1e-10
    found = launch.incidents("coded")
    assert acted_upon(found) == []
    named = [one.verdict.culprits for one in found if one.verdict is not None and one.verdict.fault == "straggler"]
    assert (3,) in named, said


def test_without_a_slow_rank_none_is_done_without(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control, in several messages: all are waited for within the grace, and the sum is the same."""
    out = launch.tmp_path / "weights.npy"

    said = train(launch, MULTI, "--grace-s=60", f"--out={out}")

    assert "late by rank: none" in said
    assert "without worker" not in said
    assert np.abs(np.load(out) - uncoded(monkeypatch, MULTI)).max() < 1e-10
    assert acted_upon(launch.incidents("multi")) == []


def test_agents_agree_without_a_slow_edge_worker(launch: Launch) -> None:
    """Two agents with two edge workers each: the token comes to the solution of all data, though rank 2 is slow."""
    said = train(launch, ADMM)

    (error,) = re.findall(r"done: 60 cycles, error (\S+)\n", said)
    late = dict(re.findall(r"agent (\d): late by edge worker: \{.*?1: (\d+)", said))
    assert float(error) < 1e-4
    assert int(late["0"]) > 40
    assert acted_upon(launch.incidents("admm")) == []


def test_a_code_that_can_not_be_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends the rank with an error, before it meets the others; one rank alone is told what is missing."""
    example = script_module(ROOT / "examples/train_coded.py")
    monkeypatch.setattr("sys.argv", ["train_coded.py", "--code=cyclic", "--stragglers=1"])
    monkeypatch.setenv("RANK", "0")
    for ranks, sentence in (
        ("2", "rank 0: 1 workers can't do without 1 of them"),
        ("1", "needs a master and a worker"),
    ):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with pytest.raises(SystemExit, match=sentence):
            example.main()


def test_the_simulator_switches_a_code_on(launch: Launch) -> None:
    """A code that does twice the work makes fewer steps than one can make that waits for a rank that is 30 % slow."""
    coded = json.loads(launch.command(*shlex.split(SIMULATED)[1:], "--json").stdout)["run"]

    uncoded_step_s = 6.34 * (0.8 * 1.3 + 0.2)
    assert coded["coded"] == "s=1,kind=clustered"
    assert 0 < coded["steps"] < (coded["wall_s"] - 90.0) / uncoded_step_s
    assert [one["incident"] != "" for one in coded["faults"]] == [True]  # the slow rank is named all the same


def test_codes_of_the_guide_exist() -> None:
    """Commands that no test runs, of the papers' sizes: their codes can be made."""
    page = Path(ROOT / GUIDES[0]).read_text(encoding="utf-8")

    assert "--nproc-per-node 13 -- examples/train_coded.py --code cyclic --stragglers 1" in page
    assert GradientCode(12, 1, "cyclic").load == 2
