# SPDX-License-Identifier: Apache-2.0
"""Tab in a real bash: what is typed becomes whole, with names of jobs and incidents that there really are."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from tests.processes.launch import PATIENCE_S, Launch

pytestmark = pytest.mark.processes


class Bash:
    """An interactive bash with our completion loaded."""

    def __init__(self, env: dict[str, str], program: Path) -> None:
        inputrc = program.with_name("inputrc")
        inputrc.write_text("set bell-style none\nset enable-bracketed-paste off\nset show-all-if-ambiguous on\n")
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            env = {**env, "PATH": f"{program.parent}:{os.environ['PATH']}", "INPUTRC": str(inputrc), "TERM": "dumb"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**env, "PS1": "ready> "})  # noqa: S606  as a user
        self._shown = ""
        self.until("ready> ")
        self.type('eval "$(megascale-ops completion bash)"; PS1="> "\r', "\n> ")

    def type(self, keys: str, until: str) -> str:
        """Type, and return what has appeared once it has ``until`` in it."""
        self._shown = ""
        os.write(self._terminal, keys.encode())
        return self.until(until)

    def until(self, what: str) -> str:
        """Wait for text; what is shown is returned.

        Raises:
            AssertionError: it did not come.
        """
        end = time.monotonic() + PATIENCE_S
        while what not in self._shown:
            left_s = end - time.monotonic()
            ready, _, _ = select.select([self._terminal], [], [], max(left_s, 0.0))
            assert ready, f"waited in vain for {what!r}; shown: {self._shown!r}"
            self._shown += os.read(self._terminal, 4096).decode(errors="replace").replace("\r\n", "\n")
        return self._shown

    def close(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)


@pytest.fixture
def bash(launch: Launch, tmp_path: Path) -> Iterator[Bash]:
    """A shell on a machine with a run that left two incidents."""
    folder = launch.state / "megascale-ops" / "gpt-large"
    folder.mkdir(parents=True)
    store = open_store(f"sqlite:///{folder / 'journal.db'}")
    ids = ("gpt-large-1", "gpt-large-2")
    found = tuple(Incident(one, "gpt-large", 1, verdict=Verdict("killed", "", 0.9)) for one in ids)
    store.submit(Batch(incidents=found))
    store.close()
    # As pip makes it; under a checkout's name or an installation's, it is the same program.
    program = tmp_path / "megascale-ops"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megascale_ops.cli.main "$@"\n')
    program.chmod(0o755)
    shell = Bash(launch.env, program)
    yield shell
    shell.close()


def test_tab_completes_what_there_is(bash: Bash) -> None:
    """A verb, an option, a job, the beginning that incidents share, a fault; each by one Tab."""
    clear = "\x15"  # Ctrl-U: the line is empty again

    assert "megascale-ops incidents " in bash.type("megascale-ops inci\t", "incidents ")
    assert "--token-file " in bash.type(f"{clear}megascale-ops status --tok\t", "--token-file ")
    assert "report gpt-large " in bash.type(f"{clear}megascale-ops report g\t", "gpt-large ")
    shown = bash.type(f"{clear}megascale-ops why g\t", "gpt-large-1")
    assert "gpt-large-2" in bash.until("gpt-large-2") or "gpt-large-2" in shown
    assert "run sigkill " in bash.type(f"{clear}megascale-ops chaos run sigk\t", "sigkill ")


def test_tab_says_nothing_where_there_is_nothing(bash: Bash) -> None:
    """No word of an error is written into the line: what was typed stands there, and Enter still runs it."""
    typed = bash.type("megascale-ops why --controller http://127.0.0.1:9 no\tsuch\r", "\n> ")

    assert "Traceback" not in typed
    assert "no controller answers at http://127.0.0.1:9" in typed
