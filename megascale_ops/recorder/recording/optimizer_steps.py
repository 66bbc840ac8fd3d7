# SPDX-License-Identifier: Apache-2.0
"""How many steps an optimizer has made in its life, by the state that it keeps and that checkpoints carry.

Adam and its kin keep a ``step`` beside the moments of each parameter, some keep it in their groups of parameters. SGD
keeps none. Parameters that got no gradient in some steps are behind, so the furthest counts.
"""

from typing import Any

# 64: all parameters of a model are as far, but for those that are seldom used; a number on a GPU costs a look there.
_MOST_LOOKED_AT = 64


def steps_made(optimizer: Any) -> int:  # noqa: ANN401  torch's, or whatever behaves like one
    """Return how many steps ``optimizer`` has made by its own account, 0 where it keeps none."""
    kept = [group.get("step") for group in getattr(optimizer, "param_groups", ())]
    for number, state in enumerate(getattr(optimizer, "state", {}).values()):
        if number == _MOST_LOOKED_AT:
            break
        kept.append(state.get("step") if hasattr(state, "get") else None)
    return max((_number(step) for step in kept), default=0)


def _number(step: Any) -> int:  # noqa: ANN401  a number, a tensor, or something else of that name
    """Return a count as a number, 0 for anything that is none."""
    if isinstance(step, bool) or step is None:
        return 0
    if hasattr(step, "numel") and step.numel() != 1:
        return 0
    try:
        return max(0, int(step))
    except (TypeError, ValueError, OverflowError):
        return 0
