# SPDX-License-Identifier: Apache-2.0
"""Faults for a running job of the user's: what would be done to which process, and doing it.

Only what can be done from outside and from this machine; the job's own controller then gives its verdict.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops import foreign
from megascale_ops.chaos.faults import MATRIX, Fault
from megascale_ops.chaos.outside import starve
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.schema.events import Incident
from megascale_ops.schema.identity import MOST_ROUND_BYTES, RoundFile

SIGNALS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigstop": signal.SIGSTOP}
LIVE = tuple(row.name for row in MATRIX if row.live)


class Deed(NamedTuple):
    """What is about to be done."""

    fault: Fault
    pid: int
    sentence: str


def plan_deed(fault: Fault, job: str, rank: int, folder: Path) -> Deed:
    """Return what ``fault`` would do to a rank of ``job`` on this machine, whose black boxes are in ``folder``.

    Raises:
        UsageError: the fault can't be done from outside, or there is no such job or rank here.
    """
    if not fault.live:
        raise UsageError(
            f"{fault.name} can't be done to a job that runs already: only {', '.join(LIVE)} can; "
            f"`megascale-ops chaos run {fault.name}` starts a job of its own"
        )
    found = _rounds(folder)
    if not found:
        raise UsageError(f"no job {job!r} runs on this machine: no round file in {folder}")
    if fault.name in {"agent_killed", "controller_killed"}:
        name = fault.name.removesuffix("_killed")
        pid = next((int(getattr(each, f"{name}_pid")) for each in found if getattr(each, f"{name}_pid")), 0)
        if not pid:
            raise UsageError(f"job {job!r} has no {name} of its own on this machine")
        return Deed(fault, pid, f"SIGKILL to the {name} of job {job}, process {pid}")
    ranks = {process.rank: process.pid for each in found for process in each.ranks}
    if rank not in ranks:
        listed = ", ".join(map(str, sorted(ranks))) or "none"
        raise UsageError(f"job {job!r} has no rank {rank} on this machine: it has {listed}")
    pid = ranks[rank]
    if fault.name == "cpu_starved":
        return Deed(fault, pid, f"bind rank {rank} of job {job}, process {pid}, to one core that others keep busy")
    return Deed(fault, pid, f"{SIGNALS[fault.name].name} to rank {rank} of job {job}, process {pid}")


def do(deed: Deed) -> Callable[[], None]:
    """Do it; return what undoes it."""
    try:
        if deed.fault.name == "cpu_starved":
            before = os.sched_getaffinity(deed.pid)
            stop = starve(deed.pid, dict(os.environ))

            def undo() -> None:
                stop()
                for thread in (Path("/proc") / str(deed.pid) / "task").glob("*"):
                    os.sched_setaffinity(int(thread.name), before)

            return undo
        os.kill(deed.pid, SIGNALS.get(deed.fault.name, signal.SIGKILL))
    except OSError as error:
        raise MegascaleError(f"{deed.sentence}: {error.strerror}") from error
    return lambda: None


def verdict_after(
    link: BlockingLink, job: str, known: set[str], seconds: float, check: Callable[[], None]
) -> Incident | None:
    """Return the first incident that is not ``known`` and has a verdict, or None when none came in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        for each in link.incidents(job).incidents:
            if each.id not in known and each.verdict is not None:
                return each
        time.sleep(0.2)
    return None


def _rounds(folder: Path) -> list[RoundFile]:
    found = []
    for path in sorted(folder.glob("*.round.json")):
        try:
            found.append(msgspec.json.decode(foreign.read(path, MOST_ROUND_BYTES, owner=os.geteuid()), type=RoundFile))
        except (OSError, *foreign.UNREADABLE):
            continue
    return found
