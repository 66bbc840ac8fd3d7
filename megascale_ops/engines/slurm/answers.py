# SPDX-License-Identifier: Apache-2.0
"""What Slurm's commands print, as values and sentences. Pure.

Formats of Slurm 22.05: `sinfo --format`, `scontrol --oneliner show job` (it has no JSON), `scontrol show config`.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from megascale_ops.engines.actuator import EngineNode

# By "|" and the reason last: whatever an administrator has written there is still one field.
NODE_FORMAT = "%N|%T|%u|%E"
# The states of `sinfo` in which a node takes jobs or runs ours; behind them may stand one sign, as in "idle*".
_USABLE = frozenset({"idle", "allocated", "mixed", "completing", "reserved", "planned"})
# "@" and "^": reboots. Not "*", a slurmd that has not answered of late: that harms no job by itself, and our own agent
# knows better; nor "$", a maintenance that has let this job in; "-" and "~": planned, powered off until it is needed.
_GONE = "@^"

RIGHTS = re.compile(r"invalid user id|permission denied|access denied|not permitted|is not authorized", re.IGNORECASE)
_OPERATOR = (
    "it takes Slurm's level Operator: an administrator gives it by "
    "`sacctmgr modify user NAME set AdminLevel=Operator`, or runs the command as SlurmUser"
)
_HINTS = (
    (
        re.compile(r"permitted to use this partition", re.IGNORECASE),
        "`scontrol show partition` tells who may use which",
    ),
    (RIGHTS, _OPERATOR),
    (re.compile(r"invalid partition", re.IGNORECASE), "`sinfo --summarize` lists the partitions"),
    (re.compile(r"invalid node name", re.IGNORECASE), "`sinfo --Node` lists the nodes"),
    (re.compile(r"account/partition|invalid account", re.IGNORECASE), "`sacctmgr show assoc user=$USER` lists yours"),
    (re.compile(r"generic resource", re.IGNORECASE), "`sinfo --format='%N %G'` lists what nodes have"),
    (re.compile(r"RebootProgram isn't defined", re.IGNORECASE), "slurm.conf has to name a RebootProgram"),
    (re.compile(r"unable to contact|connect failure|socket timed out", re.IGNORECASE), "`scontrol ping` tells more"),
)
_SPEAKER = re.compile(r"^(?:[a-z]+: )?(?:error|fatal): |^[a-z_]+ error: ")


def refusal(program: str, stderr: str, code: int) -> str:
    """Return the sentence for a command that has failed: Slurm's own last words, and what to do about them."""
    lines = [_SPEAKER.sub("", line.strip()) for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if line != "Unspecified error"] or [f"exit code {code}"]
    said = told[-1].rpartition("submission failed: ")[2].rstrip(".")
    hint = next((hint for pattern, hint in _HINTS if any(pattern.search(line) for line in lines)), "")
    return f"{program}: {said}" + (f"; {hint}" if hint else "")


def read_nodes(text: str) -> dict[str, EngineNode]:
    """Return the nodes of `sinfo --Node --noheader --format=NODE_FORMAT`; one in several partitions stands there often.

    Args:
        text: What it printed; a line that can't be read is passed over.
    """
    found = {}
    for line in text.splitlines():
        name, *rest = line.split("|", 3)
        if len(rest) != 3 or not name.strip():
            continue
        words, by, reason = (part.strip() for part in rest)
        plain = words.rstrip("*$@^~#!%+-").lower()
        is_usable = plain in _USABLE and not any(sign in words for sign in _GONE)
        has_reason = reason not in ("none", "")
        found[name.strip()] = EngineNode(
            name.strip(), words, is_usable, reason if has_reason else "", by if has_reason else ""
        )
    return found


class JobView(NamedTuple):
    """What Slurm knows of a job. ``ends_wall_s``: its time limit or the end of its grace, 0 for none."""

    state: str
    reason: str
    may_requeue: bool
    restarts: int
    ends_wall_s: float
    preempted_wall_s: float  # when it was told to leave for another job; 0: never


def read_job(line: str) -> JobView:
    """Return a job from `scontrol --oneliner show job`; times there are local."""
    fields: dict[str, str] = {}
    for found in re.finditer(r"(?:^| )([A-Za-z][A-Za-z/:]*)=(\S*)", line):
        fields.setdefault(found[1], found[2])  # a comment, which comes late, may look like a field
    restarts = fields.get("Restarts", "0")
    return JobView(
        fields.get("JobState", ""),
        fields.get("Reason", ""),
        fields.get("Requeue") == "1",
        int(restarts) if restarts.isdigit() else 0,
        _wall_s(fields.get("EndTime", "")),
        _wall_s(fields.get("PreemptTime", "")),
    )


def _wall_s(text: str) -> float:
    """Return local time as seconds; 0 for Unknown, None and what can't be read."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
    except ValueError:
        return 0.0


class Settings(NamedTuple):
    """What of slurm.conf decides about an end. ``requeue_codes``: exit codes after which Slurm requeues a job."""

    kill_wait_s: float
    requeue_codes: tuple[int, ...]


def read_settings(text: str) -> Settings:
    """Return them from `scontrol show config`; 30 s, Slurm's default, where none is told."""
    values = {found[1]: found[2] for found in re.finditer(r"^(\w+)\s*= (.*)$", text, re.MULTILINE)}
    wait = re.match(r"\d+", values.get("KillWait", ""))
    return Settings(float(wait[0]) if wait else 30.0, tuple(_numbers(values.get("RequeueExit", "").split(","))))


def _numbers(parts: Iterable[str]) -> Iterable[int]:
    """Yield the numbers of "3", "7-9"."""
    for part in parts:
        found = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if found:
            yield from range(int(found[1]), int(found[2] or found[1]) + 1)
