# SPDX-License-Identifier: Apache-2.0
"""Experts cut along I: shards numbered as expert parallelism numbers experts, and together they are the whole."""

import pytest

torch = pytest.importorskip("torch")

from megascale_kernels.errors import Unsupported  # noqa: E402
from megascale_kernels.moe.expert_shards import check_shards, choose_shards  # noqa: E402

from tests.fakes.moe_cases import Given, exact  # noqa: E402

GROUPS, EXPERTS, SHARDS, H, INNER = 2, 3, 2, 6, 8


def test_shards_come_to_the_whole_experts() -> None:
    """Two groups of two ranks: what shards of a token's experts add up to is what whole experts do."""
    generator = torch.Generator().manual_seed(1)
    x, gates = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (H, 2))
    ids = torch.stack([torch.randperm(GROUPS * EXPERTS, generator=generator)[:2] for _ in range(5)]).int()
    ids[2, 1] = -1
    w_in = torch.randn(GROUPS * EXPERTS, 2, INNER, H, generator=generator, dtype=torch.float64)
    w_out = torch.randn(GROUPS * EXPERTS, H, INNER, generator=generator, dtype=torch.float64)

    of_shards, weights = choose_shards(ids, gates, EXPERTS, SHARDS)

    nobody = (x[:0], of_shards[:0], weights[:0])
    ranks = []
    for rank in range(GROUPS * SHARDS):
        whole = slice(rank // SHARDS * EXPERTS, rank // SHARDS * EXPERTS + EXPERTS)
        part = slice(rank % SHARDS * INNER // SHARDS, (rank % SHARDS + 1) * INNER // SHARDS)
        mine = (x, of_shards, weights) if rank == 0 else nobody
        ranks.append(Given(*mine, w_in[whole][:, :, part], w_out[whole][:, :, part]))
    wanted = exact([Given(x, ids, gates, w_in, w_out)], GROUPS * EXPERTS)[0]
    torch.testing.assert_close(exact(ranks, EXPERTS)[0], wanted)


def test_each_pair_has_one_shard_a_rank_and_its_weight_gathers_their_gradients() -> None:
    """Of all shards of a pair a rank has one at most; dropped pairs stay dropped."""
    ids = torch.tensor([[0, 4], [-1, 2]], dtype=torch.int32)
    gates = torch.ones(2, 2, requires_grad=True)

    of_shards, weights = choose_shards(ids, gates, EXPERTS, SHARDS)
    weights.sum().backward()

    assert of_shards.tolist() == [[0, 3, 7, 10], [-1, -1, 2, 5]]
    assert torch.equal(gates.grad, torch.full((2, 2), 2.0))
    assert choose_shards(ids, gates, EXPERTS, 1) == (ids, gates)


@pytest.mark.parametrize("shards", [0, 3, 8])
def test_groups_that_ranks_do_not_make_are_refused(shards: int) -> None:
    """Four ranks are one, two or four groups."""
    with pytest.raises(Unsupported, match="divisor of 4"):
        check_shards(shards, 4)
    check_shards(2, 4)
