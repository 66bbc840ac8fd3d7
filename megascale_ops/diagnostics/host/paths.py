# SPDX-License-Identifier: Apache-2.0
"""Whether a folder is one, may be written to, and on which disk it is; not of the table: it is asked before all checks.

In a process of its own as they are: a folder on a file server that is gone holds whatever asks for it.
"""

import os
from pathlib import Path

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.report import CheckFinding, Fact

CHECK = Check("paths", "a folder", quick_s=5.0, full_s=5.0, a_path=True)

FINE, MISSING, FORBIDDEN = "fine", "not a folder", "not writable"


def measure(task: Task) -> Reading:
    """Look at ``task.paths[0]``."""
    path = Path(task.paths[0])
    doing(f"looking at {path}")
    if not path.is_dir():
        return Reading((), (Fact("path_state", str(path), MISSING),))
    state = FINE if os.access(path, os.W_OK | os.X_OK) else FORBIDDEN
    return Reading((), (Fact("path_state", str(path), state), Fact("path_disk", str(path), str(path.stat().st_dev))))


def judge(reading: Reading) -> list[CheckFinding]:
    """Leave it to the caller, who knows whether a user named it."""
    del reading
    return []
