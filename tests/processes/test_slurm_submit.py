# SPDX-License-Identifier: Apache-2.0
"""The guide's commands on a real Slurm: a job is handed in and followed, and what Slurm refuses is one sentence."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.fakes.slurm import SOON, OneNode
from tests.processes.launch import PLAIN, Launch
from tests.processes.slurm_jobs import PROGRAM
from tests.processes.warmed import put_stand_in

pytestmark = pytest.mark.processes

# docs/how-to/slurm.md: run here, character for character.
README_COMMANDS = (
    "megascale-ops submit slurm job.toml --dry-run",
    "megascale-ops submit slurm job.toml --follow",
    "megascale-ops slurm nodes",
    "megascale-ops slurm drain n2 'fan is loud'",
    "megascale-ops slurm resume n2",
    "megascale-ops diagnose --quick --check limits --resume --name n2",
)
DRY, FOLLOW, NODES, DRAIN, RESUME, CHECK = README_COMMANDS
FILE = """
command = ["train.py", "--steps=20"]
nodes = 2
time = "10"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    """Two nodes, and a partition that only root's group may use."""
    closed = "PartitionName=closed Nodes=ALL AllowGroups=root\n"
    with OneNode(nodes=2, settings=SOON + closed, cpus=2) as cluster:
        cluster.let_all_in()
        yield cluster


def _run(slurm: OneNode, launch: Launch, command: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    """Type a command in the folder with the job."""
    env = {name: value for name, value in launch.env.items() if not name.startswith("SLURM_")}
    env |= {"SLURM_CONF": slurm.env["SLURM_CONF"], "PATH": f"{path}:{PROGRAM.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        shlex.split(command), env=env, cwd=launch.tmp_path, capture_output=True, text=True, timeout=180, check=False
    )


def test_a_job_is_shown_handed_in_and_followed(slurm: OneNode, launch: Launch) -> None:
    """What `--dry-run` shows is what sbatch takes; `--follow` tells states, the run folder, and how it ended."""
    (launch.tmp_path / "job.toml").write_text(FILE)
    (launch.tmp_path / "train.py").write_text(PLAIN.read_text())

    shown = _run(slurm, launch, DRY)
    by_sbatch = subprocess.run(
        ["sbatch", "--test-only"],
        input=shown.stdout,
        env=slurm.env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    done = _run(slurm, launch, FOLLOW)

    assert by_sbatch.returncode == 0, by_sbatch.stderr
    number = re.match(r"Slurm job (\d+) \(train\); what it prints: train-\1.out\n", done.stdout)
    assert number is not None, done
    assert f"job {number[1]}: COMPLETED\n" in done.stdout
    assert f"run folder: {launch.run_dir(f'train-{number[1]}')}\n" in done.stdout
    assert done.returncode == 0
    printed = (launch.tmp_path / f"train-{number[1]}.out").read_text()
    assert "rank 1 done" in printed
    assert (launch.run_dir(f"train-{number[1]}") / "journal.db").exists()


def test_a_job_that_fails_is_followed_to_its_verdict(slurm: OneNode, launch: Launch) -> None:
    """The opposite: the verdict is told as it comes, and the exit code is 1."""
    done = _run(
        slurm,
        launch,
        f"megascale-ops submit slurm --follow --nodes 2 --options=--policy --options=killed=stop "
        f"-- {PLAIN} --fault=sigkill --at=5 --step-s=0.05",
        str(put_stand_in(launch.tmp_path / "bin")),
    )

    assert re.search(r"verdict plain-\d+-1: killed: .*\(stop\)", done.stdout), done
    assert re.search(r"job \d+: FAILED", done.stdout)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--partition nope", "sbatch: Invalid partition name specified; `sinfo --summarize` lists the partitions"),
        ("--nodelist n7", "sbatch: Invalid node name specified; `sinfo --Node` lists the nodes"),
        ("--time soon", "sbatch: Invalid --time specification"),
        ("--partition closed", "permitted to use this partition; `scontrol show partition` tells who may use which"),
    ],
)
def test_what_slurm_refuses_is_one_sentence(slurm: OneNode, launch: Launch, options: str, sentence: str) -> None:
    """Wrong partition, false node name, nonsense, a partition that is not this user's."""
    shim = launch.tmp_path / "bin" / "sbatch"
    shim.parent.mkdir()
    shim.write_text('#!/bin/bash\nexec setpriv --reuid=65534 --regid=65534 --clear-groups /usr/bin/sbatch "$@"\n')
    shim.chmod(0o755)

    done = _run(slurm, launch, f"megascale-ops submit slurm {options} -- train.py", str(shim.parent))

    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_node_is_drained_by_hand_and_resumed_by_a_check(slurm: OneNode, launch: Launch) -> None:
    """One that is in service is not measured; a drained one comes back by a check that finds nothing, or by hand."""
    well = _run(slurm, launch, CHECK)
    drained = _run(slurm, launch, DRAIN)
    listed = _run(slurm, launch, NODES)
    checked = _run(slurm, launch, CHECK)
    again = _run(slurm, launch, RESUME)

    assert ", and not by a verdict of ours: nothing is measured" in well.stderr
    assert drained.stdout == "node n2 is drained in Slurm: megascale-ops: fan is loud\n"
    assert listed.stdout == "n2 · drained · ours · megascale-ops: fan is loud\n"
    assert checked.returncode == 0, checked
    assert "node n2 is back in service" in checked.stdout
    assert re.fullmatch(r"node n2 is idle\*?: there is nothing to resume\n", again.stdout)
