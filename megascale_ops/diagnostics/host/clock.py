# SPDX-License-Identifier: Apache-2.0
"""The node's clock: whether anything keeps it right, how far it is off, and how sure that is.

The kernel is asked (adjtimex(2), which every discipline of the clock tells: chrony, ntpd, systemd-timesyncd, PTP), and
chrony itself where it is installed, since it slews without telling the kernel an offset.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("clock", "the clock", quick_s=5.0, full_s=10.0, severity="warn")

_UNSYNC, _NANO = 0x0040, 0x2000  # STA_UNSYNC, STA_NANO
_CHRONY_S = 2.0
# 100 ms: then times of several nodes in one report are in the wrong order for a person.
_FAR_S = 0.1
_SYSTEM_TIME = re.compile(r"System time\s*:\s*([0-9.]+) seconds (slow|fast)")


class Timex(ctypes.Structure):
    """``struct timex`` up to what is read of it; Linux, 64 bits."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def measure(task: Task) -> Reading:
    """Ask the kernel, and chrony.

    Raises:
        UnmeasuredError: the kernel does not answer such questions here.
    """
    del task
    timex = Timex()  # modes 0: it is only read
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        raise UnmeasuredError("the kernel does not tell here how its clock is kept")
    offset_s = timex.offset * (1e-9 if timex.status & _NANO else 1e-6)
    offset_s = offset_of(_chrony(), offset_s)
    synced = "no" if timex.status & _UNSYNC else "yes"
    return Reading(
        (Figure("clock_offset", "node", offset_s), Figure("clock_error", "node", timex.maxerror * 1e-6)),
        (Fact("clock_synced", "node", synced),),
    )


def offset_of(tracking: str, otherwise_s: float) -> float:
    """Return the offset in chrony's report, positive when the clock is ahead; ``otherwise_s`` where it has none."""
    match = _SYSTEM_TIME.search(tracking)
    return otherwise_s if match is None else float(match[1]) * (1 if match[2] == "fast" else -1)


def _chrony() -> str:
    program = shutil.which("chronyc")
    if program is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "-n", "tracking"], capture_output=True, text=True, timeout=_CHRONY_S, check=False
        )
        return done.stdout
    return ""


def judge(reading: Reading) -> list[CheckFinding]:
    """Warn of a clock that is not kept, or far off."""
    offset_s = reading.values("clock_offset")["node"]
    if abs(offset_s) > _FAR_S:
        text = f"the clock is {abs(offset_s):.3f} s {'ahead' if offset_s > 0 else 'behind'}"
        return [CheckFinding("warn", "node", text, "look at its source: chronyc sources, timedatectl timesync-status")]
    if reading.texts("clock_synced")["node"] == "no":
        text = "nothing keeps the clock right: times of several nodes differ by as much as their clocks do"
        return [CheckFinding("warn", "node", text, "run chrony or systemd-timesyncd on the host")]
    return []
