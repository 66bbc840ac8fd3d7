# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops examples``: what comes with an installation is copied, and nothing of the user's is lost."""

import json
import os
from pathlib import Path

import pytest

from megascale_ops.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


SCRIPTS = (
    "bench_moe_gpt.py",
    "train_coded.py",
    "train_coded_admm.py",
    "train_gpt.py",
    "train_gpt_plain.py",
    "train_moe_gpt.py",
)


def test_both_scripts_are_copied_where_the_readme_looks_for_them(elsewhere: Path) -> None:
    """Into ``examples``, byte for byte; once more changes nothing."""
    assert main(["examples", "copy"]) == 0
    assert main(["examples", "copy"]) == 0

    for script in SCRIPTS:
        assert (elsewhere / "examples" / script).read_bytes() == (ROOT / "examples" / script).read_bytes()


def test_one_script_goes_where_it_is_wanted(elsewhere: Path) -> None:
    """With or without its ending."""
    assert main(["examples", "copy", "train_gpt", "mine"]) == 0
    assert main(["examples", "copy", "train_gpt_plain.py", "mine"]) == 0

    assert sorted(path.name for path in (elsewhere / "mine").iterdir()) == ["train_gpt.py", "train_gpt_plain.py"]


def test_deployment_files_keep_their_folders_and_can_be_run(elsewhere: Path) -> None:
    """All of ``agents/deploy``; Slurm refuses a prolog that can't be executed."""
    assert main(["examples", "copy", "deploy"]) == 0

    ours = ROOT / "agents" / "deploy"
    copied = {path.relative_to(elsewhere / "deploy") for path in (elsewhere / "deploy").rglob("*") if path.is_file()}
    assert copied == {path.relative_to(ours) for path in ours.rglob("*") if path.is_file()}
    assert os.access(elsewhere / "deploy" / "slurm" / "prolog.sh", os.X_OK)


def test_what_was_changed_by_hand_is_kept_unless_forced(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names the file, and nothing at all is written."""
    (elsewhere / "examples").mkdir()
    (elsewhere / "examples" / "train_gpt_plain.py").write_text("mine")

    assert main(["examples", "copy"]) == 2

    told = capsys.readouterr().err
    assert told == (
        "megascale-ops: files there differ from those of this version: examples/train_gpt_plain.py; give --force to "
        "replace them\n"
    )
    assert not (elsewhere / "examples" / "train_gpt.py").exists()
    assert main(["examples", "copy", "--force"]) == 0
    assert (elsewhere / "examples" / "train_gpt_plain.py").read_text() != "mine"


def test_what_can_not_be_is_one_sentence(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that does not exist, with the nearest; a file where the folder should be."""
    (elsewhere / "taken").write_text("")

    assert main(["examples", "copy", "train_gtp.py"]) == 2
    assert main(["examples", "copy", "train_gpt", "taken"]) == 2
    assert main(["examples", "copy", "./my-folder"]) == 2

    name, place, folder = capsys.readouterr().err.splitlines()
    assert name == "megascale-ops: unknown example 'train_gtp.py': did you mean 'train_gpt.py'?"
    assert "can't be written" in place
    known = f"{', '.join(SCRIPTS)} and deploy"
    assert folder.endswith(f"there are {known}; a folder comes behind the name")


def test_what_there_is_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it says of itself, for people and for programs."""
    assert main(["examples", "list"]) == 0
    shown = capsys.readouterr().out
    assert main(["examples", "list", "--json"]) == 0

    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == [*SCRIPTS, "deploy"]
    assert all(name in shown and text in shown for name, text in listed.items())
