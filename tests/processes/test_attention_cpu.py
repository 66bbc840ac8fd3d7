# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel attention on the CPU, with real ranks: results, gradients, compilation, and what goes wrong."""

import functools

import pytest

from tests.fixtures.kernel_group import run_ranks
from tests.needed import needs

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

PROMISES = [
    "attention_and_its_gradients",
    "operands_need_not_lie_side_by_side",
    "what_makes_no_sense_is_refused",
    "shapes_that_differ_are_named",
]
COMPILED = "compiled_attention_equals_eager"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> "functools.partial[dict[str, dict[int, str]]]":
    """What came of all promises on a number of ranks; each group is started once."""

    @functools.cache
    def tried(world_size: int, *promises: str) -> dict[str, dict[int, str]]:
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        return run_ranks(
            "tests.fixtures.attention_cpu_promises", [*promises], world_size, folder, backend="gloo", deadline_s=300
        )

    return functools.partial(tried)


@pytest.mark.parametrize("promise", PROMISES)
# Two ranks are each other's both neighbours: what holds for four holds for them.
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.matrix), 4])
def test_every_rank_keeps_its_promise(
    promise: str, world_size: int, outcomes: "functools.partial[dict[str, dict[int, str]]]"
) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes(world_size, *PROMISES)[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


def test_it_compiles_on_two_ranks(outcomes: "functools.partial[dict[str, dict[int, str]]]") -> None:
    """What the promise's own docstring says is true on both ranks."""
    for rank, outcome in outcomes(2, COMPILED)[COMPILED].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
