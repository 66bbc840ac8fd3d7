# SPDX-License-Identifier: Apache-2.0
"""``run --hosts``: what is wrong before any host is asked is one sentence."""

from pathlib import Path

import pytest

from megascale_ops.cli.main import main


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (("--hosts=none", "--", "t.py"), "the hosts can't be read from {folder}/none: No such file or directory"),
        (("--hosts=.", "--", "t.py"), "the hosts can't be read from {folder}: Is a directory"),
        (("--hosts=hosts",), "nothing to run: give the training script after `--`"),
        (("--hosts=hosts", "--nnodes=3", "--", "t.py"), "--nnodes asks for 3 nodes, and {folder}/hosts names 1"),
        (
            ("--hosts=hosts", "--nproc-per-node=9", "--", "t.py"),
            "line 1: a has 8 slots, and --nproc-per-node asks for 9",
        ),
        (("--hosts=hosts", "--ssh='x", "--", "t.py"), "can't be read: no closing quotation"),
        (("--hosts=hosts", "--ssh=", "--", "t.py"), "--ssh is empty: name the program"),
        (("--hosts=hosts", "--ssh=/none/ssh", "--", "t.py"), "/none/ssh can't be started (No such file or directory)"),
        (("--hosts=bad", "--", "t.py"), "{folder}/bad, line 2: 'slot=8' can't be read behind b"),
        (("--ssh=ssh", "--", "t.py"), "--ssh and --remote-python are for --hosts FILE, which is missing"),
    ],
)
def test_a_mistake_is_one_sentence(
    line: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where it is, what is wrong, what to do; nothing was started."""
    (tmp_path / "hosts").write_text("a slots=8\n")
    (tmp_path / "bad").write_text("a slots=8\nb slot=8\n")
    monkeypatch.chdir(tmp_path)

    code = main(["run", *line])

    assert code == 2
    told = capfd.readouterr().err
    assert sentence.format(folder=tmp_path) in told
    assert told.count("\n") == 1
