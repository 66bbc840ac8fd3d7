# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401
# (Triton has no types: what comes from it, or goes to it, is Any)
"""Operations one after another: what a stream orders, and what starts when something ends."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from megascale_kernels.emulate import events
from megascale_kernels.emulate.clocks import Clock, Strand, joined
from megascale_kernels.emulate.events import Who
from megascale_kernels.emulate.machine import Machine
from megascale_kernels.emulate.operations import Call, Host, Launch, bind
from megascale_kernels.emulate.programs import Program
from megascale_kernels.emulate.rewrite import python_of


class Running:
    """An operation on its way.

    Attributes:
        operation: what it is.
        number: of the operation in the world's life.
        strands: how many programs it has.
        waits_for: operations that must end before it starts.
    """

    def __init__(self, operation: Launch | Call, number: int, waits_for: "list[Running]") -> None:
        self.operation = operation
        self.number = number
        self.waits_for = waits_for
        self.strands = int(np.prod(operation.shape))
        self.left = self.strands
        self.clock = self.nothing()
        self.started = False

    @property
    def done(self) -> bool:
        """All its programs have ended."""
        return self.left == 0

    @staticmethod
    def nothing() -> Clock:
        """The clock of a program that has seen nothing."""
        return np.zeros(0, dtype=np.int64)

    def __str__(self) -> str:
        return f"{self.operation.name} of rank {self.operation.rank} on stream {self.operation.stream}"


class Streams:
    """The streams of all ranks during one launch.

    Args:
        machine: runs the programs.
        clocks: per rank and stream what its operations so far have done; kept up to date.
        operations: how many operations the world has seen before.
    """

    def __init__(self, machine: Machine, clocks: dict[tuple[int, str], Clock], operations: int) -> None:
        self._machine = machine
        self._clocks = clocks
        self._operations = operations
        self._last: dict[tuple[int, str], Running] = {}
        self._all: list[Running] = []
        # Every program of this launch is known before the first one runs, so all clocks have room for all.
        self._width = machine.next_strand

    def enqueue(self, operation: Launch | Call) -> Running:
        """Put an operation behind those of its stream, and behind the streams it comes after."""
        rank = operation.rank
        keys = [(rank, name) for name in (operation.stream, *operation.after)]
        waits_for = [self._last[key] for key in keys if key in self._last]
        running = Running(operation, self._operations + len(self._all), waits_for)
        for key in keys:
            running.clock = joined(running.clock, self._clocks.get(key, Running.nothing()))
        self._last[keys[0]] = running
        self._all.append(running)
        self._width += running.strands
        return running

    def start(self, operations: Sequence[Running]) -> None:
        """Start whatever waits for nothing any more."""
        for running in operations:
            if not running.started and all(other.done for other in running.waits_for):
                running.started = True
                self._start(running)

    def _start(self, running: Running) -> None:
        operation, machine = running.operation, self._machine
        assert machine.scheduler is not None
        for other in running.waits_for:
            running.clock = joined(running.clock, other.clock)
        inherited = running.clock
        body: Any = _host_body(machine, operation) if isinstance(operation, Call) else _kernel_body(machine, operation)
        shape = operation.shape
        for index in range(running.strands):
            who = Who(operation.rank, operation.name, index, operation.stream, running.number)
            strand = Strand(who, machine.next_strand, self._width, inherited)
            machine.next_strand += 1
            place = (index % shape[0], index // shape[0] % shape[1], index // (shape[0] * shape[1]))
            program = Program(strand, place, shape)
            program.fiber = machine.scheduler.add(operation.rank, partial(self._run, running, program, body))
            machine.programs[program.fiber.number] = program

    def _run(self, running: Running, program: Program, body: Any) -> None:
        machine, strand = self._machine, program.strand
        machine.record(strand.who, events.START)
        try:
            # A GPU does not warn of infinities and NaNs, and poisoned memory is full of them.
            with np.errstate(all="ignore"):
                body()
        except Exception as error:
            error.add_note(f"in {strand.who}")
            raise
        machine.record(strand.who, events.END)
        strand.end()
        running.clock = joined(running.clock, strand.seen)
        running.left -= 1
        if running.done:
            self._ended(running)

    def _ended(self, running: Running) -> None:
        self._clocks[running.operation.rank, running.operation.stream] = running.clock
        self.start(self._all)


def _host_body(machine: Machine, call: Call) -> Any:
    return lambda: call.function(Host(machine, call.rank))


def _kernel_body(machine: Machine, launch: Launch) -> Any:
    python = python_of(launch.kernel)
    arguments = bind(launch, machine)
    return lambda: python(**arguments)
