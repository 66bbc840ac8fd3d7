# SPDX-License-Identifier: Apache-2.0
"""Processes of another user, for what may happen on a node that users share. Only root can start them.

Where the interpreter lies in a folder that is root's alone (pyenv in /root), it could not be started: then the process
keeps the right to read (CAP_DAC_READ_SEARCH). What it makes is that other user's, and so is what it may write.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

NOBODY = 65534
only_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start another user's processes, by setpriv",
)


def start_as_nobody(
    *command: str, env: Mapping[str, str] | None = None, log: Path | None = None, uid: int = NOBODY
) -> "subprocess.Popen[bytes]":
    """Start a process of another user in a session of its own; its output goes to ``log``."""
    out = subprocess.DEVNULL if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        return subprocess.Popen(
            [*as_user(uid), *command],
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    finally:
        if log is not None:
            os.close(out)


@functools.cache
def as_user(uid: int) -> tuple[str, ...]:
    """Return what makes a command another user's."""
    plain = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    # As a run does: the interpreter starts another one of its own.
    starts = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', '']))"
    tried = subprocess.run([*plain, sys.executable, "-c", starts], capture_output=True, timeout=120, check=False)
    if tried.returncode == 0:
        return plain
    return (*plain, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
