# SPDX-License-Identifier: Apache-2.0
"""Two jobs that write into one folder by mistake damage nothing, and a restart is never held up by the dead."""

import json
import os
from pathlib import Path

import pytest

from tests.processes.warmed import play_module

pytestmark = pytest.mark.processes

PAIRS = 6


def test_of_two_writers_one_is_refused_and_its_successor_goes_on_at_once(tmp_path: Path, drawn_seed: int) -> None:
    """Six pairs at drawn moments: one is refused by name, every sealed checkpoint is whole, the newest is restored.

    Negative controls: whoever follows a writer that was killed takes the folder without any wait, on the machine that
    knows of the death; and each pair has a folder of its own, in which the holders of the others are no obstacle.
    """
    env = os.environ | {"MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"}

    done = play_module("tests.fixtures.checkpoint_pair", [str(tmp_path), str(PAIRS), str(drawn_seed)], env, 500)

    assert done.returncode == 0, f"seed {drawn_seed}: {done.stderr}"
    pairs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(pairs) == PAIRS
    for pair in pairs:
        told = f"seed {drawn_seed}: {pair}"
        refused = [detail for _, kind, detail in pair["lines"] if kind == "refused"]
        assert len(refused) == 1, told
        assert "writes there" in refused[0], told
        assert all(pair["whole"]), told
        assert not pair["skipped"], told
        assert pair["newest"] >= pair["saved"] > 0, told
        said = {kind: detail for _, kind, detail in pair["successor"]}
        assert said["restored"] == [pair["holder"], pair["newest"]], told
        assert said["saved"] == pair["newest"] + 2, told
        assert "waited" not in said, told
