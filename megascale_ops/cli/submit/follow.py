# SPDX-License-Identifier: Apache-2.0
"""Follow a job that Slurm has: each change of its state, each verdict of its controller, until it is over."""

import time
from pathlib import Path

import click
import msgspec

from megascale_ops import foreign
from megascale_ops.cli.terminal.interrupt import ctrl_c_noted
from megascale_ops.engines.actuator import EngineError
from megascale_ops.engines.slurm.answers import read_job
from megascale_ops.engines.slurm.batch import SlurmJob, name_of
from megascale_ops.engines.slurm.commands import ask
from megascale_ops.errors import MegascaleError
from megascale_ops.link.whereabouts import state_root
from megascale_ops.schema.health import Verdict

# 2 s for one job: Slurm asks for a pause between two calls.
_LOOK_S = 2.0
# 300 s without an answer: slurmctld that is started again has its state within seconds.
_AWAY_S = 300.0
_OVER = frozenset({
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
})  # fmt: skip
_MOST_BYTES = 1 << 20


def follow(number: str, job: SlurmJob) -> int:
    """Print what happens until the job is over; return 0 where it has ended well.

    Raises:
        MegascaleError: Slurm does not answer any more.
    """
    folder = state_root() / f"{name_of(job)}-{number}"
    shown, told, heard_s = "", set[Path](), time.monotonic()
    with ctrl_c_noted() as ctrl_c:
        while True:
            ctrl_c.check()
            try:
                view = read_job(ask("scontrol", "--oneliner", "show", "job", number))
                heard_s = time.monotonic()
            except EngineError as error:
                if time.monotonic() - heard_s > _AWAY_S:
                    raise MegascaleError(f"Slurm tells no more of job {number}: {error}") from None
                time.sleep(_LOOK_S)
                continue
            for path in sorted(folder.glob("incidents/*/verdict.json")):
                if path not in told:
                    told.add(path)
                    _tell(path)
            state = view.state + (f" ({view.reason})" if view.reason not in ("", "None") else "")
            state += f", requeued {view.restarts} times" if view.restarts else ""
            if state != shown:
                click.echo(f"job {number}: {state}")
            shown = state
            if view.state in _OVER:
                click.echo(f"job {number} is over; run folder: {folder}")
                return 0 if view.state == "COMPLETED" else 1
            time.sleep(_LOOK_S)


def _tell(path: Path) -> None:
    """Print one verdict; a file that can't be read is passed over."""
    try:
        verdict = msgspec.json.decode(foreign.read(path, _MOST_BYTES), type=Verdict)
    except (OSError, *foreign.UNREADABLE):
        return
    click.echo(f"verdict {path.parent.name}: {verdict.fault}: {verdict.reason} ({verdict.action})")
