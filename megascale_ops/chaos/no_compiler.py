# SPDX-License-Identifier: Apache-2.0
"""Leave torch's compiler out of scripts that never compile: half of their start is its import.

An optimizer's first call imports ``torch._dynamo``, 2 s of CPU time, only to ask for functions that are not to be
compiled. Four ranks on two cores start 4 s sooner without it, and again in every round. For scripts of our own that
stand in for training; what a user trains keeps its compiler.
"""

import sys
import types
from collections.abc import Callable
from typing import Any


def leave_out() -> None:
    """Put a stand-in where ``torch._dynamo`` would be, unless it is there already; ``torch.compile`` then fails."""
    import torch

    if "torch._dynamo" not in sys.modules:
        stand_in = _StandIn("torch._dynamo", "Nothing is compiled here.")
        sys.modules["torch._dynamo"] = stand_in
        vars(torch)["_dynamo"] = stand_in


class _Nothing:
    """Accepts every attribute and call that eager training makes on the compiler; compares equal to nothing."""

    def __getattr__(self, name: str) -> "_Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: object, **_options: object) -> "_Nothing":
        return self


class _StandIn(types.ModuleType):
    @staticmethod
    def disable(function: Callable[..., Any], *_args: object, **_options: object) -> Callable[..., Any]:
        """Return the function as it is: all of it runs uncompiled."""
        return function

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()
