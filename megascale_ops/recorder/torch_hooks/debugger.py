# SPDX-License-Identifier: Apache-2.0
"""Declare that the rank waits for a person: a debugger's prompt, or a question that the script asks.

Phase "debugger" lasts as long as the prompt does. All of Python's debuggers come by one of two ways:
``pdb.Pdb.interaction`` (``breakpoint()``, ``pdb.set_trace``, ``torch.distributed.breakpoint``, IPython's) or ``input``
(``code.interact``, and scripts that ask). Between two commands, while the script runs on, the rank is no longer in
that phase.
"""

import builtins
import functools
import sys
from collections.abc import Callable
from typing import Any

from megascale_ops.recorder.hook_guard import guarded_plain
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.import_hook import after_import

NAME = "the hook on debuggers and prompts"
PHASE = "debugger"


def watch(recording: Recording) -> None:
    """Declare every prompt from now on; pdb itself is imported by the script or not at all."""

    def patch() -> None:
        debugger = sys.modules["pdb"].Pdb
        debugger.interaction = _declared(debugger.interaction, recording)

    builtins.input = _declared(builtins.input, recording)
    if "pdb" in sys.modules:
        patch()
    else:
        after_import("pdb", patch)


def _declared(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    """Return ``function`` with the phase around it."""
    begun = 0

    def note_begin() -> None:
        nonlocal begun
        recording.phase_begin(PHASE)
        begun += 1

    def note_end() -> None:
        nonlocal begun
        if begun:  # or a phase of the script would end
            begun -= 1
            recording.phase_end()

    begin, end = guarded_plain(NAME, note_begin), guarded_plain(NAME, note_end)

    @functools.wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function itself
        begin()
        try:
            return function(*args, **kwargs)
        finally:
            end()

    return declared
