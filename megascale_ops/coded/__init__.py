# SPDX-License-Identifier: Apache-2.0
"""Coded computation: work that is done more than once, so that a sum is whole without the slowest ranks.

``GradientCode`` says who computes what and how the sum is put together; ``Master`` and ``Worker`` carry it out between
ranks; ``Agent`` is the ADMM whose gradients come by such a code. Importing this room imports nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale_ops.coded.admm import Agent
    from megascale_ops.coded.code import Combined, GradientCode
    from megascale_ops.coded.master import Gathered, Master
    from megascale_ops.coded.worker import Task, Worker

_WHERE = {
    "Agent": "admm",
    "Combined": "code",
    "GradientCode": "code",
    "Gathered": "master",
    "Master": "master",
    "Task": "worker",
    "Worker": "worker",
}

__all__ = ["Agent", "Combined", "Gathered", "GradientCode", "Master", "Task", "Worker"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  a class of this room
    """Import a class when it is first asked for: they need numpy."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
