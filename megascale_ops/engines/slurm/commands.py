# SPDX-License-Identifier: Apache-2.0
"""Run one of Slurm's commands, with a deadline; what goes wrong is one sentence.

Never in a prolog or epilog: with thousands of nodes at once these calls are what brings slurmctld down.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping

from megascale_ops.engines.actuator import EngineError, RightsError
from megascale_ops.engines.slurm.answers import RIGHTS, refusal

# 20 s: a busy slurmctld answers within its MessageTimeout (10 s by default), and a client tries once more.
DEADLINE_S = 20.0


def is_here() -> bool:
    """Return whether Slurm's commands are installed."""
    return shutil.which("scontrol") is not None


def ask(
    program: str,
    *arguments: str,
    deadline_s: float = DEADLINE_S,
    said: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Return what a command prints.

    Args:
        program: sinfo, scontrol, sbatch or squeue.
        arguments: Its own.
        deadline_s: It is killed then.
        said: Its input.
        env: Its environment; this process's own where none is given.

    Raises:
        RightsError: Slurm refused for want of a right.
        EngineError: it is not installed, did not answer, or refused.
    """
    where = shutil.which(program)
    if where is None:
        raise EngineError(f"{program} is not on PATH: this takes a machine with Slurm's commands, such as a login node")
    try:
        done = subprocess.run(
            [where, *arguments],
            input="" if said is None else said,
            env=dict(os.environ if env is None else env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{program}: no answer within {deadline_s:g} s; `scontrol ping` tells more") from None
    except OSError as error:
        raise EngineError(f"{program} can't be started: {error.strerror}") from None
    if done.returncode:
        kind = RightsError if RIGHTS.search(done.stderr) else EngineError
        raise kind(refusal(program, done.stderr or done.stdout, done.returncode))
    return done.stdout
