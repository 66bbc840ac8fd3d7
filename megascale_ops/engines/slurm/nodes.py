# SPDX-License-Identifier: Apache-2.0
"""The nodes of a Slurm cluster: drained with a reason that says whose it is, resumed only where the reason is ours.

A drained node finishes what it runs and gets no new job. Slurm asks for the level Operator, or for SlurmUser or root.
"""

from collections.abc import Callable, Mapping

from megascale_ops.engines.actuator import EngineError, EngineNode, ForeignError, Nodes, find, reason_of
from megascale_ops.engines.slurm.answers import NODE_FORMAT, read_nodes
from megascale_ops.engines.slurm.commands import ask

# The states of a node that is out of service and stays so until a person or a check resumes it.
_DRAINED = ("drain", "fail", "maint")


class SlurmNodes(Nodes):
    """Nodes by Slurm's commands.

    Args:
        command: Runs one of them and returns what it prints.
    """

    title = "Slurm"

    def __init__(self, command: Callable[..., str] = ask) -> None:
        self._ask = command

    def states(self) -> Mapping[str, EngineNode]:
        """Return every node that this user may see, by Slurm's name."""
        return read_nodes(self._ask("sinfo", "--Node", "--noheader", "--all", f"--format={NODE_FORMAT}"))

    def drain(self, node: str, reason: str) -> str:
        """Drain a node; the reason of one that is drained already stays, for it is what its administrator wrote."""
        known = self._known(node)
        if known.words.lower().startswith(_DRAINED):
            return f"node {known.name} is {known.words} already: {known.reason or 'no reason is given'}"
        self._ask("scontrol", "update", f"nodename={known.name}", "state=drain", f"reason={reason_of(reason)}")
        return f"node {known.name} is drained in Slurm: {reason_of(reason)}"

    def resume(self, node: str) -> str:
        """Resume a node that we have drained."""
        known = self._known(node)
        if not known.words.lower().startswith(_DRAINED):
            return f"node {known.name} is {known.words}: there is nothing to resume"
        if not known.is_ours:
            raise ForeignError(
                f"node {known.name} is {known.words} by {known.by or 'another user'} ({known.reason or 'no reason'}) "
                f"and stays so: `scontrol update nodename={known.name} state=resume` takes that back"
            )
        self._ask("scontrol", "update", f"nodename={known.name}", "state=resume")
        return f"node {known.name} is back in service"

    def reboot(self, node: str, reason: str) -> str:
        """Let a node be restarted as soon as it runs nothing, and go back into service by itself; no job goes there.

        Raises:
            EngineError: it was not done; Slurm needs a RebootProgram for it.
        """
        known = self._known(node)
        self._ask("scontrol", "reboot", "ASAP", "nextstate=RESUME", f"reason={reason_of(reason)}", known.name)
        return f"node {known.name} is restarted as soon as it runs nothing"

    def _known(self, node: str) -> EngineNode:
        known = find(self.states(), node)
        if known is None:
            raise EngineError(f"Slurm has no node {node}: `sinfo --Node` lists its nodes")
        return known
