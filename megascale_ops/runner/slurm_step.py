# SPDX-License-Identifier: Apache-2.0
"""A run that srun has started on each node: how many nodes there are, which is this, and where they meet. Pure.

Slurm tells each task of a step so in its environment. So `srun megascale-ops run -- train.py` needs no more: the step's
nodes are the job's, its first node brings the controller up, at a port that all work out from the job's number, and the
job's name has that number, too: it is the same after a requeue, and of two jobs with one script it is not.

Where several tasks of a step run on one node, as scripts for plain srun have it (one task a rank), the node's first
task is the run, with a rank for each of them, and the others wait for it. Where each task has GPUs of its own, which
the first could not use (``--gpus-per-task``), each is a node of the job instead. ``--nnodes 1`` leaves them runs of
their own: trials side by side.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from megascale_ops.runner.config import BY_STEP, RunConfig

# From here on Slurm's own: the batch script, an interactive shell, what starts with the job.
_NO_STEP = 0xFFFF_FFF0
# Below 32768 the kernel gives no port away by itself; above 20000 few services have theirs. 31: steps of one job, and
# jobs that follow each other, lie apart.
_FIRST_PORT, _PORTS, _A_JOB = 20_000, 12_000, 31
_MOST_NODES = 65_536


class Step(NamedTuple):
    """What Slurm tells a task of its step.

    ``job`` and ``number``: the job's and the step's; ``nodes``: how many; ``node``: which of them this is, from 0;
    ``first``: the host name of the first; ``tasks``: how many of the step run on one node, the most of any; ``gpus``:
    given to this node, 0 where Slurm counts none; ``name``: Slurm's of this node, "" where it is not told.
    ``tasks_here``: of this node; ``rank``, ``local``: this task's number, in the step and on its node; ``all_tasks``:
    of the step; ``gpus_a_task``: that each task has to itself, 0 where they share a node's.
    """

    job: int
    number: int
    nodes: int
    node: int
    first: str
    tasks: int
    gpus: int
    name: str = ""
    tasks_here: int = 1
    rank: int = 0
    local: int = 0
    all_tasks: int = 1
    gpus_a_task: int = 0

    @property
    def have_own_gpus(self) -> bool:
        """Whether each of several tasks of a node has GPUs to itself."""
        return self.tasks > 1 and self.gpus_a_task > 0


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
    job, number, nodes, node, rank = (number or 0 for number in numbers)
    if number >= _NO_STEP:
        return None
    tasks = tasks_of(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    here = tasks[node] if node < len(tasks) else max(tasks, default=1)
    return Step(
        job,
        number,
        nodes,
        node,
        first,
        max(tasks, default=1),
        _number(environ.get("SLURM_GPUS_ON_NODE", "")) or 0,
        environ.get("SLURMD_NODENAME", ""),
        tasks_here=here,
        rank=rank,
        local=_number(environ.get("SLURM_LOCALID", "")) or 0,
        all_tasks=_number(environ.get("SLURM_STEP_NUM_TASKS", "")) or max(1, sum(tasks)),
        gpus_a_task=_gpus_a_task(environ, here),
    )


def tasks_of(text: str) -> list[int]:
    """Return how many tasks each node has, by Slurm's ``2(x3),1``: nodes in order, equal ones together."""
    found: list[int] = []
    for number, times in re.findall(r"(?:^|,)([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", text):
        found += [int(number)] * min(int(times or 1), _MOST_NODES)
    return found[:_MOST_NODES]


def _gpus_a_task(environ: Mapping[str, str], tasks: int) -> int:
    """Return how many GPUs each task has to itself; 0 where all of a node see all of them.

    By ``--gpus-per-task`` as sbatch hands it on, else by how Slurm has bound them (22.05 tells tasks no more than
    that), else because this task sees fewer than its node was given (``--gpu-bind``): then its share of them.

    Args:
        environ: The task's.
        tasks: How many run on this node.
    """
    by_number = re.search(r"(?:^|[:,])([0-9]{1,4})$", environ.get("SLURM_GPUS_PER_TASK", ""))  # "2", "h200:2"
    by_tres = re.search(r"gres[:/]gpu(?:[:/]\w+)?[:=]([0-9]{1,4})", environ.get("SLURM_TRES_PER_TASK", ""))
    by_bind = re.search(r"gpu:per_task:([0-9]{1,4})", environ.get("SLURMD_TRES_BIND", ""))
    found = by_number or by_tres or by_bind
    if found is not None:
        return int(found[1])
    given, visible = _number(environ.get("SLURM_GPUS_ON_NODE", "")) or 0, environ.get("CUDA_VISIBLE_DEVICES", "")
    seen = len([one for one in visible.split(",") if one])
    return max(1, min(seen, given // max(1, tasks))) if 0 < seen < given else 0


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
    asked = config.nnodes
    one_job = asked == BY_STEP or step.tasks == 1
    nodes = (step.all_tasks if step.have_own_gpus else step.nodes) if one_job else 1
    place = step.rank if step.have_own_gpus else step.node
    config = _filled(config, str(nodes), str(_ranks(step)) if one_job else "1")
    said = [] if asked != BY_STEP else list(_said_of_tasks(step, config.nproc_per_node))
    if nodes == 1 or config.nnodes == "1" or config.controller or config.rdzv_endpoint or config.master_addr:
        return config, tuple(said)
    if asked == BY_STEP:
        said.append(f"Slurm's step {step.job}.{step.number}: node {place} of {nodes}")
    port = _FIRST_PORT + (step.job * _A_JOB + step.number) % _PORTS
    return msgspec.structs.replace(
        config,
        rdzv_backend="static",
        rdzv_endpoint=f"{step.first if step.nodes > 1 else '127.0.0.1'}:{port}",
        node_rank=place if config.node_rank < 0 else config.node_rank,
    ), tuple(said)


def stands_by(config: RunConfig, step: Step | None) -> bool:
    """Return whether another task of this node is the run, and starts this task's rank, too."""
    return step is not None and step.local > 0 and not step.have_own_gpus and config.nnodes == BY_STEP


def _ranks(step: Step) -> int:
    """Return how many ranks this run has: a GPU each, where Slurm counts GPUs, or a task each."""
    if step.have_own_gpus:
        return step.gpus_a_task
    return step.tasks_here if step.tasks > 1 else step.gpus or 1


def _said_of_tasks(step: Step, ranks: str) -> Iterator[str]:
    if step.have_own_gpus:
        yield (
            f"each of the {step.all_tasks} tasks of this Slurm step has GPUs of its own (--gpus-per-task) and is a "
            "node of the job; with one task a node and --gpus-per-node a node's ranks have one run, and one agent"
        )
    elif step.tasks > 1:
        yield (
            f"the first of this node's {step.tasks_here} tasks starts all ranks of the node ({ranks}) and the others "
            "wait for it; `srun --ntasks-per-node=1` needs no tasks that wait, and by `run --nnodes 1` each is a run "
            "of its own"
        )


def _filled(config: RunConfig, nodes: str, ranks: str) -> RunConfig:
    return msgspec.structs.replace(
        config,
        nnodes=nodes if config.nnodes == BY_STEP else config.nnodes,
        nproc_per_node=ranks if config.nproc_per_node == BY_STEP else config.nproc_per_node,
    )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
