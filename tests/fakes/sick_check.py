# SPDX-License-Identifier: Apache-2.0
"""A check that does what its task's first path asks for: hangs, dies, prints, fails, or measures."""

import os
import signal
import subprocess
import sys
import time

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError, doing
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check("sick", "a sick part", quick_s=30.0, full_s=30.0)


def measure(task: Task) -> Reading:
    """Do as asked."""
    wish, *rest = task.paths
    if wish == "hang":
        doing("asking /mnt/gone")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        doing(f"asking /mnt/gone and started {child.pid}")
        time.sleep(600)
    if wish == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if wish == "leave":
        sys.stderr.write("no memory left\n")
        sys.stderr.flush()
        os._exit(3)
    if wish == "absent":
        raise UnmeasuredError("there is no such part here")
    if wish == "fail":
        raise RuntimeError("uncorrectable ECC error encountered\nand more")
    if wish == "forbidden":
        raise PermissionError(13, "Permission denied", "/dev/part")
    if wish == "broken":
        raise OSError(5, "Input/output error", "/dev/part")
    sys.stdout.write("a library's chatter\n" * 1000)
    return Reading((Figure("cpu_hash", " ".join(rest), os.getppid()),))


def judge(reading: Reading) -> list[CheckFinding]:
    """Find nothing."""
    del reading
    return []
