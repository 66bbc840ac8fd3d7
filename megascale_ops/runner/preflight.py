# SPDX-License-Identifier: Apache-2.0
"""What a run stands on: the machine, folders, room for black boxes, token and controller.

All of it is looked at before anything is started, so that a mistake costs a second and one sentence.
"""

import logging
import os
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path

from megascale_ops.blackbox.roots import take_root
from megascale_ops.errors import ControllerUnreachableError, UsageError
from megascale_ops.link.token_files import find_token
from megascale_ops.runner.plan import Machine
from megascale_ops.runner.programs import is_python
from megascale_ops.runner.slurm_step import read_step

log = logging.getLogger(__name__)

# 1 MiB for every rank: a black box takes two fifths of that.
_SHM_BYTES_A_RANK = 1 << 20


def look_at_machine() -> Machine:
    """Read what the plan needs to know."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Machine(
        hostname=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        gpus=_count_gpus(),
        state_root=f"{state}/megascale-ops",
        # The time for people; six digits more for launches of one script within the same second.
        stamp=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        cwd=_cwd(),
        python=os.environ.get("PYTHON_EXEC") or sys.executable,  # torchrun's way to name another one
        is_here=is_this_machine,
        step=read_step(os.environ),
        is_python=is_python,
    )


def _cwd() -> str:
    """Return the working directory.

    Raises:
        UsageError: it was removed meanwhile.
    """
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise UsageError("the folder that you are in was removed: change to one that is there") from None


def is_this_machine(host: str) -> bool:
    """Return whether a host name or address is one of this machine's: a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def is_free(port: int) -> bool:
    """Return whether a server could bind to ``port`` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _count_gpus() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001  NVML raises kinds of its own; no driver means no GPU
        return 0
    return count


def prepare_folder(path: Path, what: str, option: str) -> Path:
    """Make a folder that we can write into; ``option`` names another one.

    Raises:
        UsageError: one sentence.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = f"can't be written to ({error.strerror})"
        raise UsageError(f"the {what} {path} {why}: give another one by {option}") from error
    return path


def prepare_boxes(named: str, nproc: int) -> Path:
    """Make the root of the black boxes, the user's own unless one is named, and check that they fit.

    Raises:
        UsageError: there is no such place, it is not ours, no rights, or no room.
    """
    if named and not Path(named).parent.is_dir():
        raise UsageError(
            f"{Path(named).parent} is missing, so black boxes can't be kept there: give another --box-root"
        )
    root, said = take_root(named)
    if said:
        log.warning("%s", said)
    prepare_folder(root, "black box root", "--box-root")
    free = shutil.disk_usage(root).free
    if free < nproc * _SHM_BYTES_A_RANK:
        raise UsageError(
            f"{root} has {free >> 10} KiB free; the black boxes of {nproc} ranks need {nproc} MiB: "
            "free some room there or give another --box-root"
        )
    return root


def check_controller(url: str, token_file: str) -> None:
    """Refuse to start when no controller answers at ``url``; one that has no time yet is asked three times.

    Raises:
        ControllerUnreachableError: one sentence.
    """
    from megascale_ops.link import BlockingLink

    link = BlockingLink(url, find_token(token_file, os.environ))
    try:
        for is_last in (False, False, True):
            try:
                link.status(brief=True)
            except ControllerUnreachableError as error:
                if is_last or not isinstance(error.__cause__, TimeoutError):
                    raise
            else:
                return
    finally:
        link.close()
