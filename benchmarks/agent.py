# SPDX-License-Identifier: Apache-2.0
"""What the agent costs on a node with 8 ranks: CPU share, memory, start-up, and how soon a frozen rank is told.

Eight processes stand in for the ranks; their black boxes get a step each 50 ms, five phases and a collective a step,
their stderr a line a second. The agent runs as installed, by the command line, and reports once a second over HTTP.
All its collectors look at a node of 8 GPUs and 8 adapters: a stand-in for NVML (which costs more than the real one, for
it reads a file at each call), files for /sys and the kernel's log, and this machine's own /proc.

    python benchmarks/agent.py [--seconds 30] [--starts 10] [--ranks 8] [--real-gpus]

With ``--real-gpus`` the driver's own library is asked of the GPUs that are there.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megascale_ops.blackbox.records import CollectiveRecord
from tests.fakes.controller import FakeController
from tests.fakes.hardware import FakeMachine
from tests.fakes.node import FakeNode

STEP_S = 0.05
PHASES = ("data", "forward", "backward", "optimizer", "data")
# The alert after the ranks' start (10 s) must be over before anything is measured.
SETTLE_S = 12.0


def start_agent(
    controller: FakeController, node: FakeNode, machine: FakeMachine, *, real_gpus: bool
) -> subprocess.Popen[bytes]:
    """Start the agent by its command line."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "megascale_ops.cli.main", "agent",
            "--controller", controller.url, "--node", node.node, "--box-root", str(node.root),
            "--sys-root", str(machine.sys), "--kernel-log", str(machine.kernel_log),
        ],
        env={**os.environ, **({} if real_gpus else machine.environment())},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


async def train(node: FakeNode) -> None:
    """Let all ranks step for ever."""
    step = 0
    logs = [node.stderr(rank).open("a") for rank in node.boxes]
    while True:
        await asyncio.sleep(STEP_S)
        for rank, log in zip(node.boxes, logs, strict=True):
            for phase in PHASES:
                node.boxes[rank].set_now(step, phase)
            now_ns = time.monotonic_ns()
            node.boxes[rank].add_collective(
                CollectiveRecord("0", "all_reduce", step, 1 << 24, now_ns - 4_000_000, now_ns - 4_000_000, now_ns)
            )
            node.step(rank, step)
            if step % round(1 / STEP_S) == 0:
                print(f"step {step} loss 2.31 lr 3e-4", file=log, flush=True)
        step += 1


def cpu_s(pid: int) -> float:
    """CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, kind: str) -> float:
    """Resident memory of a process; ``kind`` is Rss or Pss."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


async def time_start(controller: FakeController, node: FakeNode, machine: FakeMachine, *, real_gpus: bool) -> float:
    """Seconds from the start of the process to its first heartbeat at the controller."""
    heard = len(controller.heartbeats)
    began_s = time.perf_counter()
    agent = start_agent(controller, node, machine, real_gpus=real_gpus)
    await controller.until(lambda: len(controller.heartbeats) > heard, "a heartbeat")
    took_s = time.perf_counter() - began_s
    agent.terminate()
    await asyncio.to_thread(agent.wait)
    return took_s


async def time_freeze(controller: FakeController, node: FakeNode) -> float:
    """Seconds from SIGSTOP to the heartbeat that tells it."""
    pid = node.children[0].pid

    def state() -> str:
        report = controller.last_report(0)
        return report.process.state if report else ""

    began_s = time.perf_counter()
    os.kill(pid, signal.SIGSTOP)
    await controller.until(lambda: state() == "T", "state T")
    took_s = time.perf_counter() - began_s
    os.kill(pid, signal.SIGCONT)
    await controller.until(lambda: state() == "S", "state S")
    return took_s


async def measure(options: argparse.Namespace) -> None:
    """Measure and print the table."""
    controller = FakeController()
    await controller.start()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node = FakeNode(Path(folder))
        node.start_round(options.ranks)
        training = asyncio.create_task(train(node))
        machine = FakeMachine(Path(folder) / "machine", adapters=8)
        real = options.real_gpus
        starts = [await time_start(controller, node, machine, real_gpus=real) for _ in range(options.starts)]
        agent = start_agent(controller, node, machine, real_gpus=real)
        await asyncio.sleep(SETTLE_S)
        before_s, began_s, said = cpu_s(agent.pid), time.perf_counter(), len(controller.heartbeats)
        await asyncio.sleep(options.seconds)
        passed_s = time.perf_counter() - began_s
        share = (cpu_s(agent.pid) - before_s) / passed_s
        rate = (len(controller.heartbeats) - said) / passed_s
        rss, pss = memory_mb(agent.pid, "Rss"), memory_mb(agent.pid, "Pss")
        freezes = [await time_freeze(controller, node) for _ in range(options.starts)]
        agent.terminate()
        await asyncio.to_thread(agent.wait)
        training.cancel()
        node.kill_all()
    await controller.stop()
    rows = [
        (f"CPU share, {options.ranks} ranks, {passed_s:.0f} s", f"{share:.2%} of a core", "2 %"),
        ("heartbeats", f"{rate:.2f} /s", "1 /s"),
        ("resident memory", f"{rss:.1f} MB (proportional {pss:.1f} MB)", "90 MB"),
        (f"start to first heartbeat, median of {len(starts)}", f"{statistics.median(starts):.3f} s", "0.5 s"),
        ("  slowest", f"{max(starts):.3f} s", ""),
        (f"SIGSTOP to heartbeat, median of {len(freezes)}", f"{statistics.median(freezes):.3f} s", ""),
    ]
    print(f"| {'agent':45} | {'measured':36} | {'at most':8} |\n|{'-' * 47}|{'-' * 38}|{'-' * 10}|")
    for what, measured, bound in rows:
        print(f"| {what:45} | {measured:36} | {bound:8} |")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure the CPU share")
    parser.add_argument("--starts", type=int, default=10, help="how many starts and freezes")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--real-gpus", action="store_true", help="ask the driver's own library")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
