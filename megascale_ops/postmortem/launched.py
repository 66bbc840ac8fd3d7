# SPDX-License-Identifier: Apache-2.0
"""What launchers say of the ends of ranks, in a log that no rank wrote.

Every launcher has a sentence of its own, and all of them have two parts: who (a rank, task, process, worker, PE or
container, with a number) and how it ended (a signal, by number or by name, or a code). The parts are looked for, not
the sentences, so that one of a launcher that is new here reads the same. Two launchers need more: torchrun
counts local ranks first and tells the rank in its report, and DeepSpeed repeats the command of the process that it
started last, whichever has died, so that no rank is named by it.

Who is told to have ended after a batch system has cancelled the step was ended by it, and so was who got a signal by
which launchers stop the rest.

Pure: a text in, ranks and their statuses out.
"""

import re
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_WHO = (
    r"(?:\b(?:[Gg]lobal |MPI |PE )?(?:[Rr]ank|RANK|[Tt]ask|[Ww]orker)s?[:=]? ?#?|\(first noticed rank "
    r"|(?<!Sending )\b[Pp]rocess (?=\d{1,6} (?:terminated with|exit with status) ))"
    r"\[?(?P<who>\d{1,6}(?:(?:-|, ?)\d{1,6}){0,64})\b\]?"
)
# strsignal()'s words, as srun, aprun and shells print them.
_NAMES = {
    "Segmentation fault": 11, "Bus error": 7, "Illegal instruction": 4, "Aborted": 6, "Killed": 9, "Terminated": 15,
    "Floating point exception": 8, "Hangup": 1, "Interrupt": 2, "Out Of Memory": 9,
}  # fmt: skip
_HOW = (
    r"(?:signal:? ?\(?(?:(?P<signal>\d{1,2})\b|(?P<name>SIG[A-Z]{3,5})\b|(?P<words>[A-Z][a-z]+ [a-z]+\b|[A-Z][a-z]+\b))"
    r"|: ?(?P<named>" + "|".join(_NAMES) + r")\b"
    r"|(?:exit(?:ed|s)?(?: with)?(?: exit)? |return |exit |\] )(?:code|status(?: code)?)[ :=]{1,3}(?P<code>-?\d{1,4})\b"
    r"|\bexit(?:Status|Code): (?P<yarn>-?\d{1,4})\b"
    r"|\bwith (?:exit |error)?code (?P<with>-?\d{1,4})\b"
    r"|(?P<bare>terminated with the following error|exiting improperly|has (?:failed|crashed|died)\b|\bstart failed\b"
    r"|\b(?:died|exited|ended) unexpectedly\b|\bon (?:host|node) \S{1,120} (?:failed|died|exited) and\b"
    r"|was (?:killed|aborted)\b))"
)
# 400 characters between the two: a container's command stands there.
_SENTENCE = re.compile(_WHO + r"(?P<between>[^\n]{0,400}?)" + _HOW)
_HYDRA = re.compile(
    r"RANKS? (\d{1,6})\b[^\n]{0,200}\n[^\n]{0,8}(?:KILLED BY SIGNAL: (\d{1,2})|EXIT (?:CODE|STATUS): (\d{1,3}))"
)
_MPI_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d{1,6})\b")
_SNIPPET = re.compile(r"^(?:\([^)\n]{1,80}\) ?)?\[Rank (\d{1,6}) Error Snippet\]", re.MULTILINE)
# Ray carries an actor's error to its driver, and names the actor by what it prints of itself.
_CARRIED = re.compile(r"ray::[^\n]{1,200}\(pid=\d{1,8}, ip=[^\n]{1,120}\brepr=\w{1,80}\[rank=(\d{1,6})\]\)")
_REPORT = re.compile(
    r"rank\s*: (?P<rank>\d{1,6}) \(local_rank: \d{1,6}\)\s+exitcode\s*: (?P<code>-?\d{1,4})"
    r"(?: \(pid: (?P<pid>\d{1,8})\))?"
)
# LSF's table of a job's tasks.
_TABLE = re.compile(r"^TID +HOST_NAME .*$", re.MULTILINE)
_OF_TABLE = re.compile(
    r"^(\d{1,6}) +\S{1,120} .{1,200}?\b(?:Exit \((\d{1,3})\)|Signaled \((SIG[A-Z]{2,6})\))", re.MULTILINE
)
_ROOT = re.compile(r"Root Cause \(first observed failure\):.{0,400}?rank\s*: (\d{1,6})", re.DOTALL)
_LOCAL = re.compile(r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<rank>\d{1,6}) \(pid: (?P<pid>\d{1,8})\)")
_CANCELLED = re.compile(r"error: \*\*\* (?:JOB|STEP) [^\n]{0,120}CANCELLED")
_FOR_A_REASON = re.compile(r"CANCELLED[^\n]{0,80}DUE TO|TERM_RUNLIMIT|DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE)")
# Slurm's reason for a step of which a node was lost.
LOST_NODE = "DUE TO NODE FAILURE"
# MPI's launchers, of a node that they hear no more of: their own word, and no rank's.
_LOST_DAEMON = re.compile(r"\b(?:ORTE|PRTE|PRRTE) has lost communication with a remote daemon[^\n]*\n?")
_ON_NODE = re.compile(r"\bRemote daemon *: \S{1,200} on node (\S{1,200})|\berror: Node failure on (\S{1,200})")
_GOES_ON = re.compile(r"\bretry|\brestart(?:ing|ed)\b|\bwill\b|\battempt \d", re.IGNORECASE)
_RESTARTED = re.compile(r"Worker group FAILED\. \d+/\d+ attempts left; will restart worker group")
# A sentence that is broken after the word before a number.
_BROKEN = re.compile(r"\b(on|with|by|of|exiting)\n(?=\S)")
# A bar before each line, as programs draw it that quote another's output.
_FRAMED = re.compile(r"^[ \t]{0,40}[|│] ", re.MULTILINE)
# Below all signals: YARN's own, of containers that it took away or killed.
_FEWEST_OF_YARN = -99
# How launchers and batch systems stop the rest.
ASKED = {-15, -2, -1, 143, 130, 129}


class Told(NamedTuple):
    """What launchers said: the status of each rank that failed, its line, and who was first."""

    codes: dict[int, int]
    lines: dict[int, str]
    first: tuple[int, ...] = ()  # several where one sentence names them
    is_local: bool = False  # by local ranks alone: the rank of a job of one node
    pids: Mapping[int, int] = MappingProxyType({})  # by process, whose rank it is


def told_in(text: str) -> Told:
    """Return what launchers say of ends in a text that no rank wrote."""
    text = _FRAMED.sub("", text)
    flat = _BROKEN.sub(r"\1 ", text)
    codes: dict[int, int] = {}
    lines: dict[int, str] = {}
    reports = list(_REPORT.finditer(text))
    for found in reports:
        codes.setdefault(int(found["rank"]), int(found["code"]))
    pids = {int(found["pid"]): int(found["rank"]) for found in reports if found["pid"]}
    roots = [int(found[1]) for found in _ROOT.finditer(text)]
    if reports:
        lines = {int(found["rank"]): _status_line(int(found["code"])) for found in reports}
    locals_ = [] if reports else list(_LOCAL.finditer(text))
    for found in locals_:
        codes.setdefault(int(found["rank"]), int(found["code"]))
        lines.setdefault(int(found["rank"]), _status_line(int(found["code"])))
        pids.setdefault(int(found["pid"]), int(found["rank"]))
    if not codes:
        codes, lines = _by_sentences(flat)
    failed = [rank for rank, code in codes.items() if code not in ASKED and code]
    if reports or locals_:
        first = tuple(roots[:1] or failed[:1])
    else:
        first = tuple(rank for rank in failed if lines[rank] == lines[failed[0]])
        if len(first) > 1:  # a whole node failed alike, and so did the ranks of others that failed with the same status
            first = tuple(rank for rank in failed if codes[rank] == codes[failed[0]])
    return Told(codes, lines, first, bool(locals_), pids)


def last_attempt(text: str) -> str:
    """Return what launchers said since torchrun's agent started its ranks anew: what they did before is over."""
    found = [*_RESTARTED.finditer(text)] if "will restart worker group" in text else []
    return text[found[-1].end() :] if found else text


def before_the_cancel(text: str) -> str:
    """Return a text up to where a batch system has ended the step: what follows are consequences."""
    found = _CANCELLED.search(text)
    return text[: found.start()] if found is not None else text


def lost_nodes(text: str) -> tuple[str, ...]:
    """Return the nodes that a launcher has lost, by name."""
    return tuple(sorted({found[1] or found[2] for found in _ON_NODE.finditer(text)}))


def without_lost_daemons(text: str) -> str:
    """Return a text without the line by which MPI's launcher tells that it lost a node: no rank of it has said that."""
    return _LOST_DAEMON.sub("", text)


def why_ended(text: str) -> str:
    """Return the line by which a batch system says that it has ended the job, and why; "" without one."""
    found = _FOR_A_REASON.search(text)
    if found is None:
        return ""
    return text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0][:300]


def ranks_of(who: str) -> list[int]:
    """Return the numbers of a list as Slurm writes it, "4,6-7"; at most 4,096 of them."""
    found: list[int] = []
    for part in who.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), int(first) + 4095) + 1)
    return found[:4096]


def _by_sentences(text: str) -> tuple[dict[int, int], dict[int, str]]:
    codes: dict[int, int] = {}
    lines: dict[int, str] = {}
    cancelled = _CANCELLED.search(text)
    until = cancelled.start() if cancelled is not None else len(text)
    found = [(one.start(), ranks_of(one["who"]), _code_of(one), one) for one in _SENTENCE.finditer(text, 0, until)]
    hydras = _HYDRA.finditer(text)
    found += [(one.start(), [int(one[1])], -int(one[2]) if one[2] else int(one[3]), one) for one in hydras]
    if (table := _TABLE.search(text)) is not None:
        rows = _OF_TABLE.finditer(text, table.end())
        found += [(one.start(), [int(one[1])], int(one[2]) if one[2] else -_number_of(one[3]), one) for one in rows]
    alone = (one for form in (_MPI_ABORT, _SNIPPET, _CARRIED) for one in form.finditer(text))
    found += [(one.start(), [int(one[1])], 1, one) for one in alone]
    for at, ranks, code, one in sorted(found, key=lambda told: told[0]):
        line = text[text.rfind("\n", 0, at) + 1 : (text.find("\n", one.end()) + 1 or len(text) + 1) - 1]
        if code == 0 or _GOES_ON.search(line):
            continue
        for rank in ranks:
            codes.setdefault(rank, code)
            lines.setdefault(rank, line[:400])
    return codes, lines


def _number_of(name: str) -> int:
    return int(getattr(signal, name, signal.SIGKILL))


def _code_of(found: re.Match[str]) -> int:
    if number := found["signal"]:
        return -int(number)
    if name := found["name"]:
        return -_number_of(name)
    if words := found["words"] or found["named"]:
        known = next((number for text, number in _NAMES.items() if text.startswith(words)), 0)
        return -known if known else 1
    code = int(found["code"] or found["with"] or found["yarn"] or 1)
    return -signal.SIGKILL if code < _FEWEST_OF_YARN else code


def _status_line(code: int) -> str:
    return f"exitcode : {code}"
