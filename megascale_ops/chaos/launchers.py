# SPDX-License-Identifier: Apache-2.0
"""How each launcher starts the workload, and how its log reports a fault."""

import re
import signal
import sys
from pathlib import Path

from megascale_ops.chaos.faults import Fault

LAUNCHERS = ("ours", "torchrun", "ft_launcher")
WORKLOAD = "megascale_ops.chaos.workload"
# 10 s without a heartbeat of the script: near our own 5 s, far below NVIDIA's default of 45 minutes.
FT_SETTINGS = (
    "fault_tolerance:\n  initial_rank_heartbeat_timeout: 60\n  rank_heartbeat_timeout: 10\n"
    "  workload_check_interval: 1\n  rank_termination_signal: SIGKILL\n"
)
_KNOWN = {-signal.SIGSEGV: "segfault", -signal.SIGABRT: "aborted", 1: "exception"}


def ours(verb: str) -> list[str]:
    """Return how one of our own programs is started."""
    return [sys.executable, "-m", "megascale_ops.cli.main", verb]


def rival(launcher: str, ft_launcher: str, settings: Path) -> list[str]:
    """Return how another launcher is started, up to what all of them share."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    command = [str(Path(ft_launcher).with_name("python")), ft_launcher, f"--ft-cfg-path={settings}"]
    return [*command, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nnodes=1", "--max-restarts=3"]


def workload_arguments(fault: Fault, folder: Path, rank: int) -> list[str]:
    """Return the workload's arguments for suffering the fault."""
    told = [f"--fault={fault.name}"] if fault.inside else []
    where = [f"--folder={folder}", f"--at={fault.at}", f"--steps={fault.steps}"]
    return [*where, f"--rank={-1 if fault.everywhere else rank}", *told, *fault.arguments]


def rival_named(log: str) -> tuple[str, tuple[int, ...]]:
    """Return class and rank that another launcher's log names: the first rank it calls failed; "" for none."""
    found = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)
    if found is None:
        return "", ()
    code = int(found[1])
    return _KNOWN.get(code, "killed" if code < 0 else "exit_code"), (int(found[2]),)
