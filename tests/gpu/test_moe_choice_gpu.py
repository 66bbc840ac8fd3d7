# SPDX-License-Identifier: Apache-2.0
"""How a MoE layer runs is found on real GPUs; it compiles; its schedules on NCCL give what the plain layer gives.

What each promise means stands in `moe_choice_promises.py`.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from tests.fixtures.kernel_group import run_ranks  # noqa: E402 - after the skips

PROMISES = [
    "first_calls_find_one_way_on_all_ranks",
    "a_layer_of_padded_tiles_is_tried_in_series",
    "in_training_calls_and_gradients_decide",
    "without_adaptation_nothing_is_tried",
    "a_compiled_layer_is_the_eager_one",
    "schedules_are_no_worse_than_serial",
]
DEADLINE_S = 240

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises, by promise and rank; two ranks share one cache of their own."""
    folder = tmp_path_factory.mktemp("moe_choice")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGASCALE_KERNEL_CACHE", str(folder / "cache"))
        return run_ranks(
            "tests.gpu.moe_choice_promises", PROMISES, 2, folder, backend="nccl", deadline_s=DEADLINE_S
        )  # fmt: skip


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
