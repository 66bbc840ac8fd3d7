# SPDX-License-Identifier: Apache-2.0
"""The ports of InfiniBand and RoCE adapters: ``/sys/class/infiniband/<device>/ports/<port>``.

Some 20 small files for each port, 15 us each: 2.5 ms for eight adapters, so every 10 s. Reading them asks the
adapter's firmware; one that hangs blocks the reader in the kernel, which is why this runs in a thread of its own.
``port_*_data`` count words of four octets (InfiniBand Architecture Specification 1, 16.1.3.5).
"""

import os
from pathlib import Path
from typing import NamedTuple

# File below ``counters`` -> kind of error.
ERRORS = {
    "symbol_error": "symbol",
    "link_error_recovery": "recovery",
    "port_rcv_errors": "receive",
    "port_rcv_remote_physical_errors": "remote_physical",
    "port_xmit_discards": "transmit_discard",
    "local_link_integrity_errors": "local_integrity",
    "excessive_buffer_overrun_errors": "buffer_overrun",
}
# File below ``hw_counters`` -> kind of congestion.
CONGESTION = {
    "np_cnp_sent": "cnp_sent",
    "rp_cnp_handled": "cnp_handled",
    "np_ecn_marked_roce_packets": "ecn_marked",
    "out_of_sequence": "out_of_sequence",
    "local_ack_timeout_err": "ack_timeout",
    "roce_adp_retrans": "adaptive_retransmit",
}
_OTHERS = ("link_downed", "port_rcv_data", "port_xmit_data")
_WORD_BYTES = 4
_ACTIVE = 4


class Port(NamedTuple):
    """One port; counters since the driver was loaded, without those that it does not have."""

    device: str
    port: str
    is_up: bool
    state: str  # "ACTIVE", "DOWN", ...
    rate_bytes_s: float
    received_bytes: int
    transmitted_bytes: int
    downed: int  # how often the link went down
    errors: dict[str, int]
    congestion: dict[str, int]


RawPort = dict[str, str]  # file, as in "state" or "counters/symbol_error" -> content


def read(sys_root: str) -> dict[tuple[str, str], RawPort]:
    """Return the files of every port by device and port; empty where there is no adapter.

    Raises:
        OSError: a port can't be listed any more.
    """
    folder = Path(sys_root) / "class" / "infiniband"
    if not folder.is_dir():
        return {}
    names = ["state", "rate"]
    names += [f"counters/{name}" for name in (*ERRORS, *_OTHERS)] + [f"hw_counters/{name}" for name in CONGESTION]
    found = {}
    for device in sorted(os.listdir(folder)):  # noqa: PTH208  names are all that is wanted
        for port in sorted(os.listdir(folder / device / "ports")):  # noqa: PTH208  likewise
            at = f"{folder}/{device}/ports/{port}"
            found[device, port] = {name: text for name in names if (text := _text(f"{at}/{name}"))}
    return found


def parse(raw: dict[tuple[str, str], RawPort]) -> tuple[Port, ...]:
    """Return the ports with their numbers in base units."""
    return tuple(_port(device, port, files) for (device, port), files in raw.items())


def _port(device: str, port: str, files: RawPort) -> Port:
    number, _, word = files.get("state", "").partition(":")
    return Port(
        device=device,
        port=port,
        is_up=_number(number) == _ACTIVE,
        state=word.strip(),
        rate_bytes_s=_rate_bytes_s(files.get("rate", "")),
        received_bytes=_number(files.get("counters/port_rcv_data", "")) * _WORD_BYTES,
        transmitted_bytes=_number(files.get("counters/port_xmit_data", "")) * _WORD_BYTES,
        downed=_number(files.get("counters/link_downed", "")),
        errors=_named(files, "counters", ERRORS),
        congestion=_named(files, "hw_counters", CONGESTION),
    )


def _named(files: RawPort, folder: str, kinds: dict[str, str]) -> dict[str, int]:
    return {kind: _number(files[f"{folder}/{name}"]) for name, kind in kinds.items() if f"{folder}/{name}" in files}


def _rate_bytes_s(text: str) -> float:
    """Return "400 Gb/sec (4X NDR)" in bytes a second."""
    try:
        return float(text.split(maxsplit=1)[0]) * 1e9 / 8
    except (ValueError, IndexError):
        return 0.0


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0


def _text(path: str) -> str:
    """Return a file's line; "" where this adapter does not have it or says that it can't tell."""
    # A third of what Path.read_text takes, 150 times for eight adapters.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(handle, 4096).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(handle)
