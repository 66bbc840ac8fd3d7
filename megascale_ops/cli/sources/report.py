# SPDX-License-Identifier: Apache-2.0
"""Gather what a report shows: from a running controller, or from what a finished run left in its folder.

What can't be read becomes a note in the report. Only when nothing at all is known of a job is there none.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

import megascale_ops
from megascale_ops import account
from megascale_ops.cards import Reader, card
from megascale_ops.cli.sources.history import Journal
from megascale_ops.cli.sources.locate import Place, Wanted, find_place, read_token, reader_of, run_folders
from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError, UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.link import BlockingLink
from megascale_ops.schema.events import OVER, Incident
from megascale_ops.schema.history import DamagedHistoryError, History, decode, history_file
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.policy_settings import default_of, show_settings
from megascale_ops.suggest import nearest, unknown
from megascale_ops.trace.report_facts import Gathered, Setting, Told

# 200 incidents are fetched with all their evidence; of more, the newest.
MOST_WHOLE = 200
# 10,000 incidents: a line each; a page with more is not scrolled to its end.
MOST_LISTED = 10_000
_WITHOUT = "there is no picture, and of the time only what incidents tell"


class JobFacts(msgspec.Struct, frozen=True):
    """The journal's or the controller's facts of a job itself; a part of the controller's own record."""

    job: str
    state: str = ""
    life: int = 1  # 0: not known
    started_wall_s: float = 0.0
    since_wall_s: float = 0.0
    policy: JobPolicy | None = None
    tuned: dict[str, str] = {}


class _Found(NamedTuple):
    facts: JobFacts
    incidents: tuple[Incident, ...]
    history: History | None
    notes: tuple[str, ...]
    source: str


def gather(wanted: Wanted, token_file: str | None) -> Gathered:
    """Return all that is known of a job, the newest one when none is named.

    Raises:
        ControllerUnreachableError: there is neither a controller nor a journal.
        UsageError: there is no such job; the nearest is named.
    """
    place = _place(wanted)
    if place.journal is not None:
        found = _from_journal(place.journal, wanted.job)
    else:
        with BlockingLink(place.url, read_token(token_file, place)) as link:
            found = _from_controller(link, wanted.job)
    return _gathered(found, _reader(wanted, token_file, place), is_live=place.journal is None)


def _reader(wanted: Wanted, token_file: str | None, place: Place) -> Reader:
    """Return from where a report is read: later than it is written, elsewhere, and by another shell's environment."""
    is_shared = place.journal is None and place.folder is None
    wanted = wanted._replace(
        controller=place.url if is_shared else wanted.controller,
        run_dir=wanted.run_dir and str(Path(wanted.run_dir).absolute()),
    )
    token_file = token_file and str(Path(token_file).absolute())
    return reader_of(wanted, token_file, place)._replace(is_live=False)


def _place(wanted: Wanted) -> Place:
    """Return where to ask; for a name that no run has, the error names the nearest."""
    try:
        return find_place(wanted, journal_too=True)
    except ControllerUnreachableError as error:
        known = [folder.name for folder in run_folders(Wanted())]
        if wanted.job and not wanted.run_dir and nearest(wanted.job, known) not in (None, wanted.job):
            raise UsageError(unknown("job", wanted.job, known)) from error
        raise


def _from_journal(path: Path, job: str) -> _Found:
    journal = Journal(path)
    try:
        records = journal.jobs()
        listed = journal.incidents(limit=MOST_LISTED).incidents
        name = _chosen(job, [*records, *(incident.job for incident in listed)], str(path))
        try:
            facts = msgspec.json.decode(records[name], type=JobFacts) if name in records else JobFacts(name)
            notes: list[str] = []
        except UNREADABLE as error:
            facts, notes = JobFacts(name), [f"what the journal says of the job can't be read: {error}"]
        of_job = [incident for incident in listed if incident.job == name]
        whole = tuple(journal.incident(incident.id) for incident in of_job[-MOST_WHOLE:])
    finally:
        journal.close()
    file = history_file(path.parent, name)
    history: History | None = None
    try:
        history = decode(file.read_bytes(), str(file))
    except FileNotFoundError:
        notes.append(f"no history of steps was kept ({file} is missing): {_WITHOUT}")
    except (OSError, MegascaleError) as error:
        notes.append(f"{error}: {_WITHOUT}")
    return _Found(facts, (*of_job[:-MOST_WHOLE], *whole), history, tuple(notes), str(path))


def _from_controller(link: BlockingLink, job: str) -> _Found:
    jobs = {status.job: status for status in link.status().jobs}
    name = _chosen(job, sorted(jobs, key=lambda one: jobs[one].since_wall_s), f"the controller at {link.url}")
    status, policy = jobs[name], link.policy(name)
    facts = JobFacts(
        job=name,
        life=0,
        state=status.state,
        since_wall_s=status.since_wall_s,
        policy=policy.policy,
        tuned=policy.changed,
    )
    listed = link.incidents(name).incidents
    whole = tuple(link.incident(incident.id) for incident in listed[-MOST_WHOLE:])
    history, notes = None, []
    try:
        history = decode(link.history(name), f"the history of steps from {link.url}")
    except (RefusedError, DamagedHistoryError) as error:
        notes.append(f"{error}: {_WITHOUT}")
    return _Found(facts, (*listed[:-MOST_WHOLE], *whole), history, tuple(notes), f"the controller at {link.url}")


def _chosen(job: str, known: list[str], where: str) -> str:
    """Return the job meant: the one named, else the newest.

    Raises:
        UsageError: there is none.
    """
    if job and job not in known:
        raise UsageError(f"{unknown('job', job, known)} ({where})")
    if not known:
        raise UsageError(f"no job is known yet in {where}")
    return job or known[-1]


def _gathered(found: _Found, reader: Reader, *, is_live: bool) -> Gathered:
    """Make one picture of the job's present life out of what was found."""
    facts, history = found.facts, found.history
    now = datetime.now().astimezone()
    notes = list(found.notes)
    if history is not None and facts.life and history.facts.life != facts.life:
        notes.append("the history of steps is of another start of this job: there is no picture")
        history = None
    if history is not None and history.damage:
        notes.append(f"{history.damage}: what else was kept is shown")
    began_s = facts.started_wall_s or (history.facts.began_wall_s if history is not None else 0.0)
    incidents = found.incidents
    if not began_s:
        began_s = min((_seen(one) for one in incidents), default=facts.since_wall_s)
        notes.append("when the job was started is not known: the report begins with what is known first")
    # 1 s: what a clock that was stepped a little may do to a mark.
    of_now = [one for one in incidents if _seen(one) >= began_s - 1.0]
    if len(of_now) < len(incidents):
        notes.append(f"incidents of earlier starts of this job that are left out: {len(incidents) - len(of_now):,}")
    is_over = facts.state in OVER
    until_s = facts.since_wall_s if is_over else now.timestamp() if is_live else _last_heard(history, of_now, facts)
    kept = account.kept_in(history.facts) if history is not None and is_live else None
    if history is not None and kept is not None:  # as its controller reports it: a step under way is no loss
        until_s = account.ends_at(kept, facts.state, facts.since_wall_s, history.facts.until_wall_s)
    if not is_over and not is_live:
        notes.append(
            "the job's controller is gone, and nobody said how the job ended: the report ends with what it knew last"
        )
    return Gathered(
        job=facts.job,
        state=facts.state or "not known",
        began_wall_s=began_s,
        until_wall_s=max(began_s, until_s),
        history=history,
        told=tuple(Told(one, tuple((row.label, row.lines) for row in card(one, now.tzinfo, reader))) for one in of_now),
        settings=_settings(facts, history),
        notes=tuple(notes),
        source=found.source,
        version=megascale_ops.__version__,
        made_wall_s=now.timestamp(),
        zone=now.tzinfo or UTC,
        reader=reader,
    )


def _last_heard(history: History | None, incidents: list[Incident], facts: JobFacts) -> float:
    """Return the last moment of which anything is known."""
    marks: list[float] = [getattr(one.marks, name) for one in incidents for name in one.marks.__struct_fields__]
    return max([*marks, facts.since_wall_s, history.facts.until_wall_s if history is not None else 0.0])


def _seen(incident: Incident) -> float:
    return incident.marks.detected or incident.marks.began


def _settings(facts: JobFacts, history: History | None) -> tuple[Setting, ...]:
    """Return the policy with its defaults; what was changed while the job lived is marked."""
    policy = facts.policy or (history.facts.policy if history is not None else None)
    changed = facts.tuned or (history.facts.changed if history is not None else {})
    shown = show_settings(policy) if policy is not None else {}
    return tuple(Setting(name, value, default_of(name), name in changed) for name, value in shown.items())
