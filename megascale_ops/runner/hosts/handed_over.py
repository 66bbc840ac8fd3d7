# SPDX-License-Identifier: Apache-2.0
"""The far end of ``run --hosts``: what this host is to run comes on stdin, and the run lasts as long as stdin does.

One line of JSON first; then a line for each signal that is handed on. The end of stdin is the end of the launcher, or
of the connection to it: sshd sends no signal then, and ranks without a launcher would hold the GPUs for ever.
"""

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.token_files import write_token_file
from megascale_ops.runner.config import RunConfig

log = logging.getLogger(__name__)


class Handed(msgspec.Struct, frozen=True):
    """What a host gets: the configuration, the script with its arguments, folder, variables, the controller's token."""

    config: RunConfig
    command: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    token: str


@contextmanager
def handed_over() -> Iterator[tuple[Handed, threading.Event]]:
    """Read what this host is to run, and end this process in order when stdin ends; the event tells that it has.

    Ranks get an empty stdin. The token is in a file of this user's alone, which goes with the block.

    Raises:
        UsageError: nothing came that can be read, or the folder is not on this host.
    """
    source = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        handed = msgspec.json.decode(source.readline(), type=Handed)
    except UNREADABLE as error:
        source.close()
        raise UsageError(f"run --handed-over is for run --hosts, which writes to its stdin: {error}") from None
    try:
        os.chdir(handed.cwd)
    except OSError as error:
        raise UsageError(
            f"the folder {handed.cwd} is not on this host ({error.strerror}): start from one that all hosts have"
        ) from None
    os.environ.update(handed.env)
    lost = threading.Event()
    threading.Thread(target=_follow, args=(source, lost), name="launcher", daemon=True).start()
    folder = tempfile.mkdtemp(prefix="megascale-token-")
    try:
        path = Path(folder, "token")
        if handed.token:
            write_token_file(path, handed.token)
        config = msgspec.structs.replace(handed.config, token_file=str(path) if handed.token else "")
        yield msgspec.structs.replace(handed, config=config), lost
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _follow(source: IO[bytes], lost: threading.Event) -> None:
    """Hand signals on; the end of ``source`` is a SIGTERM."""
    for line in source:
        if line.strip().isdigit():
            os.kill(os.getpid(), int(line))
    log.warning("the launcher or the connection to it has ended: so does this run")
    lost.set()
    os.kill(os.getpid(), signal.SIGTERM)
