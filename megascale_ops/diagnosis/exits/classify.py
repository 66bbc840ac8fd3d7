# SPDX-License-Identifier: Apache-2.0
"""What one rank's end means: a class of fault, a lost peer, its runner's order, or nothing at all.

An exception that ended it is the best evidence; then the last words of its output, then the exit status. What the rank
survived (``error_records``, ``diagnosis/exits/last_words``) is no evidence of its end. Peers of a dead rank die of it
within milliseconds with words of their own: Gloo "Connection closed by peer", NCCL "remote process exited". Words that
any library may use ("Connection refused") mean a peer only in torch's own exceptions: a script has connections of its
own.

Texts are matched with one table (``diagnosis/exits/word_table``), whether they were raised or printed.

Pure: how one rank ended in, a class and its reason out.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.exits.error_records import ended_it, error_of, torn_file, words
from megascale_ops.diagnosis.exits.exit_status import SIGNAL_FAULTS, TRANSLATED_SURE, signal_name, signal_of, told_by
from megascale_ops.diagnosis.exits.general_rows import LOADER_ASKED, NO_THREADS
from megascale_ops.diagnosis.exits.last_traceback import before_it
from megascale_ops.diagnosis.exits.last_words import Heard, fault_of, heard, row_of_error, weight_of
from megascale_ops.diagnosis.exits.named_ranks import Named, gathered_in
from megascale_ops.diagnosis.exits.word_rows import CAUSE, NOBODY, VICTIM, Row
from megascale_ops.diagnosis.exits.word_table import GPU_WAIT
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import HostReading
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError, RankReport

# Collectives of Python objects send sizes first. Where another rank's numbers came instead, they are read as a size, or
# as a pickle: torch requests an impossible amount of memory, or finds no pickle.
_GARBAGE = re.compile(
    r"more than 1EB|Storage size calculation overflowed|numel: integer multiplication overflow|negative dimension"
    r"|UnpicklingError|pickle data was truncated"
)
_OBJECTS = re.compile(
    r"\bin (?:all_gather_object|gather_object|broadcast_object_list|scatter_object_list|recv_object_list"
    r"|_tensor_to_object)\b"
)
# How a rank ends when its runner stops it: no exception of the script's own.
_STOPPED_BY = ("KeyboardInterrupt", "SystemExit", "SignalException")
# Raised when a rank is stopped: by Python on SIGINT, by Lightning on SIGTERM.
_INTERRUPTS = ("KeyboardInterrupt", "SIGTERMException")
# What NCCL reports of any fault below it: words of the rank's own are better evidence.
_GENERIC = "nccl_error"
# A trap on the GPU, as CUDA reports it: ``__trap`` and ``assert`` end a kernel in one of these ways.
_TRAPPED = re.compile(r"unspecified launch failure|device-side assert|illegal instruction", re.IGNORECASE)
_OF_A_CHILD = re.compile(r"^[\w.]{0,80}(?:CalledProcessError|ChildFailedError)\b")
# An exception over the end of another process or thread of the rank, which sends its reader to what was printed before.
_POINTS_ELSEWHERE = re.compile(
    r"[Ss]ee (?:the )?(?:root cause|stack ?trace|traceback|logs?|errors?|output|details)\b.{0,40}\b(?:above|for|of)\b"
    r"|[Cc]heck (?:the )?(?:logs?|output)s? (?:of|above|for)"
    r"|due to an? (?:exception|error) in an?other|background process|\b[Ee]rror is reported as above"
    r"|\b(?:[Ww]orker|[Cc]hild|[Ss]ub)[ _]?(?:[Pp]roc(?:ess)?(?:es)?|s)?\b.{0,60}"
    r"\b(?:died|failed|crashed|exited|terminated)\b"
)
# libstdc++: a std::thread was destroyed while it ran; with a C++ exception it names the type.
_THREADS_RAN, _THREW = "terminate called without an active exception", "terminate called after throwing"
# A page of shared memory that has no room raises SIGBUS where it is first touched, as broken memory does. 1 MiB free:
# what is left is less than a tensor.
_SHM_FULL_BYTES, _SHM_SURE = 1 << 20, 0.8
# 0.97 of the host's memory in use: a SIGKILL then is nearly always the kernel's out-of-memory killer.
_MEMORY_FULL = 0.97
SURE = 0.95
# 0.6: what it died of may have been the last of what a lost peer brought it.
_AFTER_A_PEER = 0.6
# 0.8: an own fault among its last words, though its end means a lost peer.
_BEFORE_A_PEER = 0.8


def is_interrupt(error: RankError) -> bool:
    """Say whether an exception is raised where a rank is asked to end, and is none of the script's own."""
    return error.type.rpartition(".")[2] in _INTERRUPTS


class Ended(NamedTuple):
    """How one rank ended: as its runner reported it, ``age_s`` before now.

    Where no runner of ours has seen it, status and time are taken for granted, and not told to the user.
    """

    node: str
    exit: RankExit
    age_s: float
    has_status: bool = True
    has_time: bool = True


class Judged(NamedTuple):
    """The meaning of one rank's end, and the words it rests on."""

    ended: Ended
    fault: str  # a class of FAULTS ("unknown": its words name no cause), or "peer", "by_us", "normal"
    why: str
    sure: float = SURE  # how sure a verdict may be that rests on this alone
    said: tuple[str, ...] = ()  # names of the table's rows among its last words
    was_asked: bool = False  # an interrupt ended it, as batch systems and frameworks stop the rest


def classify(one: Ended, report: RankReport | None, host: HostReading | None) -> Judged:
    """Return the meaning of a rank's end."""
    exit_ = one.exit
    error = error_of(exit_, report)
    ended_by = error if error is not None and ended_it(exit_, error) else None
    spoken = heard(exit_, report)
    said = tuple(dict.fromkeys(word.row.name for word in spoken))
    if ended_by is not None and not (exit_.by_us and ended_by.type.rpartition(".")[2] in _STOPPED_BY):
        return _by_error(one, ended_by, spoken)._replace(said=said)
    if plain := _plainly(one):
        return plain._replace(said=said)
    if error is not None:
        survived = row_of_error(error.type, error.message)
        spoken = [word for word in spoken if fault_of(word.row) != fault_of(survived)]  # its own traceback
    victim = _victim_by_words(spoken, exit_.code)
    return (Judged(one, "peer", victim) if victim else _by_status(one, spoken, host))._replace(said=said)


def _plainly(one: Ended) -> Judged | None:
    """Return an end that needs no words: by order, in order, or unseen."""
    if one.exit.by_us:
        return Judged(one, "by_us", "stopped by its runner or launcher")
    if one.exit.vanished:
        return Judged(one, "killed", "its process was gone in the midst of its work, and its launcher did not say how")
    return Judged(one, "normal", "ended normally") if one.exit.code == 0 else None


def _by_error(one: Ended, error: RankError, spoken: Sequence[Heard]) -> Judged:
    """Return the meaning of an exception that ended the rank."""
    if is_interrupt(error):
        return _of_interrupt(one, error, spoken)
    if (gathered := gathered_in(text_of(one.exit))) is not None:
        return _of_gathered(one, error, gathered)
    row = _row_of(error, one.exit.stderr_tail)
    fault = "collective_mismatch" if row is None else fault_of(row)
    meaning = (row.hint if row is not None else "") or (
        torn_file(error, one.exit.stderr_tail) if fault == "exception" else ""
    )
    hint = f" ({meaning})" if meaning else ""
    own = [word for word in spoken if word.row.role == CAUSE and not word.row.weak and not word.row.late and word.line]
    is_anothers = fault in ("peer", "unknown") or (row is not None and row.name == _GENERIC)
    if own and (is_anothers or (fault == "exception" and _POINTS_ELSEWHERE.search(error.message))):
        return Judged(one, own[0].row.fault, f"{_quoted(own[0])}; then {words(error)}", _BEFORE_A_PEER)
    if fault == "exception" and (root := _root_of(one.exit)) is not None:
        return Judged(one, fault_of(root[1]), f"{words(root[0])}; then {words(error)}", _BEFORE_A_PEER)
    if trap := _trap_of_a_wait(spoken, words(error)):
        return Judged(one, "peer", f"a kernel of it gave up waiting{_told(trap)}; then {words(error)}")
    sure = row.sure if row is not None else SURE
    if fault == "exception" and any(word.row.role == VICTIM for word in spoken):
        sure = _AFTER_A_PEER
    was_asked = row is not None and row.name == LOADER_ASKED
    return Judged(one, fault, f"{words(error)}{hint}", sure, was_asked=was_asked)


def _of_interrupt(one: Ended, error: RankError, spoken: Sequence[Heard]) -> Judged:
    """Return what an interrupt means: the rank was asked to go, or a library in it sent it to itself as it failed."""
    by_itself = next((word for word in spoken if word.row.name == NO_THREADS.name), None)
    if by_itself is not None:
        return Judged(one, by_itself.row.fault, f"{_quoted(by_itself)}; then {words(error)}", _BEFORE_A_PEER)
    return Judged(one, "killed", f"interrupted: {words(error)}", was_asked=True)


def _root_of(exit_: RankExit) -> tuple[RankError, Row] | None:
    """Return the exception at the root of a chain whose last one says less: memory, a disk, a GPU."""
    found = ((error, row_of_error(error.type, error.message)) for error in before_it(exit_.stderr_tail))
    is_sure = (one for one in found if one[1].role == CAUSE and not one[1].weak and one[1].fault != "exception")
    return next(is_sure, None)


def _of_gathered(one: Ended, error: RankError, gathered: Named) -> Judged:
    """Return whether a rank raised what it met itself or what a distributed checkpoint carried to it from another."""
    if one.exit.rank not in gathered.ranks:
        return Judged(one, "peer", gathered.why, gathered.sure)
    # What was carried may have been cut away; the script's own words about it are there.
    own = fault_of(row_of_error(error.type, error.message)) if gathered.fault == "exception" else gathered.fault
    fault = own if own in FAULTS and own != "unknown" else gathered.fault
    return Judged(one, fault, f"{gathered.why}; it raised {words(error)}", gathered.sure)


def text_of(exit_: RankExit) -> str:
    """Return all that a rank said as it ended."""
    return f"{exit_.error.message if exit_.error is not None else ''}\n{exit_.stderr_tail}"


def _row_of(error: RankError, traceback: str) -> Row | None:
    """Return the table's row for an exception; None for one that only another rank's numbers explain."""
    if _GARBAGE.search(f"{error.type}: {error.message}") and _OBJECTS.search(traceback):
        return None
    return row_of_error(error.type, error.message)


def class_of_error(error: RankError, traceback: str = "") -> str:
    """Return the class of an exception, raised where the end of stderr shows."""
    row = _row_of(error, traceback)
    return "collective_mismatch" if row is None else fault_of(row)


def _trap_of_a_wait(spoken: Sequence[Heard], text: str) -> Heard | None:
    """Return the line of a kernel that waited in vain, where ``text`` is CUDA's report of the trap it then made."""
    return next((word for word in spoken if word.row.name == GPU_WAIT), None) if _TRAPPED.search(text) else None


def _victim_by_words(spoken: Sequence[Heard], code: int) -> str:
    """Return why a rank is a victim by its last words, "" where it is none."""
    first = next((at for at, word in enumerate(spoken) if word.row.role == VICTIM), -1)
    if first < 0 or signal_of(code) == signal.SIGKILL:
        return ""
    for at, word in enumerate(spoken):
        is_own = word.row.role == CAUSE and not word.row.weak and not _trap_of_a_wait(spoken[:at], word.line)
        # A memory fault while it goes down is one more of the consequences; before any word of a peer it is a cause.
        if is_own and not (word.row.late and at > first):
            return ""
    names = ", ".join(dict.fromkeys(word.row.name for word in spoken if word.row.role != NOBODY))
    return f"its last words are of a lost peer ({names}){_told(spoken[first])}"


def _by_status(one: Ended, spoken: Sequence[Heard], host: HostReading | None) -> Judged:
    """Return the meaning of a rank's exit status, when it left no exception."""
    code = one.exit.code
    own = [
        word for word in spoken if word.row.role == CAUSE and word.row.name != NO_THREADS.name
    ]  # a warning, if alone
    if signal_of(code) == signal.SIGKILL:
        return _killed(one, own, host)
    strong = [word for word in own if not word.row.weak]
    if strong:
        return Judged(one, strong[0].row.fault, _quoted(strong[0]), strong[0].row.sure)
    if nobody := [word for word in spoken if word.row.role == NOBODY]:
        why = f"{_died_of(code)}, and its last words name nobody{_told(nobody[0])}: {nobody[0].row.why}"
        return Judged(one, "unknown", why, nobody[0].row.sure)
    weak = next((word for word in own if word.row.fault not in ("exception", "aborted")), None)
    if signal_of(code):
        return _by_signal(one, own, weak, host)
    named = weak or (own[0] if own else None)
    # The black box records uncaught exceptions. One that only the output shows was caught: the code is the script's.
    # What a launcher below the rank repeats was its child's, and had no box.
    was_caught = bool(one.exit.phase) and not any(_OF_A_CHILD.search(word.line) for word in own)
    if named is not None and not (named.row.fault == "exception" and was_caught):
        return Judged(one, named.row.fault, f"exit code {code}, {_quoted(named)}", named.row.sure)
    last = _last_line(one.exit.stderr_tail)
    return Judged(
        one, "exit_code", f"exit code {code}, no exception seen" + (f"; it last wrote: {last}" if last else "")
    )


def _by_signal(one: Ended, own: Sequence[Heard], weak: Heard | None, host: HostReading | None) -> Judged:
    """Classify a rank that died of a signal without strong last words."""
    code = one.exit.code
    if signal_of(code) == signal.SIGBUS and host is not None and host.has_shm and host.shm_free_bytes < _SHM_FULL_BYTES:
        left_kib = host.shm_free_bytes >> 10
        why = f"{_died_of(code)}, and shared memory of its host (/dev/shm) is full: {left_kib} KiB are free"
        return Judged(one, "out_of_memory", why, _SHM_SURE)
    if raised := _raised_before_it_aborted(own, one.exit):
        return Judged(one, raised.row.fault, f"{_quoted(raised)}; {_died_of(code)} while it ended", _BEFORE_A_PEER)
    fault = SIGNAL_FAULTS.get(signal_of(code), "killed")
    sure = SURE if code < 0 else TRANSLATED_SURE
    told = f" ({told_by(code)})" if told_by(code) else ""
    quoted = f"; {_quoted(weak)}" if weak is not None and weak.row.fault == fault else ""
    return Judged(one, fault, f"{_died_of(code)}{told}: {FAULTS[fault].meaning}{quoted}", sure)


def _raised_before_it_aborted(own: Sequence[Heard], exit_: RankExit) -> Heard | None:
    """Return the exception that ended a rank whose end C++ then aborted: a thread still ran, or a destructor threw.

    What C++ has thrown is a consequence only where Python's exception stands right before it.
    """
    at = next((at for at, word in enumerate(own) if _THREADS_RAN in word.line), 0)
    thrown = next((at for at, word in enumerate(own) if _THREW in word.line), -1)
    if signal_of(exit_.code) != signal.SIGABRT:
        return None
    raised = next((word for word in reversed(own[: max(at, thrown)]) if word.row.fault == "exception"), None)
    if thrown < 0 or raised is None:
        return raised
    between = exit_.stderr_tail.partition(raised.line)[2].partition(_THREW)[0]
    return None if any(weight_of(line) for line in between.splitlines()[1:] if line.strip()) else raised


def _died_of(code: int) -> str:
    return f"died of {signal_name(signal_of(code))}" if signal_of(code) else f"exit code {code}"


def _quoted(word: Heard) -> str:
    """Return the meaning of a line, and the line."""
    hint = f" ({word.row.hint})" if word.row.hint else ""
    return f"its last words speak for: {FAULTS[word.row.fault].meaning}{hint}{_told(word)}"


def _told(word: Heard) -> str:
    return f': "{_plain(word.line)}"' if word.line else ""


def _plain(line: str) -> str:
    return "".join(character for character in line[:200] if character.isprintable())


def _last_line(text: str) -> str:
    """Return the last line of a rank's stderr, as ``sys.exit("no data left")`` leaves it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _plain(lines[-1]) if lines else ""


def _killed(one: Ended, own: Sequence[Heard], host: HostReading | None) -> Judged:
    """Separate the kernel's out-of-memory killer from any other sender of SIGKILL."""
    told = f" ({told_by(one.exit.code)})" if told_by(one.exit.code) else ""
    sure = SURE if one.exit.code < 0 else TRANSLATED_SURE
    # A GPU's memory is no reason to be killed.
    hosts = (word for word in own if word.row.fault == "out_of_memory" and word.row.name != "cuda_out_of_memory")
    of_memory = next(hosts, None)
    if of_memory is not None:
        return Judged(one, "out_of_memory", f"SIGKILL{told}, and its last words are of memory{_told(of_memory)}", sure)
    if host is not None and host.memory_used > _MEMORY_FULL:
        why = f"SIGKILL{told} while {host.memory_used:.0%} of the host's memory was used"
        return Judged(one, "out_of_memory", why, sure)
    by = next((word for word in own if word.row.name in ("killed", "cancelled")), None)
    return Judged(one, "killed", f"killed by SIGKILL from outside{told}{_told(by) if by is not None else ''}", sure)
