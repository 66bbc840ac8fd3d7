# SPDX-License-Identifier: Apache-2.0
"""Boards of kernels that hang on real GPUs, read as an agent reads them; two ranks, which may share one GPU.

What each promise means stands in `tile_board_promises.py`.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from tests.fixtures.kernel_group import run_ranks  # noqa: E402 - after the skips

PROMISES = [
    "a_hanging_kernel_is_read_from_its_board",
    "words_of_a_real_time_out_name_the_absent_rank",
    "graphs_are_captured_beside_a_board_that_is_copied",
    "a_refused_mapping_leaves_no_error_behind",
]
# All promises together take half a minute, most of it compilation.
DEADLINE_S = 180

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


@pytest.fixture(scope="module", params=(2, 4), ids="{} ranks".format)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises, by promise and rank."""
    folder = tmp_path_factory.mktemp("boards")
    module = "tests.gpu.tile_board_promises"
    return run_ranks(module, PROMISES, request.param, folder, backend="nccl", deadline_s=DEADLINE_S)


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
