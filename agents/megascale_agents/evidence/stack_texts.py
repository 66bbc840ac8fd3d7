# SPDX-License-Identifier: Apache-2.0
"""Read stacks as the tools of others write them: one text in, its processes with their threads out.

| tool | a thread begins with | frames |
| --- | --- | --- |
| faulthandler, worker server | ``Thread 0x... (most recent call first):``, the main thread last | innermost first |
| py-spy dump | ``Thread 123 (idle): "MainThread"`` | innermost first |
| py-spy dump --json | an object | innermost first |
| gdb, gstack | ``Thread 1 (Thread 0x... (LWP 123) "python"):`` | innermost first, C |
| eu-stack | ``TID 123:`` | innermost first, C |
| pystack | ``Traceback for thread 123 (...) [...] (most recent call last):`` | outermost first |
| Python, interrupted | ``Traceback (most recent call last):``, ended by ``KeyboardInterrupt`` | outermost first |

A text may hold several looks at one process: a thread that comes a second time begins a new one. What is no stack
(log lines, the C++ frames that torch prints of its watchdog's thread) is passed over.

Pure: text in, processes out.
"""

import re
from typing import NamedTuple

import msgspec

from megascale_agents.evidence.frame_classes import Frame
from megascale_ops.foreign import UNREADABLE


class Thread(NamedTuple):
    """One thread of one look; ``state`` is py-spy's (idle, active, active+gil), "" where the tool tells none."""

    number: str
    name: str
    state: str
    frames: tuple[Frame, ...]


class Look(NamedTuple):
    """One look at one process: its main thread, and how many others it has."""

    pid: int  # 0: not told
    command: str
    main: Thread
    others: int


_PROCESS = re.compile(r"^(?:Process|Python process) (\d{1,9}): (.*)$")
_PY_SPY = re.compile(r'^\s*Thread (0x[0-9a-fA-F]+|\d{1,20}) \(((?:active|idle)[\w+ ,]*)\)(?:: "(.*)")?\s*$')
_FAULT = re.compile(r"^\s*(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):\s*$")
_STACK = re.compile(r"^\s*(?:Stack|Traceback) \(most recent call first\):\s*$")
_TRACEBACK = re.compile(r"^\s*Traceback \(most recent call last\):\s*$")
_INTERRUPTED = re.compile(r"^(?:KeyboardInterrupt\b|\S{0,80}SignalException: )")
_GDB = re.compile(r'^Thread (\d{1,6}) \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP|process) (\d{1,9})\)?(?: "(.*)")?\):?\s*$')
_EU = re.compile(r"^TID (\d{1,9})(?: \"?(.*?)\"?)?:\s*$")
_EU_PROCESS = re.compile(r"^PID (\d{1,9}) - process")
_PYSTACK = re.compile(r"^Traceback for thread (\d{1,9}) \((.*?)\) \[(.*)\] \(most recent call last\):\s*$")
_FRAME = re.compile(
    r'^\s*(?:\((?:Python|C)\) )?File "(?P<file>.*?)", line (?P<line>\d{1,9}|\?+),? in (?P<function>.*)$'
)
_SPY_FRAME = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d{1,9}))?\)\s*$")
_GDB_FRAME = re.compile(r"^#\d+\s+(?:0x[0-9a-f]+ (?:in )?)?(?:- \d+ )?(?P<rest>\S.*)$")
_GDB_WHERE = re.compile(r" (?:at|from) (?P<file>\S+?)(?::(?P<line>\d{1,9}))?$")
# What gdb shows of Python's frames where it has Python's own helpers.
_OF_PYTHON = re.compile(r"for file (?P<file>.+?), line (?P<line>\d{1,9}), in (?P<function>[^\s(]+) \(")
_MOST_FRAMES = 512


def looks(text: str) -> list[Look]:
    """Return what a text shows, look by look, in its order; none where it holds no stack."""
    begin = text.lstrip()[:1]
    if begin in ("[", "{") and (found := _json(text)):
        return found
    reader = _Reader()
    for line in text.splitlines():
        reader.take(line)
    return reader.end()


def _json(text: str) -> list[Look]:
    try:
        told = msgspec.json.decode(text.encode(), type=list[_JsonThread])
    except UNREADABLE:
        return []
    processes: dict[int, list[_JsonThread]] = {}
    for thread in told:
        processes.setdefault(thread.pid or thread.process_info_pid, []).append(thread)
    found = []
    for pid, threads in processes.items():
        main = next((one for one in threads if one.os_thread_id == pid or one.thread_name == "MainThread"), threads[0])
        state = ("active" if main.active else "idle") + ("+gil" if main.owns_gil else "")
        frames = tuple(Frame(one.name, one.filename, one.line, one.module is not None) for one in main.frames)
        seen = Thread(str(main.os_thread_id or 0), main.thread_name or "", state, frames[:_MOST_FRAMES])
        found.append(Look(pid, "", seen, len(threads) - 1))
    return found


class _JsonFrame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    module: str | None = None
    line: int = 0


class _JsonThread(msgspec.Struct):
    frames: list[_JsonFrame]
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    process_info: "_JsonProcess | None" = None

    @property
    def process_info_pid(self) -> int:
        """The process of a thread, where py-spy looked at children, too."""
        return self.process_info.pid if self.process_info is not None else 0


class _JsonProcess(msgspec.Struct):
    pid: int = 0


class _OpenThread(NamedTuple):
    """A thread whose frames are being read."""

    number: str
    name: str
    state: str
    frames: list[Frame]


class _OpenLook(NamedTuple):
    """A look whose threads are being read; ``tool`` is "" before the first of them."""

    pid: int
    command: str
    tool: str
    threads: list[Thread]


class _Reader:
    """Takes lines one by one; ``end`` has what they were."""

    def __init__(self) -> None:
        self._found: list[Look] = []
        self._look = _OpenLook(0, "", "", [])
        self._thread: _OpenThread | None = None

    def take(self, line: str) -> None:
        """Take one line."""
        if (process := _PROCESS.match(line)) or (process := _EU_PROCESS.match(line)):
            self._close_look(int(process[1]), process[2] if process.re is _PROCESS else "")
        elif (head := _head_of(line)) is not None:
            self._begin(*head)
        elif self._thread is not None:
            self._frame(self._thread.frames, line)
        elif _STACK.match(line):
            self._begin("faulthandler", "0", "", "")
        elif line.startswith("#0 "):
            self._begin("gdb", "0", "", "")
            self.take(line)

    def _begin(self, tool: str, number: str, name: str, state: str) -> None:
        self._close_thread(is_whole=self._look.tool != "traceback")
        look = self._look
        if look.tool not in ("", tool):
            self._close_look(0, "")
        elif any(thread.number == number for thread in look.threads):
            self._close_look(look.pid, look.command)
        self._look = self._look._replace(tool=tool)
        self._thread = _OpenThread(number, name, state, [])

    def _frame(self, frames: list[Frame], line: str) -> None:
        tool = self._look.tool
        if found := _FRAME.match(line):
            number = int(found["line"]) if found["line"].isdigit() else 0
            frames.append(Frame(found["function"].strip(), found["file"], number))
        elif tool == "gdb" and (found := _GDB_FRAME.match(line)):
            frames.append(_gdb_frame(found["rest"]))
        elif tool == "py-spy" and (found := _SPY_FRAME.match(line)):
            native = not found["file"].endswith((".py", ">", ".pyx")) or found["function"].startswith("0x")
            frames.append(Frame(found["function"], found["file"], int(found["line"] or 0), native))
        elif tool == "traceback" and line.strip() and not line.startswith((" ", "\t")):
            # What was raised otherwise is no stack of a rank that hangs.
            self._close_thread(is_whole=_INTERRUPTED.match(line) is not None)
            self._close_look(0, "")
        elif line.strip() and tool == "faulthandler" and not line.startswith((" ", "\t")):
            self._close_thread()
            if line.startswith(("Timeout (", "Fatal Python error", "Traceback")):
                self._close_look(0, "")

    def _close_thread(self, *, is_whole: bool = True) -> None:
        if self._thread is not None and is_whole:
            number, name, state, read = self._thread
            frames = tuple(reversed(read)) if self._look.tool in ("pystack", "traceback") else tuple(read)
            self._look.threads.append(Thread(number, name, state, frames[:_MOST_FRAMES]))
        self._thread = None

    def _close_look(self, pid: int, command: str) -> None:
        """End a look; the next one is at the process that is told."""
        self._close_thread(is_whole=self._look.tool != "traceback")
        look = self._look
        if look.threads:
            main = _main_of(look.threads, look.tool, look.pid)
            self._found.append(Look(look.pid, look.command, main, len(look.threads) - 1))
        self._look = _OpenLook(pid, command, "", [])

    def end(self) -> list[Look]:
        """Return what the lines were."""
        self._close_look(0, "")
        return [look for look in self._found if look.main.frames or look.others]


def _head_of(line: str) -> tuple[str, str, str, str] | None:
    """Return the tool, number, name and state of a thread that a line begins; None where it begins none."""
    if found := _PY_SPY.match(line):
        return "py-spy", found[1], found[3] or "", found[2]
    if found := _FAULT.match(line):
        return "faulthandler", found[1], found[2] or "", ""
    if found := _GDB.match(line):
        return "gdb", found[2], found[3] or "", ""
    if found := _EU.match(line):
        return "gdb", found[1], found[2] or "", ""
    if found := _PYSTACK.match(line):
        return "pystack", found[1], found[2], "active+gil" if "GIL" in found[3] else ""
    return ("traceback", "0", "", "") if _TRACEBACK.match(line) else None


def _main_of(threads: list[Thread], tool: str, pid: int) -> Thread:
    """Return the main thread: by its number or its name, or where the tool writes it."""
    named = next((one for one in threads if one.number == str(pid) or one.name == "MainThread"), None)
    if named is not None:
        return named
    if tool == "faulthandler":
        return threads[-1]
    return min(threads, key=lambda one: int(one.number) if one.number.isdigit() else 1 << 62)


def _gdb_frame(rest: str) -> Frame:
    """Read what stands behind the number and the address of a frame."""
    if python := _OF_PYTHON.search(rest):
        return Frame(python["function"], python["file"], int(python["line"]))
    where = _GDB_WHERE.search(rest)
    file, line = (where["file"], int(where["line"] or 0)) if where is not None else ("", 0)
    name = rest[: where.start()] if where is not None else rest
    return Frame(name.partition("(")[0].strip() or name.strip(), file, line, native=True)
