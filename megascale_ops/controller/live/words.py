# SPDX-License-Identifier: Apache-2.0
"""Verdicts and incidents in the few words that a page has room for: ranks, class, and how to take back what was done.

Pure: values in, words out.
"""

from megascale_ops.schema.events import Incident
from megascale_ops.schema.folding import listed, named
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.live import IncidentLine

# 4: what fits beside a sentence; all culprits are in the incident.
MOST_NAMED = 4
_SAYS = {
    "exception": "died of an exception",
    "exception_everywhere": "died of the same exception",
    "killed": "was killed",
    "segfault": "crashed with a memory fault",
    "aborted": "aborted",
    "out_of_memory": "ran out of memory",
    "disk_full": "could not write: the disk is full",
    "cuda_error": "died of a CUDA error",
    "nccl_error": "died of an NCCL error",
    "exit_code": "ended with an error",
    "exited_early": "ended while the others still trained",
    "frozen": "froze",
    "silent": "makes no progress",
    "not_joined": "did not come to the collective that the others wait in",
    "collective_order": "called collectives in another order than the others",
    "collective_mismatch": "called a collective with other sizes than the others",
    "tile_timeout": "never sent the tile that the kernels of others wait for",
    "group_never_formed": "waits for a process group that never forms",
    "link_cut": "is cut off on the network",
    "stuck": "is stuck outside of collectives",
    "gpu_stuck": "has a GPU that does not come to its collective",
    "sleeping": "sleeps while the others wait",
    "gil_held": "is stuck in native code",
    "busy": "works on something of its own",
    "data_stall": "waits for its data loader",
    "storage_stall": "waits for storage",
    "slow": "is slow",
    "straggler": "is slow and makes all others wait",
    "slow_link": "moves data more slowly than its equals",
    "duplicate_rank": "runs twice",
}
# Of these no rank is the subject.
_WHOLE = {
    "idle": "No rank does anything",
    "loss_nan": "The loss is not a number",
    "loss_spike": "The loss jumped",
    "membership": "The set of nodes changed",
    "script_bug": "The script fails at the same step again",
}
_NODES = {"node_lost": "does not answer", "runner_lost": "lost its runner and its ranks"}
# 3 a.m. is no time to wonder whether it still is so.
_WAS = {
    "is": "was", "does": "did", "makes": "made", "waits": "waited", "sleeps": "slept", "moves": "moved",
    "runs": "ran", "has": "had", "forms": "formed", "fails": "failed",
}  # fmt: skip
_ARE = {
    "was": "were", "is": "are", "does": "do", "makes": "make", "waits": "wait", "sleeps": "sleep", "moves": "move",
    "runs": "run", "has": "have",
}  # fmt: skip
# By what was done: how to take it back, and the setting that has it done otherwise the next time.
_UNDO = {
    "restart": ("A restart can't be undone. To be told only, the next time that this happens:", "warn"),
    "evict": ("The node comes back by itself (policy show says when). To keep it in, the next time:", "restart"),
    "stop": ("The job was stopped: start it again by its own command. To have it restarted instead:", "restart"),
    "nothing": ("Nothing was done to the job. To have it restarted, the next time that this happens:", "restart"),
}


def what(verdict: Verdict, *, past: bool = False) -> str:
    """Return a verdict as the beginning of a sentence: who, and what happens to it; ``past``: happened."""
    if verdict.fault in _WHOLE:
        return _past(_WHOLE[verdict.fault]) if past else _WHOLE[verdict.fault]
    is_node = verdict.fault in _NODES and bool(verdict.nodes)
    says = (
        _NODES[verdict.fault]
        if is_node
        else _SAYS.get(verdict.fault, f"has a fault: {verdict.fault.replace('_', ' ')}")
    )
    says = _past(says) if past else says
    if is_node:
        return _of_nodes(verdict.nodes, says)
    if not verdict.culprits:
        return f"Nobody can be named, but a rank {says}"
    return f"{named(verdict.culprits).capitalize()} {_many(says) if len(set(verdict.culprits)) > 1 else says}"


def is_past(incident: Incident) -> bool:
    """Say whether what an incident is about is over."""
    return incident.state not in ("open", "watching")


def lower(text: str) -> str:
    """Return a sentence as a part of another one."""
    return text[:1].lower() + text[1:]


def _of_nodes(nodes: tuple[str, ...], says: str) -> str:
    if len(nodes) == 1:
        return f"Node {nodes[0]} {says}"
    return f"Nodes {listed(nodes, MOST_NAMED)} {_many(says)}"


def incident_line(incident: Incident) -> IncidentLine:
    """Return one incident as the list shows it."""
    verdict, marks = incident.verdict, incident.marks
    began = marks.began or marks.detected
    steps_lost = -1
    if min(incident.step_before, incident.step_after) >= 0:
        steps_lost = max(0, incident.step_before - incident.step_after)
    undo, command = undoing(incident)
    return IncidentLine(
        id=incident.id,
        state=incident.state,
        what=what(verdict, past=is_past(incident)) if verdict is not None else "Not judged yet",
        fault=verdict.fault if verdict is not None else "",
        reason=verdict.reason if verdict is not None else "",
        culprits=verdict.culprits[:MOST_NAMED] if verdict is not None else (),
        nodes=verdict.nodes[:MOST_NAMED] if verdict is not None else (),
        began_wall_s=began,
        recovered_s=marks.stepped - began if marks.stepped and began else -1.0,
        steps_lost=steps_lost,
        done=incident.done,
        undo=undo,
        undo_command=command,
    )


def undoing(incident: Incident) -> tuple[str, str]:
    """Return how to take back what was done about an incident, or have it done otherwise: a sentence and a command."""
    verdict = incident.verdict
    if verdict is None:
        return "", ""
    action = verdict.action
    if incident.state in ("watching", "harmless", "over") and action not in ("restart", "evict"):
        action = "nothing"
    undo, other = _UNDO.get(action, ("", ""))
    if not undo:
        return "", ""
    return undo, f"megascale-ops policy set {incident.job} {verdict.fault}={other}"


def _many(says: str) -> str:
    """Return a predicate for more than one subject."""
    return " ".join(_ARE.get(word, word) for word in says.split(" "))


def _past(says: str) -> str:
    """Return a predicate of what is over."""
    return " ".join(_WAS.get(word, word) for word in says.split(" "))
