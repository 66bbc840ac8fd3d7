# SPDX-License-Identifier: Apache-2.0
"""The options of ``megascale-ops run``, with the reason for every default."""

from typing import Literal

import msgspec

from megascale_ops.schema.policy import JobPolicy


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section ``[run]`` of the configuration; every field is an option of ``megascale-ops run``.

    Empty strings mean "choose for me"; ``plan.py`` chooses.
    """

    nproc_per_node: str = "1"  # a number, or auto, gpu, cpu
    nnodes: str = "1"  # N or MIN:MAX
    node_name: str = ""
    job: str = ""
    controller: str = ""  # "": start one for this run
    # 60 s for a controller that is being restarted; running jobs outlast its absence anyway.
    controller_wait_s: float = 60.0
    # torchrun's options for where nodes meet; `meeting.py` makes a controller's address of them.
    rdzv_backend: str = ""  # "": ours
    rdzv_endpoint: str = ""
    node_rank: int = -1  # of several nodes 0 brings the meeting point up; otherwise the controller gives ranks to nodes
    master_addr: str = ""
    master_port: int = 0  # 0: every round gets a free port of its own
    token_file: str = ""
    run_dir: str = ""
    box_root: str = ""  # the user's own folder in /dev/shm
    checkpoint_dir: str = ""
    log_dir: str = ""
    local_addr: str = ""
    role: str = "default"
    max_restarts: int = -1  # -1: as many as the hourly budgets allow
    # 0.02 s: a death is seen 10 ms later on average for 1 % of a core; torchrun's 0.1 s costs 50 ms.
    monitor_interval_s: float = 0.02
    # 30 s between SIGTERM and SIGKILL, torchrun's; ranks that can't use them (frozen, blocked) do not get them.
    stop_grace_s: float = 30.0
    # 30 s for what ranks that ended well have left running (an upload); inf: as long as it takes, 0: none.
    child_grace_s: float = 30.0
    warm: bool = False
    # 3 s: a spare process costs a second of CPU to start; not while the ranks themselves start.
    warm_delay_s: float = 3.0
    wrap: bool = False
    module: bool = False
    no_python: bool = False
    virtual_local_rank: bool = False
    # auto: where there is a GPU. Without it no slow rank is found there: Python does not wait for NCCL.
    nccl_profiler: Literal["auto", "on", "off"] = "auto"
    # 0: never. One step in 1,000 costs 0.2 %, and a script that uses torch's profiler itself must not be sampled.
    profile_every: int = 0
    quiet: bool = False
    local_ranks_filter: str = ""
    policy: JobPolicy = JobPolicy()
