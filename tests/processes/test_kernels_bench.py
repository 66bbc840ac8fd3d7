# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the kernels on the CPU, with real ranks: what its tables rest on."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from tests.fixtures.kernel_group import run_ranks

pytestmark = pytest.mark.processes

PROMISES = [
    "drawn_trials_are_right",
    "wrong_and_failed_operators_are_told_on_every_rank",
    "the_host_time_is_the_slower_rank_s",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises on two ranks."""
    return run_ranks(
        "tests.fixtures.kernel_bench_promises", PROMISES, 2, tmp_path_factory.mktemp("bench"), backend="gloo",
        deadline_s=120,
    )  # fmt: skip


@pytest.mark.parametrize("promise", PROMISES)
def test_both_ranks_keep_their_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on both ranks."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
