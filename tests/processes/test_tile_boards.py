# SPDX-License-Identifier: Apache-2.0
"""A board outlives its process, whatever ended it: the runner and `inspect` read what it showed last."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_ops.blackbox.boards import fact_of, of_process
from tests.needed import needs

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

# A rank of two whose peer never comes; it is killed while it waits, or gives up and ends with the exception.
RANK = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from megascale_kernels import Workspace, ag_gemm
from megascale_kernels.progress import board_format
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
workspace = Workspace(max_rows=8, max_gather_cols=8, device="cpu", dtype=torch.float32, deadline_s=float(sys.argv[2]))
workspace.agreement.world_size = 2
def kill():
    state = board_format.LINE + board_format.PROGRESS_FIELDS.index("state")
    while int(workspace.board[state]) != board_format.WAITING:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "kill":
    threading.Thread(target=kill, daemon=True).start()
if sys.argv[1] == "fork" and os.fork() == 0:
    workspace.close()
    os._exit(0)
ag_gemm(torch.ones(4, 8), torch.eye(8), workspace)
"""


@pytest.mark.parametrize(
    ("how", "deadline_s", "code", "gave_up"),
    [("kill", "60", -signal.SIGKILL, False), ("fork", "1", 1, True)],
)
def test_what_a_rank_waited_for_is_known_after_its_end(
    tmp_path: Path, how: str, deadline_s: str, code: int, *, gave_up: bool
) -> None:
    """After a SIGKILL as after an exception; a forked child that closes its copy takes nothing away."""
    environment = {**os.environ, "MEGASCALE_BOX_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, how, deadline_s]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as rank:
        _, said = rank.communicate(timeout=180)

    assert rank.returncode == code, said
    (board,) = of_process(tmp_path, "0", rank.pid)
    fact = fact_of(board._replace(members=(0, 1)), 2)
    assert (fact.operator, fact.launch) == ("ag_gemm", 1)
    assert [(wait.peer, wait.gave_up) for wait in fact.waits] == [(1, gave_up)]
    assert oct((tmp_path / "0.0.board").stat().st_mode)[-3:] == "600"
