# SPDX-License-Identifier: Apache-2.0
"""The end of a rank's own work in a backward pass is marked in each pass, and the mark leaves nothing behind."""

from pathlib import Path

import pytest
import torch

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.waits import BackwardWatch, wrap_making


class Marks(Recording):
    """A recording that counts the marks."""

    marks = 0

    def backward_worked(self) -> None:
        """Count."""
        self.marks += 1


@pytest.fixture
def recording(tmp_path: Path) -> Marks:
    """Return a recording with a box."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    return Marks(BoxWriter.create(tmp_path, identity))


def backward(recording: Marks, root: torch.Tensor, group: object = "world", *, ddp: bool = True) -> None:
    """Run a backward pass as the hook sees it, in a process that has made a DDP model or none."""
    watch = BackwardWatch(recording, lambda: group)
    if ddp:
        wrap_making(lambda: None, watch)()
    watch.begin(root)
    root.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch's


def test_each_pass_through_a_kept_graph_is_marked_once(recording: Marks) -> None:
    """Our hook goes with the first gradient; what is left is what ``register_hook`` leaves."""
    root = (torch.ones(2, requires_grad=True) * 2).sum()

    backward(recording, root)
    backward(recording, root)

    assert recording.marks == 2
    assert not root._backward_hooks
    assert recording.loss.read() == 4.0


def test_a_leaf_can_be_a_root(recording: Marks) -> None:
    """It has no ``grad_fn``."""
    backward(recording, torch.ones((), requires_grad=True))

    assert recording.marks == 1


def test_the_scripts_own_hooks_run_and_stay(recording: Marks) -> None:
    """Those that were there before the pass, and those that come after one."""
    root = (torch.ones(2, requires_grad=True) * 2).sum()
    seen: list[str] = []
    backward(recording, root)

    root.register_hook(lambda _: seen.append("mine"))  # type: ignore[no-untyped-call]  # torch's
    backward(recording, root)
    backward(recording, root)

    assert seen == ["mine", "mine"]
    assert recording.marks == 3


def test_a_parameter_can_be_a_root(recording: Marks) -> None:
    """As every tensor of a class of its own."""
    backward(recording, torch.nn.Parameter(torch.ones(())))

    assert recording.marks == 1


def test_alone_nothing_is_marked(recording: Marks) -> None:
    """Without a process group there is no waiting."""
    root = torch.ones((), requires_grad=True)

    backward(recording, root, group=None)

    assert recording.marks == 0
    assert root._backward_hooks is None


def test_without_a_ddp_model_nothing_is_marked(recording: Marks) -> None:
    """Any other optimizer waits in Python, where it is seen for less; the loss is read all the same."""
    root = torch.ones((), requires_grad=True)

    backward(recording, root, ddp=False)

    assert recording.marks == 0
    assert root._backward_hooks is None
    assert recording.loss.read() == 1.0
