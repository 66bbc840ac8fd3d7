# SPDX-License-Identifier: Apache-2.0
"""A gate is closed until its own turn opens it, and none is used again soon."""

import pytest

torch = pytest.importorskip("torch")

from megascale_kernels.memory.gates import Gates  # noqa: E402 - after the skip


def test_each_turn_has_a_gate_of_its_own() -> None:
    """Opening one opens no other; a gate that was opened is closed when it comes round again."""
    gates = Gates(torch.zeros(3, dtype=torch.int32))

    first, second = gates.close(), gates.close()
    gates.open(first)
    assert gates.words.tolist() == [1, 0, 0]
    assert second == 1

    gates.open(second)
    assert [gates.close() for _ in range(2)] == [2, 0]
    assert gates.words.tolist() == [0, 1, 0]
