# SPDX-License-Identifier: Apache-2.0
"""Open this process's recording, once: the box, the monitor thread and the exit hooks. Needs no torch."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.hook_guard import step_aside
from megascale_ops.recorder.recording.config import (
    FoundRank,
    RankSettings,
    read_found_settings,
    read_settings,
    shows_later,
)
from megascale_ops.recorder.recording.endings import Endings
from megascale_ops.recorder.recording.monitor_thread import MonitorThread
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.recording.stack_file import StackFile
from megascale_ops.schema import environment


class _Opened:
    """What this process has opened; one recording per process, and none after a failure."""

    tried = False
    recording: Recording | None = None
    settings: RankSettings | None = None
    monitor: MonitorThread | None = None
    endings: Endings | None = None


def open_recording() -> Recording | None:
    """Return this process's recording, made on the first call; None when it is no rank or has no box. Never raises."""
    if not _Opened.tried and not shows_later(os.environ, os.getpid()):
        _Opened.tried = True
        try:
            settings = read_settings(os.environ, os.getpid())
            if settings is not None:
                _open(settings)
        except Exception as error:  # noqa: BLE001  without a box the script must still run; reported once on stderr
            step_aside("the black box", error)
    return opened_recording()


def opened_recording() -> Recording | None:
    """Return this process's recording, None where nothing was opened in it."""
    recording = _Opened.recording
    return recording if recording is not None and recording.live else None


def open_as(found: FoundRank, claim: Callable[[RankSettings, int], str]) -> str:
    """Open the recording of a rank that another launcher has started; return why not, "" when it is open.

    Args:
        found: The process's rank.
        claim: Takes the rank for this process, given its start time (ticks); returns why not, "" when taken.

    Raises:
        BoxError: the folder of black boxes is another user's.
        OSError: it can't be written.
        ValueError: a variable that must be a number is none.
    """
    settings = read_found_settings(os.environ, os.getpid(), found)
    if _Opened.tried or settings is None:
        return ""
    refused = claim(settings, _start_ticks())
    if not refused:
        _Opened.tried = True
        os.environ[environment.FOUND_RANK] = str(settings.rank)  # for the NCCL plugin, which reads the environment
        _open(settings)
    return refused


def opened_settings() -> RankSettings | None:
    """Return the settings of the recording that was opened."""
    return _Opened.settings


def opened_monitor() -> MonitorThread | None:
    """Return the thread of the recording that was opened."""
    return _Opened.monitor


def opened_endings() -> Endings | None:
    """Return what notes how this process ends, None where nothing was opened in it (a fork's child)."""
    return _Opened.endings if opened_recording() is not None else None


def _open(settings: RankSettings) -> None:
    """Make the box and everything that writes into it without torch."""
    # Descendants of a rank are not the rank, also where the explicit API came first.
    os.environ[environment.CLAIMED] = str(os.getpid())
    box = BoxWriter.create(
        settings.box_dir,
        BoxIdentity(
            job=settings.job,
            node=settings.node,
            rank=settings.rank,
            local_rank=settings.local_rank,
            world_size=settings.world_size,
            pid=os.getpid(),
            start_ticks=_start_ticks(),
            round=settings.round,
            stderr_path=settings.stderr_path,
            started_mono_s=time.monotonic(),
            started_wall_s=time.time(),
        ),
    )
    recording = Recording(box, settings.rank)
    os.register_at_fork(after_in_child=recording.leave)
    _Opened.recording, _Opened.settings = recording, settings
    _Opened.endings = Endings(recording)
    _Opened.endings.install()
    _Opened.monitor = MonitorThread(recording, StackFile(settings.box_dir, settings.rank))
    _Opened.monitor.start()


def _start_ticks() -> int:
    """Return field 22 of ``/proc/self/stat``; the name in field 2 may contain spaces and brackets."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
