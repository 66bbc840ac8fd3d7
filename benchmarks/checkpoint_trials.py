# SPDX-License-Identifier: Apache-2.0
"""Trials of ``checkpoint_kills.py``: states of which every bit is known, and forks that save and restore them."""

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.errors import MegascaleError

# 1 MB of 16 tensors: a save of two ranks takes 15 ms, of which a kill may hit any.
TENSORS, ELEMENTS = 16, 16_384
STEPS = (1, 2, 3)
# 30 s: a trial takes one; who is not done by then hangs.
DEADLINE_S = 30
# 3 s: for how long a rank waits for one whose storage hangs.
PATIENCE_S = 3


class Trial(NamedTuple):
    """What came of one; ``problem`` is empty where it is as it must be."""

    kind: str  # "" until the campaign names it
    outcome: str
    problem: str
    took_s: float


def state_of(step: int) -> dict[str, Any]:
    """A state of which every bit is known from its step."""
    generator = torch.Generator().manual_seed(step)
    weights = [torch.randn(ELEMENTS, generator=generator) for _ in range(TENSORS)]
    return {"weights": weights, "step": step, "text": f"of step {step}"}


def empty() -> dict[str, Any]:
    """What a state is restored into."""
    return {"weights": [torch.zeros(ELEMENTS) for _ in range(TENSORS)], "step": -1, "text": ""}


def differs(state: dict[str, Any], step: int) -> str:
    """Why a restored state is not that of a step; "" where it is, in every bit."""
    wanted = state_of(step)
    wrong = sum(not torch.equal(*pair) for pair in zip(state["weights"], wanted["weights"], strict=True))
    rest = [name for name in ("step", "text") if state[name] != wanted[name]]
    return f"{wrong} tensors and {rest} are not of step {step}" if wrong or rest else ""


def forked(work: Callable[[], Any]) -> int:
    """Do work in a fork; its pid. What it returns or raises is its own matter."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(DEADLINE_S)
        work()
    except BaseException:  # noqa: BLE001  a forked child must not run the parent's code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def asked(work: Callable[[], Any]) -> Any:  # noqa: ANN401  what the work returns
    """Do work in a fork and return what it returns, as JSON.

    Raises:
        ChildProcessError: it failed, or hung.
    """
    listening, told = os.pipe()

    def tell() -> None:
        os.write(told, json.dumps(work()).encode())

    pid = forked(tell)
    os.close(told)
    with os.fdopen(listening, "rb") as heard:
        raw = heard.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise ChildProcessError("it hung" if code == -signal.SIGALRM else f"it ended with {code}")
    return json.loads(raw)


def join_group(scratch: Path, rank: int, world_size: int, patience_s: int = DEADLINE_S) -> None:
    """Join the ranks of a trial."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=patience_s),
    )


def restored(folder: Path) -> tuple[int, str]:
    """Restore in this process: the step and what is wrong with it; -2 and the sentence where it is refused."""
    logging.disable()
    state = empty()
    try:
        step = CheckpointManager(folder, keep=100).restore(state)
    except MegascaleError as error:
        return -2, str(error)
    except Exception as error:  # noqa: BLE001  not a sentence of ours: it is told, and wrong
        return -3, f"{type(error).__name__}: {error}"
    return step, differs(state, step) if step >= 0 else ""


def saved(folder: Path, step: int) -> str:
    """Save in this process; "" or the sentence that refuses it."""
    logging.disable()
    try:
        CheckpointManager(folder, keep=100).save(step, state_of(step))
    except MegascaleError as error:
        return str(error)
    return ""


def sealed_steps(folder: Path) -> list[int]:
    """The steps that a listing shows as whole, the newest last; of names alone."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
