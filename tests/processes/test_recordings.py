# SPDX-License-Identifier: Apache-2.0
"""From a job that fails to a file that is sent and replayed: the commands of the guide, in order."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.replay.export import contents
from megascale_ops.replay.files import read_recording
from tests.processes.guides import commands

pytestmark = pytest.mark.processes

GUIDES = ("docs/how-to/send-what-happened.md",)

# Without torch: what is told of its end is the traceback.
SCRIPT = """
import os, time
secret_project = "zanzibar"
time.sleep(1.0)
if os.environ["RANK"] == "1":
    raise ValueError(f"no shard {secret_project} of customer-4711 in /data/zanzibar/shards")
time.sleep(60)
"""


def test_an_incident_is_exported_without_names_and_replayed_with_the_same_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exported, looked at, replayed as it was, and under another policy."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    train, *others = (shlex.split(line) for line in commands(GUIDES[0]))
    options = ("--box-root", str(tmp_path / "boxes"), "--node", "zanzibar-host-9", "--max-restarts", "1")
    trained = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", train[1], *options, *train[2:]],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert trained.returncode, trained.stdout + trained.stderr

    said: list[str] = []
    for words in others:
        code = main(words[1:])  # in this process: each of another would import NumPy and all judges
        out, err = capsys.readouterr()
        assert code == 0, f"{words}\n{out}\n{err}"
        said.append(out)

    exported, shown, replayed, otherwise = said
    assert "recorded: exception of rank 1 on node-1" in exported
    assert "names, paths, addresses and texts are replaced" in exported
    assert "ValueError" in shown
    assert "zanzibar" not in shown
    assert "the same as was recorded" in replayed
    assert "said now, and not recorded: exception of rank 1 on node-1, stop" in otherwise
    file = tmp_path / "incident.recording"
    assert b"zanzibar" not in file.read_bytes()
    assert contents(read_recording(file)).ranks == 2
    assert file.stat().st_size < 16_000
