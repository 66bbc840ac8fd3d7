# SPDX-License-Identifier: Apache-2.0
"""This node is measured: before it joins the job (``run --preflight``), and when the controller asks for it.

A bad node does not join the job.

Each runner measures its own node, all of them at the same time, before a controller, an agent or a rank of this run is
started: nothing disturbs the measurement, and a bad node has cost the others nothing. The self-check is a program of
its own (``megascale-ops diagnose``) and its report is all that is read of it. Where it can't be made, the
job starts without it: what can't be measured is held against no node.
"""

import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megascale_ops.errors import MegascaleError
from megascale_ops.schema.health import NodeCheck

log = logging.getLogger(__name__)

# Half a minute and ten minutes are what the checks are meant to take; one that hangs takes its own deadline more, and
# loading torch from a cold disk half a minute.
DEADLINES_S = {"quick": 120.0, "full": 900.0}
_MOST_NAMED = 3
_MOST_TEXT, _MOST_PATH = 2000, 1024  # of a message to the controller


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
    log.info("measuring this node before it joins (--preflight %s)", depth)
    measured = _measure(depth, node, run_dir / f"preflight-{node}.json", paths, program)
    if isinstance(measured, str):
        log.warning("this node could not be measured (%s): it joins as it is", measured)
        return
    if refusal := refusal_of(measured):
        out = run_dir / f"preflight-{node}.json"
        raise MegascaleError(
            f"{node} is kept out of the job: {refusal}. {shlex.quote(str(out))} has all, and --preflight none joins "
            "it as it is"
        )
    for text in _texts(measured, "warn"):
        log.warning("preflight: %s", text)
    log.info("this node is good (%.0f s)", measured.seconds)


def recheck_node(
    node: str, run_dir: Path, paths: Sequence[str], checks: Sequence[str] = (), program: Sequence[str] = ()
) -> NodeCheck:
    """Measure this node between two rounds, as the controller has asked; quick, and never a reason to end the run.

    Args:
        node: Its name.
        run_dir: Where the report is kept.
        paths: Folders that the job writes into.
        checks: Which checks, by name; empty: all that are quick.
        program: What makes the check; empty: ours.
    """
    out = run_dir / f"check-{node}.json"
    began_mono_s = time.monotonic()
    measured = _measure("quick", node, out, paths, program, checks)
    seconds = time.monotonic() - began_mono_s
    if isinstance(measured, str):
        log.warning("this node could not be measured: %s", measured)
        return NodeCheck("unmeasured", measured[:_MOST_TEXT], seconds)
    refusal = refusal_of(measured)
    if refusal:
        log.warning("this node is bad: %s", refusal)
    else:
        log.info("this node is good (%.0f s)", seconds)
    return NodeCheck("bad" if refusal else "good", refusal[:_MOST_TEXT], seconds, str(out)[:_MOST_PATH])


def _measure(
    depth: str, node: str, out: Path, paths: Sequence[str], program: Sequence[str], checks: Sequence[str] = ()
) -> _Report | str:
    """Return the report of a self-check that also goes to ``out``, or why there is none."""
    command = [*(program or (sys.executable, "-P", "-m", "megascale_ops.cli", "diagnose"))]
    command += [f"--{depth}", "--json", "--name", node, "--out", str(out), *(f"--check={name}" for name in checks)]
    try:
        by_disk = {Path(path).stat().st_dev: path for path in reversed(paths)}
        command += [f"--path={path}" for path in reversed(by_disk.values())]
        # A session of its own: Ctrl-C comes to this runner, which ends it.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINES_S[depth], check=False,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    report = report_of(done.stdout)
    if report is None:
        return next(reversed(done.stderr.decode("utf-8", "replace").strip().splitlines()), "no report came")
    return report


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
