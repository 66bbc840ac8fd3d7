# SPDX-License-Identifier: Apache-2.0
"""Where ``megascale-ops targets --out`` writes: a file that Prometheus reads, whole at any time, and nothing else."""

import os
from pathlib import Path

import pytest

from megascale_ops.cli import targets
from megascale_ops.errors import UsageError


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    """As Kubernetes mounts its files."""
    (tmp_path / "real.json").write_text("[]")
    (tmp_path / "link.json").symlink_to("real.json")

    targets._write(tmp_path / "link.json", "[1]")

    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "[1]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    """Root's /dev/null must not become a file."""
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(UsageError, match="is a device or a pipe"):
        targets._write(tmp_path / "pipe", "[1]")

    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    """In one sentence."""
    with pytest.raises(UsageError, match=r"gone/targets.json can't be written: No such file"):
        targets._write(tmp_path / "gone" / "targets.json", "[1]")
