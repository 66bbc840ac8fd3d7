# SPDX-License-Identifier: Apache-2.0
"""A job's description becomes a batch script that sbatch and bash read as it was meant."""

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.engines.slurm.batch import SlurmJob, name_of, output_of, script
from megascale_ops.errors import UsageError

PROGRAM = "/opt/ops/bin/megascale-ops"


def options(text: str) -> list[str]:
    """The script's options of sbatch."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_spares_are_nodes_of_the_allocation_and_not_of_the_job() -> None:
    """Slurm is asked for all, `run` for those that train, and the loss of one ends neither job nor step."""
    text = script(SlurmJob(command=("train.py",), nodes=4, spares=2, gpus_per_node=8), PROGRAM)

    assert {"--nodes=6", "--gpus-per-node=8", "--no-kill", "--requeue", "--signal=USR1@120"} <= set(options(text))
    assert text.splitlines()[-1] == (
        f"exec srun --ntasks-per-node=1 --no-kill {PROGRAM} run --nnodes=4 --requeues=3 "
        "--job=train-$SLURM_JOB_ID -- train.py"
    )


def test_without_requeues_slurm_warns_nobody() -> None:
    """The signal would be the script's own."""
    text = script(SlurmJob(command=("train.py",), requeues=0), PROGRAM)

    assert not [one for one in options(text) if one.startswith(("--signal", "--requeue"))]
    assert "--requeues" not in text


# All but a colon by itself, which is refused.
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1).filter(lambda word: word != ":")


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_a_command_comes_through_bash_as_it_was_given(words: list[str]) -> None:
    """Blanks, quotes, dollars: nothing of a user's is the shell's."""
    last = script(SlurmJob(command=tuple(words), name="x"), "run").split("\n")[-2]

    assert tuple(shlex.split(last.partition(" -- ")[2])) == tuple(words)


@pytest.mark.parametrize("batch_controller", [False, True])
def test_bash_reads_the_script(batch_controller: bool) -> None:
    """Its own check of the syntax, whatever is switched on."""
    job = SlurmJob(command=("a b.py", "--x=$HOME"), setup=("module load cuda",), batch_controller=batch_controller)

    done = subprocess.run(
        ["bash", "-n"], input=script(job, "a b"), text=True, capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_names_and_files() -> None:
    """The script's name, fit for a name of ours; an array's tasks have a file each."""
    job = SlurmJob(command=("/a/my train.py",))

    assert name_of(job) == "my-train"
    assert output_of(job) == "my-train-%j.out"
    assert output_of(SlurmJob(command=("x",), array="0-3")) == "x-%A_%a.out"


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (SlurmJob(), "nothing to run"),
        (SlurmJob(command=("x",), partition="a\n#SBATCH --uid=0"), "more than one line"),
    ],
)
def test_what_cannot_be_is_refused(job: SlurmJob, sentence: str) -> None:
    """With one sentence."""
    with pytest.raises(UsageError, match=sentence):
        script(job, PROGRAM)
