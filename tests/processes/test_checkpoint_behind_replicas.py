# SPDX-License-Identifier: Apache-2.0
"""Features of checkpoints together: saved in the background, replicas compared, a tier on the node, restored.

One process imports torch and forks the two ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megascale_ops.checkpoint import newest
from megascale_ops.checkpoint.trust import alarms
from tests.processes.warmed import env_of_programs, play_module

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks save."""
    return tmp_path_factory.mktemp("behind") / "jobs"


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Play both scenarios; what each rank tells."""
    env = env_of_programs() | {"MEGASCALE_RECORDER": "0"}
    done = play_module("tests.fixtures.checkpoint_behind_replicas", [str(folder)], env, deadline_s=300)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda one: one["rank"])


def test_replicas_are_compared_as_they_were_when_a_save_in_the_background_began(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    """The one that differs is told at its save, and beside its files; what is restored is what was saved."""
    for rank in ranks:
        assert rank["checked"] == {
            "told": {"1": [], "2": ["replicas_differ"], "3": []},
            "restored": 3,
            "is right": True,
            "step": 3,
        }

    found = {step: alarms.read(folder / "checked" / f"step-0000000{step}") for step in (1, 2, 3)}
    assert {step: one and (one.since, [alarm.fault for alarm in one.alarms]) for step, one in found.items()} == {
        1: (-1, []),
        2: (1, ["replicas_differ"]),
        3: (2, []),
    }
    chosen = newest(folder / "checked").newest
    assert chosen is not None
    assert chosen.manifest is not None
    names = [entry.name for entry in chosen.manifest.files]
    assert alarms.FILE_NAME in names
    assert any(name.endswith("_1.tensors") for name in names)  # a large tensor has a file of its own here, too


def test_a_save_that_is_refused_leaves_nothing_in_any_tier(ranks: list[dict[str, Any]], folder: Path) -> None:
    """It raises on all ranks, though it would be written in the background; the next one is well."""
    for rank in ranks:
        assert list(rank["refused"]["errors"]) == ["4"]
        assert "saving step 4 is refused" in rank["refused"]["errors"]["4"]
        assert (rank["refused"]["restored"], rank["refused"]["is right"]) == (6, True)

    assert not list((folder / "refused").rglob("step-00000004*"))
    # 6 is on the node only
    assert {path.name for path in (folder / "refused" / "shared").glob("step-*")} == {"step-00000001", "step-00000005"}
