# SPDX-License-Identifier: Apache-2.0
"""What is being looked at, and what each key changes about it. Pure: a state and a key in, a state out."""

from typing import NamedTuple

from megascale_ops.schema.live import Frame

JOB_KEYS = "q quit   j/k next, previous job   i incidents"
INCIDENT_KEYS = "q quit   j/k next, previous incident   i back to the job"


class View(NamedTuple):
    """What is on the screen.

    Attributes:
        job: whose frames are asked for; "": of the one that needs a look most.
        incident: the incident that is shown; "" while a job is.
        is_over: the user wants to leave.
    """

    job: str = ""
    incident: str = ""
    is_over: bool = False


def pressed(view: View, key: str, frame: Frame) -> View:
    """Return what is looked at after a key; keys that mean nothing change nothing."""
    if key in ("q", "Q"):
        return view._replace(is_over=True)
    names = [one.id for one in frame.incidents or ()]
    if key == "i":
        return view._replace(incident="" if view.incident or not names else names[0])
    if key == "escape":
        return view._replace(incident="")
    if key not in ("j", "k", "up", "down"):
        return view
    by = 1 if key in ("j", "down") else -1
    if view.incident:
        return view._replace(incident=_neighbour(names, view.incident, by))
    jobs = [one.job for one in frame.jobs or ()]
    return view._replace(job=_neighbour(jobs, frame.job, by)) if len(jobs) > 1 else view


def _neighbour(names: list[str], now: str, by: int) -> str:
    """Return the next name, around the end; the first when ``now`` is not among them any more."""
    if not names:
        return ""
    return names[(names.index(now) + by) % len(names)] if now in names else names[0]
