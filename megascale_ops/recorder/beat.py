# SPDX-License-Identifier: Apache-2.0
"""The recorder's own thread: ten times a second it says "I live", and how far the process groups are.

Its silence is evidence: a process that runs but whose beat is stale holds the GIL. The position comes from torch's
flight recorder, which also sees the all-reduces that DDP starts from C++ (3 us a look; the full dump, 19 ms with the
GIL held, is never taken here).
"""

import atexit
import json
import threading
from collections.abc import Callable

from megascale_ops.recorder.aside import step_aside
from megascale_ops.recorder.recording import Recording

INTERVAL_S = 0.1
# The thread is inside torch for a millisecond, on a machine under full load for more than a second; left there when the
# interpreter ends, it aborts the process ("terminate called without an active exception").
_STOP_DEADLINE_S = 5.0


class Beat:
    """The thread, and where it asks for the position once torch is there."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._dump: Callable[[], bytes] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megascale-ops-beat", daemon=True)

    def start(self) -> None:
        """Begin to beat. Ends before the interpreter does: a daemon thread inside C++ would abort the process then."""
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread; in the child of a fork there is none."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_DEADLINE_S)

    def follow(self, dump: Callable[[], bytes]) -> None:
        """Ask ``dump`` for torch's process group status from now on."""
        self._dump = dump

    def _run(self) -> None:
        """Beat until the end, or until something goes wrong that would go wrong again."""
        box = self._recording.box
        last = (-1, -1, "")
        try:
            while True:
                position = read_position(self._dump()) if self._dump is not None else last
                if position != last:
                    box.moved()
                    last = position
                box.beat(*position)
                if self._ended.wait(INTERVAL_S) or not self._recording.live:
                    return
        except Exception as error:  # noqa: BLE001  a thread of ours must not print a traceback into the script; said once
            step_aside("the beat", error)


def read_position(dump: bytes) -> tuple[int, int, str]:
    """Return (enqueued, completed, name) of the process group that says most: the first that waits, else the first.

    (-1, -1, "") before there is a process group, and for anything that does not look as expected.
    """
    try:
        status = json.loads(dump).get("pg_status") or {}
        found = [
            (int(group["last_enqueued_collective"]), int(group["last_completed_collective"]), f"pg {name}")
            for name, group in sorted(status.items(), key=lambda item: (len(item[0]), item[0]))
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return (-1, -1, "")
    waiting = [position for position in found if position[0] > position[1]]
    return next(iter(waiting or found), (-1, -1, ""))
