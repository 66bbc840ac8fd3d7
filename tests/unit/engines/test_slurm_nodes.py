# SPDX-License-Identifier: Apache-2.0
"""Nodes are drained with our prefix and resumed only where it stands; what an administrator has done stays."""

import pytest

from megascale_ops.engines.actuator import EngineError
from megascale_ops.engines.slurm.nodes import SlurmNodes

STATES = "n1|idle|Unknown|none\nn2|drained|root|fan\nn3|drained|slurm|megascale-ops: killed\nn4|down*|slurm|gone\n"


class Commands:
    """Answers sinfo, and writes down all else."""

    def __init__(self) -> None:
        self.given: list[tuple[str, ...]] = []

    def __call__(self, program: str, *arguments: str) -> str:
        """Run one."""
        if program == "sinfo":
            return STATES
        self.given.append(arguments)
        return ""


def test_a_node_is_drained_with_whose_reason_it_is() -> None:
    """By its host name, too."""
    commands = Commands()

    said = SlurmNodes(commands).drain("n1.example", "killed twice")

    assert commands.given == [("update", "nodename=n1", "state=drain", "reason=megascale-ops: killed twice")]
    assert said == "node n1 is drained in Slurm: megascale-ops: killed twice"


def test_what_an_administrator_drained_keeps_its_reason() -> None:
    """The opposite: nothing is written over."""
    commands = Commands()

    assert "drained already: fan" in SlurmNodes(commands).drain("n2", "killed")
    assert commands.given == []


def test_only_ours_is_resumed() -> None:
    """Also by a person: Slurm's own command is for what others have drained."""
    commands = Commands()
    nodes = SlurmNodes(commands)

    nodes.resume("n3")
    with pytest.raises(EngineError, match=r"by root \(fan\) and stays so"):
        nodes.resume("n2")
    nodes.resume("n1")
    nodes.resume("n4")

    assert commands.given == [("update", "nodename=n3", "state=resume")]


def test_a_node_that_slurm_has_not_is_said_to_be_none() -> None:
    """A false name."""
    with pytest.raises(EngineError, match="Slurm has no node n9"):
        SlurmNodes(Commands()).drain("n9", "x")
