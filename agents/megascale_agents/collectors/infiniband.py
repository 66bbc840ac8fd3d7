# SPDX-License-Identifier: Apache-2.0
"""The ports of InfiniBand, RoCE and EFA adapters: ``/sys/class/infiniband/<device>/ports/<port>``.

Some 25 small files for each port, 15 us each: 3 ms for eight adapters, so every 10 s. Reading them asks the
adapter's firmware; one that hangs blocks the reader in the kernel, which is why this runs in a thread of its own.

Drivers differ. mlx5 and hfi1 have the counters of the InfiniBand Architecture Specification 1 (16.1.3.5) in
``counters``: ``port_*_data`` in words of four octets, the others 4 to 16 bits wide, which stay at their largest value
when it is reached (widths: Linux, drivers/infiniband/core/sysfs.c). EFA, bnxt_re and irdma have ``hw_counters`` alone,
by names of their own (Linux, drivers/infiniband/hw/*). What a driver does not report is unknown, which is not zero:
``N/A (no PMA)`` of older kernels, and reads that fail, as on ConnectX-7 functions that the fabric manager keeps for
itself. Each such read is a line in the kernel's log, so the caller names what is not to be tried now.
"""

import errno
import fnmatch
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

# Kind of error -> files, and below the width of those that stay at their largest value.
ERRORS = {
    "symbol": ("counters/symbol_error",),
    "recovery": ("counters/link_error_recovery",),
    "receive": ("counters/port_rcv_errors", "hw_counters/rx_roce_errors"),
    "remote_physical": ("counters/port_rcv_remote_physical_errors",),
    "transmit_discard": ("counters/port_xmit_discards",),
    "local_integrity": ("counters/local_link_integrity_errors",),
    "buffer_overrun": ("counters/excessive_buffer_overrun_errors",),
    "checksum": ("hw_counters/rx_icrc_encapsulated",),
}
DOWNED = "counters/link_downed"
RECEIVED = ("counters/port_rcv_data", "hw_counters/rx_bytes", "hw_counters/ip4InOctets")
TRANSMITTED = ("counters/port_xmit_data", "hw_counters/tx_bytes", "hw_counters/ip4OutOctets")
# Kind of congestion or loss -> files: mlx5, then bnxt_re, irdma, EFA.
CONGESTION = {
    "cnp_sent": ("np_cnp_sent", "cnpSent"),
    "cnp_handled": ("rp_cnp_handled", "cnpHandled"),
    "ecn_marked": ("np_ecn_marked_roce_packets", "RxECNMrkd"),
    "out_of_sequence": ("out_of_sequence", "oos_drop_count"),
    "sequence_nak": ("packet_seq_err", "seq_err_naks_rcvd"),
    "ack_timeout": ("local_ack_timeout_err", "to_retransmits", "retrans_timeout_events"),
    "adaptive_retransmit": ("roce_adp_retrans",),
    "retransmit": ("retrans_pkts", "tcpRetransSegs"),
    "no_buffer": ("out_of_buffer", "rnr_nak_retry_err", "rx_out_of_buffer", "rnr_naks_rcvd"),
    "retries_exceeded": ("req_transport_retries_exceeded", "max_retry_exceeded", "unresponsive_remote_events"),
    "discarded": ("rx_discards", "rx_roce_discards", "ip4InDiscards", "ip6InDiscards", "rx_drops"),
    "impaired": ("impaired_remote_conn_events",),
}
# Only RoCE has these: the zeros of an InfiniBand port carry no information, and are five of its 23 series.
_OF_ROCE = frozenset({"cnp_sent", "cnp_handled", "ecn_marked", "adaptive_retransmit", "checksum"})
_BITS = {
    "counters/symbol_error": 16,
    "counters/link_error_recovery": 8,
    "counters/link_downed": 8,
    "counters/port_rcv_errors": 16,
    "counters/port_rcv_remote_physical_errors": 16,
    "counters/port_xmit_discards": 16,
    "counters/local_link_integrity_errors": 4,
    "counters/excessive_buffer_overrun_errors": 4,
}
# Of all others: older adapters count data, and mlx5's queue counters what they count, in 32 bits.
_WIDE = frozenset({2**32 - 1})
# All ones: at 400 Gb/s it takes 47 years of words to get there, so it is no count.
_NO_COUNT = 2**64 - 1
_MOST_DIGITS = 20  # of 64 bits
FACTS = ("state", "phys_state", "rate", "link_layer")
_CONGESTION = {kind: tuple(f"hw_counters/{name}" for name in names) for kind, names in CONGESTION.items()}
_FILES = tuple(
    dict.fromkeys(
        [
            *(name for names in ERRORS.values() for name in names),
            *(DOWNED, *RECEIVED, *TRANSMITTED),
            *(name for names in _CONGESTION.values() for name in names),
        ]
    )
)
_FOLDERS = ("counters", "hw_counters")
_WORD_BYTES = 4
# 5 is ACTIVE_DEFER: the link is active and has seen a recoverable error.
_UP = (4, 5)
# Missing, or removed: reads of an adapter that is taken out fail with ENODEV.
_ABSENT = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR)
_RATE = re.compile(r"(?P<gigabits>\d+(?:\.\d+)?) Gb/sec(?: \((?P<lanes>\d+)X)?")


class Port(NamedTuple):
    """One port; counters since the driver was loaded or they were reset. What is not known is None or left out."""

    device: str
    port: str
    is_up: bool | None
    state: str  # "ACTIVE", "DOWN", ...
    physical: str  # "LinkUp", "Polling", "Disabled", ...
    kind: str  # link layer and board, "InfiniBand MT_0000000838": ports of one kind can be compared
    is_virtual: bool  # a function that is lent to containers and taken back
    guid: str  # of the adapter, whatever its name is; "": not reported, or not set up
    rate_bytes_s: float | None
    lanes: int  # 0: unknown
    received_bytes: int | None
    transmitted_bytes: int | None
    downed: int | None  # how often the link went down
    errors: dict[str, int]
    congestion: dict[str, int]
    full: dict[str, int]  # counters that have reached their largest value and count no more, by file


RawPort = dict[str, str]  # file, as in "state" or "counters/symbol_error" -> content


class Look(NamedTuple):
    """What was read of all ports."""

    ports: dict[tuple[str, str], RawPort]  # by device and port
    refused: dict[str, str]  # "mlx5_0/1/counters/symbol_error" -> the driver's text


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a device ("mlx5_4") or a file of it ("mlx5_4/1/counters/symbol_error") is never to be read.

    A pattern without a slash is one of devices, with one it is one of files.
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns if ("/" in pattern) == ("/" in name))


def read(sys_root: str, excluded: Collection[str] = (), resting: Collection[str] = ()) -> Look:
    """Return the files of every port; none where there is no adapter.

    Args:
        sys_root: Where /sys is.
        excluded: Patterns of devices and files that are never touched.
        resting: Files that were refused of late and are not tried now.
    """
    folder = Path(sys_root) / "class" / "infiniband"
    look = Look({}, {})
    for device in _names(folder):
        if is_excluded(device, excluded):
            continue
        static = _of_device(folder / device)
        for port in _names(folder / device / "ports"):
            at, name = f"{folder}/{device}/ports/{port}", f"{device}/{port}"
            there = {f"{below}/{one}" for below in _FOLDERS for one in _names(Path(at, below))}
            found = dict(static)
            for file in (*FACTS, *(one for one in _FILES if one in there)):
                whole = f"{name}/{file}"
                if whole in resting or is_excluded(whole, excluded):
                    continue
                text, why = _text(f"{at}/{file}")
                if why:
                    look.refused[whole] = why
                elif text:
                    found[file] = text
            if len(found) > len(static) or any(one.startswith(f"{name}/") for one in (*look.refused, *resting)):
                look.ports[device, port] = found
    return look


def _of_device(at: Path) -> RawPort:
    """Return what is the same for all ports of an adapter; a VF has a link to the function that it is part of."""
    board = _text(f"{at}/board_id")[0] or _text(f"{at}/hca_type")[0]
    virtual = "yes" if os.path.lexists(f"{at}/device/physfn") else ""
    guid = _text(f"{at}/node_guid")[0]
    guid = guid if guid.strip("0:") else ""  # zeros: a function that is not set up
    return {name: text for name, text in (("board", board), ("virtual", virtual), ("guid", guid)) if text}


def parse(raw: dict[tuple[str, str], RawPort]) -> tuple[Port, ...]:
    """Return the ports with their numbers in base units."""
    return tuple(_port(device, port, files) for (device, port), files in raw.items())


def _port(device: str, port: str, files: RawPort) -> Port:
    number, _, word = files.get("state", "").partition(":")
    state = _number(number)
    rate = _RATE.match(files.get("rate", ""))
    counts = {name: count for name in _FILES if (count := _number(files.get(name, ""))) is not None}
    return Port(
        device=device,
        port=port,
        is_up=None if state is None else state in _UP,
        state=word.strip(),
        physical=files.get("phys_state", "").partition(":")[2].strip(),
        kind=_kind(device, files),
        is_virtual="virtual" in files,
        guid=files.get("guid", ""),
        rate_bytes_s=float(rate["gigabits"]) * 1e9 / 8 if rate else None,
        lanes=int(rate["lanes"] or 0) if rate else 0,
        received_bytes=_octets(counts, RECEIVED),
        transmitted_bytes=_octets(counts, TRANSMITTED),
        downed=counts.get(DOWNED),
        errors=_summed(counts, ERRORS, files),
        congestion=_summed(counts, _CONGESTION, files),
        full={name: count for name, count in counts.items() if _is_full(name, count)},
    )


def _kind(device: str, files: RawPort) -> str:
    """Return what a port can be compared with: its link layer and its board, else the driver by the device's name."""
    board = files.get("board") or re.sub(r"_?\d.*", "", device)
    return " ".join([files.get("link_layer", "unknown"), board, *(["bond"] if "bond" in device else [])])


def _is_full(name: str, count: int) -> bool:
    return count == 2 ** _BITS[name] - 1 if name in _BITS else count in _WIDE


def _octets(counts: dict[str, int], names: tuple[str, ...]) -> int | None:
    """Return the first of several counters that is there, in octets."""
    for name in names:
        if name in counts:
            return counts[name] * (_WORD_BYTES if name.startswith("counters/") else 1)
    return None


def _summed(counts: dict[str, int], kinds: dict[str, tuple[str, ...]], files: RawPort) -> dict[str, int]:
    found = {
        kind: sum(counts[name] for name in names if name in counts)
        for kind, names in kinds.items()
        if any(name in counts for name in names)
    }
    is_infiniband = files.get("link_layer") == "InfiniBand"
    return {kind: count for kind, count in found.items() if count or not (is_infiniband and kind in _OF_ROCE)}


def _number(text: str) -> int | None:
    """Return a count; None for anything else, such as "N/A (no PMA)"."""
    text = text.strip()
    count = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else _NO_COUNT
    return count if count < _NO_COUNT else None


def _names(folder: Path) -> list[str]:
    """Return what is in a folder; nothing when it is not there, or no longer."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  only names are needed
    except OSError:
        return []


def _text(path: str) -> tuple[str, str]:
    """Return a file's line and why it could not be read; both "" where this adapter does not have it."""
    # A third of what Path.read_text takes, 200 times for eight adapters.
    handle = -1
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.read(handle, 4096).decode("ascii", "replace").strip(), ""
    except OSError as error:
        known = error.errno is not None and error.errno not in _ABSENT
        return "", errno.errorcode.get(error.errno or 0, "EIO") if known else ""
    finally:
        if handle >= 0:
            os.close(handle)
