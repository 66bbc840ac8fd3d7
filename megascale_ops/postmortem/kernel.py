# SPDX-License-Identifier: Apache-2.0
"""The kernel's log beside the logs of ranks: whose end it explains.

It knows processes and GPUs, no ranks. A process is a rank's where a launcher or NCCL has printed both, and a GPU is by
NCCL's own line of it (host, bus and rank); a bus alone may be one of several hosts. What belongs to no rank that way
names the fault alone.

Pure: texts in, lines by rank out.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from megascale_agents.collectors.xid_table import meaning_of

_LINE = re.compile(
    r"^(?:<\d+>)?(?:\[ *\d+\.\d+\]|[A-Z][a-z]{2} +\d+ (?:[\d:]{8} )?(?:\S+ )?"
    r"(?:kernel|earlyoom\[\d+\]|systemd-oomd\[\d+\]):|\d{4}-\d\d-\d\dT\S+ \S+ kernel:"
    r"|\[\w{3} \w{3} +\d+ [\d:]{8} \d{4}\])"
)
# 0.6 of all lines: a job's log has some of the kernel's where a console mixes them.
_MOST = 0.6
_FAULT = re.compile(
    r"NVRM: S?Xid|[Kk]illed process \d|sending SIG(?:TERM|KILL) to process \d|fallen off the bus|segfault at"
    r"|amdgpu: .*(?:error|reset|page fault)|amdgpu: +Process .{1,64} pid \d"
    r"|(?:Sending SIGBUS to|Killing) .{1,64}:\d{1,8} due to hardware memory corruption"
)
# By the OOM killer or a daemon that comes before it; for a page of memory that is broken; by a memory fault of its own.
_KILLED = re.compile(
    r"(?:[Kk]illed|sending SIG(?:TERM|KILL) to) process (\d{1,8})\b"
    r"|(?:Sending SIGBUS to|Killing) .{1,64}?:(\d{1,8}) due to hardware memory"
    r"|\[(\d{1,8})\]: segfault at|amdgpu: +Process .{1,64}? pid (\d{1,8})\b"
)
_XID = re.compile(r"Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}):[0-9a-fA-F.]+\): \d+(?:, pid='?(\d{1,8}))?")
_HOST = re.compile(r"^(?:[A-Z][a-z]{2} +\d+ [\d:]{8}|\d{4}-\d\d-\d\dT\S+) (\S+) kernel:")
# init.cc: host:process:thread [device] NCCL INFO ... rank 3 nranks 16 cudaDev 3 nvmlDev 3 busId 9b000
_NCCL = re.compile(
    r"(?:^|\s)(\S{1,80}):\d{1,8}:\d{1,8} \[\d{1,3}\] NCCL INFO .{0,200}?\brank (\d{1,6}) nranks \d{1,6} "
    r".{0,60}?busId ([0-9a-f]{4,12})\b"
)
# The driver clears a GPU's channels behind a fault, which may be another GPU's that it is linked to.
_ECHO = re.compile(r"Xid \([^)]{1,40}\): 45\b")
_NUMBER = re.compile(r"NVRM: Xid \([^)]{1,40}\): (\d{1,5})\b")
_OF_A_PROCESS = (43, 45)
# A line of any unit in a journal; who was killed, and names of what ranks start.
_OF_UNITS = re.compile(r"^(?:[A-Z][a-z]{2} +\d+ [\d:]{8}|\d{4}-\d\d-\d\dT\S+) \S+ [\w./@:-]{1,80}(?:\[\d+\])?: ")
_WHO = re.compile(r"[Kk]illed process (\d{1,8}),? (?:UID \d+,? )?\(([^)]{1,64})\)")
_OF_A_JOB = re.compile(r"py|^pt_|ray|torch|train", re.IGNORECASE)
_DATED = re.compile(r"\b(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_OF_DMESG = re.compile(rf"\[\w{{3}} ({'|'.join(_MONTHS)}) +(\d{{1,2}}) (\d\d)[\d:]{{6}} (20\d\d)\]")
# 27 h: zones are up to 26 h apart, and hours are compared.
_ZONES = timedelta(hours=27)
_HUNG = re.compile(r"INFO: task \S{1,40}:(\d{1,8}) blocked for more than \d{1,6} seconds")
_STORAGE = re.compile(r"\b(?:Lustre(?:Error)?: |nfs: |ceph: |GPFS|beegfs|cl_sync_io|nfs_\w+|wait_on_page_bit)")
_OWN_PID = re.compile(r"\bpid[ =:]{1,2}(\d{1,8})\b")
_RANK_AND_PID = re.compile(r"(?<![\w-])(?:global_)?[Rr]ank[ =:#]{1,2}(\d{1,6})\b[^\n]{0,60}?\bpid[ =:]{1,2}(\d{1,8})\b")
_LOADER = re.compile(r"DataLoader worker \(pid (\d{1,8})\)")


def is_kernels(text: str) -> bool:
    """Return whether a text is a kernel's log, by what its lines begin with."""
    lines = [line for line in text.splitlines()[:2000] if line.strip()]
    return bool(lines) and sum(_LINE.match(line) is not None for line in lines) >= _MOST * len(lines)


def is_journal(text: str) -> bool:
    """Return whether a text is a node's journal, in which lines of services stand among the kernel's."""
    lines = [line for line in text.splitlines()[:2000] if line.strip()]
    return any(map(_LINE.match, lines)) and sum(_OF_UNITS.match(line) is not None for line in lines) >= _MOST * len(
        lines
    )


def without_strangers(faults: Iterable[str], logs: Mapping[int, str], pids: Mapping[int, int]) -> list[str]:
    """Return the lines without those of processes that were killed and are no part of the job.

    That is known where each rank tells its own process, and the killed one is none of them and no Python.
    """
    own = _own_pids(logs)
    if not logs or {*own.values()} != {*logs}:
        return list(faults)
    return [
        line
        for line in faults
        if (found := _WHO.search(line)) is None or int(found[1]) in {*own, *pids} or _OF_A_JOB.search(found[2])
    ]


def without_other_pods(lines: Iterable[str]) -> list[str]:
    """Return lines without Kubernetes' events of processes that a node has killed and that are named as no job's."""
    return [
        line
        for line in lines
        if "OOMKilling" not in line or (found := _WHO.search(line)) is None or _OF_A_JOB.search(found[2])
    ]


def of_a_job(faults: Iterable[str]) -> list[str]:
    """Return the lines of processes that were killed and are named as a job's are."""
    return [line for line in faults if (found := _WHO.search(line)) is not None and _OF_A_JOB.search(found[2])]


def faults_in(text: str) -> list[str]:
    """Return the lines of a kernel's log that tell of the end of a process or of a fault of a GPU."""
    return [line for line in text.splitlines() if _FAULT.search(line) and not _is_note(line)]


def _is_note(line: str) -> bool:
    """Return whether a line is an Xid that ends nothing: memory that was or will be mended, power, firmware.

    Of a process whose work was given up (43, 45) another line has the reason, and these say whose it was.
    """
    number = int(found[1]) if (found := _NUMBER.search(line)) is not None else 0
    return number not in (0, *_OF_A_PROCESS) and meaning_of(number).action == "none"


def of_ranks(
    faults: Iterable[str], logs: Mapping[int, str], rest: str, pids: Mapping[int, int]
) -> dict[int, list[str]]:
    """Return the lines by the rank that they are about; by -1 those of no rank.

    Args:
        faults: lines of the kernel's log.
        logs: what each rank printed.
        rest: what no rank printed.
        pids: whose processes a launcher has named.
    """
    if not (faults := list(faults)):  # without looking for whose processes and GPUs they could be
        return {}
    known = dict(pids)
    homes: dict[tuple[str, str], set[int]] = {}
    for text in (rest, *logs.values()):
        for host, rank, bus in _NCCL.findall(text):
            homes.setdefault((host, _bus_of_nccl(bus)), set()).add(int(rank))
    known = {**_own_pids(logs), **_table_of(rest), **known}
    for rank, text in logs.items():
        known |= {int(pid): rank for pid in _LOADER.findall(text)}
    found: dict[int, list[str]] = {}
    for line in faults:
        found.setdefault(_rank_of(line, known, homes), []).append(line)
    return found


def _own_pids(logs: Mapping[int, str]) -> dict[int, int]:
    """Return the processes that logs of ranks name as "pid 48213", each where one rank alone names it."""
    named: dict[int, set[int]] = {}
    for rank, text in logs.items():
        for pid in set(_OWN_PID.findall(text)):
            named.setdefault(int(pid), set()).add(rank)
    return {pid: next(iter(ranks)) for pid, ranks in named.items() if len(ranks) == 1}


def _table_of(text: str) -> dict[int, int]:
    """Return the processes of ranks as lines of a launcher or a script tell both, each where they are told alike."""
    told: dict[int, set[int]] = {}
    for rank, pid in _RANK_AND_PID.findall(text) if "pid" in text else ():
        told.setdefault(int(pid), set()).add(int(rank))
    return {pid: next(iter(ranks)) for pid, ranks in told.items() if len(ranks) == 1}


def since(faults: Iterable[str], begins: Iterable[str]) -> list[str]:
    """Return the lines that are not older than all that a job printed, by more than zones of time may be apart.

    A line without a year, and all lines beside a job without dates, are kept.

    Args:
        faults: lines of the kernel's log.
        begins: how the job's own logs begin.
    """
    known = [date for text in begins if (date := _date_of(text)) is not None]
    if not known:
        return list(faults)
    oldest = min(known) - _ZONES
    return [line for line in faults if (date := _date_of(line[:60])) is None or date >= oldest]


def _date_of(text: str) -> datetime | None:
    """Return the date that a line begins with, in its own zone; None without one."""
    if (found := _DATED.search(text)) is not None:
        year, month, day, hour = map(int, found.groups())
    elif (found := _OF_DMESG.match(text)) is not None:
        year, month, day, hour = int(found[4]), _MONTHS.index(found[1]) + 1, int(found[2]), int(found[3])
    else:
        return None
    try:
        return datetime(year, month, day, hour, tzinfo=UTC)
    except ValueError:
        return None


def in_storage(text: str, logs: Mapping[int, str]) -> set[int]:
    """Return the ranks that sleep in the kernel for minutes, by a log that tells of a file system, and by their pids.

    A process is a rank's where its own log says so.
    """
    pids = {int(pid) for pid in _HUNG.findall(text)} if _STORAGE.search(text) else set()
    return {rank for rank, own in logs.items() if pids and not pids.isdisjoint(map(int, _OWN_PID.findall(own)))}


def first_hit(of_ranks_: Mapping[int, list[str]], ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks whose GPU had a fault where the kernel's log has only an echo of it (Xid 45) for all others.

    () where that does not part them: one of them is in no line, or each has a fault of its own.
    """
    xids = {rank: [line for line in of_ranks_.get(rank, ()) if _XID.search(line)] for rank in ranks}
    own = tuple(rank for rank, lines in xids.items() if any(not _ECHO.search(line) for line in lines))
    return own if all(xids.values()) and 0 < len(own) < len(xids) else ()


def _rank_of(line: str, pids: Mapping[int, int], homes: Mapping[tuple[str, str], set[int]]) -> int:
    xid, killed, host = _XID.search(line), _KILLED.search(line), _HOST.match(line)
    pid = (
        int(next(filter(None, killed.groups())))
        if killed is not None
        else int(xid[2])
        if xid is not None and xid[2]
        else -1
    )
    if pid in pids:
        return pids[pid]
    if xid is None:
        return -1
    bus = xid[1].lower()[-7:]
    there = [ranks for (name, at), ranks in homes.items() if at == bus and (host is None or _same(name, host[1]))]
    ranks = set().union(*there) if there else set()
    return next(iter(ranks)) if len(ranks) == 1 else -1


def _bus_of_nccl(number: str) -> str:
    """Return NCCL's number of a bus, 9b000, as the driver writes it: 0000:9b."""
    value = int(number, 16)
    return f"{value >> 20 & 0xFFFF:04x}:{value >> 12 & 0xFF:02x}"


def _same(one: str, other: str) -> bool:
    return one.partition(".")[0] == other.partition(".")[0]
