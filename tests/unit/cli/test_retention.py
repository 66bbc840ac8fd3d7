# SPDX-License-Identifier: Apache-2.0
"""What goes by itself: bounds that are refused, incidents that are kept."""

import os
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.runner.run_folder import keep_newest

NOW_S = 1_790_000_000.0


def test_the_newest_incidents_of_a_run_keep_their_evidence(tmp_path: Path) -> None:
    """The oldest go; a link among them is left, and 0 keeps all."""
    for number in range(5):
        (tmp_path / f"gpt-{number}").mkdir()
        os.utime(tmp_path / f"gpt-{number}", (NOW_S + number, NOW_S + number))
    (tmp_path / "link").symlink_to(tmp_path / "gpt-0")

    assert keep_newest(tmp_path, 0) == 0
    assert keep_newest(tmp_path, 2) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt-3", "gpt-4", "link"]
    assert keep_newest(tmp_path / "none", 2) == 0


@pytest.mark.parametrize("setting", ["keep_days = -1", "keep_runs = -1", "keep_days = nan", "keep_incidents = -3"])
def test_a_bound_below_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str) -> None:
    """It would remove everything: one sentence, and no run."""
    path = tmp_path / "ops.toml"
    path.write_text(f"[run]\n{setting}\n")

    assert main(["run", "--config", str(path), "--", "nothing.py"]) == 2
    assert "0 keeps all" in capsys.readouterr().err
