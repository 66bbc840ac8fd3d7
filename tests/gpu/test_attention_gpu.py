# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel attention on real GPUs, one process a rank: right, repeatable, trainable, and never hanging.

Two and four ranks, a GPU each as far as there are so many; else they share what there is, and it runs them by turns.
What each promise means stands in `attention_gpu_promises.py`.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from tests.fixtures.kernel_group import run_ranks  # noqa: E402 - after the skips

WORLD_SIZES = (2, 4)
PROMISES = [
    "other_ways_are_no_worse_than_serial",
    "attention_repeats_bit_by_bit",
    "every_element_is_right_whoever_is_late",
    "compiled_attention_equals_eager",
    "attention_replays_like_eager_calls",
    "heads_that_differ_are_named",
    "a_rank_that_does_not_come_is_named",
]
# In groups of their own: what goes wrong in one hides nothing of the other.
ALONE = ["attention_is_no_worse_than_serial", "the_warp_specialised_backward_is_no_worse_than_serial"]
# A hung GPU process is killed after this. The promises take seconds; some thirty kernels are compiled, 2 to 4 s each on
# an idle machine, by each rank.
DEADLINE_S = 400

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises, by promise and rank."""
    folder = tmp_path_factory.mktemp("attention")
    return run_ranks(
        "tests.gpu.attention_gpu_promises", PROMISES, request.param, folder, backend="nccl", deadline_s=DEADLINE_S
    )


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.parametrize("promise", ALONE)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_and_gradients_are_right(world_size: int, promise: str, tmp_path: Path) -> None:
    """As it runs by itself, and with the backward in Gluon too: what the promise's own docstring says."""
    tried = run_ranks(
        "tests.gpu.attention_gpu_promises", [promise], world_size, tmp_path, backend="nccl", deadline_s=DEADLINE_S
    )
    for rank, outcome in tried[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_killed_peer_is_named_and_the_others_compute_on(world_size: int, tmp_path: Path) -> None:
    """A SIGKILL in mid-kernel ends in `TileTimeout` on every survivor, in time, with a CUDA context that works."""
    tried = run_ranks(
        "tests.gpu.attention_gpu_promises", ["a_killed_peer_is_named"], world_size, tmp_path, backend="nccl",
        deadline_s=DEADLINE_S,
    )  # fmt: skip

    *survivors, victim = tried["a_killed_peer_is_named"].values()
    assert "ended with -9" in victim
    assert survivors == ["kept"] * (world_size - 1), survivors
