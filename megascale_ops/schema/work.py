# SPDX-License-Identifier: Apache-2.0
"""What a rank's process and its children got done between two looks at it, as their kernel counts.

A rank that makes no step may be stuck, or it may upload, compress, convert or copy something without saying so. Both
look alike to a stack. What the kernel has counted meanwhile tells them apart more often than not.
"""

import msgspec

# 60 characters of a command line: the program and its first arguments.
MOST_COMMAND = 60
# 4 children: a script waits for one or two programs; its data loader's workers tell nothing by name.
MOST_CHILDREN_TOLD = 4


class ChildWork(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A living process that the rank started, or one of its children's."""

    pid: int
    command: str
    state: str = ""  # of /proc/PID/stat
    is_new: bool = False  # started after the rank had last moved


class ProcessWork(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What was done between two looks, by the rank's process and all living processes below it."""

    mono_s: float  # end of the time looked at, the agent's monotonic clock
    over_s: float  # how long it was
    own_cpu_s: float = 0.0  # CPU time of the process itself
    child_cpu_s: float = 0.0  # of its children, those included that ended meanwhile
    io_bytes: int = 0  # read and written by system calls: files, pipes
    socket_bytes: int = 0  # acknowledged by the other end or received, TCP
    grown_bytes: int = 0  # by how much the files that they hold open have grown
    is_running: bool = False  # the main thread was in state R at most looks
    children: tuple[ChildWork, ...] = ()  # at most MOST_CHILDREN_TOLD: new ones first, then who used most CPU
