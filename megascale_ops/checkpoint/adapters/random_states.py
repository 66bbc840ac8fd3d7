# SPDX-License-Identifier: Apache-2.0
"""The random generators of all ranks, as a state may hold them: Python's, NumPy's, torch's on the CPU and on the GPU.

All ranks save all of them (5 KB a rank) under one name, so a job of another number of ranks finds those that it has.
"""

import random
import sys
from typing import Any

import torch

from megascale_ops.checkpoint.ranks import Ranks


def gathered() -> list[dict[str, Any]]:
    """The generators' states of every rank, in the order of ranks; every rank must call."""
    mine: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        mine["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        mine["cuda"] = torch.cuda.get_rng_state()
    return Ranks().gather(mine)


def put_back(states: list[dict[str, Any]]) -> None:
    """Set this rank's generators as they were saved; a rank that was not there keeps its own."""
    rank = Ranks().rank
    if rank >= len(states):
        return
    mine = states[rank]
    random.setstate(mine["python"])
    torch.set_rng_state(mine["torch"])
    if "numpy" in mine and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(mine["numpy"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
