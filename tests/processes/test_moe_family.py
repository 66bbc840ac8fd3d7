# SPDX-License-Identifier: Apache-2.0
"""The family of MoE schedules on the CPU, with real ranks: EPS-MoE, Parm, ScMoE, LocMoE, and what goes wrong."""

import pytest

from tests.fixtures.kernel_group import run_ranks
from tests.needed import needs

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

PROMISES = [
    "a_pipeline_of_experts_is_the_layer",
    "parm_s_schedules_are_the_layer",
    "a_shortcut_block_is_its_parts",
    "the_locality_loss_keeps_tokens_at_home",
    "a_layer_s_capacity_is_the_bound",
    "wrong_schedules_are_named",
    "a_rank_that_does_not_come_is_told",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises on four ranks: two by two is the least that has both kinds of Parm's groups."""
    folder = tmp_path_factory.mktemp("family")
    return run_ranks("tests.fixtures.moe_family_promises", PROMISES, 4, folder, backend="gloo", deadline_s=300)


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
