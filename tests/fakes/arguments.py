# SPDX-License-Identifier: Apache-2.0
"""Arguments of a kernel that is not launched: what laying them out asks of tensors and of their descriptors."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Memory(NamedTuple):
    """What is asked of a tensor."""

    address: int

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.address


class Descriptor(NamedTuple):
    """What is asked of a descriptor."""

    base: Memory
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


def arguments_of(signature: Mapping[str, str]) -> dict[str, Any]:
    """Something of the right kind for each parameter of a signature."""
    return {name: _of(kind) for name, kind in signature.items() if kind != "constexpr"}


def _of(kind: str) -> object:
    described = re.match(r"tensordesc<\w+\[([\d, ]+)\]", kind)
    if described is not None:
        axes = described.group(1).count(",") + 1
        return Descriptor(Memory(4096), [256] * axes, [256] * (axes - 1) + [1])
    return Memory(8192) if kind.startswith("*") else 1
