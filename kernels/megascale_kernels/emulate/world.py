# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401
# (Triton has no types: what comes from it, or goes to it, is Any)
"""Several ranks in one process: their memory, their streams, and what they launch.

    world = World(layout(4, channels=8, data_bytes=4096), seed=7)
    world.launch([Launch(rank, kernel, grid=2, args=(world.words[rank], world.peers[rank], ...)) for rank in range(4)])
    assert not world.findings

Operations of one rank and one stream follow each other; everything else runs side by side. What one call of `launch`
started has ended when it returns, but nothing counts as ordered for that reason alone: only streams, `after`, releases
and acquires order, and `synchronize`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale_kernels.device import signals
from megascale_kernels.device.layout import FAULT_FIELDS, FAULT_WORDS, PROGRESS_WORDS, Layout
from megascale_kernels.emulate.assembly import Assembly, Meaning
from megascale_kernels.emulate.clocks import Clock, joined
from megascale_kernels.emulate.events import Event
from megascale_kernels.emulate.interpreter import Builder
from megascale_kernels.emulate.machine import Drop, Machine
from megascale_kernels.emulate.operations import Call, Host, Launch, copy, integer
from megascale_kernels.emulate.places import name_of
from megascale_kernels.emulate.programs import Wait
from megascale_kernels.emulate.races import Finding
from megascale_kernels.emulate.rewrite import interpreting
from megascale_kernels.emulate.schedule import Scheduler
from megascale_kernels.emulate.streams import Running, Streams

__all__ = ["Call", "Host", "Launch", "World", "copy"]

# Seeds of the launches of one world must differ; a prime keeps (seed, launch) pairs apart.
SEED_STRIDE = 1_000_003
POISON = -1  # all bits set is a NaN in bf16, fp16 and fp32: what was never written shows in the result


class World:
    """Ranks that share memory.

    Args:
        layout: of the symmetric memory; it defines the number of ranks.
        seed: of the schedule.
        schedule: "random", "round_robin" or "eager" (see `schedule.py`).
        deadline_us: hand it to the kernels; it also bounds how far time leaps while all wait.
        stragglers: {rank: how many times slower its steps are}.
        drop: a predicate on `Notify`: True loses it.
        polls_per_look: replaces `signals.POLLS_PER_LOOK`.
        max_steps: accesses to memory after which a launch is given up.
        assembly: further inline assembly, {text: function} (see `assembly.py`).

    Attributes:
        words: per rank the symmetric memory (int32).
        peers: per rank the table of all ranks' addresses (int64).
        status: per rank the fault record in host memory (int32).
    """

    def __init__(
        self,
        layout: Layout,
        *,
        seed: int = 0,
        schedule: str = "random",
        deadline_us: int = 1_000_000,
        stragglers: Mapping[int, float] | None = None,
        drop: Drop | None = None,
        polls_per_look: int = 4,
        max_steps: int = 1_000_000,
        assembly: Mapping[str, Meaning] | None = None,
    ) -> None:
        self.layout = layout
        self.world_size = layout.world_size
        self.deadline_us = deadline_us
        self._seed, self._schedule, self._stragglers = seed, schedule, dict(stragglers or {})
        self._polls_per_look, self._max_steps = polls_per_look, max_steps
        self.machine = Machine(layout, drop)
        self._builder = Builder(self.machine, Assembly(assembly))
        self._streams: dict[tuple[int, str], Clock] = {}
        self._launches = 0
        self._operations = 0
        self._now_ns = 0
        self._make_memory()
        # A wrong policy is the caller's mistake: let it show here and not in the first launch.
        self._scheduler()

    def _make_memory(self) -> None:
        ranks = range(self.world_size)
        control = self.layout.data(0) // 4
        self.words = [torch.full((self.layout.bytes // 4,), POISON, dtype=torch.int32) for _ in ranks]
        for words in self.words:
            words[:control] = 0
        addresses = [words.data_ptr() for words in self.words]
        self.peers = [torch.tensor(addresses, dtype=torch.int64) for _ in ranks]
        self.status = [torch.zeros(FAULT_WORDS, dtype=torch.int32) for _ in ranks]
        memory = self.machine.memory
        for rank in ranks:
            memory.add(self.words[rank], rank, "workspace", lambda offset: name_of(self.layout, offset))
            memory.add(self.peers[rank], rank, "table of peers")
            memory.add(self.status[rank], rank, "status")
            self.machine.symmetric[addresses[rank]] = rank

    # --- memory ------------------------------------------------------------------------------------------------

    def board(self, rank: int) -> Tensor:
        """A rank's progress board (int32 words)."""
        return self.words[rank][self.layout.progress : self.layout.progress + PROGRESS_WORDS]

    def data(self, rank: int, slot: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A rank's data slot as a tensor, beginning `offset` elements in."""
        size = 1
        for extent in shape:
            size *= extent
        first = self.layout.data(slot) // dtype.itemsize + offset
        if (offset + size) * dtype.itemsize > self.layout.data_bytes:
            raise ValueError(
                f"{tuple(shape)} of {dtype} at {offset} does not fit a slot of {self.layout.data_bytes} bytes"
            )
        return self.words[rank].view(dtype)[first : first + size].view(*shape)

    def name(self, rank: int, name: str, tensor: Tensor) -> Tensor:
        """Give a tensor a name for findings; without it the tensor is named after the parameter it first met."""
        self.machine.memory.add(tensor, rank, name)
        return tensor

    def fault(self, rank: int) -> dict[str, int]:
        """A rank's fault record by field; empty when there is none."""
        values = self.status[rank].tolist()
        return dict(zip(FAULT_FIELDS, values, strict=False)) if values[0] else {}

    # --- results -----------------------------------------------------------------------------------------------

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Unordered accesses so far."""
        return self.machine.detector.findings

    @property
    def events(self) -> tuple[Event, ...]:
        """What the programs did and when, in order."""
        return tuple(self.machine.events)

    def report(self) -> str:
        """The findings as text."""
        return "\n".join(str(finding) for finding in self.findings) or "no findings"

    # --- running -----------------------------------------------------------------------------------------------

    def launch(self, operations: Sequence[Launch | Call]) -> None:
        """Run operations of all ranks to their end, concurrently.

        Raises:
            EmulationError: something cannot be emulated, or a kernel left its memory.
            StuckError: no program moves any more, or the budget of steps is spent.
            BaseException: whatever a kernel or a host operation raised.
        """
        scheduler = self._scheduler()
        scheduler.now_ns = self._now_ns
        self.machine.scheduler = scheduler
        self.machine.programs = {}
        streams = Streams(self.machine, self._streams, self._operations)
        running = [streams.enqueue(operation) for operation in operations]
        self._operations += len(running)
        hooks = {signals.wait_for: self._waiting}
        with interpreting(self._builder, hooks, self._polls_per_look):
            try:
                streams.start(running)
                scheduler.run()
            finally:
                self._now_ns = scheduler.now_ns
        self._launches += 1
        unfinished = [str(one) for one in running if not one.done]
        assert not unfinished, unfinished

    def synchronize(self) -> None:
        """Order all so far before all that follows: every host waits for its streams, then for the other hosts."""
        everything = Running.nothing()
        for clock in self._streams.values():
            everything = joined(everything, clock)
        for key in self._streams:
            self._streams[key] = everything
        self.machine.detector.forget_accesses()

    def _scheduler(self) -> Scheduler:
        return Scheduler(
            seed=self._seed * SEED_STRIDE + self._launches,
            policy=self._schedule,
            slowness=self._stragglers,
            deadline_us=self.deadline_us,
            max_steps=self._max_steps,
            explain=self.machine.who_waits,
        )

    def _waiting(self, python: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record which program waits for what around `signals.wait_for`."""
        named = dict(zip(signals.wait_for.arg_names, args, strict=False)) | kwargs
        values = (named["flag_ptr"], named["tile"], named["peer"], named["index"], named["channel"].stamp)
        wait = Wait(*(integer(value) for value in values))
        self.machine.begin_wait(wait)
        code = python(*args, **kwargs)
        self.machine.end_wait(integer(code))
        return code
