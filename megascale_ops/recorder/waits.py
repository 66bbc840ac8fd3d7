# SPDX-License-Identifier: Apache-2.0
"""See what a rank waits for others where no collective function of Python is called.

Three places, each by a public door or by a name that is looked up at every call:

- **Inside the backward pass.** DDP starts its all-reduces from C++ as gradients become ready, and waits for all of them
  in a callback that autograd's engine runs when the last gradient is computed. Callbacks run in the order in which they
  were queued, so one of ours that is queued by the very first gradient runs just before DDP's: it marks the end of this
  rank's own work, and what is left until ``backward`` returns is waiting. (FSDP's last wait is such a callback, too.)
- **Work.wait**, of collectives that were started with ``async_op=True``, sent or received.
- **The broadcast of buffers** with which DDP's forward pass begins.

On a GPU none of these blocks the host, which only launches; there these times say nothing, and nobody is named by them.
"""

import functools
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any

from megascale_ops.recorder.aside import guarded
from megascale_ops.recorder.recording import Recording

NAME = "the hook on waits"


class BackwardWatch:
    """Marks the end of a rank's own work in each of its backward passes."""

    def __init__(self, recording: Recording) -> None:
        from torch import distributed
        from torch.autograd import Variable

        self._recording = recording
        self._distributed = distributed
        self._queue = Variable._execution_engine.queue_callback  # noqa: SLF001  how FSDP does it, too
        self._worked = guarded(NAME, recording.backward_worked)

    def begin(self, roots: Any) -> None:  # noqa: ANN401  whatever the script passed
        """Look at what a backward pass begins with; while there is a process group, mark the end of its own work."""
        root = roots[0] if isinstance(roots, list | tuple) and roots else roots
        recording = self._recording
        if recording.is_outer_backward and hasattr(root, "requires_grad"):
            recording.loss.take_root(root)
            if root.requires_grad and self._distributed.is_available() and self._distributed.is_initialized():
                self._mark(root)

    def _mark(self, root: Any) -> None:  # noqa: ANN401  a tensor
        """Queue our callback with the first gradient of this pass, and only of this one: a graph may be kept."""

        def first_gradient(_: object) -> None:
            handle.remove()
            self._queue(self._worked)

        handle = root.register_hook(first_gradient)


def wrap_wait(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    """Return ``function``, a wait for others, with its time told to ``recording``."""
    waited = guarded(NAME, recording.waited)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        began_s = monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            waited(get_ident(), monotonic() - began_s)

    return timed
