# SPDX-License-Identifier: Apache-2.0
"""Identity: jobs, nodes, ranks and their place in the device mesh."""

import re

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.schema.ranges import Axis

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it can be a job or node name: it becomes a folder name, a label and part of a URL.

    Raises:
        UsageError: one sentence with what is allowed.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{kind} name {name!r} can't be used: take 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or a digit"
        )
    return name


# 1 MB: a rank takes 200 bytes, or 9 KB with the longest paths there are; a node has at most a hundred or so.
MOST_ROUND_BYTES = 1 << 20


class Mesh(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A rank's coordinates in the device mesh; ``-1`` where the axis is not known."""

    tp: Axis = -1
    pp: Axis = -1
    dp: Axis = -1
    ep: Axis = -1


class RankProcess(msgspec.Struct, frozen=True):
    """One rank as a process of one node; ``start_ticks`` (field 22 of /proc/PID/stat) distinguishes a re-used pid."""

    rank: int
    local_rank: int
    pid: int
    start_ticks: int
    stdout_path: str = ""
    stderr_path: str = ""


class RoundFile(msgspec.Struct, frozen=True):
    """``<box root>/<job>/<node>.round.json``: what one runner started, for the agent and for the next start's clean-up.

    A *round* is one incarnation of the whole job: every restart of its ranks begins the next round.
    """

    version: int
    job: str
    node: str
    round: int
    runner_pid: int
    runner_start_ticks: int
    run_dir: str
    ranks: tuple[RankProcess, ...] = ()
    agent_pid: int = 0
    controller_pid: int = 0
    run_id: str = ""  # the mark that every process of this runner carries in its environment
