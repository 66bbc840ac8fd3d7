# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on the CPU, with real ranks: the serial path, all gradients, the layer, and what goes wrong."""

from pathlib import Path

import pytest

from tests.fixtures.kernel_group import run_ranks
from tests.needed import needs

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

PROMISES = [
    "experts_and_all_gradients",
    "experts_cut_among_ranks_are_whole_together",
    "a_layer_is_its_parts",
    "wrong_calls_are_named",
]
IN_SERIES = [
    "any_routing_is_right_in_series",
    "cut_experts_are_right_in_series",
    "bits_repeat_in_series",
    "too_many_tokens_are_refused_in_series",
    "a_cpu_takes_the_other_serial_path",
]


@pytest.fixture(scope="module", params=[3], ids="{} ranks".format)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises; one of three ranks has no token, which two ranks would show less of."""
    folder = tmp_path_factory.mktemp("moe")
    return run_ranks("tests.fixtures.moe_cpu_promises", PROMISES, request.param, folder, backend="gloo", deadline_s=300)


@pytest.mark.parametrize("promise", PROMISES)
def test_every_rank_keeps_its_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.matrix
@pytest.mark.parametrize(
    "promise", ["a_compiled_layer_is_one_node_each_way", "compiled_experts_may_be_cut_among_ranks"]
)
def test_a_compiled_layer_is_the_eager_one(promise: str, tmp_path: Path) -> None:
    """What the promise's own docstring says is true on both ranks."""
    tried = run_ranks("tests.fixtures.moe_compile_promises", [promise], 2, tmp_path, backend="gloo", deadline_s=300)

    assert set(tried[promise].values()) == {"kept"}, tried


@pytest.fixture(scope="module")
def in_series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of the promises of the serial path without waits of the host, its kernels emulated."""
    folder = tmp_path_factory.mktemp("moe_in_series")
    return run_ranks("tests.fixtures.moe_sync_free_promises", IN_SERIES, 3, folder, backend="gloo", deadline_s=300)


@pytest.mark.parametrize("promise", IN_SERIES)
def test_without_waits_of_the_host_the_layer_is_the_same(promise: str, in_series: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on every rank."""
    for rank, outcome in in_series[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"
