# SPDX-License-Identifier: Apache-2.0
"""``controller.json`` in a run folder: where the controller that a run brought up is, and which file holds its token.

Written by the run, read by the same user's other clients of that controller: the verbs, and the other runners
of one launch line on the same machine.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.errors import ControllerUnreachableError, UsageError
from megascale_ops.link.blocking import BlockingLink
from megascale_ops.link.token_files import read_token_file
from megascale_ops.whole_file import write_whole

CONTROLLER_FILE = "controller.json"
TOKEN_FILE = "controller.token"  # noqa: S105  a file's name
_FOLDER = "megascale-ops"
# 64 kB: a URL, a path and two numbers.
_MOST_BYTES = 1 << 16


class Whereabouts(msgspec.Struct, frozen=True):
    """Address of the controller, its process and its runner's, and the file with its token ("": it asks for none)."""

    url: str
    pid: int = 0
    runner_pid: int = 0
    token_file: str = ""


def state_root() -> Path:
    """Return the folder under which runs keep their folders by default."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / _FOLDER


def read_whereabouts(folder: Path) -> Whereabouts | None:
    """Return what a run said about its controller, or None when it said nothing that can be read."""
    try:
        return msgspec.json.decode(foreign.read(folder / CONTROLLER_FILE, _MOST_BYTES), type=Whereabouts)
    except (OSError, *foreign.UNREADABLE):
        return None


def write_whereabouts(folder: Path, found: Whereabouts) -> None:
    """Write beside and rename, so that no reader sees half of it.

    Raises:
        UsageError: the folder takes nothing.
    """
    try:
        write_whole(folder / CONTROLLER_FILE, msgspec.json.encode(found))
    except OSError as error:
        raise UsageError(f"{folder} can't be written to ({error.strerror}): give another --run-dir") from error


def link_of(folder: Path) -> BlockingLink:
    """Return a link to the controller that the run in ``folder`` has brought up.

    Raises:
        ControllerUnreachableError: that run records none.
        UsageError: its token can't be read.
    """
    found = read_whereabouts(folder)
    if found is None:
        raise ControllerUnreachableError(f"the run in {folder} tells of no controller")
    return BlockingLink(found.url, read_token_file(found.token_file) if found.token_file else None)


def token_file_of(url: str, folders: Iterable[Path]) -> str:
    """Return the file with the token of the controller at ``url``, "" where no run in these folders has it.

    A run that was killed leaves its address behind, and any process may listen there since: a token of its own is worth
    nothing any more, but one that the user has for several controllers is handed out only while that run lives.
    """
    for folder in folders:
        found = read_whereabouts(folder)
        if found is None or not found.token_file or found.url.rstrip("/") != url.rstrip("/"):
            continue
        if Path(found.token_file).parent == folder or is_ours(found.runner_pid):
            return found.token_file
    return ""


def is_ours(pid: int) -> bool:
    """Return whether a process of this number runs and belongs to this user."""
    try:
        return pid > 0 and Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False
