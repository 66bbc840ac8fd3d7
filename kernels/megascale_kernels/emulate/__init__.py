# SPDX-License-Identifier: Apache-2.0
"""Run the kernels of several ranks on a CPU, at the same time, and prove their synchronisation.

The very same `@triton.jit` functions run under Triton's interpreter: every program of every rank is a thread, but only
the one that holds the baton runs, and a seeded scheduler hands it over at each access to memory. So nothing depends on
real time, a schedule is repeated by its seed, and a deadline of a second passes at once when all programs wait.

A correct result proves little, because the bad order may be rare. So every access is also checked against vector
clocks (FastTrack, Flanagan and Freund 2009; the orders that count are those of the PTX ISA, "Memory Consistency
Model"): two accesses that no release and acquire, no barrier and no stream orders are reported, even when they came
out right.

    world        ranks, symmetric memory, streams, launches: what a test talks to
    machine      one access: switch programs, check bounds, check order, perform
    schedule     which program runs next, and the virtual time
    races        which accesses are ordered
    interpreter  Triton's interpreter, with the memory operations handed to the machine
    quick        what the interpreter makes anew for each operation, kept
    learned      operators between tensors, learned by types
    semantic     loads, stores, casts and choices, likewise
    rewrite      functions made interpretable without TRITON_INTERPRET
    assembly     what the inline assembly of `signals.py` means
"""

from megascale_kernels.emulate.errors import EmulationError, StuckError
from megascale_kernels.emulate.events import Event, Notify
from megascale_kernels.emulate.machine import Machine
from megascale_kernels.emulate.races import NARROW, RACE, UNDRAINED, UNFENCED, UNSYNCED, Finding
from megascale_kernels.emulate.world import Call, Host, Launch, World, copy

__all__ = [
    "NARROW",
    "RACE",
    "UNDRAINED",
    "UNFENCED",
    "UNSYNCED",
    "Call",
    "EmulationError",
    "Event",
    "Finding",
    "Host",
    "Launch",
    "Machine",
    "Notify",
    "StuckError",
    "World",
    "copy",
]
