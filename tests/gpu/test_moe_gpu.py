# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on real GPUs, one process a rank: right for any routing, repeatable, trainable, never hanging.

What each promise means stands in `moe_gpu_promises.py`.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from tests.fixtures.kernel_group import run_ranks  # noqa: E402 - after the skips

WORLD_SIZES = (2, 4)
PROMISES = [
    "warp_specialised_layers_take_any_routing",
    "warp_specialised_layers_take_any_configuration",
    "how_tiles_are_dealt_changes_no_bit",
    "any_routing_is_no_worse_than_serial",
    "any_configuration_is_no_worse_than_serial",
    "graphs_replay_with_any_routing",
    "gradients_of_any_routing_are_no_worse_than_serial",
    "gradients_of_any_configuration_are_no_worse_than_serial",
    "in_series_any_routing_is_no_worse_than_plain",
    "in_series_graphs_replay_with_any_routing",
    "experts_cut_among_ranks_are_no_worse_than_serial",
    "only_what_is_wanted_is_enough",
    "gradients_repeat_bit_by_bit",
    "results_repeat_bit_by_bit",
    "layers_that_differ_are_named",
    "a_rank_that_does_not_come_is_named",
    "any_top_k_and_type_is_no_worse_than_serial",
]
# A hung GPU process is killed after this; all promises together take one or two minutes, nearly all of it compilation.
DEADLINE_S = 300

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises, by promise and rank."""
    folder = tmp_path_factory.mktemp("moe")
    return run_ranks(
        "tests.gpu.moe_gpu_promises", PROMISES, request.param, folder, backend="nccl", deadline_s=DEADLINE_S
    )


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_killed_peer_is_named_and_the_others_compute_on(world_size: int, tmp_path: Path) -> None:
    """A SIGKILL in mid-layer ends in `TileTimeout` on every survivor, in time, with a CUDA context that works."""
    tried = run_ranks(
        "tests.gpu.moe_gpu_promises", ["a_killed_peer_is_named"], world_size, tmp_path, backend="nccl", deadline_s=90
    )

    *survivors, victim = tried["a_killed_peer_is_named"].values()
    assert "ended with -9" in victim
    assert survivors == ["kept"] * (world_size - 1), survivors
