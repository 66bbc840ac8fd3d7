# SPDX-License-Identifier: Apache-2.0
"""Trainers of other libraries, the real ones, save and restore by our callbacks, below our runner and through a kill.

A script that calls ``torch.save`` stays as it is: ``test_recorder_scripts`` holds that its saves are seen.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.processes.launch import Launch
from tests.processes.warmed import Ahead

pytestmark = pytest.mark.processes
SCRIPTS = Path(__file__).parents[1] / "fixtures" / "frameworks"
# What a library's script needs, imported once for all four ranks of its two rounds.
SCRIPTS_OF = {
    "transformers": ("hugging_face_checkpoints.py", ("transformers.trainer", "megascale_ops.checkpoint")),
    "lightning": ("lightning_checkpoints.py", ("lightning.pytorch", "megascale_ops.checkpoint")),
}


def found_by(launch: Launch, library: str) -> dict[str, Any]:
    """Run a library's script to its end on two ranks; what it says."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e '.[frameworks]'")
    name, imports = SCRIPTS_OF[library]
    script = SCRIPTS / name
    launch.env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    launch.ahead = Ahead(imports, (str(script),))

    code = launch.finish(launch.run(script=script), deadline_s=360.0)

    assert code == 0, launch.output()
    lines = [line.partition("found ")[2] for line in launch.output().splitlines() if "found {" in line]
    assert len(lines) == 1, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.step_before) == ("killed", 8), launch.output()
    launch.assert_nothing_left()
    told: dict[str, Any] = json.loads(lines[0])
    return told


def test_transformers_trainer_goes_on_to_the_bit(launch: Launch) -> None:
    """From step 6 of 12: weights, epochs and logged losses are those of a training that was never ended."""
    found = found_by(launch, "transformers")

    assert found["restored"] == [6, -1, 12]
    assert found["same"], found
    assert (found["steps"], found["still"]) == ([12, 12], True)
    assert found["epochs"] == [2.4, 2.4]
    assert found["losses"][0] == found["losses"][1]
    assert found["evaluated"] == [4, 4]
    assert found["accumulated"] == [8, True]
    assert (found["newest"], found["has_metric"]) == (12, True)


def test_lightning_goes_on_to_the_bit(launch: Launch) -> None:
    """From step 6 of 12, with its loops, its other callbacks and its schedule."""
    found = found_by(launch, "lightning")

    assert found["restored"] == [6, -1, 12]
    assert found["same"], found
    assert (found["steps"], found["still"]) == ([12, 12], True)
    assert found["best"][0] == found["best"][1]
    assert (found["newest"], found["has_metric"]) == (12, True)
