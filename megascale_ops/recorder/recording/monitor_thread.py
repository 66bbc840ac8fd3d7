# SPDX-License-Identifier: Apache-2.0
"""The recorder's own thread: at 10 Hz it writes its heartbeat and the position of the process groups into the box.

A stale heartbeat is evidence: a process that runs without one holds the GIL. The position comes from torch's
flight recorder, which also sees the all-reduces that DDP starts from C++ (3 us a read; the full dump, 19 ms with the
GIL held, is never taken here). It does not see NCCL's first collective of a group while the communicator is formed,
which waits for all ranks: so a Python call that lasts for a second also counts as a wait.
"""

import atexit
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from megascale_ops.blackbox.writer import collective_name
from megascale_ops.recorder.hook_guard import step_aside
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.recording.stack_file import StackFile
from megascale_ops.recorder.recording.stack_watch import StackWatch
from megascale_ops.schema.environment import BEAT_THREAD

INTERVAL_S = 0.1
# 1 s: calls of collectives that are still on their way to torch's recorder take microseconds.
_LONG_S = 1.0
# The thread is inside torch for a millisecond, on a machine under full load for more than a second; left there when the
# interpreter ends, it aborts the process ("terminate called without an active exception").
_STOP_DEADLINE_S = 5.0


class MonitorThread:
    """The thread, and where it asks for the position once torch is there."""

    def __init__(self, recording: Recording, stack_file: StackFile) -> None:
        self._recording = recording
        self._stack_file = stack_file
        self._dumps: Sequence[Callable[[], bytes]] = ()
        self._also: Callable[[], None] | None = None
        self._calls: Callable[[], tuple[float, str]] | None = None
        self._stack_watch = StackWatch(recording.box)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megascale-ops-beat", daemon=True)

    def start(self) -> None:
        """Start the thread. It ends before the interpreter does: a daemon thread inside C++ would abort the process."""
        self._thread.start()
        tell_name(self._thread.native_id)  # from here: the thread itself may wait for the GIL without end
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread; in the child of a fork there is none."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_DEADLINE_S)

    def follow(self, *dumps: Callable[[], bytes]) -> None:
        """Ask each of ``dumps`` for torch's process group status from now on."""
        self._dumps = dumps

    def follow_calls(self, waits: Callable[[], tuple[float, str]]) -> None:
        """Ask ``waits`` from now on for how long Python is inside a collective's call, and of which group."""
        self._calls = waits

    def also(self, look: Callable[[], None]) -> None:
        """Call ``look`` at each heartbeat from now on; it must neither wait nor raise."""
        self._also = look

    def _run(self) -> None:
        """Write heartbeats until the end, or until an error that would repeat.

        One last heartbeat follows the end: the groups' final position shows which rank called another collective.
        """
        box = self._recording.box
        last = (-1, -1, "")
        try:
            while True:
                last_one = self._ended.is_set() or not self._recording.live
                position = self._position(last)
                if position != last:
                    box.moved()
                    last = position
                box.beat(*position)
                self._stack_watch.sample(self._recording.thread, monotonic())
                self._stack_file.check_signal()
                if self._also is not None:
                    self._also()
                if last_one:
                    return
                self._ended.wait(INTERVAL_S)
        except Exception as error:  # noqa: BLE001  a recorder's thread must not print a traceback into the script; reported once
            step_aside("the beat", error)

    def _position(self, last: tuple[int, int, str]) -> tuple[int, int, str]:
        position = read_position(*(dump() for dump in self._dumps)) if self._dumps else last
        if self._calls is None or position[0] > position[1]:
            return position
        waits_s, group = self._calls()
        return position if waits_s < _LONG_S else inside(position, group)


def tell_name(thread: int | None) -> None:
    """Let the kernel know our thread by name: an agent that wants stacks signals it rather than wake the script."""
    comm = Path(f"/proc/self/task/{thread}/comm")
    with suppress(OSError), comm.open("w", encoding="ascii") as name:  # without a name it is not signalled, no more
        name.write(BEAT_THREAD)


def inside(position: tuple[int, int, str], group: str) -> tuple[int, int, str]:
    """Return the position of a rank that waits in a call of ``group`` of which torch's recorder knows nothing yet."""
    known = position[1] if position[2] == f"pg {group}" else 0
    completed = max(known, 0)
    return completed + 1, completed, f"pg {group}"


def read_position(*dumps: bytes) -> tuple[int, int, str]:
    """Return (enqueued, completed, name) of the first process group that waits, else of the first that has any.

    torch keeps a flight recorder for NCCL and one for all else, and a group may stand in both, empty in one. (-1, -1,
    "") before there is a process group, and for anything that does not look as expected.
    """
    found = sorted((row for dump in dumps for row in _groups(dump)), key=lambda row: (len(row[2]), row[2]))
    waiting = [position for position in found if position[0] > position[1]]
    used = [position for position in found if position[0] >= 0]
    return next(iter(waiting or used or found), (-1, -1, ""))


def _groups(dump: bytes) -> list[tuple[int, int, str]]:
    try:
        status = json.loads(dump).get("pg_status") or {}
        return [
            (int(group["last_enqueued_collective"]), int(group["last_completed_collective"]), f"pg {_held(name)}")
            for name, group in status.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _held(name: str) -> str:
    """Return a group's name as the box's ring holds it: torch names some by a hash of 40 digits."""
    return collective_name(name).decode("utf-8", "ignore")
