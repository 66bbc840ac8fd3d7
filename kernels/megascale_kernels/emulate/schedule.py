# SPDX-License-Identifier: Apache-2.0
"""The emulator's scheduler: which program runs next, and what time it is.

Every program is a thread, but only the holder of the baton runs; at each access to memory it may pass the baton on.
Time is virtual: a step takes about a microsecond, a poll that saw nothing new sleeps until its word changes, at first
for half a microsecond and then for longer and longer. So when all programs wait, a deadline passes at once, and while
any program works, it does not pass by accident.

The next to run is the one whose step ends first. Policies differ in how long a step takes:

    random       each program has a pace of its own (up to 32 times slower than the fastest), each step varies
    round_robin  all steps take the same time
    eager        a program runs until it waits
"""

import ctypes
import heapq
import random
import threading
from collections.abc import Callable, Mapping

from megascale_kernels.emulate.errors import StuckError
from megascale_kernels.emulate.fibers import Fiber, Stopped

POLICIES = ("random", "round_robin", "eager")
STEP_NS = 1000
POLL_NS = 500
# Paces of programs lie between 1 and 2^5: far enough apart for a fast one to lap a slow one.
PACE_BITS = 5
# Programs that only wait are stuck after this many deadlines and this many steps of each: a wait with a deadline
# gives up within about 25 polls, since polls become rarer and rarer.
PATIENCE_DEADLINES = 4
PATIENCE_STEPS = 100
JOIN_S = 5.0
# A program that touches no memory for so long (real time) computes for ever; a tile takes milliseconds.
SILENCE_S = 60.0


class Scheduler:
    """Hands the baton over, deterministically for a seed.

    Args:
        seed: of everything random.
        policy: one of `POLICIES`.
        slowness: how many times longer the steps of a rank take.
        deadline_us: of the kernels' waits; bounds how long a poll sleeps.
        max_steps: accesses to memory after which a run is given up.
        explain: describes which program waits for what.
    """

    def __init__(
        self,
        *,
        seed: int,
        policy: str,
        slowness: Mapping[int, float],
        deadline_us: int,
        max_steps: int,
        explain: Callable[[], str],
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"schedule={policy!r}: choose one of {', '.join(POLICIES)}")
        self.now_ns = 0
        self.steps = 0
        self._random = random.Random(seed)  # noqa: S311 (a schedule, not a secret)
        self._policy = policy
        self._slowness = slowness
        self._deadline_ns = deadline_us * 1000
        self._max_steps = max_steps
        self._explain = explain
        self._heap: list[tuple[int, float, int, int, Fiber]] = []
        self._fibers: list[Fiber] = []
        self._alive: dict[int, Fiber] = {}
        self._sleeping: dict[int, set[Fiber]] = {}
        self._pushes = 0
        self._moved_ns = 0
        self._moves = 0
        self._main = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._stopping = False
        self.current: Fiber | None = None

    def add(self, rank: int, body: Callable[[], None]) -> Fiber:
        """Make a program runnable from now on."""
        pace = 2.0 ** self._random.uniform(0, PACE_BITS) if self._policy == "random" else 1.0
        fiber = Fiber(rank, len(self._fibers), body, pace)
        self._fibers.append(fiber)
        self._alive[fiber.number] = fiber
        self._push(fiber, self._cost(fiber))
        return fiber

    def run(self) -> None:
        """Run all programs, and those they add, to their end.

        Raises:
            StuckError: no program moves any more, or the budget of steps is spent.
            BaseException: whatever a program raised first.
        """
        first = self._pop()
        if first is None:
            return
        self._moved_ns = self.now_ns
        try:
            self._resume(first)
            self._wait_for_the_end()
        finally:
            self._stop()
        if self._failure is not None:
            raise self._failure

    def step(self) -> None:
        """Called by the running program before each access: let those run whose turn it is."""
        fiber = self.current
        assert fiber is not None
        if self._stopping:
            raise Stopped
        self.steps += 1
        if self.steps > self._max_steps:
            raise StuckError(f"after {self._max_steps} accesses to memory the run is not over\n{self._explain()}")
        self._look_for_life(fiber)
        if self._policy == "eager" and fiber.nap is None:
            return
        self._push(fiber, self._cost(fiber))
        following = self._pop()
        assert following is not None
        if following is not fiber:
            self._resume(following)
            fiber.baton.acquire()
            if self._stopping:
                raise Stopped
        self._wake_up(fiber)

    def sleep_on(self, address: int, turn: int) -> None:
        """The running program saw nothing new at an address, for the `turn`-th time: its next step may wait."""
        fiber = self.current
        assert fiber is not None
        fiber.nap = (address, turn)

    def changed(self, lo: int, hi: int) -> None:
        """Wake the programs that sleep on any of these bytes."""
        for address in [address for address in self._sleeping if lo <= address < hi]:
            for fiber in sorted(self._sleeping.pop(address), key=lambda fiber: fiber.number):
                fiber.nap = None
                self._push(fiber, self._cost(fiber))

    def _wait_for_the_end(self) -> None:
        steps = -1
        while not self._main.acquire(timeout=SILENCE_S):
            if steps == self.steps:
                raise StuckError(f"no access to memory for {SILENCE_S} s: a loop without an end\n{self._explain()}")
            steps = self.steps

    # --- the machinery -----------------------------------------------------------------------------------------

    def _cost(self, fiber: Fiber) -> int:
        if fiber.nap is not None:
            address, turn = fiber.nap
            self._sleeping.setdefault(address, set()).add(fiber)
            return min(POLL_NS << min(turn, 40), max(self._deadline_ns // 8, POLL_NS))
        jitter = 0.25 + self._random.expovariate(1) if self._policy == "random" else 1.0
        return int(STEP_NS * jitter * fiber.pace * self._slowness.get(fiber.rank, 1.0))

    def _push(self, fiber: Fiber, cost_ns: int) -> None:
        fiber.version += 1
        self._pushes += 1
        tie = self._random.random() if self._policy == "random" else self._pushes
        heapq.heappush(self._heap, (self.now_ns + cost_ns, tie, fiber.number, fiber.version, fiber))

    def _pop(self) -> Fiber | None:
        while self._heap:
            at_ns, _, _, version, fiber = heapq.heappop(self._heap)
            if version == fiber.version and not fiber.done:
                self.now_ns = max(self.now_ns, at_ns)
                return fiber
        return None

    def _wake_up(self, fiber: Fiber) -> None:
        if fiber.nap is not None:
            self._sleeping.get(fiber.nap[0], set()).discard(fiber)
            fiber.nap = None

    def _look_for_life(self, fiber: Fiber) -> None:
        if not fiber.idle:
            self._moved_ns = self.now_ns
            self._moves += 1
            return
        if fiber.moves_seen != self._moves:
            fiber.moves_seen, fiber.idle_steps = self._moves, 0
        fiber.idle_steps += 1
        if self.now_ns - self._moved_ns > PATIENCE_DEADLINES * self._deadline_ns and all(
            other.idle and other.moves_seen == self._moves and other.idle_steps > PATIENCE_STEPS
            for other in self._alive.values()
        ):
            raise StuckError(f"nobody has moved for {PATIENCE_DEADLINES} deadlines\n{self._explain()}")

    def _resume(self, fiber: Fiber) -> None:
        self.current = fiber
        if fiber.thread is None:
            fiber.thread = threading.Thread(target=self._live, args=(fiber,), daemon=True)
            fiber.thread.start()
        else:
            fiber.baton.release()

    def _live(self, fiber: Fiber) -> None:
        try:
            fiber.body()
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 (handed to the thread that called run)
            self._failure = self._failure or error
            self._stopping = True
        fiber.done = True
        del self._alive[fiber.number]
        following = None if self._stopping else self._pop()
        if following is None:
            self._main.release()
        else:
            self._resume(following)

    def _stop(self) -> None:
        """Unwind what still lives: after a failure, or when the caller was interrupted."""
        self._stopping = True
        for fiber in list(self._alive.values()):
            if fiber.thread is None:
                continue
            if fiber is self.current and not fiber.done:
                # It holds the baton and may never request its next step.
                identity = ctypes.c_ulong(fiber.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Stopped))
            elif fiber.baton.locked():
                fiber.baton.release()
            fiber.thread.join(JOIN_S)
