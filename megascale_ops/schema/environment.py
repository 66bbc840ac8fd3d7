# SPDX-License-Identifier: Apache-2.0
"""Names of the environment variables by which the runner reaches a training process, and of what is shared.

Only the names: reading the environment is for ``cli``, ``config`` and the recorder's bootstrap alone.
"""

CONFIG = "MEGASCALE_CONFIG"  # the TOML file that every program reads its section of
JOB = "MEGASCALE_JOB"
JOB_ID = "MEGASCALE_JOB_ID"  # differs for jobs of one name, not for rounds; checkpoint folders are held by it
NODE = "MEGASCALE_NODE"
ROUND = "MEGASCALE_ROUND"
BOX_DIR = "MEGASCALE_BOX_DIR"  # <box root>/<job>
RUN_DIR = "MEGASCALE_RUN_DIR"
CHECKPOINT_DIR = "MEGASCALE_CHECKPOINT_DIR"
CHECKPOINT_ALLOW_PICKLE = "MEGASCALE_CHECKPOINT_ALLOW_PICKLE"  # "1": checkpoints of format 1 may be unpickled
RESTORE_BEFORE = "MEGASCALE_RESTORE_BEFORE"  # a step: only checkpoints of earlier ones are restored, if there are any
STDERR_PATH = "MEGASCALE_STDERR_PATH"
CLAIMED = "MEGASCALE_CLAIMED_BY"  # pid of the process that instruments itself; its children must not
WRAPPED = "MEGASCALE_WRAPPED"  # "1": another launcher starts the ranks; which process is one shows later
FOUND_RANK = "MEGASCALE_RANK"  # of a process that had no RANK when it began; for what reads the environment
RECORDER = "MEGASCALE_RECORDER"  # "0" turns instrumentation off
PROFILE_EVERY = "MEGASCALE_PROFILE_EVERY"  # sample the kernels of one step in so many; 0 or not set: none
GPU_TIMERS = "MEGASCALE_GPU_TIMERS"  # "0" leaves the CUDA events out
RUNNER_PID = "MEGASCALE_RUNNER_PID"  # workers die with this process
RUN_ID = "MEGASCALE_RUN_ID"  # marks every process that one start of a runner brought up, however deep
TOKEN = "MEGASCALE_TOKEN"  # noqa: S105  the variable's name, not a token
TOKEN_FILE = "MEGASCALE_TOKEN_FILE"  # noqa: S105  same
TLS_CA = "MEGASCALE_TLS_CA"  # whom clients trust over https, instead of the system's
TLS_CERT = "MEGASCALE_TLS_CERT"  # what clients show where a controller asks for a certificate
TLS_KEY = "MEGASCALE_TLS_KEY"  # its key, where it is in another file
# A user's settings of the NCCL profiler plugin; the plugin itself reads them.
CHAIN_PROFILER = "MEGASCALE_CHAIN_PROFILER"  # a second plugin behind this one: a path, or a name as in NCCL
PROFILER_BUDGET = "MEGASCALE_PROFILER_BUDGET"  # per cent of the wall time; 0.5 when not set
PROFILER_MASK = "MEGASCALE_PROFILER_MASK"  # thin, adapt or fixed: how NCCL's events are reduced; thin when not set
PROFILER_THIN_AFTER = "MEGASCALE_PROFILER_THIN_AFTER"  # seconds of collectives before that; 30 when not set

# The recorder's own thread as named in the kernel (/proc/PID/task/TID/comm): 15 bytes at most.
BEAT_THREAD = "megascale-beat"
