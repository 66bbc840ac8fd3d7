# SPDX-License-Identifier: Apache-2.0
"""What a rank of the workload suffers from inside, done for real: nothing here pretends.

``suffer(name, stage)`` is called at the chosen step for what happens once and ends or blocks the rank. What lasts (a
slow rank, another shape of step) is asked for in every step by the workload itself.
"""

import ctypes
import gc
import hashlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist

from megascale_ops.chaos import counterpart
from megascale_ops.chaos.legitimate import WAITS
from megascale_ops.chaos.scene import Scene

# 2 GHz for 70 years.
FOR_EVER_CYCLES = 1 << 62
# An hour: longer than any limit of a detector.
FOR_EVER_S = 3600


def suffer(name: str, scene: Scene) -> None:
    """Suffer ``name``; returns only where the rank lives on."""
    MISDEEDS[name](scene)


def _raise(scene: Scene) -> None:
    raise RuntimeError(f"the gradient of rank {scene.rank} is broken")


def _raise_everywhere(_scene: Scene) -> None:
    raise RuntimeError("the gradient is broken")


def _raise_in_thread(_scene: Scene) -> None:
    def report(arguments: threading.ExceptHookArgs) -> None:
        sys.__excepthook__(arguments.exc_type, arguments.exc_value or RuntimeError(), arguments.exc_traceback)
        os._exit(1)

    def work() -> None:
        raise RuntimeError("the prefetch thread is broken")

    threading.excepthook = report
    threading.Thread(target=work).start()
    time.sleep(FOR_EVER_S)


def _segfault(_scene: Scene) -> None:
    ctypes.string_at(0)


def _abort(_scene: Scene) -> None:
    os.abort()


def _out_of_memory(_scene: Scene) -> None:
    # A limit of 16 GB of addresses, and a request for 64: refused as by the kernel, without harm to other processes.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    bytearray(64 << 30)


def _exit_early(_scene: Scene) -> None:
    sys.stdout.flush()
    os._exit(0)


def _exit_silently(_scene: Scene) -> None:
    os._exit(1)


def _ask_refused(_scene: Scene) -> None:
    with socket.socket() as nobodys:  # bound but not listening: a connection is refused
        nobodys.bind(("127.0.0.1", 0))
        urllib.request.urlopen(f"http://127.0.0.1:{nobodys.getsockname()[1]}/batch", timeout=10)


def _loop(_scene: Scene) -> None:
    end = time.monotonic() + FOR_EVER_S
    while time.monotonic() < end:
        pass


def _hold_the_lock(_scene: Scene) -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER_S)  # PyDLL keeps the interpreter's lock, CDLL would let go of it


def _sleep(_scene: Scene) -> None:
    time.sleep(FOR_EVER_S)


def _lock_twice(_scene: Scene) -> None:
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire(timeout=FOR_EVER_S)


def _read_unfed_pipe(scene: Scene) -> None:
    pipe = scene.folder / "unfed"
    os.mkfifo(pipe)
    counterpart.start("hold_open", str(pipe), FOR_EVER_S)
    pipe.read_bytes()


def _ask_in_vain(_scene: Scene) -> None:
    url = counterpart.start("serve", FOR_EVER_S)
    urllib.request.urlopen(f"{url}/never", timeout=FOR_EVER_S).close()  # noqa: S310  http, the trial's own server


def _wait_for_stopped_child(_scene: Scene) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    subprocess.run([sys.executable, "-S", "-c", code], timeout=FOR_EVER_S, check=False)


def exchange(name: str, gradients: torch.Tensor, world: int) -> None:
    """Do the two collectives of a step: the gradients are reduced, 16 numbers of every rank gathered.

    ``name`` is the fault that this rank suffers in this very step, or "".
    """
    rows = 3 if name == "shapes_differ" else 4
    own = torch.ones(4, rows, device=gradients.device)
    if name == "kernel_endless":
        spin = getattr(torch.cuda, "_sleep")  # noqa: B009  torch has no public name for it, and no types
        spin(FOR_EVER_CYCLES)
    if name == "types_differ":
        gradients = gradients.double()
    if name == "sizes_differ":
        gradients = gradients.repeat(2)
    if name == "collectives_swapped":
        dist.all_gather([torch.empty_like(own) for _ in range(world)], own)
    if name != "collective_skipped":
        dist.all_reduce(gradients)
    if name != "collectives_swapped":
        dist.all_gather([torch.empty_like(own) for _ in range(world)], own)


def _slow_evaluation(scene: Scene) -> None:
    model = torch.nn.Linear(64, 64).eval()
    end = time.monotonic() + scene.seconds
    with torch.no_grad():
        while time.monotonic() < end:
            model(torch.randn(64, 64))


def _evaluate_alone(scene: Scene) -> None:
    """As one rank of a GPU job does: a little Python for each batch, and then one line that waits for the result."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).eval()
    end = time.monotonic() + scene.seconds
    with torch.no_grad():
        while time.monotonic() < end:
            begun = time.monotonic()
            while time.monotonic() < begun + 0.06:
                layers(torch.randn(64, 64))
            hashlib.pbkdf2_hmac("sha256", b"loss", b"", 300_000)  # 0.2 s of a core, in C


def _recompile(_scene: Scene) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x.T).square().sum() + x.cos().mean()

    torch.compile(forward, dynamic=False)(torch.randn(17, 23))


def _pause(scene: Scene) -> None:
    time.sleep(scene.seconds)


def _nothing(_scene: Scene) -> None:
    """Only mark the moment: the workload does the rest."""


def pace_sockets(bytes_per_s: int) -> int:
    """Let every TCP connection of this process send no faster than this; return how many there are.

    The kernel paces a socket by itself (SO_MAX_PACING_RATE, socket(7)), without a queueing discipline or root.
    """
    pacing = 47  # SO_MAX_PACING_RATE, which the socket module does not name
    count = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in {socket.AF_INET, socket.AF_INET6}:
                    connection.setsockopt(socket.SOL_SOCKET, pacing, bytes_per_s)
                    count += 1
        except OSError:
            continue
    return count


def _slow_link(_scene: Scene) -> None:
    pace_sockets(4 << 20)


def _cut_link(_scene: Scene) -> None:
    pace_sockets(1)


def collect_garbage(seconds: float) -> None:
    """Make and collect cycles for about so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        nodes: list[list[object]] = [[] for _ in range(2000)]
        for node in nodes:
            node.append(node)
        del nodes
        gc.collect()


MISDEEDS: dict[str, Callable[[Scene], None]] = {
    "exception_one": _raise,
    "exception_all": _raise_everywhere,
    "exception_startup": _raise,
    "exception_thread": _raise_in_thread,
    "segfault": _segfault,
    "abort": _abort,
    "out_of_memory": _out_of_memory,
    "exit_early": _exit_early,
    "exit_silent": _exit_silently,
    "own_connection": _ask_refused,
    "stuck_loop": _loop,
    "gil_held": _hold_the_lock,
    "sleep_syscall": _sleep,
    "lock_twice": _lock_twice,
    "pipe_unfed": _read_unfed_pipe,
    "http_unanswered": _ask_in_vain,
    "child_stopped": _wait_for_stopped_child,
    "rendezvous_never": _sleep,
    "gather_never_sent": _sleep,
    "tile_given_up": _sleep,
    "tile_late": _slow_evaluation,
    "slow_link": _slow_link,
    "partition_ranks": _cut_link,
    "eval_undeclared": _slow_evaluation,
    "eval_one_undeclared": _evaluate_alone,
    "recompilation": _recompile,
    "first_step_minute": _pause,
    "slow_step_once": _pause,
    "idle_before_start": _pause,
    **{name: wait.do for name, wait in WAITS.items()},
    # Done by the workload, in the midst of what it does anyway; these only mark when.
    **dict.fromkeys(
        (
            *("loader_hung", "loader_killed", "storage_hung"),
            *("collective_skipped", "collectives_swapped", "group_not_created"),
            *("shapes_differ", "types_differ", "sizes_differ", "saves_alone", "debugger_attached", "kernel_endless"),
            *("compute_5", "compute_20", "compute_100", "gc_storm", "data_slow", "launch_late", "drift"),
            *(
                "slow_one_in_fifty",
                "loss_nan",
                "loss_spike",
                "one_bad_batch",
                "eval_declared",
                "eval_one_declared",
                "checkpoint_slow",
            ),
            *("end_apart", "steps_alternate", "lengths_uneven"),
            *("scatter_never_sent", "stopped_in_kernel"),
        ),
        _nothing,
    ),
}
