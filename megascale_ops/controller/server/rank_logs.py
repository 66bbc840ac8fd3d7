# SPDX-License-Identifier: Apache-2.0
"""What a rank printed, out of the folder of the one run that this controller is for.

Only the controller that a run has brought up for itself reads files, and only those of that run's folder, which its own
command line named: a shared controller has another user's rights, and any runner that joins could name any folder. It
asks the agent of the rank's node instead (``agent_logs``).

Four requests at a time, each in a thread: a disk that is away holds up nothing else.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.log_parts import nothing_of, read_part
from megascale_ops.schema.runs import LogPart, LogQuery

# 5 s: a disk that takes longer is away; the page shows it.
PATIENCE_S = 5.0
# 4 at a time: threads that wait for a disk that is away are no more than these.
MOST_AT_ONCE = 4


class RankLogs:
    """The files of one run.

    Args:
        folder: the run folder; None where files of others might be read: then none is.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._reading = 0

    def may_read(self, jobs: int) -> bool:
        """Say whether the files of this controller's job are its own to read; ``jobs``: how many it serves."""
        return self._folder is not None and jobs == 1

    async def read(self, query: LogQuery) -> LogPart:
        """Return a part of what a rank printed.

        Raises:
            RefusedError: this controller is busy with others, or the disk does not answer.
            NotFoundError: the rank has left no such file.
        """
        if self._folder is None:
            raise RefusedError("this controller is not a single run's own, and reads no files")
        if self._reading >= MOST_AT_ONCE:
            raise RefusedError(f"{MOST_AT_ONCE} logs are being read already: ask again in a few seconds")
        folder = self._folder
        self._reading += 1
        answer = _in_thread(lambda: _read(folder / "logs", query), self._done)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except TimeoutError as error:
            raise RefusedError(f"the disk of {folder} did not answer within {PATIENCE_S:.0f} s") from error

    def _done(self) -> None:
        self._reading -= 1


def _in_thread(work: Callable[[], LogPart], done: Callable[[], None]) -> "asyncio.Future[LogPart]":
    """Do ``work`` in a thread that keeps nothing from ending, ``done`` afterwards in the loop."""
    events = asyncio.get_running_loop()
    answer: asyncio.Future[LogPart] = events.create_future()

    def finish(part: LogPart | None, error: Exception | None) -> None:
        done()
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        elif part is not None:
            answer.set_result(part)

    def run() -> None:
        part, error = None, None
        try:
            part = work()
        except Exception as caught:  # noqa: BLE001  raised in the waiting task
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended since
            events.call_soon_threadsafe(finish, part, error)

    threading.Thread(target=run, name="rank-logs", daemon=True).start()
    return answer


def _read(root: Path, query: LogQuery) -> LogPart:
    """Return the part that is asked for.

    Raises:
        NotFoundError: the rank has left no such file.
    """
    found = None
    with contextlib.suppress(OSError):  # there is none, or it is none of this user's
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = read_part(handle, query, os.geteuid())
        finally:
            os.close(handle)
    if found is None:
        raise NotFoundError(f"{nothing_of(query)} in this run's folder")
    return found
