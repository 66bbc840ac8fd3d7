# SPDX-License-Identifier: Apache-2.0
"""From records of the kernel's log to what happened: Xids, SXids, GPUs off the bus, and the kinds of ``kernel_rules``.

Text of a log is not to be trusted: programs choose their names, devices theirs. So lines are cut, what a terminal would
act on is replaced, and numbers are read up to the length that the kernel writes. One event may be logged twice (a GPU
that leaves the bus: an Xid and a line; a process killed for memory: its control group and the kill): it counts once.

Some events span several lines. "The NVIDIA GPU 0000:18:00.0" and two lines later "fallen off the bus": the address is
kept until then. A CPU that stands still names its process in a line "CPU: 3 PID: 77 Comm: python" below: it is put in
where both come with one look, which they do but for a fraction of a percent.

Pure, with a memory of the last lines. Sources: Documentation/ABI/testing/dev-kmsg; docs.nvidia.com/deploy/xid-errors;
NVIDIA's Fabric Manager guide, appendix on SXids; os-interface of the open kernel modules.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from megascale_agents.collectors import kernel_rules, kernel_rules_io, kernel_rules_net, kernel_rules_storage
from megascale_agents.collectors.nvlink_xids import advice_of
from megascale_agents.collectors.xid_table import meaning_of

# 1,024 characters: a record of the kernel has no more, and what a search looks at stays bounded (1 ms a line at worst).
MOST_TEXT = 1024
# A report and its duplicate come within a second; a GPU can't fall off the bus and be back within ten.
_SAME_S = 10.0
# Lines of one report follow each other within milliseconds; 2 s hold a console that is slow.
_REPORT_S = 2.0
_MOST_KEPT = 64
_MOST_BETWEEN = 8  # reports of others that stand between a report and its process
FELL_OFF = 79

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,20})[^)]{0,40}\): (\d{1,19})(?:, (.*))?$")
# The driver's prefix: the process and the channel at work. An unknown process is "<unknown>".
_WHOSE = re.compile(r"^pid='?(\d{1,19}|<unknown>)'?,? ?(?:name=[^,]*,? ?)?")
_ADDRESS = r"(?:PCI:)?((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_FELL = re.compile(rf"NVRM: .*?\b{_ADDRESS}(?:\.[0-7])?\b.*fallen off the bus")
_GPU_NAMED = re.compile(rf"NVRM: The NVIDIA GPU {_ADDRESS}\b")
_SXID = re.compile(r"nvidia-nvswitch\w*: SXid \((?:PCI:)?([0-9a-fA-F:.]{5,20})\): (\d{1,19})(?:, (.*))?$")
# Registers of the line before it.
_SXID_MORE = re.compile(r"Severity \d|Data \{|Engine instance")
_AT_WORK = re.compile(
    r"\bCPU: (?P<cpu>\d{1,6}) (?:UID: \d+ )?PID: (?P<pid>\d{1,10}) Comm: (?P<who>.{1,40}?)(?: Tainted| Not "
    r"tainted| Kdump|$)"
)
# A frame of the stack below a CPU that was held: it was the adapter's driver that held it.
_NIC_FRAME = re.compile(r"^ *mlx5e?_\w*poll\w*\+0x")
# Kernels before 4.20 name the process they choose before the one they kill, which may be its child.
_CHOSEN = re.compile(r"\bKill process .* or (?:sacrifice|a) child")
# By the kill and its control group; by the port and the device.
_TOLD_TWICE = frozenset({"oom_kill", "pcie_fatal"})
_WITHOUT_PROCESS = frozenset({"rcu_stall", "hard_lockup", "kernel_oops", "kernel_panic"})

RULES = (*kernel_rules.RULES, *kernel_rules_io.RULES, *kernel_rules_net.RULES, *kernel_rules_storage.RULES)
NEEDLES = tuple(
    dict.fromkeys(
        ["Xid", "fallen off the bus", "NVRM: The NVIDIA GPU", " Comm: ", "poll", *(rule.needle for rule in RULES)]
    )
)
_NEEDLES = re.compile("|".join(map(re.escape, sorted(NEEDLES))))
# Rules by the words in their lines: a line is matched only against rules whose words it contains.
_BY_NEEDLE = {needle: [rule for rule in RULES if rule.needle == needle] for needle in NEEDLES}


class Record(NamedTuple):
    """One line; ``mono_s`` is on the clock that Python's ``monotonic`` shows."""

    seq: int
    mono_s: float
    text: str


class KernelEvent(NamedTuple):
    """An event that the kernel logged.

    ``kind`` is xid, sxid or the name of a rule. ``text`` is a rule's sentence; of the others it is the line's own text.
    """

    kind: str
    mono_s: float
    text: str
    seq: int = -1
    pci: str = ""  # as in ``pci_key``
    number: int = 0  # of the Xid or SXid
    pid: int = 0  # the process at work, or one of its threads; 0 where not reported
    action: str = ""  # of an Xid: the action required, from its line or else from its row
    device: str = ""  # of a rule: disk, adapter, server, CPU
    severity: str = "warn"  # of a rule, and of an Xid with one in its line
    ends: str = ""  # name of the rule whose finding is over


def pci_key(text: str) -> str:
    """Return a PCI address as domain:bus:device: NVML, the driver and the kernel write it in three ways."""
    parts = text.lower().removeprefix("pci:").split(".")[0].split(":")
    if len(parts) == 2:
        parts.insert(0, "0")
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return text
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def is_worth(text: str) -> bool:
    """Whether a line may be an event; nearly all lines are not (5 us)."""
    return _NEEDLES.search(text) is not None


class LineReader:
    """Reads records in their order; remembers what the last ones named."""

    def __init__(self) -> None:
        self._gpu: tuple[str, float] = ("", 0.0)  # from a line that continues on the next one, and when
        self._held_s = -math.inf  # when a stuck CPU was last reported
        self._oops_s = -math.inf  # when an error inside the kernel was last reported; a report has several such lines
        self._chosen: KernelEvent | None = None  # the process that is to be killed for memory
        self._told: dict[tuple[str, str, int, int], float] = {}  # events that may be reported twice, and when they were

    def read(self, records: Iterable[Record]) -> list[KernelEvent]:
        """Return the events in these records."""
        found: list[KernelEvent] = []
        for record in records:
            text = record.text[:MOST_TEXT]
            text = text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)
            if " Comm: " in text and found and _name_process(found, record.mono_s, text):
                continue
            event = self._event(record._replace(text=text))
            if event is not None and event.kind == "soft_lockup":
                self._held_s = event.mono_s
            if event is not None and not self._is_child(event, found) and not self._is_told(event):
                self._chosen = event if _CHOSEN.search(text) else None
                found.append(event)
        return found

    def _is_child(self, event: KernelEvent, found: list[KernelEvent]) -> bool:
        """Whether this process was killed in place of the chosen one; then it stands where that stood."""
        chosen = self._chosen
        if event.kind != "oom_kill" or chosen is None or event.pid == chosen.pid or chosen not in found:
            return False
        self._chosen = None
        if not 0.0 <= event.mono_s - chosen.mono_s <= _REPORT_S:
            return False
        self._told.pop((chosen.kind, chosen.pci, chosen.number, chosen.pid), None)
        self._is_told(event)
        found[found.index(chosen)] = event._replace(text=event.text + chosen.text.partition("for memory")[2])
        return True

    def _event(self, record: Record) -> KernelEvent | None:
        seq, mono_s, text = record
        if match := _XID.search(text):
            return _xid(match, mono_s, seq)
        if match := _SXID.search(text):
            return _sxid(match, mono_s, seq)
        if "NVRM" in text and (pci := self._fell(text, mono_s)):
            return KernelEvent(
                "xid", mono_s, "GPU has fallen off the bus", seq, pci, FELL_OFF, action=meaning_of(FELL_OFF).action
            )
        if self._is_held(text, mono_s):
            said = "the driver of an adapter (mlx5) held a CPU and hangs"
            return KernelEvent("nic_stuck", mono_s, said, seq, severity="fail")
        rules = (rule for needle, rules in _BY_NEEDLE.items() if needle in text for rule in rules)
        found = ((rule, rule.pattern.search(text)) for rule in rules)
        return next((_ruled(rule, match, mono_s, seq) for rule, match in found if match is not None), None)

    def _is_held(self, text: str, mono_s: float) -> bool:
        """Whether a frame of the stack below a CPU that was held is the adapter's; once for each."""
        if not 0.0 <= mono_s - self._held_s <= _REPORT_S or _NIC_FRAME.match(text) is None:
            return False
        self._held_s = -math.inf
        return True

    def _fell(self, text: str, mono_s: float) -> str:
        """Return the address of a GPU that left the bus, by this line or by one that named it just before."""
        if match := _FELL.search(text):
            return pci_key(match[1])
        if match := _GPU_NAMED.search(text):
            self._gpu = (pci_key(match[1]), mono_s)
        pci, named_s = self._gpu
        if pci and "fallen off the bus" in text and 0.0 <= mono_s - named_s <= _REPORT_S:
            return pci
        return ""

    def _is_told(self, event: KernelEvent) -> bool:
        if event.kind == "kernel_oops":
            since_s, self._oops_s = event.mono_s - self._oops_s, event.mono_s
            return 0.0 <= since_s <= _REPORT_S
        if event.kind not in _TOLD_TWICE and event.number != FELL_OFF:
            return False
        key = (event.kind, event.pci, event.number, event.pid if event.kind == "oom_kill" else 0)
        before_s = self._told.pop(key, None)
        self._told[key] = event.mono_s
        while len(self._told) > _MOST_KEPT:
            del self._told[next(iter(self._told))]
        return before_s is not None and abs(event.mono_s - before_s) <= _SAME_S


def _xid(match: re.Match[str], mono_s: float, seq: int) -> KernelEvent:
    said, number = match[3] or "", int(match[2])
    whose = _WHOSE.match(said)
    pid = int(whose[1]) if whose is not None and whose[1].isdigit() else 0
    said = (said[whose.end() :] if whose is not None else said).strip()
    advice = advice_of(number, said)
    event = KernelEvent("xid", mono_s, said, seq, pci_key(match[1]), number, pid)
    if advice is None:
        return event._replace(action=meaning_of(number).action)
    return event._replace(action=advice.action, text=advice.text, severity="warn" if advice.warn else "note")


def _sxid(match: re.Match[str], mono_s: float, seq: int) -> KernelEvent | None:
    said = match[3] or ""
    if _SXID_MORE.match(said):
        return None
    return KernelEvent("sxid", mono_s, said, seq, pci_key(match[1]), int(match[2]))


def _ruled(rule: kernel_rules.Rule, match: re.Match[str], mono_s: float, seq: int) -> KernelEvent:
    groups = {name: (value or "").strip()[:120] for name, value in match.groupdict().items()}
    said = rule.says.format_map({name: value or "(not told)" for name, value in groups.items()})
    pci = groups.get("pci", "")
    return KernelEvent(
        kind=rule.name,
        mono_s=mono_s,
        text=said,
        seq=seq,
        pci=pci_key(pci) if pci else "",
        pid=int(groups.get("pid") or "0"),
        device=groups.get("device", "") or pci,
        severity=rule.severity,
        ends=rule.ends,
    )


def _name_process(found: list[KernelEvent], mono_s: float, text: str) -> bool:
    """Put the process into the report that it belongs to; whether there was one."""
    match = _AT_WORK.search(text)
    if match is None:
        return False
    for index in range(len(found) - 1, max(-1, len(found) - 1 - _MOST_BETWEEN), -1):
        event = found[index]
        if event.kind in _WITHOUT_PROCESS and not event.pid and mono_s - event.mono_s <= _REPORT_S:
            told = f"{event.text}; at work was {match['who']} (process {match['pid']})"
            found[index] = event._replace(pid=int(match["pid"]), text=told)
            return True
    return False
