# SPDX-License-Identifier: Apache-2.0
"""What a launcher that is wrapped can't have of the recovery, in one line said at the start. Pure.

Whatever the launcher is, it is one unit: its ranks are seen and named one by one, and all are started anew with it.
What differs is which restarts are its own, and which of its ranks are no processes below this run.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

_ALL = "is restarted as a whole, with all its ranks: none is replaced alone, no spare steps in, --warm prepares nothing"
_HERE = "ranks that it starts on other machines are not watched"
_WORDS = {
    "deepspeed": f"its own restarts (--elastic_training) are not seen; {_HERE}: start `run --wrap` on each, with "
    "deepspeed's --no_ssh --node_rank",
    "accelerate": "its own restarts (--max_restarts) are not seen; of several machines each needs its own "
    "`run --wrap`, with its --machine_rank",
    "mpirun": f"{_HERE}, and a machine that is lost ends it; `run --hosts FILE` starts the same script by ssh",
    "srun": "ranks that it starts on other nodes are not watched, and Slurm's own limits end it; `srun megascale-ops "
    "run -- SCRIPT` watches and restarts each node",
    "torchrun": "its own restarts (--max-restarts) are not seen; without `--wrap` and torchrun, `run` takes the same "
    "options and restarts what it has to",
    "ray": "workers of a cluster that runs already are no processes below this run and are not watched, those of a "
    "cluster that the script starts are; Ray Train's own restarts (FailureConfig) are not seen",
}
_NAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"deepspeed(\.pt)?|ds|deepspeed\.launcher\.\w+", "deepspeed"),
        (r"accelerate(-launch)?|accelerate\.commands\.(launch|accelerate_cli)", "accelerate"),
        (r"mpirun|mpiexec(\.\w+)?|orterun|prterun", "mpirun"),
        (r"srun", "srun"),
        (r"torchrun|torch\.distributed\.(run|launch)", "torchrun"),
        (r"ray", "ray"),
    )
)
_MOST_WORDS = 8  # env NAME=VALUE, numactl and their options before the launcher


def launcher_of(command: Sequence[str], reads: Callable[[str], str] = lambda _path: "") -> str:
    """Return which launcher a command starts, "" for one that is not known.

    Args:
        command: Program and arguments.
        reads: Returns the begin of a script, by which one that uses Ray Train is known; "" where it can't be read.
    """
    for word in command[:_MOST_WORDS]:
        name = PurePath(word).name
        found = next((known for pattern, known in _NAMES if pattern.fullmatch(name)), "")
        if found:
            return found
        if word.endswith(".py"):
            return "ray" if re.search(r"^\s*(import ray\b|from ray\b)", reads(word), re.MULTILINE) else ""
    return ""


def limits(command: Sequence[str], reads: Callable[[str], str] = lambda _path: "") -> str:
    """Return the line for a command."""
    name = launcher_of(command, reads)
    words = f"; {_WORDS[name]}" if name else ""
    return f"{name or 'what is wrapped'} {_ALL}{words}"
