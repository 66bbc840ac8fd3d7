# SPDX-License-Identifier: Apache-2.0
"""Which layers add up our own tokens' sums between those that peers wait for."""

import pytest

pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Sizes

# Of two H200 (moe_columns_2gpu_h200.txt): whether our own tokens' sums between those that peers wait for gained 0.5 %.
MIXED = {
    "E24 k3 H5696 I576": (Sizes(2, 4822, 3, 12, 5696, 576), True),
    "E8 k2 H4992 I1376": (Sizes(2, 5460, 2, 4, 4992, 1376), True),
    "E32 k1 H2080 I688": (Sizes(2, 5455, 1, 16, 2080, 688), True),
    "Qwen3-30B-A3B": (Sizes(2, 2048, 8, 64, 2048, 768), False),
    "Phi-3.5-MoE": (Sizes(2, 4096, 2, 8, 4096, 6400), False),
    "E60 k8 H4800 I1296": (Sizes(2, 1311, 8, 30, 4800, 1296), False),
}


@pytest.mark.parametrize("name", MIXED)
def test_sums_are_mixed_where_they_are_long_on_their_way(name: str) -> None:
    """By bytes and products; not in plain Triton nor among four, where it was not measured, nor against an order."""
    sizes, mixes = MIXED[name]

    assert MoeConfig().resolved(sizes).mixes == mixes
    assert not MoeConfig(kernel="triton").resolved(sizes).mixes
    assert not MoeConfig().resolved(sizes._replace(world_size=4)).mixes
    for asked in (True, False):
        assert MoeConfig(mixes=asked).resolved(sizes).mixes is asked
