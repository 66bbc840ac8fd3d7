# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine, slowed by a neighbour; a part of diagnose_faults.py (``--kinds gpu``).

A neighbour is a second process on one GPU that takes its cores, its memory or its way to the host. All of them are
started first and stand still (SIGSTOP), each with its context: without a fault a GPU has such a process, too. Of checks
that no neighbour of one GPU is meant for (links between GPUs, NCCL) there are clean runs only.
"""

import contextlib
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.diagnose_faults import Trial
from megascale_ops.diagnostics.check import Task, UnmeasuredError
from megascale_ops.diagnostics.children import Child, Planned, end_all, run_together
from megascale_ops.diagnostics.examination import judged_outcome
from megascale_ops.diagnostics.table import modules

# What a neighbour does to a GPU, by the check that is to see it: its place, and the work of one turn.
WORK = """
import sys, torch
torch.cuda.set_device(int(sys.argv[1]))
{made}
print("begun", flush=True)
while True:
    for _ in range({times}):
        {turn}
    torch.cuda.synchronize()
"""
NEIGHBOURS = {
    "gemm": ("products", 'a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)', 20, "a @ a"),
    "hbm": (
        "copies within its memory",
        'a = torch.empty(1 << 30, device="cuda", dtype=torch.uint8); b = torch.empty_like(a)',
        50,
        "b.copy_(a)",
    ),
    "pcie": (
        "copies to and from the host",
        "h = torch.empty(1 << 28, dtype=torch.uint8).pin_memory(); a = h.cuda()",
        4,
        "a.copy_(h, non_blocking=True); h.copy_(a, non_blocking=True)",
    ),
}
CLEAN_ONLY = ("nvlink", "nccl")
QUICK_FIRST = ("nvlink", "hbm", "pcie", "gemm", "nccl")
# 0.2 s: what it has given to the GPU is over, or under way.
_SETTLES_S = 0.2
_BEGINS_S = 120.0


class Neighbour:
    """A process beside the check that uses one GPU; it stands still until it is told to go on."""

    def __init__(self, check: str, place: int) -> None:
        _, made, times, turn = NEIGHBOURS[check]
        script = WORK.format(made=made, times=times, turn=turn)
        self._process = subprocess.Popen([sys.executable, "-c", script, str(place)], stdout=subprocess.PIPE)

    def await_begun(self) -> None:
        """Wait until it uses the GPU, and stop it."""
        assert self._process.stdout is not None
        come, _, _ = select.select([self._process.stdout], [], [], _BEGINS_S)
        if not come or self._process.stdout.readline() != b"begun\n":
            raise SystemExit("a second process has not begun to use the GPU")
        self._process.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let it work."""
        self._process.send_signal(signal.SIGCONT)
        time.sleep(_SETTLES_S)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(_SETTLES_S)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait(20)


def gpu_trials(draw: random.Random, trials: int, runs: int, only: str, until_s: float) -> Iterator[tuple[str, Trial]]:
    """Slow a GPU, drawn at random, by a neighbour, or none; judge each by the check itself, until the time is over.

    Each check is made as the verb makes it, in a process that has loaded torch and made no other check; that one is
    kept from trial to trial.
    """
    from megascale_ops.diagnostics.gpu.devices import devices

    try:
        known = devices()[0]
    except UnmeasuredError as error:
        raise SystemExit(f"GPUs: {error}") from error
    if len(known) < 2:
        raise SystemExit("two GPUs are needed: a GPU is judged by its equals")
    chosen = [check for check in QUICK_FIRST if not only or check in only.split(",")]
    neighbours = {
        (check, one.label): Neighbour(check, one.place) for check in chosen if check in NEIGHBOURS for one in known
    }
    child = Child(("torch",))
    try:
        for neighbour in neighbours.values():
            neighbour.await_begun()
        made = ""
        for check, is_sick in _turns(draw, chosen, trials, runs):
            if time.monotonic() > until_s:
                return
            # NCCL's ranks can't be forked from a process that has used a GPU; and a hung check's process was killed.
            if made not in ("", check) or (child.is_ready and not child.is_usable):
                child.end()
                child = Child(("torch",))
            made = check
            sick = draw.choice(known).label
            with neighbours[check, sick].at_work() if is_sick else contextlib.nullcontext():
                trial = _by_the_check(child, check, sick if is_sick else "")
            yield (f"{NEIGHBOURS[check][0]} of another process, by {check}" if is_sick else check), trial
    finally:
        end_all([child])
        for neighbour in neighbours.values():
            neighbour.end()


def _turns(draw: random.Random, checks: list[str], trials: int, runs: int) -> Iterator[tuple[str, bool]]:
    """Yield what is tried: check after check; with and without a fault in drawn order."""
    for check in checks:
        turns = [True] * (trials if check in NEIGHBOURS else 0) + [False] * runs
        draw.shuffle(turns)
        yield from ((check, is_sick) for is_sick in turns)


def _by_the_check(child: Child, check: str, expected: str) -> Trial:
    """Make one check in that process, and judge it."""
    module, one = modules()[check]
    planned = Planned(module, one.CHECK, Task(deadline_s=one.CHECK.quick_s))
    ((_, outcome),) = run_together([child], [planned])
    result = judged_outcome(planned, outcome)
    if result.status == "unmeasured":
        raise SystemExit(f"{check}: {result.unmeasured}")
    found = [each for each in result.findings if each.severity != "note"]
    names = tuple(dict.fromkeys(each.of for each in found))
    return Trial(expected, names, tuple(each.text for each in found), result.figures)
