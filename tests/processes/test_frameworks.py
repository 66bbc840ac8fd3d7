# SPDX-License-Identifier: Apache-2.0
"""Scripts that people write with transformers, accelerate and Lightning, the real ones, are understood as they are."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes.launch import Launch
from tests.processes.warmed import Ahead

pytestmark = pytest.mark.processes
# A folder of their own: transformers tests for a package "kernels", and the scripts' folder has one.
SCRIPTS = Path(__file__).parents[1] / "fixtures" / "frameworks"
# What a library's script needs, imported once for all four ranks of its two rounds.
IMPORTS = {"transformers": "transformers.trainer", "lightning": "lightning.pytorch"}


@pytest.mark.parametrize(
    ("library", "script", "phases", "checks"),
    [
        ("transformers", "hugging_face.py", "evaluating=eval saving=checkpoint training=forward", 0),
        ("lightning", "lightning_trainer.py", "saving=checkpoint testing=eval validating=eval", 4),
    ],
)
def test_a_framework_says_its_phases_and_steps(
    launch: Launch, library: str, script: str, phases: str, checks: int
) -> None:
    """Evaluations and saves are told apart from steps; after a restart from step 5, 6 to 8 are lost."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e '.[frameworks]'")
    launch.env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    launch.ahead = Ahead((IMPORTS[library],), (str(SCRIPTS / script),))

    code = launch.finish(launch.run(script=SCRIPTS / script), deadline_s=360.0)

    said = launch.output()
    assert code == 0, said
    assert f"phases {phases}\n" in said
    assert "steps (6, 6) (12, 12) True 7" in said
    assert "steps aside" not in said
    assert said.count("checking=") == said.count("checking=eval") == checks
    incident = launch.the_incident()
    assert (incident.step_before, incident.step_after) == (8, 6)
    launch.assert_nothing_left()
