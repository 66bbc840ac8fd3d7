# SPDX-License-Identifier: Apache-2.0
"""One access to memory: switch programs, check bounds, check order, update the clocks.

The machine knows which program runs and what it is doing; the interpreter performs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megascale_kernels.device.layout import Layout
from megascale_kernels.emulate import events
from megascale_kernels.emulate.clocks import SYS, Flags
from megascale_kernels.emulate.errors import EmulationError
from megascale_kernels.emulate.events import Event, Notify
from megascale_kernels.emulate.memory import Memory
from megascale_kernels.emulate.places import FlagPlace, flag_at
from megascale_kernels.emulate.programs import Program, Wait, lines_of, trail
from megascale_kernels.emulate.races import ATOMIC, SCALAR, WRITE, Deed, Detector
from megascale_kernels.emulate.spans import Span, span_of

if TYPE_CHECKING:
    from megascale_kernels.emulate.schedule import Scheduler

Drop = Callable[[Notify], bool]
_Done = TypeVar("_Done")


def as_large(mask: NDArray[np.bool_], addresses: NDArray[Any]) -> NDArray[np.bool_]:
    """A mask for each address; nearly always it is one already."""
    return mask if mask.shape == addresses.shape else np.broadcast_to(mask, addresses.shape)


class Machine:
    """Everything that outlives a launch: memory, clocks, findings, events.

    Args:
        layout: of the symmetric memory.
        drop: which notifies get lost.
    """

    def __init__(self, layout: Layout, drop: Drop | None = None) -> None:
        self.memory = Memory()
        self.flags = Flags()
        self.detector = Detector()
        self.events: list[Event] = []
        self.symmetric: dict[int, int] = {}
        self.programs: dict[int, Program] = {}
        self.scheduler: Scheduler | None = None
        self.next_strand = 0
        self._layout = layout
        self._drop = drop

    @property
    def current(self) -> Program:
        """The program that holds the baton."""
        assert self.scheduler is not None
        assert self.scheduler.current is not None
        return self.programs[self.scheduler.current.number]

    def read_clock(self) -> int:
        """Virtual nanoseconds; reading them takes a step, so a loop on the clock ends."""
        assert self.scheduler is not None
        self.scheduler.step()
        return self.scheduler.now_ns

    def record(
        self, who: events.Who, what: str, peer: int = -1, channel: int = -1, tile: int = -1, value: int = 0
    ) -> None:
        """Keep an event for the trace."""
        now_ns = self.scheduler.now_ns if self.scheduler is not None else 0
        self.events.append(Event(now_ns, who, what, peer, channel, tile, value))

    # --- accesses ----------------------------------------------------------------------------------------------

    def touch(
        self,
        addresses: NDArray[Any],
        mask: NDArray[np.bool_] | None,
        width: int,
        flags: int,
        operation: str,
        *,
        volatile: bool = False,
    ) -> None:
        """A load or store is about to happen, of all addresses where there is no mask.

        Scalars that are volatile count as relaxed atomics (PTX ISA).

        Raises:
            EmulationError: out of bounds.
        """
        assert self.scheduler is not None
        self.scheduler.step()
        self.current.moves()
        chosen = addresses if mask is None or mask.all() else addresses[as_large(mask, addresses)]
        if not chosen.size:
            return
        scope = 0
        if addresses.size == 1:
            flags |= SCALAR | (ATOMIC if volatile else 0)
            scope = SYS if volatile else 0
        self.note(span_of(chosen, width), Deed(flags, operation, trail(), scope))

    def note(self, span: Span, deed: Deed) -> None:
        """Check an access of the running program and remember it."""
        assert self.scheduler is not None
        strand = self.current.strand
        try:
            for region, part in self.memory.parts(span):
                self.detector.access(strand, region, part, deed)
        except EmulationError as error:
            place = " > ".join(f"{file}:{line}" for file, line in lines_of(deed.trail))
            raise EmulationError(f"{strand.who}, {deed.operation} at {place}: {error}") from None
        if deed.flags & WRITE and not deed.flags & ATOMIC:
            self.flags.overwrite(span.lo, span.hi)
            self.scheduler.changed(span.lo, span.hi)

    def atomic(
        self,
        operation: str,
        addresses: NDArray[Any],
        width: int,
        *,
        value: int,
        acquires: bool,
        releases: bool,
        scope: int,
        perform: Callable[[], _Done],
        wrote: Callable[[_Done], bool],
    ) -> _Done | None:
        """Perform an atomic; None when it got lost (`drop`) or masked away."""
        assert self.scheduler is not None
        self.scheduler.step()
        self.current.moves()
        if not addresses.size:
            return None
        span = span_of(addresses, width)
        for _ in self.memory.parts(span):
            pass  # out of bounds is an error before it is a crash
        notify = self._notify(int(addresses.item(0)), value) if releases else None
        strand = self.current.strand
        if notify is not None and self._drop is not None and self._drop(notify):
            self.record(strand.who, events.DROPPED, notify.target, notify.channel, value=value)
            return None
        result = perform()
        changed = wrote(result)
        self.note(span, Deed(ATOMIC | (WRITE if changed else 0), operation, trail(), scope))
        for address in [span.lo] if addresses.size == 1 else sorted(set(addresses.ravel().tolist())):
            if acquires:
                self.flags.acquire(strand, address, scope)
            if releases and changed:
                self.flags.release(strand, address, scope)
        if acquires:
            # One thread executes an atomic; its result reaches the others through a barrier (Triton's lowering).
            strand.barrier()
        if changed:
            self.scheduler.changed(span.lo, span.hi)
            if notify is not None:
                self.record(strand.who, events.NOTIFY, notify.target, notify.channel, value=value)
        return result

    def saw(self, address: int, value: float) -> None:
        """The running program read a word; reading it again and seeing the same is a poll that may sleep."""
        assert self.scheduler is not None
        program = self.current
        before = program.polls.get(address)
        turn = before[1] + 1 if before is not None and before[0] == value else 0
        program.polls[address] = (value, turn)
        if turn and program.previous_read == address:
            self.scheduler.sleep_on(address, turn)
        program.last_read = address

    # --- waits -------------------------------------------------------------------------------------------------

    def begin_wait(self, wait: Wait) -> None:
        """The running program enters `signals.wait_for`."""
        program = self.current
        assert program.fiber is not None
        program.wait, program.fiber.waits = wait, True
        self.record(program.strand.who, events.WAIT, wait.peer, wait.channel, wait.tile, wait.needed)

    def end_wait(self, code: int) -> None:
        """It leaves, with what the wait returned."""
        program = self.current
        wait = program.wait
        assert wait is not None
        assert program.fiber is not None
        program.wait, program.fiber.waits = None, False
        what, value = (events.GAVE_UP, code) if code else (events.ARRIVED, wait.needed)
        self.record(program.strand.who, what, wait.peer, wait.channel, wait.tile, value)

    def who_waits(self) -> str:
        """A line for each program that waits: its name, place, peer, the stamp seen and the stamp needed."""
        lines = []
        for program in self.programs.values():
            if program.fiber is None or program.fiber.done:
                continue
            who = program.strand.who
            if program.wait is not None:
                wait = program.wait
                seen = program.polls.get(wait.address, ("nothing yet", 0))[0]
                lines.append(
                    f"{who} waits for rank {wait.peer}, channel {wait.channel} (tile {wait.tile}) at "
                    f"{self.memory.place(wait.address)}: saw {seen}, needs {wait.needed}"
                )
            elif program.fiber.nap is not None:
                address = program.fiber.nap[0]
                lines.append(f"{who} polls {self.memory.place(address)}: saw {program.polls[address][0]}")
            else:
                lines.append(f"{who} does not wait")
        return "\n".join(lines)

    def _notify(self, address: int, value: int) -> Notify | None:
        region = self.memory.find(address)
        if region is None or region.start not in self.symmetric:
            return None
        place: FlagPlace | None = flag_at(self._layout, address - region.start)
        if place is None:
            return None
        return Notify(self.current.strand.who, self.symmetric[region.start], *place, value)
