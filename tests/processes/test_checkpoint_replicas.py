# SPDX-License-Identifier: Apache-2.0
"""Real ranks save what they hold alike: who differs is named, and who may differ is not.

One process imports torch and forks the ranks of all scenarios, two to four each: half a second of CPU time a rank.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from megascale_ops.schema.events import Incident
from tests.processes.launch import SCRIPTS, Launch, until
from tests.processes.warmed import env_of_programs, play_module

pytestmark = pytest.mark.processes

OURS = ("silent_corruption", "replicas_differ", "stale_weights")
NAMES = ("clean2", "flipped2", "flipped3", "formats", "refused", "off", "sharded2", "sharded4")
FOUR = ("clean4", "flipped4")
Ranks = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """Play a scenario, and all others of its kind with it; what each rank heard at each save."""

    @cache
    def play(names: tuple[str, ...]) -> dict[str, Ranks]:
        arguments = [str(tmp_path_factory.mktemp("replicas")), *names]
        env = env_of_programs() | {"MEGASCALE_RECORDER": "0"}
        done = play_module("tests.fixtures.checkpoint_replicas", arguments, env, deadline_s=400)
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert all(set(one["codes"]) == {0} for one in told), done.stderr
        return {one["name"]: one["ranks"] for one in told}

    return lambda name: play(FOUR if name in FOUR else NAMES)[name]


def heard(ranks: Ranks) -> dict[str, list[str]]:
    """What each save has found, which every rank heard alike."""
    assert all([save["heard"] for save in rank] == [save["heard"] for save in ranks[0]] for rank in ranks)
    return {save["what"]: save["heard"] for save in ranks[0]}


def logged(ranks: Ranks, what: str) -> str:
    """What the leading rank logged at a save; the others log nothing of it."""
    assert not any("checkpoint of step" in line for rank in ranks[1:] for save in rank for line in save["logged"])
    return "\n".join(line for save in ranks[0] if save["what"] == what for line in save["logged"])


# Two and three ranks show what four do, but for replicas of shards.
@pytest.mark.parametrize("name", ["clean2", pytest.param("clean4", marks=pytest.mark.matrix)])
def test_clean_replicas_are_no_alarm(played: Callable[[str], Ranks], name: str) -> None:
    """DDP with BatchNorm, dropout, AdamW, generators: what differs and may is told once, as what it is."""
    ranks = played(name)

    assert [save["heard"] for rank in ranks for save in rank] == [[]] * (3 * len(ranks))
    first, *later = ("different values under" in "".join(save["logged"]) for save in ranks[0])
    assert (first, later) == (True, [False, False])
    assert "generator, model.module.1.running_mean, model.module.1.running_var" in logged(ranks, "clean")


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.matrix)])
def test_the_rank_whose_bit_flipped_is_named(played: Callable[[str], Ranks], size: int) -> None:
    """With the tensor and the element; also after more training, and in an optimizer's state; until it is mended."""
    ranks = played(f"flipped{size}")

    assert heard(ranks) == {
        "before": [],
        "weight": ["silent_corruption [1]"],
        "trained on": ["silent_corruption [1]"],
        "mended": [],
        "moment": [f"silent_corruption [{size - 1}]"],
    }
    weight = "1 of 24 tensors: model.module.4.weight (1 of 2880 elements differs, the first is number 5; 1 bit)"
    assert f"rank 1 holds other values than the {size - 1} other replicas in {weight}" in logged(ranks, "weight")
    assert "optimizer.state.4.exp_avg (1 of 2880 elements differs, the first is number 2879" in logged(ranks, "moment")


def test_of_two_both_are_named(played: Callable[[str], Ranks]) -> None:
    """As a pair of which one is wrong."""
    ranks = played("flipped2")

    assert [faults for faults in heard(ranks).values() if faults] == [["replicas_differ [0, 1]"]] * 3
    assert "no majority tells which of them is right" in logged(ranks, "weight")


def test_order_in_memory_is_no_difference_and_a_nan_is_its_bits(played: Callable[[str], Ranks]) -> None:
    """Channels last on one rank; another payload; two elements that changed places in what the user has named."""
    assert heard(played("formats")) == {
        "same": [],
        "another NaN": ["silent_corruption [1]"],
        "elements that changed places": ["silent_corruption [1]"],
    }
    assert "average.x (2 of 7 elements differ" in logged(played("formats"), "elements that changed places")


def test_a_save_can_be_refused_for_it(played: Callable[[str], Ranks]) -> None:
    """On all ranks, with the same sentence."""
    sentences = {rank[1]["what"] for rank in played("refused")}

    assert len(sentences) == 1
    assert sentences.pop().startswith("saving step 1 is refused: rank 1 holds other values than the 2 other replicas")


def test_it_can_be_switched_off(played: Callable[[str], Ranks]) -> None:
    """Then replicas that differ are saved without a word."""
    assert heard(played("off")) == {"off": []}


@pytest.mark.parametrize(("name", "flipped"), [("sharded2", []), ("sharded4", ["replicas_differ [1, 3]"])])
def test_shards_are_compared_with_those_of_other_replicas(
    played: Callable[[str], Ranks], name: str, flipped: list[str]
) -> None:
    """FSDP2 over two ranks has no replicas; over two by two a shard has two. Weights that stand are told in both."""
    assert heard(played(name)) == {"clean": [], "stale": ["stale_weights []"], "flipped": flipped}


def test_a_flipped_bit_becomes_a_warning_that_names_its_rank(launch: Launch) -> None:
    """By the ordinary way: the rank's black box, its agent, the controller; over when the weights are alike again."""
    proc = launch.run(script=SCRIPTS / "replicas.py", nproc=3)
    launch.until_step(7)
    folder = launch.run_dir() / "checkpoints"
    assert not [one for one in launch.incidents() if one.verdict is not None and one.verdict.fault in OURS]

    (folder / "flip").touch()
    told = until(lambda: corrupted(launch, "watching"), f"rank 1 to be named; so far:\n{launch.output()}")
    (folder / "mend").touch()
    over = until(lambda: corrupted(launch, "over"), "the warning to end")
    launch.enough()
    assert launch.finish(proc) == 0, launch.output()

    assert told.verdict is not None
    assert told.verdict.culprits == (1,)
    assert "model.module.weight (1 of 64 elements differs" in told.verdict.reason
    assert (over.id, "a later checkpoint found nothing of the kind" in over.done) == (told.id, True)
    launch.assert_nothing_left()


def corrupted(launch: Launch, state: str) -> Incident | None:
    """The incident of silent corruption, in a state."""
    found = [one for one in launch.incidents() if one.verdict is not None and one.verdict.fault in OURS]
    assert {one.verdict.fault for one in found if one.verdict is not None} <= {"silent_corruption"}
    return next((one for one in found if one.state == state), None)
