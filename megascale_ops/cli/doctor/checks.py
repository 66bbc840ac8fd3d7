# SPDX-License-Identifier: Apache-2.0
"""What a machine needs for all of this to work, one function a need: it looks, and reports what is there or what to do.

Set-up only: whether the hardware is well is another question. Nothing is installed, changed or left behind, and a look
that does not answer within some seconds is reported as that. A need is *must* when training under `megascale-ops run`
can't do without it; else its absence costs one ability, which is named.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

GOOD, COSTS, MUST = "good", "costs", "must"
_GIB = 1 << 30
# 5 s: NVML of a well node takes one at most to begin, a name server that is there a tenth.
DEADLINE_S = 5.0
# What `make test-versions` has held; a test compares them with what pyproject.toml lets in.
FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 14)
FIRST_TORCH, LAST_TORCH = (2, 11), (2, 15)
# 404 KiB a rank, and a full /dev/shm ends NCCL's own start: 64 MB is Docker's default, which is too little for both.
_ENOUGH_SHM = _GIB
_ENOUGH_DISK = 5 * _GIB
# 4,096: a runner of eight ranks holds some 200, a data loader of torch hundreds more for each rank.
_ENOUGH_FILES = 4096
# STA_UNSYNC of adjtimex(2): nothing disciplines the clock.
_UNSYNC = 0x40
_TIMEX_STATUS_OFFSET = 40


class Finding(msgspec.Struct, frozen=True):
    """What one look found: ``kind`` is good, costs or must; ``remedy`` what to do, "" where nothing is to be done."""

    name: str
    kind: str
    found: str
    remedy: str = ""


def answered(name: str, check: Callable[[], Finding], deadline_s: float = DEADLINE_S) -> Finding:
    """Return what a check found, or that it does not answer: a sick driver, name server or mount must not hold us."""
    found: Future[Finding] = Future()

    def look() -> None:
        try:
            found.set_result(check())
        except Exception as error:  # noqa: BLE001  raised in the thread that waits
            found.set_exception(error)

    # A daemon: one that never answers must not keep the command from ending.
    threading.Thread(target=look, name="doctor", daemon=True).start()
    try:
        return found.result(deadline_s)
    except TimeoutError:
        sick = "look at what it asks: the driver (nvidia-smi), the name server, the mounts (df)"
        return Finding(name, COSTS, f"no answer within {deadline_s:g} s", sick)


def _range(first: tuple[int, int], last: tuple[int, int]) -> str:
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


def python() -> Finding:
    """Find out whether this Python is one that is supported."""
    version = platform.python_version()
    supported = FIRST_PYTHON <= sys.version_info[:2] <= LAST_PYTHON
    return Finding(
        "Python",
        GOOD if supported else COSTS,
        f"{version} at {sys.executable}",
        ""
        if supported
        else f"{_range(FIRST_PYTHON, LAST_PYTHON)} are tested; with another one say so when you report a fault",
    )


def torch() -> Finding:
    """Find torch by its metadata, since importing it takes a second."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", MUST, "not installed", "pip install 'megascale-ops[train]' where training runs")
    found = re.match(r"(\d+)\.(\d+)", version)
    known = found is not None and FIRST_TORCH <= (int(found[1]), int(found[2])) <= LAST_TORCH
    return Finding(
        "torch", GOOD if known else COSTS, version, "" if known else f"{_range(FIRST_TORCH, LAST_TORCH)} are tested"
    )


def numpy() -> Finding:
    """Find NumPy by its metadata: the controller that a run starts judges with it."""
    try:
        return Finding("NumPy", GOOD, importlib.metadata.version("numpy"))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "NumPy", MUST, "not installed: a run's own controller can't start", "pip install 'megascale-ops[train]'"
        )


def compiler() -> Finding:
    """Find a C compiler, which builds the NCCL profiler plugin on first use and serves torch.compile."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "")
    if found:
        return Finding("C compiler", GOOD, found)
    cost = "no NCCL profiler plugin (who is late in which collective), no torch.compile"
    return Finding("C compiler", COSTS, f"none on PATH: {cost}", "apt-get install gcc libc6-dev, or your system's own")


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:  # noqa: S108  it is what is looked at
    """Measure what is free where black boxes and NCCL's own buffers lie."""
    try:
        room = os.statvfs(path)
    except OSError as error:
        return Finding(
            "shared memory", MUST, f"{path}: {error.strerror}", "mount a tmpfs there, or give --box-root DIR"
        )
    free = room.f_bavail * room.f_frsize
    if free >= _ENOUGH_SHM:
        return Finding("shared memory", GOOD, f"{free / _GIB:.1f} GiB free in {path}")
    remedy = "more of it (docker run --shm-size=8g, an emptyDir of medium Memory), or remove what others left there"
    return Finding("shared memory", COSTS, f"{free / _GIB:.2f} GiB free in {path}: NCCL may fail to start", remedy)


def run_folders(root: Path) -> Finding:
    """Try to write where run folders go, and measure what is free there."""
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Finding("run folders", MUST, f"{there} can't be written to: {error.strerror}", "give --run-dir DIR")
    enough = free >= _ENOUGH_DISK
    remedy = "" if enough else "`megascale-ops clean` removes old runs; --run-dir DIR takes another disk"
    return Finding("run folders", GOOD if enough else COSTS, f"{root}, {free / _GIB:.1f} GiB free", remedy)


def stacks() -> Finding:
    """Find py-spy, and whether Linux lets it look into processes that are not its children."""
    program = shutil.which("py-spy") or shutil.which(str(Path(sys.executable).with_name("py-spy")))
    if not program:
        cost = "no native stacks of ranks that hold the interpreter's lock"
        return Finding("native stacks", COSTS, f"no py-spy: {cost}", "pip install 'megascale-ops[stacks]'")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope in ("", "0") or os.geteuid() == 0:
        return Finding("native stacks", GOOD, program)
    remedy = "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE for the agent"
    return Finding("native stacks", COSTS, f"ptrace_scope is {scope}: py-spy sees no rank", remedy)


def kernel_log(path: Path = Path("/dev/kmsg")) -> Finding:
    """Try to read the kernel's log, the source of Xids, kills for memory and link faults."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        cost = "no kills for memory, machine checks and link faults in verdicts"
        remedy = "sysctl kernel.dmesg_restrict=0, or CAP_SYSLOG for the agent"
        return Finding("kernel log", COSTS, f"{path}: {error.strerror}: {cost}", remedy)
    return Finding("kernel log", GOOD, f"{path} can be read")


def gpus() -> Finding:
    """Ask the driver's library for its GPUs; a machine without one trains on CPU, which is no fault."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return Finding("GPUs", COSTS, "nvidia-ml-py is missing: no GPU is watched", "pip install nvidia-ml-py")
    except pynvml.NVMLError as error:
        if Path("/dev/nvidiactl").exists():
            remedy = (
                "install the driver's libnvidia-ml, in a container too (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
            return Finding("GPUs", COSTS, f"there are some, but the driver's library does not answer: {error}", remedy)
        return Finding("GPUs", GOOD, "none here (no NVIDIA driver)")
    try:
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        names = sorted({pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(each)) for each in range(count)})
        return Finding("GPUs", GOOD, f"{count} x {', '.join(names)}, driver {driver}")
    except pynvml.NVMLError as error:
        return Finding(
            "GPUs", COSTS, f"the driver's library fails: {error}", "nvidia-smi, and the kernel's log, say more"
        )
    finally:
        pynvml.nvmlShutdown()


def loopback() -> Finding:
    """Serve and be reached on this machine, as the controller of a run is."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1.0).close()
            return Finding("loopback", GOOD, "127.0.0.1 serves and answers")
    except OSError as error:
        return Finding("loopback", MUST, f"127.0.0.1: {error.strerror or error}", "ip link set lo up")


def own_name() -> Finding:
    """Resolve this machine's name, by which nodes of a job find rank 0."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        cost = "on several nodes the others won't find rank 0 by it"
        return Finding(
            "host name", COSTS, f"{name} has no address: {cost}", f"an entry for {name} in DNS or /etc/hosts"
        )
    return Finding("host name", GOOD, f"{name} is {address}")


def clock() -> Finding:
    """Ask the kernel whether anything keeps the clock right: times of several nodes are compared."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = (ctypes.c_char * 256)()  # modes 0: it is only read
    if libc.adjtimex(timex) < 0:
        return Finding("clock", GOOD, "whether it is kept right can't be asked here")
    status = int.from_bytes(timex.raw[_TIMEX_STATUS_OFFSET : _TIMEX_STATUS_OFFSET + 4], sys.byteorder)
    if not status & _UNSYNC:
        return Finding("clock", GOOD, "kept right (NTP or PTP)")
    cost = "one node is no matter; of several nodes times in reports differ by as much as the clocks do"
    return Finding("clock", COSTS, f"nothing keeps it right: {cost}", "run chrony or systemd-timesyncd on the host")


def open_files() -> Finding:
    """Read how many files a process may hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES
    remedy = "" if enough else "raise nofile in /etc/security/limits.conf, or --ulimit nofile=65536 of a container"
    shown = "without limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    return Finding("open files", GOOD if enough else COSTS, f"at most {shown} in a process", remedy)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def all_checks(root: Path) -> dict[str, Callable[[], Finding]]:
    """Return every look by the name of its row, in the order in which a person reads them."""
    return {
        "Python": python,
        "torch": torch,
        "NumPy": numpy,
        "GPUs": gpus,
        "C compiler": compiler,
        "shared memory": shared_memory,
        "run folders": lambda: run_folders(root),
        "loopback": loopback,
        "host name": own_name,
        "clock": clock,
        "open files": open_files,
        "native stacks": stacks,
        "kernel log": kernel_log,
    }
