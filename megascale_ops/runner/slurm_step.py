# SPDX-License-Identifier: Apache-2.0
"""A run that srun has started on each node: how many nodes there are, which is this, and where they meet. Pure.

Slurm tells each task of a step so in its environment. So `srun megascale-ops run -- train.py` needs no more: the step's
nodes are the job's, its first node brings the controller up, at a port that all work out from the job's number, and the
job's name has that number, too: it is the same after a requeue, and of two jobs with one script it is not.

Where several tasks of a step run on one node they are runs of their own, as several torchruns would be.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from megascale_ops.runner.config import BY_STEP, RunConfig

# From here on Slurm's own: the batch script, an interactive shell, what starts with the job.
_NO_STEP = 0xFFFF_FFF0
# Below 32768 the kernel gives no port away by itself; above 20000 few services have theirs. 31: steps of one job, and
# jobs that follow each other, lie apart.
_FIRST_PORT, _PORTS, _A_JOB = 20_000, 12_000, 31


class Step(NamedTuple):
    """What Slurm tells a task of its step.

    ``job`` and ``number``: the job's and the step's; ``nodes``: how many; ``node``: which of them this is, from 0;
    ``first``: the host name of the first; ``tasks``: how many of the step run on one node, the most of any; ``gpus``:
    given to this node, 0 where Slurm counts none; ``name``: Slurm's of this node, "" where it is not told.
    """

    job: int
    number: int
    nodes: int
    node: int
    first: str
    tasks: int
    gpus: int
    name: str = ""


def read_step(environ: Mapping[str, str]) -> Step | None:
    """Return the step that this process is a task of; None outside of one, as in the batch script itself.

    Args:
        environ: The environment; variables of srun (Slurm 20.11 and later).
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_PROCID")
    numbers = [_number(environ.get(name, "")) for name in names]
    first = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    if None in numbers or not first:
        return None
    job, number, nodes, node, _ = (number or 0 for number in numbers)
    if number >= _NO_STEP:
        return None
    # "2(x3),1": how many tasks each node has, nodes in order, equal ones together.
    tasks = [int(found) for found in re.findall(r"(?:^|,)(\d{1,6})", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))]
    gpus = _number(environ.get("SLURM_GPUS_ON_NODE", "")) or 0
    return Step(job, number, nodes, node, first, max(tasks, default=1), gpus, environ.get("SLURMD_NODENAME", ""))


def node_name(step: Step | None, hostname: str) -> str:
    """Return this node's name: its host name, or Slurm's where that is another one, since nodes are drained by it."""
    if step is None or not step.name or step.tasks > 1 or step.nodes == 1:
        return hostname
    return hostname if hostname.partition(".")[0] == step.name else step.name


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list, as in ``gpu[001-004,7],login1``; "" where it has none.

    Of several brackets in one name (``rack[1-2]n[1-8]``) each gives its first.
    """
    head = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])*", hosts)
    return re.sub(r"\[([^\[\]]*)\]", lambda found: re.split(r"[-,]", found[1])[0], head[0]) if head else ""


def within(config: RunConfig, step: Step | None) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with what the step says, where the user has said nothing, and sentences for the user.

    A place to meet that the user names stays; so does the number of nodes and of ranks.
    """
    if step is None:
        return _filled(config, "1", "1"), ()
    alone = step.nodes == 1 or step.tasks > 1
    said = []
    if step.tasks > 1 and config.nnodes == BY_STEP:
        said.append(
            f"this Slurm step has {step.tasks} tasks a node, and each is a run of its own: for one job of them all "
            "start one task a node, `srun --ntasks-per-node=1`"
        )
    asked = config.nnodes
    # With several tasks a node Slurm counts the node's GPUs to each of them.
    config = _filled(config, "1" if alone else str(step.nodes), str(step.gpus or 1) if step.tasks == 1 else "1")
    if alone or config.nnodes == "1" or config.controller or config.rdzv_endpoint or config.master_addr:
        return config, tuple(said)
    if asked == BY_STEP:
        said.append(f"Slurm's step {step.job}.{step.number}: node {step.node} of {step.nodes}")
    port = _FIRST_PORT + (step.job * _A_JOB + step.number) % _PORTS
    return msgspec.structs.replace(
        config,
        rdzv_backend="static",
        rdzv_endpoint=f"{step.first}:{port}",
        node_rank=step.node if config.node_rank < 0 else config.node_rank,
    ), tuple(said)


def _filled(config: RunConfig, nodes: str, ranks: str) -> RunConfig:
    return msgspec.structs.replace(
        config,
        nnodes=nodes if config.nnodes == BY_STEP else config.nnodes,
        nproc_per_node=ranks if config.nproc_per_node == BY_STEP else config.nproc_per_node,
    )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
