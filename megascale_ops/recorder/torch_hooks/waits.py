# SPDX-License-Identifier: Apache-2.0
"""Time that a rank waits for others where no collective function of Python is called.

Three places, each hooked by a public API or by a name that is looked up at every call:

- **Inside the backward pass.** DDP starts its all-reduces from C++ as gradients become ready, and waits for all of them
  in a callback that autograd's engine runs when the last gradient is computed. Callbacks run in the order in which they
  were queued, so one of ours that is queued by the very first gradient runs just before DDP's: it marks the end of this
  rank's own work, and what is left until ``backward`` returns is waiting. That costs 17 us a pass, so it is done only
  in a process that has made a DDP model; others (FSDP, DeepSpeed, Megatron) wait in functions of Python.
- **Work.wait**, of collectives that were started with ``async_op=True``, sent or received.
- **The broadcast of buffers** with which DDP's forward pass begins.

On a GPU none of these blocks the host, which only launches; there these times show nothing and blame no rank.
"""

import functools
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any

from megascale_ops.recorder.hook_guard import guarded, guarded_plain
from megascale_ops.recorder.recording.recording import Recording

NAME = "the hook on waits"
_SEQUENCES = (list, tuple)


class BackwardWatch:
    """Marks the end of a rank's own work in each of its backward passes."""

    def __init__(self, recording: Recording, default_group: Callable[[], object]) -> None:
        from torch.autograd import Variable

        self._recording = recording
        self._default_group = default_group  # None where there is none
        self._queue = Variable._execution_engine.queue_callback  # noqa: SLF001  how FSDP does it, too
        self._worked = guarded_plain(NAME, recording.backward_worked)
        self.has_reducers = False  # a DDP model was made: it waits inside C++, where no Python hook runs

    def begin(self, roots: Any) -> None:  # noqa: ANN401  whatever the script passed
        """Look at what a backward pass begins with; while there is a process group, mark the end of its own work."""
        recording = self._recording
        if not recording.is_outer_backward():
            return
        root = roots[0] if isinstance(roots, _SEQUENCES) and roots else roots
        requires_grad = getattr(root, "requires_grad", None)
        if requires_grad is not None:
            recording.loss.keep_root(root)
            if self.has_reducers and requires_grad and self._default_group() is not None:
                self._mark(root)

    def _mark(self, root: Any) -> None:  # noqa: ANN401  a tensor
        """Queue our callback with the first gradient of this pass, and only of this one: a graph may be kept."""

        def first_gradient(_: object) -> None:
            handle.remove()
            self._queue(self._worked)

        handle = root.register_hook(first_gradient)


def wrap_making(init: Callable[..., None], watch: BackwardWatch) -> Callable[..., None]:
    """Return ``init``, the constructor of DDP models, such that ``watch`` knows of the first."""

    @functools.wraps(init)
    def noted(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401  as the constructor itself
        watch.has_reducers = True
        init(*args, **kwargs)

    return noted


def wrap_wait(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    """Return ``function``, a wait for others, with its time reported to ``recording``.

    Inside a collective whose whole time is reported (torch waits there in nearly every call) it is not timed again.
    """
    waited = guarded(NAME, recording.waited)
    calls = recording.calls

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        thread = get_ident()
        call = calls.get(thread)
        if call is not None and call[2]:
            return function(*args, **kwargs)
        began_s = monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            now_s = monotonic()
            waited(thread, now_s - began_s, now_s)

    return timed
