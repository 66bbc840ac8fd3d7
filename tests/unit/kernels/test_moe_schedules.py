# SPDX-License-Identifier: Apache-2.0
"""The models behind MoE schedules, and LocMoE's loss and bound: plain functions of numbers."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from hypothesis import given  # noqa: E402 - after the skips
from hypothesis import strategies as st  # noqa: E402
from megascale_kernels.bench.moe.moe_shapes import MODELS  # noqa: E402
from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.moe.router import capacity, route  # noqa: E402
from megascale_kernels.moe.schedules.locality import (  # noqa: E402
    bounded_factor,
    capacity_bound,
    least_cosine,
    local_experts,
    locality_loss,
)
from megascale_kernels.moe.schedules.schedule_model import (  # noqa: E402
    GROUP_S,
    Layer,
    Links,
    expert_groups,
    parm_s,
    parm_schedule,
    pipeline_s,
    products_s,
)

DEEPSEEK = Layer(2, 8192, 6, 32, 2048, 1408)
SLOW = Links(latency_s=25e-6, bytes_per_s=50e9)


def test_more_groups_pay_where_links_are_slow_and_not_alone() -> None:
    """One rank has nothing in flight; between hosts several groups hide what one cannot; small layers are latency."""
    assert expert_groups(DEEPSEEK._replace(ranks=1)) == 1
    groups = expert_groups(DEEPSEEK, SLOW)

    assert groups > 1
    assert pipeline_s(DEEPSEEK, groups, SLOW) < 0.9 * pipeline_s(DEEPSEEK, 1, SLOW)
    assert expert_groups(DEEPSEEK._replace(tokens=64), SLOW) == 1


def test_a_pipeline_is_never_faster_than_what_it_is_made_of() -> None:
    """Neither than its products nor than both all-to-alls; and one group is all of them in a row."""
    for groups in (1, 2, 4, 8):
        whole = pipeline_s(DEEPSEEK, groups, SLOW)
        assert whole >= products_s(DEEPSEEK, 32, DEEPSEEK.rows)
        assert whole >= 2 * DEEPSEEK.travelling / SLOW.bytes_per_s
    alone = products_s(DEEPSEEK, 32, DEEPSEEK.rows) + 2 * SLOW.seconds(DEEPSEEK.travelling)
    assert pipeline_s(DEEPSEEK, 1, SLOW) == pytest.approx(alone + GROUP_S)


def test_parm_takes_s2_where_a_token_has_few_experts() -> None:
    """S2 hides its all-gather, which has a row for each pair: with one expert it is ahead, with eight behind."""
    one, eight = DEEPSEEK._replace(top_k=1, ranks=8), DEEPSEEK._replace(top_k=8, ranks=8)

    assert parm_schedule(one, 2, 4, SLOW._replace(bytes_per_s=10e9)) == "S2"
    assert parm_schedule(one._replace(tokens=64), 2, 4, SLOW) == "S1"  # two pieces are launched, and nothing is hidden
    assert parm_schedule(eight, 8, 1, SLOW) == "S1"
    for layer in (one, eight):
        for mp in (2, 4):
            best = min(parm_s(layer, "S1", mp, 2, SLOW), parm_s(layer, "S2", mp, 2, SLOW))
            assert best < parm_s(layer, "plain", mp, 2, SLOW)
    assert parm_schedule(one, 1, 2) == "S1"  # nothing is split
    with pytest.raises(Unsupported, match="positive numbers"):
        parm_schedule(one, 0, 1)


@pytest.mark.parametrize("model", ["DeepSeek-MoE-16B", "Qwen3-30B-A3B", "Mixtral-8x7B", "Phi-3.5-MoE"])
@pytest.mark.parametrize("tokens", [8192, 16384])
def test_the_models_choose_what_was_fastest_on_two_h200(model: str, tokens: int) -> None:
    """`moe_family_2gpu_h200.txt`: over NVLink no second group of experts paid, and S1 was ahead of S2 everywhere."""
    experts, top_k, hidden, inner = MODELS[model]

    assert expert_groups(Layer(2, tokens // 2, top_k, experts // 2, hidden, inner)) == 1
    for esp in (1, 2):
        layer = Layer(2, tokens // 2, top_k, experts * esp // 2, hidden, inner // esp)
        assert parm_schedule(layer, 2, esp) == "S1"


def test_experts_of_a_host_are_those_of_its_ranks() -> None:
    """Consecutive ranks, consecutive experts; what does not divide is refused."""
    assert [local_experts(rank, 4, 16) for rank in (0, 3)] == [slice(0, 4), slice(12, 16)]
    assert [local_experts(rank, 4, 16, ranks_per_host=2) for rank in (1, 2)] == [slice(0, 8), slice(8, 16)]
    for wrong in ((4, 4, 16, None), (0, 4, 15, None), (0, 4, 16, 3), (0, 4, 16, 0)):
        with pytest.raises(Unsupported, match="hosts divide the ranks"):
            local_experts(*wrong[:3], ranks_per_host=wrong[3])


def test_the_locality_loss_is_a_divergence() -> None:
    """0 for the wanted distribution, else above; log(near / (1 - leak)) more for tokens that go to one expert."""
    wanted = torch.full((6,), 0.1 / 4, dtype=torch.float64)
    wanted[2:4] = 0.45
    home = torch.zeros(5, 6, dtype=torch.float64)
    home[:, 2] = 200.0
    away = torch.zeros(5, 6, dtype=torch.float64)
    away[:, 0] = 200.0

    assert float(locality_loss(wanted.log().expand(7, 6), slice(2, 4))) == pytest.approx(0, abs=1e-12)
    assert float(locality_loss(home, slice(2, 4))) == pytest.approx(-math.log(0.45))
    assert float(locality_loss(away, slice(2, 4))) == pytest.approx(-math.log(0.1 / 4))
    assert float(locality_loss(torch.randn(9, 6), slice(0, 6))) == 0
    assert float(locality_loss(torch.zeros(0, 6), slice(0, 2))) == 0
    logits = torch.zeros(3, 6, requires_grad=True)
    locality_loss(logits, slice(2, 4)).backward()
    assert bool((logits.grad[:, 2:4] < 0).all())  # a step against the gradient raises the local ones
    assert bool((logits.grad[:, :2] > 0).all())


@pytest.mark.parametrize(
    ("logits", "local", "leak", "said"),
    [
        ((3,), slice(0, 1), 0.1, r"\[T, E\]"),
        ((3, 4), slice(4, 6), 0.1, "names none"),
        ((3, 4), slice(0, 1), 1.0, "share"),
    ],
)
def test_a_wrong_locality_is_named(logits: tuple[int, ...], local: slice, leak: float, said: str) -> None:
    """In a sentence."""
    with pytest.raises(Unsupported, match=said):
        locality_loss(torch.zeros(logits), local, leak=leak)


@given(st.floats(0, 1), st.integers(1, 8192), st.integers(1, 256), st.integers(0, 1 << 20))
def test_a_capacity_is_between_one_pair_and_all(cosine: float, hidden: int, experts: int, tokens: int) -> None:
    """For any angle and size; it grows with the cosine, and what the router makes of its factor is the bound."""
    bound = capacity_bound(cosine, hidden, experts, tokens)

    assert 1 <= bound <= max(1, tokens)
    assert bound <= capacity_bound(min(1.0, cosine + 0.05), hidden, experts, tokens)
    if tokens:
        assert capacity(tokens, 2, experts, bounded_factor(bound, tokens, 2, experts)) == bound


def test_the_bound_is_of_the_caps_of_a_sphere() -> None:
    """The share of directions beyond a cosine, drawn; the next paper's form is below; a number by hand, and errors."""
    generator = torch.Generator().manual_seed(5)
    for dimensions, cosine in ((64, 0.2), (256, 0.1), (1024, 0.03)):
        drawn = torch.nn.functional.normalize(torch.randn(40_000, dimensions, generator=generator), dim=1)[:, 0]
        share = float((drawn.abs() > cosine).double().mean())
        assert 1 / capacity_bound(cosine, dimensions, 1, 1 << 40) == pytest.approx(share, rel=0.35)  # whole pairs
        z = dimensions * cosine**2 / (2 - cosine**2)
        assert math.erfc(math.sqrt(z)) == pytest.approx(share, rel=0.05)
        assert capacity_bound(cosine, dimensions, 1, 1 << 40) >= math.exp(z)
    assert capacity_bound(0.1, 1000, 4, 10_000) == math.ceil(1 / (4 * math.erfc(math.sqrt(10 / 1.99)))) == 165
    assert capacity_bound(1.0, 4096, 4, 10_000) == 10_000
    with pytest.raises(Unsupported, match="a cosine is 0 to 1"):
        capacity_bound(1.2, 8, 2, 4)
    with pytest.raises(Unsupported, match="positive numbers"):
        bounded_factor(0, 8, 2, 4)


def test_the_widest_angle_is_of_pairs_that_are_kept() -> None:
    """Only a token's own experts count, and none that was dropped; one that points away is as wide as can be."""
    tokens = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    router = torch.tensor([[2.0, 0.0], [0.0, 3.0]])

    assert float(least_cosine(tokens, router, torch.tensor([[0], [1]]))) == pytest.approx(math.sqrt(0.5))
    assert float(least_cosine(tokens, router, torch.tensor([[0], [-1]]))) == pytest.approx(1)
    assert float(least_cosine(tokens, router, torch.tensor([[1], [1]]))) == 0
    assert float(least_cosine(-tokens, router, torch.tensor([[0], [0]]))) == 0
    assert float(least_cosine(tokens, router, torch.tensor([[-1], [-1]]))) == 1
    assert float(least_cosine(tokens[:0], router, torch.zeros(0, 1, dtype=torch.int32))) == 1
    routed = route(tokens @ router.T, 1)
    assert float(least_cosine(tokens, router, routed.ids)) == pytest.approx(math.sqrt(0.5))
