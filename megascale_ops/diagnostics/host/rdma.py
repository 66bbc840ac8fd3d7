# SPDX-License-Identifier: Apache-2.0
"""Adapters for RDMA: state, rate and firmware of each port, and how fast each writes to itself and to the next one.

A link that was trained to fewer lanes or to a lower rate is up and slow; ports of one kind of board tell. What moves
bytes is perftest (``ib_write_bw``), where it is installed: each adapter to itself over its PCIe link, then each to the
next of its kind. Ports are read by the agent's collector.
"""

import contextlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from megascale_agents.collectors.infiniband import Port, parse, read

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError, doing
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("rdma", "adapters for RDMA", quick_s=15.0, full_s=90.0, alone=True)

_PROGRAM = "ib_write_bw"
_BYTES = 1 << 20
_QUICK_S, _FULL_S = 1, 3
_REPETITIONS = 1, 3
_LOOK_S = 0.05
# 10 s: it registers memory first, which takes a second where pages are few.
_SLACK_S = 10.0
_GIGABIT = 1e9 / 8


def measure(task: Task) -> Reading:
    """Read all ports, and run perftest.

    Raises:
        UnmeasuredError: there is no adapter.
    """
    ports = parse(read("/sys").ports)
    if not ports:
        raise UnmeasuredError("no InfiniBand, RoCE or EFA adapter on this node")
    figures, facts = [*_rates(ports)], [*_facts(ports)]
    missing: list[str] = []
    up = [port for port in ports if port.is_up and not port.is_virtual]
    if shutil.which(_PROGRAM) is None:
        missing.append(f"{_PROGRAM} is not installed (package perftest): adapters are read, and move no bytes")
    else:
        for name, one, other in _ways(up):
            doing(f"writing from {one.device} to {other.device}")
            try:
                samples = [_write(one, other, thorough=task.thorough) for _ in range(_REPETITIONS[task.thorough])]
            except UnmeasuredError as error:
                missing.append(str(error))
                continue
            of = one.device if one is other else f"{one.device} to {other.device}"
            figures.append(Figure(name, of, median(samples), tuple(samples), one.kind))
    return Reading(tuple(figures), tuple(facts), tuple(missing))


def _rates(ports: Sequence[Port]) -> Iterator[Figure]:
    for port in ports:
        if port.is_up and port.rate_bytes_s:
            yield Figure("port_rate", f"{port.device} port {port.port}", port.rate_bytes_s, peers=port.kind)


def _facts(ports: Sequence[Port]) -> Iterator[Fact]:
    for port in ports:
        if not port.is_virtual:
            yield Fact("port_state", f"{port.device} port {port.port}", port.state or "unknown", peers=port.kind)
    for device, kind in {port.device: port.kind for port in ports}.items():
        with contextlib.suppress(OSError):
            text = Path(f"/sys/class/infiniband/{device}/fw_ver").read_text(encoding="ascii", errors="replace").strip()
            yield Fact("adapter_firmware", device, text, peers=kind)


def _ways(up: Sequence[Port]) -> Iterator[tuple[str, Port, Port]]:
    """Yield each adapter to itself, then each to the next one of its kind."""
    for port in up:
        yield "rdma_loopback", port, port
    for one in up:
        others = [port for port in up if port.kind == one.kind]
        other = others[(others.index(one) + 1) % len(others)]
        if other is not one:
            yield "rdma_next", one, other


def _write(one: Port, other: Port, *, thorough: bool) -> float:
    """Return bytes a second of writes from one adapter to another of this node.

    Raises:
        UnmeasuredError: perftest could not do it; its last line.
    """
    seconds = _FULL_S if thorough else _QUICK_S
    common = [_PROGRAM, "-F", "--report_gbits", "-s", str(_BYTES), "-D", str(seconds), "-p", str(_free_port())]
    serving = [*common, "-d", other.device, "-i", other.port]
    with subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            text = _asked([*common, "-d", one.device, "-i", one.port, "127.0.0.1"], server, seconds + _SLACK_S)
        finally:
            server.kill()
    rate = average_of(text)
    if rate is None:
        last = next(reversed(text.strip().splitlines()), "it printed nothing")
        raise UnmeasuredError(f"{one.device} to {other.device}: {_PROGRAM} measured nothing ({last.strip()})")
    return rate


def _asked(command: Sequence[str], server: "subprocess.Popen[str]", seconds: float) -> str:
    """Run the client until the server listens; return what it prints."""
    end_s = time.monotonic() + seconds
    while True:
        left_s = max(_LOOK_S, end_s - time.monotonic())
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds:.0f} s"
        if average_of(done.stdout) is not None or server.poll() is not None or time.monotonic() > end_s:
            return done.stdout
        time.sleep(_LOOK_S)


def average_of(text: str) -> float | None:
    """Return the average bandwidth of perftest's table, bytes a second; None where there is none.

    Columns: bytes, iterations, peak, average (Gbit/s), messages.
    """
    found = re.findall(r"^ *\d+ +\d+ +[\d.]+ +([\d.]+) +[\d.]+ *$", text, re.MULTILINE)
    return float(found[-1]) * _GIGABIT if found else None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def judge(reading: Reading) -> list[CheckFinding]:
    """Find ports that are down where others of their kind are up."""
    states = {fact.of: (fact.value, fact.peers) for fact in reading.facts if fact.name == "port_state"}
    found = []
    for port, (state, kind) in states.items():
        up = sum(other == ("ACTIVE", kind) for other in states.values())
        if state != "ACTIVE" and up:
            text = f"{port} is {state}, where {up} of its kind are ACTIVE"
            found.append(
                CheckFinding("warn", port, text, "cable, transceiver and switch port; ibstat, mlxlink -d DEVICE")
            )
    return found
