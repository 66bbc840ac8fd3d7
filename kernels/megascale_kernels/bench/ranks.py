# SPDX-License-Identifier: Apache-2.0
"""Start one process per GPU and wait for them, with a deadline.

Rank 0's exit code is the result. When a rank fails, the others get `GRACE_S` to print their errors.
"""

import os
import socket
import subprocess
import sys
import time

GRACE_S = 20.0
REAP_S = 60.0  # a killed rank is gone in milliseconds, later on a machine without a free core
POLL_S = 0.1
# Fair to all: multicast would need hardware that is not everywhere available, so neither NCCL nor torch may use it.
ALIKE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environments(gpus: int, port: int, base: dict[str, str]) -> list[dict[str, str]]:
    """Each rank's environment."""
    return [
        {
            **ALIKE, **base, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(gpus),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
        for rank in range(gpus)
    ]  # fmt: skip


def place(rank: int, ranks: int, seen: int) -> int:
    """The GPU of a rank, of so many seen. Ranks that share a GPU are set up for it: call before NCCL is initialised.

    NCCL refuses a GPU that another rank of the same host has, so each rank becomes a host to it, and it takes sockets;
    torch refuses to map one GPU's memory for several ranks by default. The GPU runs the ranks by turns: results are
    valid, times are not.
    """
    if seen < ranks:
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    return rank % seen


def start(arguments: list[str], gpus: int, deadline_s: float) -> int:
    """Run `python -m megascale_kernels.bench arguments` as `gpus` ranks; rank 0's exit code, 1 when it was ended."""
    command = [sys.executable, "-m", "megascale_kernels.bench", *arguments]
    processes = [
        subprocess.Popen(command, env=environment) for environment in environments(gpus, free_port(), dict(os.environ))
    ]
    return wait(processes, deadline_s)


def wait(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> int:
    """Wait for all; after a failure, after rank 0's end or after the deadline the rest is ended."""
    end = time.monotonic() + deadline_s
    try:
        while True:
            codes = [process.poll() for process in processes]
            if None not in codes:
                break
            if any(codes) or codes[0] is not None:
                end = min(end, time.monotonic() + GRACE_S)
            if time.monotonic() > end:
                late = [rank for rank, code in enumerate(codes) if code is None]
                print(f"ranks {late} did not end in time and were stopped", file=sys.stderr)
                break
            time.sleep(POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait(timeout=REAP_S)
    first = processes[0].returncode
    return first if first >= 0 else 1
