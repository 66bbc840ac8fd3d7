# SPDX-License-Identifier: Apache-2.0
"""The examples learn, and a run that was stopped and resumed ends exactly like one that was not."""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from megascale_ops.checkpoint import newest
from tests.processes.launch import free_port
from tests.processes.warmed import play_ranks, play_script

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--batch-size", "4", "--sequence-length", "32", "--width", "32", "--log-every", "1", "--evaluate-every", "10"]


def run(script: str, folder: Path, steps: int, *, rendezvous_port: int = 0) -> dict[int, float]:
    """Train in one process, or on two ranks when a port is given; the loss of each step that was printed."""
    options = ["--steps", str(steps), "--checkpoint-every", "6", *SMALL]
    env = os.environ | {"MEGASCALE_CHECKPOINT_DIR": str(folder), "MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"}
    if rendezvous_port:
        all_done = play_ranks(EXAMPLES / script, options, env, 2, rendezvous_port, 400)
    else:
        all_done = [play_script(EXAMPLES / script, options, env, 400)]
    assert not any(done.returncode for done in all_done), [done.stderr for done in all_done]
    words = [line.split() for line in all_done[0].stdout.splitlines()]
    return {int(line[1]): float(line[3]) for line in words if line[:1] == ["step"] and line[2] == "loss"}


class Trained(NamedTuple):
    """The losses of 12 steps, and of the first 6 with the folder of their checkpoints."""

    whole: dict[int, float]
    first: dict[int, float]
    folder: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Train a script on one rank, once for all tests."""

    @cache
    def train(script: str) -> Trained:
        folder = tmp_path_factory.mktemp("trained")
        return Trained(run(script, folder / "whole", 12), run(script, folder / "half", 6), folder / "half")

    return train


@pytest.mark.parametrize("script", ["train_gpt.py", "train_gpt_plain.py"])
def test_a_resumed_run_ends_like_one_that_was_never_stopped(
    trained: Callable[[str], Trained], script: str, tmp_path: Path
) -> None:
    """Weights, moments and the stream of text continue where they were: every loss is the same."""
    before = trained(script)
    halves = shutil.copytree(before.folder, tmp_path / "halves")

    second = run(script, halves, 12)

    assert sorted(second) == list(range(7, 13))
    assert before.first | second == before.whole
    assert before.whole[12] < before.whole[1]


def test_two_ranks_share_the_stream_that_one_reads_alone(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """A run resumed with more ranks goes on in the same text, so its mean loss goes on too."""
    before = trained("train_gpt.py")
    shared = shutil.copytree(before.folder, tmp_path / "shared")

    together = run("train_gpt.py", shared, 12, rendezvous_port=free_port())

    assert sorted(together) == list(range(7, 13))
    assert all(abs(together[step] - before.whole[step]) < 0.01 for step in together)
    choice = newest(shared)
    assert choice.newest is not None
    assert choice.newest.manifest is not None
    assert choice.newest.manifest.world_size == 2
