# SPDX-License-Identifier: Apache-2.0
"""Verdicts and incidents in the few words that a page has room for: ranks, class, and how to take back what was done.

Pure: values in, words out.
"""

from itertools import pairwise

from megascale_ops.schema.courses import course_words
from megascale_ops.schema.events import Incident
from megascale_ops.schema.fault_classes import Blames, class_of, unnamed
from megascale_ops.schema.folding import listed, named
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.live import IncidentLine

# 4: what fits beside a sentence; all culprits are in the incident.
MOST_NAMED = 4
# 3 a.m. is no time to wonder whether it still is so. What is regular needs no line here where it is the first verb.
_WAS = {
    "is": "was", "does": "did", "makes": "made", "sleeps": "slept", "runs": "ran", "has": "had", "forms": "formed",
    "fails": "failed",
}  # fmt: skip
_ARE = {"was": "were", "is": "are", "does": "do", "makes": "make", "has": "have"}
# By what was done: how to take it back, and the setting that has it done otherwise the next time.
_UNDO = {
    "restart": ("A restart can't be undone. To be told only, the next time that this happens:", "warn"),
    "evict": ("The node comes back by itself (policy show says when). To keep it in, the next time:", "restart"),
    "stop": ("The job was stopped: start it again by its own command. To have it restarted instead:", "restart"),
    "nothing": ("Nothing was done to the job. To have it restarted, the next time that this happens:", "restart"),
}


def what(verdict: Verdict, *, past: bool = False) -> str:
    """Return a verdict as the beginning of a sentence: ranks or nodes, and their fault; ``past``: in the past tense."""
    row = class_of(verdict.fault)
    if row.blames is Blames.JOB:
        return _past(row.says) if past else row.says
    is_node = row.blames is Blames.NODE and bool(verdict.nodes)
    says = unnamed(row.name) if row.blames is Blames.NODE and not is_node else row.says
    says = _past(says) if past else says
    if is_node:
        return _of_nodes(verdict.nodes, says)
    if not verdict.culprits:
        return f"Nobody can be named, but a rank {says}"
    return f"{named(verdict.culprits).capitalize()} {_many(says) if len(set(verdict.culprits)) > 1 else says}"


def is_past(incident: Incident) -> bool:
    """Return whether what an incident is about is over."""
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
        course=course_words(incident.course, incident.marks.began) if incident.course is not None else "",
        is_ordered=marks.ordered > 0,
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
    """Return a predicate for more than one subject: its first verb, and one that follows an "and"."""
    first, *rest = says.split(" ")
    both = [_ARE.get(word, word) if before == "and" else word for before, word in pairwise([first, *rest])]
    return " ".join([_ARE.get(first) or _stem(first), *both])


def _past(says: str) -> str:
    """Return a predicate, or a sentence, of what is over."""
    first, *rest = says.split(" ")
    stem = _stem(first)
    regular = first if stem == first else f"{stem.removesuffix('e')}ed"
    return " ".join([_WAS.get(first) or regular, *(_WAS.get(word, word) for word in rest)])


def _stem(verb: str) -> str:
    """Return a regular verb without the s of its third person; what has none is in the past already, or no verb."""
    return verb.removesuffix("s") if verb != "was" and verb.islower() else verb
