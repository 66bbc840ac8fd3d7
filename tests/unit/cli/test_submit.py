# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops submit``: a file and options become a script or an object; what can't be is one sentence."""

import shlex
from pathlib import Path

import pytest
import yaml

from megascale_ops.cli.main import main

FILE = 'command = ["train.py", "--steps=20"]\nnodes = 4\npartition = "gpu"\nsetup = ["module load cuda"]\n'


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run it without handing anything in."""
    code = main(["submit", "slurm", "--dry-run", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_options_count_for_more_than_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a command behind `--` for more than its."""
    path = tmp_path / "job.toml"
    path.write_text(FILE)

    code, out, _ = dry(capsys, str(path), "--nodes=2")
    _, other, _ = dry(capsys, str(path), "--", "other.py", "--x")

    assert code == 0
    assert "#SBATCH --nodes=2\n" in out
    assert "#SBATCH --partition=gpu\n" in out
    assert "\nmodule load cuda\n" in out
    assert out.endswith("--job=train-$SLURM_JOB_ID -- train.py --steps=20\n")
    assert other.endswith("-- other.py --x\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nods = 4\n", "unknown setting 'nods': did you mean 'nodes'?"),
        ('nodes = "four"\n', 'job.toml: nodes = "four" can\'t be: it takes a whole number from 1 to 1,000,000'),
        ("nodes = 0\n", "job.toml: nodes = 0 can't be: it takes a whole number from 1 to 1,000,000"),
        ("exclusive = 1\n", "exclusive = 1 can't be: it takes true or false"),
        ("time = 10\n", 'time = 10 can\'t be: it takes text, as in time = "..."'),
        ('command = "train.py"\n', "it takes a list of texts, as in command = ["),
        ("nodes = \n", "is no TOML"),
        ("nodes = 4\n", "nothing to run"),
        ("\0", "is no TOML"),
    ],
)
def test_a_file_that_cannot_be_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    """It names the file's mistake, and nothing is handed in."""
    path = tmp_path / "job.toml"
    path.write_text(text)

    code, out, err = dry(capsys, str(path))

    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name, and why."""
    code, _, err = dry(capsys, "/nonexistent/job.toml")

    assert code == 2
    assert "/nonexistent/job.toml can't be read: No such file or directory" in err


def test_without_slurm_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that has no sbatch."""
    monkeypatch.setenv("PATH", "/nonexistent")

    code = main(["submit", "slurm", "--", "train.py"])

    assert code == 1
    assert "sbatch is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nodes=0",), "--nodes 0 can't be: it takes a whole number from 1 to 1,000,000"),
        (("--nodes=-1",), "invalid value for '--nodes': -1 is not in the range"),
        (("--nodse=2",), "unknown option '--nodse': did you mean '--nodes'?"),
        (("--name=my job",), "job name 'my job' can't be used: take 1 to 100 letters, digits"),
        (("--name", "x" * 95), "the job's name has 95 characters; with Slurm's number behind it 89 may be"),
        (("--partition=a\nb",), "'a\\nb' can't be an option of sbatch: it has more than one line"),
        (("--sbatch=hetjob",), "a heterogeneous job is several, and `submit` writes one"),
        (("--sbatch=mem=4G",), "'mem=4G' is no option of sbatch, which all begin with '-': --mem=4G?"),
        (("--options=--nonsense",), "options: No such option '--nonsense'"),
        (("--options=--profile-every=-3",), "options: Invalid value for '--profile-every': -3 is not in the range"),
        (("--options=--warm --wrap",), "options: No such option '--warm --wrap'"),
        (("--options=other.py",), "options: 'other.py' is no option of `megascale-ops run`: write --NAME=VALUE"),
        (("--options=--help",), "options: --help ends `run` at once, and nothing would train"),
        (("--follow",), "--dry-run hands nothing in, so there is nothing to follow"),
    ],
)
def test_an_option_that_cannot_be_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    """Told here, and not by a node hours later."""
    code, out, err = dry(capsys, *words, "--", "train.py")

    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [("t.py", ":", "other.py"), (":",)])
def test_a_colon_by_itself_would_be_sruns(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """It reads one anywhere in its line as the begin of another component; within a word it is the script's own."""
    code, _, err = dry(capsys, "--", *words)
    well, out, _ = dry(capsys, "--", "t.py", "a:b", "::")

    assert code == 2
    assert "':' by itself can't be an argument of what srun starts" in err
    assert well == 0
    assert out.endswith(" -- t.py a:b ::\n")


def test_blanks_and_quotes_are_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a path, of an argument, of a comment; a name is made of what a script's may have; an array's file has both."""
    code, out, _ = dry(
        capsys, "--array=0-3", '--comment=he said "hi"', "--options=--policy", "--options=killed=stop", "--",
        "my dir/-train it.py", "it's", "$HOME",
    )  # fmt: skip

    assert code == 0
    assert "#SBATCH --job-name=train-it\n" in out
    assert "#SBATCH --output=train-it-%A_%a.out\n" in out
    assert '#SBATCH --comment="he said \\"hi\\""\n' in out
    assert "--policy killed=stop --job=train-it-$SLURM_JOB_ID -- 'my dir/-train it.py' 'it'" in out
    assert shlex.split(out.rpartition(" -- ")[2]) == ["my dir/-train it.py", "it's", "$HOME"]


def test_an_array_is_followed_by_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Several jobs at once."""
    assert main(["submit", "slurm", "--follow", "--array=0-3", "--", "train.py"]) == 2
    assert "--array makes several" in capsys.readouterr().err


KUBERNETES = 'command = ["train.py"]\nimage = "example.com/train:1"\nkind = "Job"\nnodes = 4\nqueue = "gpus"\n'


def test_a_file_becomes_an_object_of_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As YAML that kubectl takes; options count for more than the file, a command behind `--` for more than its."""
    path = tmp_path / "job.toml"
    path.write_text(KUBERNETES)

    code = main(["submit", "kubernetes", "--dry-run", str(path), "--nodes=2", "--min-nodes=1", "--", "other.py", "--x"])
    made = yaml.safe_load(capsys.readouterr().out)

    assert code == 0
    assert (made["kind"], made["metadata"]["name"], made["spec"]["completions"]) == ("Job", "other", 2)
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "example.com/train:1"
    assert container["command"][-3:] == ["--", "other.py", "--x"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("partition = 'gpu'\n", "unknown setting 'partition'"),
        ("imgae = 'x'\n", "unknown setting 'imgae': did you mean 'image'?"),
        ('kind = "MPIJob"\n', 'kind = "MPIJob" can\'t be: it takes one of Job, JobSet'),
        ("grace_s = 5\n", "grace_s = 5 can't be: it takes a whole number from 20 to 86,400"),
        ("nodes = 4\n", "nothing to run"),
        ('command = ["a.py"]\n', "no image: give the training image"),
    ],
)
def test_a_job_for_kubernetes_that_cannot_be_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    """It names the file's mistake, and nothing is handed in."""
    path = tmp_path / "job.toml"
    path.write_text(text)

    code = main(["submit", "kubernetes", "--dry-run", str(path)])
    out = capsys.readouterr()

    assert (code, out.out) == (2, "")
    assert sentence in out.err
    assert out.err.count("\n") == 1


def test_without_a_cluster_a_job_is_not_handed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says what there is no way to."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    code = main(["submit", "kubernetes", "--image=x", "--", "a.py"])

    assert code == 1
    assert "no way to the API server" in capsys.readouterr().err
