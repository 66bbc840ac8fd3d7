# SPDX-License-Identifier: Apache-2.0
"""Every way to save into every place: what is restored is the state at the call of the newest save.

In this process, with its writer process; several ranks, crashes and failures have tests of their own.
"""

from contextlib import closing
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megascale_ops.checkpoint import CheckpointManager, LocalTier
from megascale_ops.errors import UsageError
from tests.matrix import wide

if TYPE_CHECKING:  # the worker that holds these tests imports it, and not each that finds them
    import torch

pytestmark = pytest.mark.processes

MODES = ("sync", "async", "overlapped")


class Job:
    """A training that saves before each step, so that a copy that comes too late has the weights of the next."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        torch.manual_seed(7)
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.seen = torch.zeros((), dtype=torch.int64)

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "seen": self.seen}

    def train(self) -> None:
        """One step."""
        import torch

        self.model(torch.ones(4, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += 1


@pytest.mark.parametrize(
    ("on_nodes", "where", "mode"),
    wide(
        product((False, True), ("folder", "url"), MODES),
        # Each mode, to either place, with the nodes and without.
        keep=[
            (False, "folder", "sync"),
            (False, "url", "async"),
            (True, "folder", "async"),
            (True, "url", "overlapped"),
        ],
    ),
)
def test_the_newest_save_comes_back_as_it_was(tmp_path: Path, mode: str, where: str, on_nodes: bool) -> None:
    """On the nodes each step, on the shared storage each second one: then the newest is on the node alone."""
    import torch

    path = str(tmp_path / "shared") if where == "folder" else f"file://{tmp_path}/shared"
    options: dict[str, Any] = {"mode": mode}
    if on_nodes:
        options |= {"local": LocalTier(tmp_path / "node", every=1), "shared_every": 2}
    job, saved = Job(), list[dict[str, "torch.Tensor"]]()
    with closing(CheckpointManager(path, **options)) as manager:
        for step in range(4):
            job.train()
            saved.append({name: tensor.clone() for name, tensor in flat(job).items()})
            manager.save(step, job.state)
            job.train()  # it must not change what is saved
            if step == 3:
                manager.wait(60.0)

    fresh = Job()
    with closing(CheckpointManager(path, **options)) as manager:
        step = manager.restore(state := fresh.state)
        fresh.seen = state["seen"]

    assert step >= 2 if on_nodes else step == 3  # a set on the nodes that would have to wait is left out
    assert all(torch.equal(tensor, saved[step][name]) for name, tensor in flat(fresh).items())
    assert not torch.equal(saved[step]["0"], flat(job)["0"])
    assert (tmp_path / "node").exists() is on_nodes


def flat(job: Job) -> "dict[str, torch.Tensor]":
    """Weights, moments and the count."""
    moments = [tensor for kept in job.optimizer.state.values() for _, tensor in sorted(kept.items())]
    tensors = [*(each.detach() for each in job.model.parameters()), *moments, job.seen]
    return {str(number): tensor for number, tensor in enumerate(tensors)}


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("on_nodes", [False, True])
def test_what_only_this_process_sees_is_refused_in_the_background(tmp_path: Path, mode: str, on_nodes: bool) -> None:
    """A writer process would write into a memory of its own; also where the nodes have their part."""
    local = LocalTier(tmp_path / "node") if on_nodes else None

    with pytest.raises(UsageError, match=rf"^mode='{mode}' writes in a process of its own, and what is at memory://x "):
        CheckpointManager("memory://x", mode=mode, local=local)  # type: ignore[arg-type]  # a word
