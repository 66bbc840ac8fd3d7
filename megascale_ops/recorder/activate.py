# SPDX-License-Identifier: Apache-2.0
"""Switch the recorder on in this process: what must stand before the script's first line runs.

Cheap on purpose: nothing here needs mmap, struct, json or torch. Everything else waits for the script to import torch
(or to use the explicit API), because a script that does neither needs no black box.
"""

import os
import signal
import sys
from collections.abc import Callable

from megascale_ops.recorder.hook_guard import step_aside
from megascale_ops.recorder.recording.kept_words import keep_last_words
from megascale_ops.recorder.recording.stack_file import answer_sigusr1
from megascale_ops.recorder.torch_hooks.import_hook import after_import
from megascale_ops.schema import environment

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def activate() -> None:
    """Tie our life to the runner's, listen for SIGUSR1, and wait for the import of torch. Never raises."""
    for name, piece in (
        ("dying with the runner", _die_with_the_runner),
        ("stacks on SIGUSR1", _write_stacks_on_sigusr1),
        ("keeping the last words", _keep_last_words),
        ("the import hook", _wait_for_torch),
    ):
        _try(name, piece)


def _try(name: str, piece: Callable[[], None]) -> None:
    """Run one piece; if it fails the others stand."""
    try:
        piece()
    except Exception as error:  # noqa: BLE001  the script must run whatever fails here; reported once on stderr
        step_aside(name, error)


def _die_with_the_runner() -> None:
    """Have the kernel kill this process when the runner dies, if the runner started it itself."""
    runner_pid = os.environ.get(environment.RUNNER_PID, "")
    if not runner_pid.isdigit() or os.getppid() != int(runner_pid):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # The runner may have died just before that call; then no signal will ever come.
    if os.getppid() != int(runner_pid):
        os.kill(os.getpid(), signal.SIGKILL)


def await_rank() -> None:
    """Below a launcher of another kind: wait for this process to show that it is a rank. Never raises."""

    def wait() -> None:
        from megascale_ops.recorder.foreign_launch.hooks import await_rank

        await_rank()

    _try("finding out the rank", wait)


def _write_stacks_on_sigusr1() -> None:
    answer_sigusr1(int(os.environ["RANK"]))


def _keep_last_words() -> None:
    keep_last_words(int(os.environ["RANK"]))


def _wait_for_torch() -> None:
    """Install the hooks as soon as torch is imported: at once in a warm worker."""

    def install() -> None:
        from megascale_ops.recorder.install import install

        install()

    if "torch" in sys.modules:
        install()
    else:
        after_import("torch", install)
