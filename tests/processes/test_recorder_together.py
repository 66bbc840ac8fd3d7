# SPDX-License-Identifier: Apache-2.0
"""Ranks among others: two that reduce together, one whose runner dies, one that was warm before it was a rank."""

import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.schema.identity import Mesh
from tests.processes.launch import free_port
from tests.processes.ranks import BOOTSTRAP, DEADLINE_S, SOON, TRAIN_SOON, Ranks
from tests.processes.slurm_scripts import is_gone

pytestmark = pytest.mark.processes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Ranks]:
    """Return a function that starts a rank."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


DDP = f"""
import time
import torch; {SOON}
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
dist.all_reduce(torch.ones(16))
if rank == 1:
    time.sleep(600)
model(torch.randn(2, 4)).sum().backward()
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_and_one_that_waits_in_a_collective_of_cpp(start: Ranks) -> None:
    """The rank that waits inside DDP's all-reduce shows more enqueued than completed, in backward, with stacks."""
    port = str(free_port())
    first = start.forked(DDP, rank=0, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    late = start.forked(DDP, rank=1, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def waits(box: BoxReader) -> bool:
        position = box.collective()
        found = box.progress()
        if position is None or position.enqueued - position.completed != 1:
            return False
        if (found.step, found.phase) != (4, "backward"):
            return False
        # What DDP waits for inside of the backward pass is distinguished from the rank's own work.
        return any(step.waiting_s > 0.0 for step in box.steps())

    box = first.wait_until(waits)

    position, found = box.collective(), box.progress()
    assert position is not None
    assert (position.enqueued - position.completed, position.name) == (1, "pg 0")
    assert (found.phase, found.steps_seen) == ("backward", 5)
    reduced = [record for record in box.collectives() if record.function == "all_reduce"]
    assert [(record.bytes_moved, record.ended_mono_ns > 0) for record in reduced] == [(64, True)]
    assert "backward" in ask_worker_server(box.identity().worker_server_path, "dump_traceback")
    assert "pg_status" in ask_worker_server(box.identity().worker_server_path, "fr_trace_json")
    first.process.send_signal(signal.SIGUSR1)
    stacks = first.box_dir / "0.stacks"
    deadline = time.monotonic() + DEADLINE_S
    while "script0.py" not in stacks.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "script0.py" in stacks.read_text()
    late.process.kill()
    code, _, err = first.end()
    error = first.box().error()
    assert code == 1, err
    assert error is not None
    assert error.type == "RuntimeError"
    assert "script0.py:15" in error.where


def test_a_rank_that_is_asked_while_it_ends_ends_well(start: Ranks, tmp_path: Path) -> None:
    """Its stacks are requested at that very moment, waiting for the GIL when the interpreter begins to end."""
    # Calls by PyDLL keep the GIL. A second: so that the server's own thread has taken the request.
    last_words = """
import ctypes, sys
libc = ctypes.PyDLL(None)
print("ends", flush=True)
sys.setswitchinterval(1000.0)
while libc.access(b"asked", 0):
    libc.usleep(20_000)
libc.usleep(1_000_000)
"""
    rank = start(TRAIN_SOON + last_words)
    box = rank.wait_until(lambda box: box.identity().worker_server_path != "" and box.progress().steps_seen >= 10)
    path = box.identity().worker_server_path
    assert rank.process.stdout is not None
    assert rank.process.stdout.readline() == "ends\n"

    answer = ask_worker_server(path, "dump_traceback", (tmp_path / "asked").touch)
    code, _, err = rank.end()

    assert "in _close" in answer  # it was waited for
    assert code == 0, err
    assert not Path(path).exists()


def ask_worker_server(path: str, what: str, asked: Callable[[], object] = lambda: None) -> str:
    """Return the answer of torch's worker server; ``asked`` is called once the request is on its way."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_S)
        client.connect(path)
        client.sendall(
            f"POST /handler/{what} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        asked()
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    return answer.decode()


def test_a_rank_dies_with_its_runner(tmp_path: Path) -> None:
    """Started by the runner itself, it is gone when the runner is killed."""
    launcher = tmp_path / "launcher.py"
    script = tmp_path / "sleeper.py"
    script.write_text("import time, os\nopen('up', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    launcher.write_text(
        textwrap.dedent(f"""
        import os, subprocess, sys
        env = dict(os.environ, MEGASCALE_RUNNER_PID=str(os.getpid()), PYTHONPATH={str(BOOTSTRAP)!r}, RANK="0",
                   MEGASCALE_BOX_DIR={str(tmp_path / "box")!r})
        subprocess.run([sys.executable, {str(script)!r}], env=env)
    """)
    )
    parent = subprocess.Popen([sys.executable, str(launcher)], cwd=tmp_path)
    deadline = time.monotonic() + DEADLINE_S
    while not ((tmp_path / "up").exists() and (tmp_path / "up").read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int((tmp_path / "up").read_text())

    parent.kill()
    parent.wait(DEADLINE_S)

    deadline = time.monotonic() + DEADLINE_S
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_warm_worker_is_recorded(start: Ranks) -> None:
    """A process that imported torch first and learns its rank later is instrumented by running the bootstrap again."""
    script = f"""
        import os, runpy, torch
        os.environ["RANK"] = "0"
        runpy.run_path({str(BOOTSTRAP / "sitecustomize.py")!r}, run_name="megascale_bootstrap")
    """
    rank = start(script + textwrap.indent(TRAIN_SOON, "        "), RANK="")

    assert rank.end() == (0, "", "")

    assert rank.box().progress().steps_seen == 10


MESH = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
assert mesh["tp"].size() == 2
dist.barrier()
dist.destroy_process_group()
"""


def test_the_place_in_the_scripts_device_mesh_is_recorded(start: Ranks) -> None:
    """Without a word of the script to us: its mesh has names, and slices of it change nothing."""
    port = str(free_port())
    ranks = [start.forked(MESH, rank=at, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for at in range(2)]

    assert [rank.end()[0] for rank in ranks] == [0, 0]

    assert [rank.box().identity().mesh for rank in ranks] == [Mesh(tp=0, dp=0), Mesh(tp=1, dp=0)]
