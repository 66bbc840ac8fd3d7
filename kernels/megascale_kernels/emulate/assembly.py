# SPDX-License-Identifier: Apache-2.0
"""What the inline assembly of `signals.py` means on a CPU.

A table from the constant's name to a Python function; the text itself stands in `signals.py` alone. Assembly that the
table does not know is an error that names it: guessing would make the emulator lie.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megascale_kernels.device import signals
from megascale_kernels.emulate.errors import EmulationError

if TYPE_CHECKING:
    from megascale_kernels.emulate.machine import Machine

Meaning = Callable[..., Any]


def _global_timer(machine: "Machine") -> int:
    return machine.read_clock()


def _multiprocessor(machine: "Machine") -> int:
    return machine.current.strand.who.program


def _fence_proxy(machine: "Machine") -> int:
    machine.current.strand.fence()
    return 0


def _bulk_wait(machine: "Machine") -> int:
    machine.current.strand.drain()
    machine.current.strand.fence()
    return 0


def _launch_wait(machine: "Machine") -> int:
    machine.current.follow()
    return 0


MEANINGS: dict[str, Meaning] = {
    "ASM_GLOBALTIMER": _global_timer,
    "ASM_SM": _multiprocessor,
    "ASM_FENCE_PROXY": _fence_proxy,
    "ASM_BULK_WAIT": _bulk_wait,
    "ASM_LAUNCH_WAIT": _launch_wait,
}


def _normal(text: str) -> str:
    return " ".join(text.split())


class Assembly:
    """Finds the meaning of assembly by its text.

    Args:
        more: further {text: function}; a function takes the machine and the operands (numpy arrays), and returns the
            result.

    Raises:
        EmulationError: `signals.py` has assembly without a meaning here.
    """

    def __init__(self, more: Mapping[str, Meaning] | None = None) -> None:
        names = [name for name in vars(signals) if name.startswith("ASM_")]
        unknown = sorted(set(names) - set(MEANINGS))
        if unknown:
            raise EmulationError(f"signals.py has assembly that the emulator has no meaning for: {', '.join(unknown)}")
        self._by_text = {_normal(getattr(signals, name).value): MEANINGS[name] for name in names}
        self._by_text.update({_normal(text): meaning for text, meaning in (more or {}).items()})

    def meaning_of(self, text: str) -> Meaning:
        """The function that stands for a text.

        Raises:
            EmulationError: unknown text.
        """
        meaning = self._by_text.get(_normal(text))
        if meaning is None:
            raise EmulationError(f"inline assembly without a meaning in emulate/assembly.py: {_normal(text)!r}")
        return meaning
