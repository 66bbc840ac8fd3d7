# SPDX-License-Identifier: Apache-2.0
"""The overlap operators on real GPUs, one process a rank: right, repeatable, trainable, and never hanging.

Two, four and eight ranks, a GPU each as far as there are so many; else they share what there is, and it runs them by
turns. What each promise means stands in `kernel_gpu_promises.py`, `kernel_piece_promises.py` and
`kernel_gated_promises.py`.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from tests.fixtures.kernel_group import run_ranks  # noqa: E402 - after the skips

WORLD_SIZES = (2, 4, 8)
PROMISES = [
    "nothing_fell_back",
    "ag_gemm_is_no_worse_than_serial",
    "gemm_rs_is_no_worse_than_serial",
    "gemm_ar_is_no_worse_than_serial",
    "rows_that_tma_cannot_read_are_widened",
    "the_tuner_is_asked",
    "a_contest_ends_alike_on_all_ranks",
    "empty_tensors_are_served",
    "results_repeat_bit_by_bit",
    "two_quarters_in_a_slot_change_no_bit",
    "gradients_are_no_worse_than_serial",
    "layers_equal_the_whole_model",
    "graphs_replay_like_eager_calls",
    "shapes_that_differ_are_named",
    "shapes_that_differ_are_named_on_the_serial_path",
    "a_rank_that_does_not_come_is_named",
    "compiled_layers_equal_the_whole_model",
]
PIECE_PROMISES = [
    "pieces_are_no_worse_than_serial",
    "pieces_repeat_bit_by_bit",
    "pieces_replay_in_graphs",
    "compiled_pieces_equal_eager_ones",
    "a_rank_that_does_not_come_to_pieces_is_named",
]
GATED_PROMISES = [
    "gradients_are_no_worse_than_apart",
    "training_equals_float64",
    "gradients_repeat_bit_by_bit",
    "a_contest_finds_the_way",
    "a_rank_that_does_not_come_is_named",
    "layers_by_parts_equal_one",
    "swiglu_is_that_of_what_is_stored",
    "a_gated_mlp_trains_as_float64_does",
    "swiglu_repeats_bit_by_bit",
    "a_contest_finds_the_way_to_swiglu",
    "a_rank_that_does_not_come_to_swiglu_is_named",
    "one_module_equals_two_layers",
]
# A hung GPU process is killed after this; all promises together take about a minute, most of it compilation.
DEADLINE_S = 180

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises, by promise and rank."""
    folder = tmp_path_factory.mktemp("kernels")
    return run_ranks(
        "tests.gpu.kernel_gpu_promises", PROMISES, request.param, folder, backend="nccl", deadline_s=DEADLINE_S
    )


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_swiglu_in_a_product_keeps_its_promises(world_size: int, tmp_path: Path) -> None:
    """SwiGLU or its gradient before the product is stored: right, repeatable, in graphs and compiled, bounded waits."""
    tried = run_ranks(
        "tests.gpu.kernel_gated_promises", GATED_PROMISES, world_size, tmp_path, backend="nccl",
        deadline_s=2 * DEADLINE_S,  # two kinds of kernels to compile
    )  # fmt: skip

    for promise, outcomes in tried.items():
        assert set(outcomes.values()) == {"kept"}, f"{promise}: {outcomes}"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_pieces_of_an_operator_keep_their_promises(world_size: int, tmp_path: Path) -> None:
    """Where cuBLAS multiplies between copies: the same bits again, graphs, compiled code, and bounded waits."""
    tried = run_ranks(
        "tests.gpu.kernel_piece_promises", PIECE_PROMISES, world_size, tmp_path, backend="nccl", deadline_s=DEADLINE_S
    )

    for promise, outcomes in tried.items():
        assert set(outcomes.values()) == {"kept"}, f"{promise}: {outcomes}"


@pytest.mark.parametrize(
    ("module", "promise"),
    [
        ("kernel_gpu_promises", "a_killed_peer_is_named"),
        ("kernel_piece_promises", "a_peer_killed_in_pieces_is_named"),
    ],
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_killed_peer_is_named_and_the_others_compute_on(
    module: str, promise: str, world_size: int, tmp_path: Path
) -> None:
    """A SIGKILL in mid-kernel ends in `TileTimeout` on every survivor, in time, with a CUDA context that works."""
    tried = run_ranks(f"tests.gpu.{module}", [promise], world_size, tmp_path, backend="nccl", deadline_s=90)

    *survivors, victim = tried[promise].values()
    assert "ended with -9" in victim
    assert survivors == ["kept"] * (world_size - 1), survivors
