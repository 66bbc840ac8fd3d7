# SPDX-License-Identifier: Apache-2.0
"""``run --preflight``: this node is measured before it joins the job, and does not join when it is bad.

Each runner measures its own node, all of them at the same time, before a controller, an agent or a rank of this run is
started: nothing disturbs the measurement, and a bad node has cost the others nothing. The self-check is a program of
its own (``megascale-ops diagnose``) and its report is all that is read of it. Where it can't be made, the
job starts without it: what can't be measured is held against no node.
"""

import logging
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megascale_ops.errors import MegascaleError

log = logging.getLogger(__name__)

# Half a minute and ten minutes are what the checks are meant to take; one that hangs takes its own deadline more, and
# loading torch from a cold disk half a minute.
DEADLINES_S = {"quick": 120.0, "full": 900.0}
_MOST_NAMED = 3


class _Finding(msgspec.Struct, frozen=True):
    """As much of a finding as decides."""

    severity: str
    text: str


class _Result(msgspec.Struct, frozen=True):
    """As much of a check's result."""

    findings: tuple[_Finding, ...] = ()


class _Report(msgspec.Struct, frozen=True):
    """As much of a report; ``diagnostics/report.py`` has all of it."""

    seconds: float
    results: tuple[_Result, ...]


def check_node(depth: str, node: str, run_dir: Path, paths: Sequence[str], program: Sequence[str] = ()) -> None:
    """Measure this node.

    Args:
        depth: ``quick`` or ``full``.
        node: Its name.
        run_dir: Where the report is kept.
        paths: Folders that the job writes into; of several on one disk the first is measured.
        program: What makes the check; empty: ours.

    Raises:
        MegascaleError: it is bad, and why; the job is not joined.
    """
    out = run_dir / f"preflight-{node}.json"
    command = [*(program or (sys.executable, "-P", "-m", "megascale_ops.cli", "diagnose"))]
    command += [f"--{depth}", "--json", "--name", node, "--out", str(out)]
    by_disk = {Path(path).stat().st_dev: path for path in reversed(paths)}
    command += [f"--path={path}" for path in reversed(by_disk.values())]
    log.info("measuring this node before it joins (--preflight %s)", depth)
    try:
        # A session of its own: Ctrl-C comes to this runner, which ends it.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINES_S[depth], check=False,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("this node could not be measured (%s): it joins as it is", error)
        return
    report = report_of(done.stdout)
    if report is None:
        last = next(reversed(done.stderr.decode("utf-8", "replace").strip().splitlines()), "no report came")
        log.warning("this node could not be measured (%s): it joins as it is", last)
        return
    if refusal := refusal_of(report):
        raise MegascaleError(
            f"{node} is kept out of the job: {refusal}. {shlex.quote(str(out))} has all, and --preflight none joins "
            "it as it is"
        )
    for text in _texts(report, "warn"):
        log.warning("preflight: %s", text)
    log.info("this node is good (%.0f s)", report.seconds)


def report_of(data: bytes) -> _Report | None:
    """Return the report; None where it is none."""
    try:
        return msgspec.json.decode(data, type=_Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def refusal_of(report: _Report) -> str:
    """Return what is bad, "" where nothing is."""
    bad = _texts(report, "bad")
    more = f"; and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
    return f"{'; '.join(bad[:_MOST_NAMED])}{more}" if bad else ""


def _texts(report: _Report, severity: str) -> list[str]:
    return [one.text for result in report.results for one in result.findings if one.severity == severity]
