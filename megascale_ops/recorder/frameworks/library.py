# SPDX-License-Identifier: Apache-2.0
"""What the hooks on one library can do: declare phases around its functions, and report the script's step number.

A function is replaced where its owner (a class, a module) keeps it, so that subclasses and instances find ours. Phases
nest: a checkpoint inside an evaluation is a checkpoint, and then the evaluation goes on. An exception ends its phase.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megascale_ops.recorder.hook_guard import guarded, guarded_plain, step_aside
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.bracket import bracket


class Library:
    """One library that the script has imported."""

    def __init__(self, name: str, recording: Recording) -> None:
        self.name = name
        self.recording = recording
        self.count = guarded(f"the steps of {name}", self._count)
        self.begin = guarded(f"the phases of {name}", recording.phase_begin)
        self.end = guarded_plain(f"the phases of {name}", recording.phase_end)

    def declare(self, owner: Any, phase: str, *functions: str, also: tuple[str, ...] = ()) -> None:  # noqa: ANN401  a class or module
        """Let ``phase`` last as long as each of the ``functions`` of ``owner``.

        Args:
            owner: the class or module that keeps them.
            phase: a name of up to 31 bytes.
            functions: present in every known version; a missing one is reported on stderr.
            also: present in some versions only; a missing one is ignored.
        """

        def begin() -> None:
            self.begin(phase)

        for function in (*functions, *also):
            if function not in also or hasattr(owner, function):
                self.replace(owner, function, lambda original: bracket(original, begin, self.end))

    def replace(self, owner: Any, function: str, wrap: Callable[[Any], Any]) -> None:  # noqa: ANN401  as above
        """Put ``wrap(function)`` in the place of a ``function`` of ``owner``; report on stderr if there is none."""
        try:
            setattr(owner, function, wrap(getattr(owner, function)))
        except Exception as error:  # noqa: BLE001  one function less, but the others are seen; reported once
            step_aside(f"the hook on {self.name}'s {getattr(owner, '__name__', owner)}.{function}", error)

    def _count(self, owner: object, attribute: str) -> None:
        """Take the total number of steps made so far from ``owner``'s ``attribute``."""
        self.recording.count_from(int(getattr(owner, attribute)))


# What is done to a module that has just been imported.
Hook = Callable[[ModuleType, Library], None]
