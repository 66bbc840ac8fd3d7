# SPDX-License-Identifier: Apache-2.0
"""Have NCCL load our profiler plugin into the ranks, through the environment variable that NCCL has for it.

The plugin is built by a program of its own while the companions start, so a first build costs a run nothing that could
be noticed, and a machine without a GPU not even that. Without a plugin the run goes on, with one log line.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megascale_ops.schema import environment

log = logging.getLogger(__name__)

NCCL_VARIABLE = "NCCL_PROFILER_PLUGIN"
# NVIDIA's driver, AMD's, and NVIDIA's inside WSL.
DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
_BUILDER = "megascale_ops.recorder.nccl_profiler.build"
# 30 s from its start: the builder gives the compiler 25.
_DEADLINE_S = 30.0
# 5 s for processes that were killed, on a machine that is busy.
_END_S = 5.0


class Profiler:
    """The plugin that ranks shall load; ``variables`` waits for it the first time.

    Args:
        setting: "on", "off", or "auto": only where there is a GPU.
        environ: What the runner was given; what it builds with, and where a user may have named a plugin.
        has_device: Whether there is a GPU.
    """

    def __init__(self, setting: str, environ: Mapping[str, str], *, has_device: bool) -> None:
        self._variables: dict[str, str] | None = {}
        self._proc: subprocess.Popen[bytes] | None = None
        if setting == "off" or (setting == "auto" and not has_device):
            return
        theirs = environ.get(NCCL_VARIABLE)
        if theirs and not _is_ours(theirs):
            # NCCL's own word for no profiler: there is no second plugin to load.
            advice = "" if theirs == "none" else f": name it in {environment.CHAIN_PROFILER} instead to have both"
            log.warning("%s=%s is left alone, so NCCL's collectives are not recorded%s", NCCL_VARIABLE, theirs, advice)
            return
        self._variables = None
        self._deadline_s = time.monotonic() + _DEADLINE_S
        self._proc = subprocess.Popen(
            [sys.executable, "-m", _BUILDER],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def variables(self) -> dict[str, str]:
        """Return what a rank's environment needs for the plugin; nothing when there is none."""
        if self._variables is None:
            path, reason = self._await()
            if reason:
                log.warning(
                    "NCCL's collectives are not recorded: %s; hangs are judged by torch's flight recorder alone", reason
                )
            self._variables = {NCCL_VARIABLE: path} if path else {}
        return self._variables

    def _await(self) -> tuple[str, str]:
        """Return the plugin's path, or "" and the reason."""
        assert self._proc is not None
        try:
            said, complaint = self._proc.communicate(timeout=max(0.0, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stop()
            return "", f"its plugin was not built within {_DEADLINE_S:.0f} s"
        self._end_compiler()
        # The last lines are the builder's; those before them are from a user's sitecustomize.
        if self._proc.returncode != 0:
            lines = complaint.decode(errors="replace").strip().splitlines()
            return "", (lines or [f"its builder ended with {self._proc.returncode}"])[-1]
        return os.fsdecode(said.removesuffix(b"\n").rpartition(b"\n")[2]), ""

    def stop(self) -> None:
        """Give up a build that is no longer needed."""
        if self._proc is None:
            return
        if self._proc.poll() is None:
            self._end_compiler()  # it holds the pipes, too
        with suppress(subprocess.TimeoutExpired):
            self._proc.communicate(timeout=_END_S)

    def _end_compiler(self) -> None:
        """End the builder and all that it has started: a compiler that it gave up has left its parts running."""
        assert self._proc is not None
        with suppress(ProcessLookupError):
            os.killpg(self._proc.pid, signal.SIGKILL)


def _is_ours(plugin: str) -> bool:
    """Return whether a plugin is one that an outer run has built: its ranks' environment came down to this one."""
    return Path(plugin).parent.parts[-2:] == ("megascale-ops", "nccl_profiler")


def has_device() -> bool:
    """Return whether this machine has something that NCCL or RCCL runs on."""
    return any(Path(device).exists() for device in DEVICES)
