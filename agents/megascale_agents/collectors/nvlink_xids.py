# SPDX-License-Identifier: Apache-2.0
"""Xids whose line carries the advice: NVLink (74), NVLink 5 (144 to 150) and the driver's recovery action (154).

    Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 ...)
                               unit           severity         link  IntrInfo   error status
    Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)

Severity and unit stand in the line as words. Nonfatal means that the hardware went on: nothing follows, but for two
units that report an ended process (they are followed by a 154 where more is needed). Fatal asks for a reset,
but for two causes of a link that went down by an administrator's will. Why a link went down is in bits 25 to 20 of
IntrInfo.

Of 74 seven registers stand in the line. Only those of the catalog's work flow marked "ignore" or "continue" make it
less than a check of the links: three bits of the first, and thresholds of corrected errors in the fifth.

Sources: NVIDIA's Xid catalog, sheets "XID 144-150 Decode" and "Guidance Classes" (read 2026-11), which tests compare
row by row; names of the causes from the link-down page of the adapters' programming manual, where the catalog's
note on peers agrees with them. Pure.
"""

import re
from typing import NamedTuple

RECOVERY, OLD_NVLINK = 154, 74
NVLINK = range(144, 151)
BY_LINE = frozenset({OLD_NVLINK, RECOVERY, *NVLINK})

_LINE = re.compile(
    r"^(?P<unit>[A-Z][\w/ ]{1,40}?) +(?P<severity>Non-?fatal|(?:Link )?Fatal)\b"
    r"(?:.*?\bLink +(?P<link>-?\d{1,3}))?"
    r"(?:.*?\((?P<info>0x[0-9a-f]{1,8})[, ]+(?P<status>0x[0-9a-f]{1,8}))?",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"recovery action changed from .*? to (?P<number>0x[0-9a-f]{1,4}|\d{1,3})? ?\(?(?P<word>[^)]*)", re.IGNORECASE
)

_REGISTERS = re.compile(r"\((0x[0-9a-f]{1,8}(?:, ?0x[0-9a-f]{1,8}){6})\)", re.IGNORECASE)
_IGNORED_1 = 1 << 0 | 1 << 23 | 1 << 30
_THRESHOLDS_5 = 1 << 20 | 1 << 23 | 1 << 26 | 1 << 29
# The process ends (cross-containment), the GPU goes on: unit -> bits of the error status.
_ENDS_PROCESS = {"RLW_REMAP": 0x3F, "RLW_SRC_TRACK": 0xC}
# An error of the receiver that was raised to fatal: bit 7 beside unit 6 (driver 575 on), bit 10 beside the older unit.
_RAISED = ((0xFF, 0x86), (0x7FF, 0x4C2))
# Both ends are well: a link that was turned off, and one that the host took down.
_BY_WILL = {0x26: "its side was turned off", 0x28: "the host took it down"}
_LINK_DOWN = {
    0x01: "for an unknown reason",
    0x02: "for too many bit errors",
    0x04: "for lost alignment",
    0x0A: "for a packet that was sent again too often",
    0x0F: "by a command from outside",
    0x10: "by a command from outside, with many bit errors",
    0x11: "by a command",
    0x12: "by a command, with many bit errors",
    0x15: "because its peer went down",
    0x16: "by a management command",
    0x20: "because its peer went to sleep",
    0x21: "because its peer was turned off",
    0x22: "because its peer was turned off and locked",
    0x23: "because its peer was too hot",
    0x24: "because its peer was forced down",
    0x25: "because its peer was reset",
    0x2A: "for a bad signal or cable",
    0x2B: "for a bad signal or cable",
}  # fmt: skip
_WORDS = (
    ("reboot", "restart_node"),
    ("reset", "reset_gpu"),
    ("flr", "reset_gpu"),
    # Traffic between GPUs has to end, which the restart of the processes does; the GPU itself is well.
    ("p2p", "restart_app"),
    ("none", "none"),
)
# As NVML numbers them, for a driver with other words.
_NUMBERS = {
    0: "none",
    1: "reset_gpu",
    2: "restart_node",
    3: "restart_app",
    4: "reset_gpu",
    6: "reset_gpu",
    7: "restart_node",
}


class Advice(NamedTuple):
    """What a line asks for: an action of ``xid_table``; ``warn`` where no action follows but a person should look."""

    action: str
    text: str
    warn: bool = False


def advice_of(number: int, said: str) -> Advice | None:
    """Return what the line of an Xid advises; None when it is not of these, or can't be read."""
    if number == RECOVERY:
        return _recovery(said)
    if number == OLD_NVLINK and (match := _REGISTERS.search(said)):
        return _old_nvlink([int(one, 16) for one in match[1].split(",")])
    if number in NVLINK and (match := _LINE.match(said)):
        return _nvlink(match)
    return None


def _recovery(said: str) -> Advice | None:
    match = _ADVICE.search(said)
    if match is None:
        return None
    word = match["word"].strip().lower()
    action = next((action for part, action in _WORDS if part in word), "")
    if not action and match["number"]:
        action = _NUMBERS.get(int(match["number"], 0), "")
    return Advice(action or "contact_support", f"the driver advises: {match['word'].strip()[:60] or match['number']}")


def _old_nvlink(registers: list[int]) -> Advice | None:
    first, _, third, fourth, fifth = registers[:5]
    if not (first or fifth) or first & ~_IGNORED_1 or third or fourth or fifth & ~_THRESHOLDS_5:
        return None
    if fifth:
        return Advice("none", "many errors of an NVLink were corrected", warn=True)
    return Advice("none", "an NVLink error that may be ignored")


def _nvlink(match: re.Match[str]) -> Advice:
    unit = match["unit"].strip()
    info, status = (int(match[name] or "0", 16) for name in ("info", "status"))
    link = f"NVLink {int(match['link'])}" if match["link"] and int(match["link"]) >= 0 else "an NVLink"
    is_fatal = "non" not in match["severity"].lower()
    text = f"{'a fatal' if is_fatal else 'a non-fatal'} error of {link} in {unit}"
    is_raised = unit == "RLW_RXPIPE" and any(info & mask == raised for mask, raised in _RAISED)
    if not is_fatal and not is_raised:
        ends = bool(status & _ENDS_PROCESS.get(unit, 0)) and not status & 0x80000000
        return Advice("restart_app" if ends else "none", text, warn=ends or unit == "NETIR_BER_EVENT")
    if unit.split("/")[0] in ("NETIR_LINK_EVT", "NETIR_LINK_DOWN"):
        cause = info >> 20 & 0x3F
        if cause in _BY_WILL:
            return Advice("none", f"{link} went down: {_BY_WILL[cause]}", warn=True)
        text = f"{link} went down {_LINK_DOWN.get(cause, f'(cause {cause})')}"
    return Advice("reset_gpu", text)
