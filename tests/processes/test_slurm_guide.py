# SPDX-License-Identifier: Apache-2.0
"""Batch scripts in a real Slurm: the guide's, read out of it, and such as users have who have never heard of us."""

import os
from collections.abc import Iterator

import pytest

from tests.fakes.servers import until
from tests.fakes.slurm import SOON, OneNode
from tests.processes.guides import blocks
from tests.processes.launch import PLAIN, Launch
from tests.processes.slurm_jobs import PROGRAM

pytestmark = pytest.mark.processes

GUIDE = "docs/how-to/slurm.md"
# The cluster of the tests has two nodes and no GPU.
SMALLER = {"--nodes=4": "--nodes=2", " --gpus-per-node=8": "", "--nodes=5": "--nodes=2", "--nnodes 4": "--nnodes 1"}

# As they go round: where nodes meet by the first host's name, torchrun's line with torchrun replaced, in a heredoc, a
# task a rank with what plain srun's scripts export, an environment that is activated first.
PUBLIC = """#!/bin/bash
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
set -euo pipefail
source activate.sh && activate torch
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS OMP_NUM_THREADS=1 LOGLEVEL=INFO

srun --ntasks-per-node=1 --ntasks=2 megascale-ops run \\
    --nnodes $SLURM_NNODES --nproc_per_node 2 \\
    --rdzv_id c10d-$SLURM_JOB_ID --rdzv_backend c10d --rdzv_endpoint $head_node:$MASTER_PORT \\
    train.py --steps=5

srun --ntasks-per-node=1 --ntasks=2 bash <<'EOF'
megascale-ops run --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --nproc_per_node=1 \\
    --master_addr=$MASTER_ADDR --master_port=$((MASTER_PORT + 1)) --job=static-$SLURM_JOB_ID train.py --steps=5
EOF

srun --wait=60 --kill-on-bad-exit=1 bash -c \\
    'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID megascale-ops run --job=tasks-$SLURM_JOB_ID -- train.py --steps=5'
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    """Two nodes."""
    with OneNode(nodes=2, settings=SOON, cpus=2) as cluster:
        yield cluster


def submit(slurm: OneNode, launch: Launch, script: str, name: str) -> str:
    """Hand a script in from the folder with train.py, wait for its end, and return what it has printed."""
    (launch.tmp_path / "train.py").write_text(PLAIN.read_text())
    env = {key: value for key, value in launch.env.items() if not key.startswith("SLURM_")}
    env["PATH"] = f"{PROGRAM.parent}:{os.environ['PATH']}"
    head, rest = script.split("\n", 1)
    job = slurm.submit(f"{head}\n#SBATCH --chdir={launch.tmp_path}\n{rest}", env, name)
    ended = ("COMPLETED", "FAILED", "CANCELLED")
    until(
        lambda: slurm.job(job)["JobState"] in ended,
        f"the job is one of {ended}",
        deadline_s=300.0,  # several runs of two nodes, on a machine that has other work
        why=lambda: slurm.output(name) + slurm.logs(),
    )
    printed = slurm.output(name)
    assert slurm.job(job)["JobState"] == "COMPLETED", printed
    return printed


def test_every_script_of_the_guide_trains(slurm: OneNode, launch: Launch) -> None:
    """As it stands there, but for numbers of nodes and GPUs; a job that has ended well is not requeued."""
    scripts = [block for block in blocks(GUIDE, "bash") if "#SBATCH" in block]
    everything = "".join(scripts)

    for number, script in enumerate(scripts):
        for theirs, ours in SMALLER.items():
            script = script.replace(theirs, ours)  # noqa: PLW2901  a smaller one, step by step
        whole = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
        printed = submit(slurm, launch, whole, f"guide-{number}.out")
        assert "every rank ended normally" in printed, printed

    assert len(scripts) == 3
    assert [one for one in SMALLER if one not in everything] == []


@pytest.mark.matrix
def test_a_script_of_the_usual_public_shape_trains(slurm: OneNode, launch: Launch) -> None:
    """Two of torchrun's ways to meet, a heredoc, and a task a rank with its own RANK: each a job of all its ranks."""
    (launch.tmp_path / "activate.sh").write_text("activate() { export CONDA_DEFAULT_ENV=$1; }\n")

    printed = submit(slurm, launch, PUBLIC, "public.out")

    jobs = {
        job: [line for line in printed.splitlines() if f"job {job}-" in line] for job in ("c10d", "static", "tasks")
    }
    assert {job: sum("every rank ended normally" in line for line in lines) for job, lines in jobs.items()} == {
        "c10d": 2,
        "static": 2,
        "tasks": 2,
    }, printed
    assert printed.count("rank 3 done") == 2
    assert printed.count("rank 1 done") == 3
