# SPDX-License-Identifier: Apache-2.0
"""The first call of the explicit API: a script that the hooks have not seen yet may be a rank all the same."""

import os

from megascale_ops.recorder.hook_guard import step_aside
from megascale_ops.recorder.recording.api import recorder
from megascale_ops.schema import environment


def open_first(trains: bool) -> bool:
    """Open the recording and attach it to the API, if this process is a rank; return whether that is settled.

    Below a launcher of another kind a process that ``trains`` is one. Another may become one later, and is attached
    then. Never raises.
    """
    try:
        return _open_first(trains=trains)
    except Exception as error:  # noqa: BLE001  without a box the script must still run; reported once
        step_aside("the black box", error)
        return True


def _open_first(*, trains: bool) -> bool:
    if os.environ.get(environment.WRAPPED) == "1":
        from megascale_ops.recorder.foreign_launch.hooks import become_by_environment
        from megascale_ops.recorder.recording.config import shows_later

        if shows_later(os.environ, os.getpid()):
            if trains:
                become_by_environment()
            return trains
    if not os.environ.get(environment.BOX_DIR) or not os.environ.get("RANK"):
        return True
    from megascale_ops.recorder.recording.start import open_recording

    recording = open_recording()
    if recording is not None:
        recorder.attach(recording)
    return True
