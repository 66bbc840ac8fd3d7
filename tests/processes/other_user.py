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
    *command: str, env: Mapping[str, str] | None = None, log: Path | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process of another user in a session of its own; its output goes to ``log``."""
    out = subprocess.DEVNULL if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        return subprocess.Popen(
            [*_as_nobody(), *command],
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
def _as_nobody() -> tuple[str, ...]:
    """Return what makes a command another user's."""
    plain = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    tried = subprocess.run([*plain, sys.executable, "-c", ""], capture_output=True, timeout=30, check=False)
    if tried.returncode == 0:
        return plain
    return (*plain, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
