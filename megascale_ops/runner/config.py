# SPDX-License-Identifier: Apache-2.0
"""The options of ``megascale-ops run``, with the reason for every default."""

from typing import ClassVar, Literal

import msgspec

from megascale_ops.schema.policy import JobPolicy

# As the Slurm step says, in which srun has started this run; 1 outside of one.
BY_STEP = "step"


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section ``[run]`` of the configuration; every field is an option of ``megascale-ops run``.

    Empty strings mean "choose for me"; ``plan.py`` chooses.
    """

    # Of settings whose option is hidden, or that have none; the others' line is their option's.
    HELP: ClassVar[dict[str, str]] = {
        "rdzv_backend": "torchrun's name of the meeting point; all of them lead to our controller.",
        "node_rank": "This node's place, as in torchrun; of several nodes 0 brings the controller up.",
        "log_line_prefix_template": "What stands before a shown line, as in torchrun: ${hostname}:${rank}: .",
        "keep_days": "Days that logs, journals and incidents of ended runs stay; 0: for ever. Checkpoints always do.",
        "keep_runs": "Ended runs of which they stay, the newest; 0: all.",
        "keep_incidents": "Incidents of one run whose evidence stays, the newest; 0: all.",
        "warm_delay_s": "Seconds after the ranks' start before spare processes are started.",
    }

    nproc_per_node: str = BY_STEP  # a number, or auto, gpu, cpu
    nnodes: str = BY_STEP  # N or MIN:MAX
    node_name: str = ""
    job: str = ""
    controller: str = ""  # "": start one for this run
    # 60 s for a controller that is being restarted; running jobs outlast its absence anyway.
    controller_wait_s: float = 60.0
    # torchrun's options for where nodes meet; `meeting.py` makes a controller's address of them.
    rdzv_backend: str = ""  # "": this runner's own
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
    # 0: Slurm's signals are the script's. More: the job saves and goes back into the queue when its time is up.
    requeues: int = 0
    # 0: SIGTERM stops the ranks. More: it means that the engine takes this node away in so many seconds, which is what
    # a pod's terminationGracePeriodSeconds says; the job saves and goes on without it.
    eviction_grace_s: float = 0.0
    # 0.02 s: a death is seen 10 ms later on average for 1 % of a core; torchrun's 0.1 s costs 50 ms.
    monitor_interval_s: float = 0.02
    # 30 s between SIGTERM and SIGKILL, torchrun's; ranks that can't use them (frozen, blocked) do not get them.
    stop_grace_s: float = 30.0
    # 30 s for what ranks that ended well have left running (an upload); inf: as long as it takes, 0: none.
    child_grace_s: float = 30.0
    # none: half a minute before the first step is a user's choice. quick, full: `megascale-ops diagnose` of each node.
    preflight: Literal["none", "quick", "full"] = "none"
    warm: bool = False
    # Off: a context's memory of each GPU, and scripts that fork before they use CUDA can't use it in the child.
    warm_gpu: bool = False
    # 3 s: a spare process costs a second of CPU to start; not while the ranks themselves start.
    warm_delay_s: float = 3.0
    wrap: bool = False
    hosts: str = ""  # "": this machine alone, or wherever `run` is started by hand or by Slurm
    ssh: str = "ssh"
    remote_python: str = ""  # "": the path of this machine's, as where all hosts share an environment
    module: bool = False
    no_python: bool = False
    virtual_local_rank: bool = False
    # auto: where there is a GPU. Without it no slow rank is found there: Python does not wait for NCCL.
    nccl_profiler: Literal["auto", "on", "off"] = "auto"
    # 0: never. One step in 1,000 costs 0.2 %, and a script that uses torch's profiler itself must not be sampled.
    profile_every: int = 0
    quiet: bool = False
    log_line_prefix_template: str = ""  # "": torchrun's variable for it, else [RANK] where several are shown
    local_ranks_filter: str = ""
    # Once a day, after a run: what runs of this user left behind goes, never their checkpoints. 90 days: the runs of a
    # quarter can still be compared; 200 runs: some GB of logs and journals.
    keep_days: float = 90.0
    keep_runs: int = 200
    # 200 incidents of one run with the evidence of all ranks: a job that restarts every hour for a week.
    keep_incidents: int = 200
    policy: JobPolicy = JobPolicy()

    def __post_init__(self) -> None:
        if self.requeues < 0:
            raise ValueError(f"requeues = {self.requeues} can't be: 0 requeues nothing, more is a budget")
        if not 0 <= self.eviction_grace_s < float("inf"):
            raise ValueError(f"eviction_grace_s = {self.eviction_grace_s} can't be: seconds from SIGTERM to SIGKILL")
        for name in ("keep_days", "keep_runs", "keep_incidents"):
            if not getattr(self, name) >= 0:  # NaN is none of it either
                raise ValueError(f"{name} = {getattr(self, name)} can't be: 0 keeps all, more is a bound")
