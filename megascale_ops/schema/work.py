# SPDX-License-Identifier: Apache-2.0
"""What a rank's process and its children got done between two looks at it, as their kernel counts.

A rank that makes no step may be stuck, or it may upload, compress, convert or copy something without declaring it. Both
look alike to a stack. What the kernel has counted meanwhile separates them more often than not.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Bytes, Line, Pid, Seconds, Word

# 60 characters of a command line: the program and its first arguments.
MOST_COMMAND = 60
# 4 children: a script waits for one or two programs; the names of data loader workers carry no information.
MOST_CHILDREN_TOLD = 4


class ChildWork(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A living process that the rank started, or one of its children's."""

    pid: Pid
    command: Line
    state: Word = ""  # of /proc/PID/stat
    is_new: bool = False  # started after the rank had last moved


class ProcessWork(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What was done between two looks, by the rank's process and all living processes below it."""

    mono_s: Seconds  # end of the time looked at, the agent's monotonic clock
    over_s: Seconds  # how long it was
    own_cpu_s: Seconds = 0.0  # CPU time of the process itself
    child_cpu_s: Seconds = 0.0  # of its children, including those that have ended since
    io_bytes: Bytes = 0  # read and written by system calls: files, pipes
    socket_bytes: Bytes = 0  # acknowledged by the other end or received, TCP
    grown_bytes: Bytes = 0  # by how much the files that they hold open have grown
    is_running: bool = False  # the main thread was in state R at most looks
    # At most MOST_CHILDREN_TOLD: new ones first, then those that used most CPU.
    children: Annotated[tuple[ChildWork, ...], Meta(max_length=64)] = ()
