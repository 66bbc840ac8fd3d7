# SPDX-License-Identifier: Apache-2.0

"""Faults that a machine without GPUs can have, injected for real; a part of diagnose_faults.py (``--kinds host``).

Six nodes of a fleet are six measurements of this machine, one after the other, by the check's own ``measure`` in a
process of its own; one of them has the fault beside it, and ``--compare`` judges them against their median. The machine
has other work to do meanwhile. That is told from a fault in two ways: a figure that other work took part in (less than
0.8 of a core) has no equals, and what neighbours do to memory differs from node to node, which widens the bar. So that
there is something to compare at any load, measurements and injected neighbours run in the real-time class (SCHED_RR)
for the tenths of a second that they take. A neighbour that took nothing, as measured right before and after, is no
fault: on a virtual machine the host decides.

Links are network namespaces on a bridge, each at 1 Gbit/s (``tc tbf``), that meet as ``diagnose --between`` does; the
store is a folder, since torch's costs seconds of CPU for each node. Clocks are chrony's: a real chronyd that leaves the
clock alone (-x) hears a server that is wrong. It needs root; what is missing is said, and not injected.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from benchmarks.diagnose_faults import Around, Clean, Rows, Trial, judged, named_in, run
from megascale_ops.diagnostics.between.meeting import Place, meet
from megascale_ops.diagnostics.between.streams import measure
from megascale_ops.diagnostics.check import Reading, Task
from megascale_ops.diagnostics.judgement import result_of
from megascale_ops.diagnostics.report import PairsReport
from megascale_ops.diagnostics.table import modules

FLEET = 6
# 15 %: a neighbour on one core of a virtual machine takes half of the bandwidth in one minute and nothing in the next.
LEAST_TAKEN = 0.15
CHILD_S = 120.0
LINK_MBIT = 1000
_NEW_NETWORK = 0x4000_0000  # CLONE_NEWNET
BESIDE = Path(__file__).parent / "scripts" / "beside.py"


class Row(NamedTuple):
    """One fault: how it is injected, one trial with it, one run without."""

    how: str
    sick: Callable[[Random], Trial]
    clean: Callable[[Random], Trial]


class NoFaultError(Exception):
    """What was injected had no effect: there is nothing to name."""


calm = [0, 0]  # readings with equals, and all


def of_the_host(draw: Random, trials: int, runs: int, only: str, rows: Rows, clean: Clean) -> None:
    """Make trials and runs without a fault, drawn one by one from all of them, and put them into the table's rows."""
    chosen = {name: row for name, row in ROWS.items() if only in name}
    wanted = [(name, True) for name in chosen for _ in range(trials)]
    wanted += [(name, False) for name in chosen for _ in range(runs)]
    draw.shuffle(wanted)
    idle: dict[str, int] = {}
    for name, is_sick in wanted:
        row = chosen[name]
        try:
            trial = (row.sick if is_sick else row.clean)(draw)
        except NoFaultError as error:
            idle[name] = idle.get(name, 0) + 1
            print(f"# {name}: without effect: {error}", file=sys.stderr, flush=True)
            continue
        except (PermissionError, FileNotFoundError) as error:
            print(f"# {name}: not injected: {error}", file=sys.stderr)
            continue
        held = rows.setdefault(name, (row.how, []))[1] if is_sick else clean.setdefault(f"without {name}", [])
        held.append(trial)
        well = trial.is_right if is_sick else not trial.named
        print(
            f"# {name}{'' if is_sick else ', clean'}: {'as it should be' if well else trial}",
            file=sys.stderr,
            flush=True,
        )
    for name, count in idle.items():
        print(f"# {name}: {count} of {trials} trials were without effect, and are in no row", file=sys.stderr)
    if calm[1]:
        print(f"# {calm[0]} of {calm[1]} readings of memory and cores had equals", file=sys.stderr)


# --- readings in processes of their own


def in_a_child(work: Callable[[], bytes]) -> bytes:
    """Return what a forked process makes of it; it ends in any case."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as out:
                out.write(work())
            code = 0
        except BaseException:  # noqa: BLE001  a child must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return data


def at_once(priority: int = 1) -> None:
    """Let this process run before all that is not in the real-time class."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))


def reading_of(check: str, cores: set[int], before: Callable[[], None] = at_once) -> Reading:
    """Measure once on these cores."""

    def work() -> bytes:
        os.sched_setaffinity(0, cores)
        before()
        return msgspec.json.encode(modules()[check][1].measure(Task()))

    found = msgspec.json.decode(in_a_child(work), type=Reading)
    calm[0] += all(one.peers for one in found.figures if one.name in ("memory_copy", "cpu_hash"))
    calm[1] += 1
    return found


@contextlib.contextmanager
def beside(*given: str, core: int | None = None, priority: int = 0) -> Iterator[None]:
    """Have another program run meanwhile, on one core."""

    def before() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        if priority:
            at_once(priority)

    command = [sys.executable, str(BESIDE), *given]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=before,  # noqa: PLW1509  this process has one thread
    ) as program:
        assert program.stdout is not None
        try:
            if program.stdout.readline() != "begun\n":
                raise PermissionError("the other program did not begin")
            yield
        finally:
            program.kill()


# --- neighbours


def a_fleet(sick: str, core: int, other: int) -> Trial:
    """Measure memory on one core of each of six nodes; beside the sick one a neighbour copies on another core.

    Raises:
        NoFaultError: the neighbour took next to nothing, by measurements without it right before and after.
    """
    readings = {}
    for node in [f"n{number}" for number in range(FLEET)]:
        before = memory_rate(reading_of("memory", {core})) if node == sick else 0.0
        with beside("memory", core=other, priority=1) if node == sick else contextlib.nullcontext():
            found = reading_of("memory", {core})
        readings[node] = {"memory": found}
        if node == sick:
            least = min(before, memory_rate(reading_of("memory", {core})))
            if memory_rate(found) > (1 - LEAST_TAKEN) * least:
                raise NoFaultError(f"{memory_rate(found) / 1e9:.1f} GB/s beside it, {least / 1e9:.1f} without")
    trial = judged(readings, sick)
    return Trial(sick, tuple(dict.fromkeys(one.partition("/")[0] for one in trial.named)), trial.texts)


def two_cores(draw: Random) -> tuple[int, int]:
    """Return two different cores of this process."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise PermissionError("there is one core only")
    core, other = draw.sample(cores, 2)
    return core, other


def memory_rate(reading: Reading) -> float:
    """Return the bandwidth that was measured."""
    return next(one.value for one in reading.figures if one.name == "memory_copy")


def memory_neighbour(draw: Random) -> Trial:
    """Memory bandwidth is taken by a neighbour of one node."""
    core, other = two_cores(draw)
    return a_fleet(f"n{draw.randrange(FLEET)}", core, other)


def memory_alone(draw: Random) -> Trial:
    """The same without it."""
    core, other = two_cores(draw)
    return a_fleet("", core, other)


def cores(hogged: int | None) -> Trial:
    """Measure two cores; what is said of shared cores counts as named, for it is what a hog is told by."""
    wanted = set(sorted(os.sched_getaffinity(0))[:2])
    with beside("core", core=hogged, priority=2) if hogged is not None else contextlib.nullcontext():
        found = reading_of("cpu", wanted)
    module = modules()["cpu"][1]
    findings = result_of(module.CHECK, found, module.judge, 1.0).findings
    return Trial(f"CPU {hogged}", tuple(one.of for one in findings), tuple(one.text for one in findings))


def hog(draw: Random) -> Trial:
    """Another program takes four fifths of one core."""
    return cores(two_cores(draw)[0])


# --- limits


@contextlib.contextmanager
def control_group(controller: str, **values: int) -> Iterator[Path]:
    """Yield a control group of version 1 below this process's own."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line.split(":", 2)[2] for line in lines if controller in line.split(":")[1].split(",")), None)
    top = Path("/sys/fs/cgroup", controller)
    if own is None or not top.is_dir():
        raise PermissionError(f"there is no control group of version 1 for {controller} here")
    folder = top / own.lstrip("/") / f"bench-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        for name, value in values.items():
            Path(folder, name.replace("__", ".")).write_text(str(value), encoding="ascii")
        yield folder
    finally:
        end_s = time.monotonic() + 10.0
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def enter(group: Path) -> None:
    """Move this process into a group."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def of_limits(reading: Reading, word: str) -> Trial:
    """Return what is said of one limit; all of them are of the node, and others may be low here anyhow."""
    found = [one for one in modules()["limits"][1].judge(reading) if word in one.text]
    return Trial("node", tuple(one.of for one in found), tuple(one.text for one in found))


def quota(percent: int) -> Trial:
    """Work for two seconds under a quota of processors (0: none), then look at the limits."""
    # The largest weight: on a busy machine it would not get as much as its quota, and nothing would hold it back.
    given = {"cpu__cfs_quota_us": percent * 1000 or -1, "cpu__cfs_period_us": 100_000, "cpu__shares": 262_144}
    with control_group("cpu", **given) as group:

        def before() -> None:
            enter(group)
            end_s = time.monotonic() + 2.0
            while time.monotonic() < end_s:
                pass

        return of_limits(reading_of("limits", os.sched_getaffinity(0), before), "throttled")


def group_memory(mebibytes: int) -> Trial:
    """Look at the limits in a group with so much memory."""
    with control_group("memory", memory__limit_in_bytes=mebibytes << 20) as group:
        return of_limits(reading_of("limits", os.sched_getaffinity(0), lambda: enter(group)), "of memory left")


def locked(kibibytes: int) -> Trial:
    """Look at the limits with so much locked memory where the kernel shows an RDMA adapter; 0: where it shows none."""
    adapter = "mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/mlx5_0 && " if kibibytes else ""

    def before() -> None:
        if kibibytes:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (kibibytes << 10, kibibytes << 10))

    prefix = ("unshare", "-m", "sh", "-c", f'{adapter}exec "$@"', "sh")
    trial = named_in(run(Around(("--check", "limits"), before, prefix)), set(), "node")
    chosen = [(of, text) for of, text in zip(trial.named, trial.texts, strict=True) if "locked" in text]
    return Trial("node", tuple(of for of, _ in chosen), tuple(text for _, text in chosen))


# --- clocks


def clock(offset_s: float) -> Trial:
    """Ask a chrony whose server is so far off."""
    daemon, client = shutil.which("chronyd"), shutil.which("chronyc")
    if daemon is None or client is None:
        raise PermissionError("chrony is not installed")
    with tempfile.TemporaryDirectory(prefix="bench-clock-") as folder:
        lines = (
            "server 127.0.0.1 iburst minpoll 0 maxpoll 0", "cmdport 323", "bindcmdaddress 127.0.0.1",
            f"bindcmdaddress {folder}/chronyd.sock", f"pidfile {folder}/chronyd.pid", "user root",
        )  # fmt: skip
        Path(folder, "chrony.conf").write_text("\n".join(lines) + "\n", encoding="ascii")

        def work() -> bytes:
            if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
                raise PermissionError("no network namespace can be made here")
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            with beside("clock", str(offset_s)), subprocess.Popen(
                [daemon, "-x", "-d", "-f", f"{folder}/chrony.conf"], stderr=subprocess.DEVNULL
            ) as chrony:  # fmt: skip
                try:
                    _await_source(client)
                    return msgspec.json.encode(modules()["clock"][1].measure(Task()))
                finally:
                    chrony.terminate()

        found = msgspec.json.decode(in_a_child(work), type=Reading)
    said = [one for one in modules()["clock"][1].judge(found) if "ahead" in one.text or "behind" in one.text]
    return Trial("node", tuple(one.of for one in said), tuple(one.text for one in said))


def _await_source(client: str) -> None:
    """Wait until chrony has chosen its server."""
    end_s = time.monotonic() + 30.0
    while time.monotonic() < end_s:
        told = subprocess.run([client, "-n", "tracking"], capture_output=True, text=True, check=False).stdout
        if "127.0.0.1" in told:
            return
        time.sleep(0.2)
    raise PermissionError("chrony has chosen no server within 30 s")


# --- links


class FolderStore:
    """A store of torch's kind in a folder: what is set is there whole."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value beside its place, and rename it."""
        place = self._folder / key.replace("/", "_")
        beside_it = place.with_name(f".{place.name}.{os.getpid()}")
        beside_it.write_bytes(value.encode() if isinstance(value, str) else value)
        beside_it.rename(place)

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return (self._folder / key.replace("/", "_")).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """Return whether all of them are there."""
        return all((self._folder / key.replace("/", "_")).exists() for key in keys)


@contextlib.contextmanager
def namespaces() -> Iterator[list[str]]:
    """Yield the names of six network namespaces on one bridge, each with a link of 1 Gbit/s."""
    mark = f"b{os.getpid()}"
    names = [f"{mark}n{number}" for number in range(FLEET)]
    hub = f"{mark}hub"
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{number}", "netns", hub)
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", hub, "link", "set", f"p{number}", "master", "br0", "up")
            shape(name, LINK_MBIT)
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def shape(name: str, mbit: int) -> None:
    """Set the rate at which a node sends."""
    given = f"tc -n {name} qdisc replace dev eth0 root tbf rate {mbit}mbit burst 256kb latency 50ms"
    done = subprocess.run(given.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"{given}: {done.stderr.strip()}")


def links(slowed: int | None, mbit: int) -> Trial:
    """Let six nodes meet; one of them sends at another rate."""
    with namespaces() as names, tempfile.TemporaryDirectory(prefix="bench-meet-") as folder:
        if slowed is not None:
            shape(names[slowed], mbit)
        children = [_part(folder, names, number) for number in range(1, FLEET)]
        report = msgspec.json.decode(in_a_child(lambda: _meet(folder, names, 0)), type=PairsReport)
        for child in children:
            os.waitpid(child, 0)
    named = [*report.bad_nodes, *(" and ".join(both) for both in report.bad_links), *report.bad_switches]
    said = [f"{node}: {why}" for node, why in report.unclear.items()]
    rates = [f"{one.of} {one.value * 8e-6:.0f} Mbit/s" for one in report.figures if one.name == "pair_rate"]
    return Trial(f"n{slowed}", tuple(named), (*said, *rates))


def _part(folder: str, names: list[str], number: int) -> int:
    """Start a node's process; return its number."""
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        _meet(folder, names, number)
    os._exit(0)


def _meet(folder: str, names: list[str], number: int) -> bytes:
    with Path("/run/netns", names[number]).open("rb") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEW_NETWORK):
            raise PermissionError("a network namespace can't be entered")
    at_once()
    place = Place(("", 0), number, FLEET, f"n{number}", "", f"10.77.0.{number + 1}", 0.3)
    store = FolderStore(folder)
    return msgspec.json.encode(meet(store, place, lambda *_: None, measure))


def low_quota(draw: Random) -> Trial:
    """A fifth to four fifths of a processor."""
    return quota(draw.randint(20, 80))


def low_memory(draw: Random) -> Trial:
    """Less than the 2 GiB from which on it is said."""
    return group_memory(draw.randint(512, 1945))


def enough_memory(draw: Random) -> Trial:
    """Four GiB and more."""
    return group_memory(draw.randint(4096, 16384))


def far_clock(draw: Random) -> Trial:
    """Ahead or behind by more than the 0.1 s from which on it is said."""
    return clock(draw.choice((-1, 1)) * draw.uniform(0.2, 60))


def near_clock(draw: Random) -> Trial:
    """Off by half of that at most."""
    return clock(draw.uniform(-0.05, 0.05))


def slow_link(draw: Random) -> Trial:
    """One node's link sends at 0.1 to 0.6 of the others' rate."""
    return links(draw.randrange(FLEET), draw.randint(100, 600))


ROWS = {
    "memory bandwidth that a neighbour takes": Row("a process that copies", memory_neighbour, memory_alone),
    "a core that another program uses": Row("a process, 80 % of a core", hog, lambda _draw: cores(None)),
    "a quota of 0.2 to 0.8 processors": Row("cgroup v1 cpu", low_quota, lambda _draw: quota(0)),
    "a control group of 0.5 to 1.9 GiB": Row("cgroup v1 memory", low_memory, enough_memory),
    "64 KiB to 8 MiB of locked memory, with RDMA": Row(
        "setrlimit", lambda draw: locked(draw.randint(64, 8192)), lambda _draw: locked(0)
    ),
    "a clock 0.2 to 60 s off": Row("chronyd -x", far_clock, near_clock),
    "a link of 100 to 600 Mbit/s among those of 1000": Row("tc tbf", slow_link, lambda _draw: links(None, 0)),
}
