# SPDX-License-Identifier: Apache-2.0
"""The overlap operators on the CPU, with real ranks: results, gradients, layers, styles, and what goes wrong."""

import functools

import pytest

from tests.fixtures.kernel_group import run_ranks
from tests.matrix import wide
from tests.needed import needs

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

OPERATORS = [
    "ag_gemm_and_its_gradients",
    "the_gathered_rows_have_gradients_too",
    "gemm_rs_and_its_gradients",
    "gradients_that_nobody_needs_are_not_computed",
    "gemm_ar_and_its_gradients",
    "empty_tensors_are_served",
    "results_repeat_bit_by_bit",
    "layers_equal_the_whole_model",
    "gated_layers_equal_the_whole_model",
    "workspaces_that_differ_are_named",
    "shapes_that_differ_are_named",
    "a_gradient_that_one_rank_does_not_want_is_named",
    "a_rank_that_does_not_come_is_named",
    "ranks_of_a_part_of_the_job_are_told_apart",
    "the_board_shows_who_is_waited_for",
]
MODELS = [
    "styles_equal_those_of_torch",
    "styles_take_and_give_dtensors",
    "styles_refuse_what_they_would_get_wrong",
    "compiled_layers_equal_eager_ones",
    "a_gated_mlp_equals_whole_layers",
]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "functools.partial[dict[str, dict[int, str]]]":
    """What came of all promises that are held here on a number of ranks; each group is started once."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    held = [item.callspec.params for item in tests]

    @functools.cache
    def tried(world_size: int) -> dict[str, dict[int, str]]:
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        wanted = {one["promise"] for one in held if one.get("world_size", 2) == world_size}
        promises = [promise for promise in OPERATORS + MODELS if promise in wanted]
        return run_ranks(
            "tests.fixtures.kernel_cpu_promises", promises, world_size, folder, backend="gloo", deadline_s=300
        )

    return functools.partial(tried)


@pytest.mark.parametrize("promise", OPERATORS)
# Two ranks are each other's both neighbours: what holds for four holds for them.
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.matrix), 4])
def test_every_rank_keeps_its_promise(
    promise: str, world_size: int, outcomes: "functools.partial[dict[str, dict[int, str]]]"
) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes(world_size)[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.parametrize("promise", wide(MODELS, keep=[one for one in MODELS if "compiled" not in one]))
def test_models_on_two_ranks(promise: str, outcomes: "functools.partial[dict[str, dict[int, str]]]") -> None:
    """What the promise's own docstring says is true on both ranks."""
    for rank, outcome in outcomes(2)[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
