# SPDX-License-Identifier: Apache-2.0
"""Days of large clusters with and without each feature, beside what was published: ``simulate`` many times.

    python benchmarks/simulate.py --faults-of 100000 --ranks 72 --pp 1 --hours 4 --results FILE

Each row and seed is a process of its own. What came of it is appended to FILE as one line as soon as it is there; what
FILE has already is not run again, so the same command goes on where it was ended. The table of all that FILE has of
these ranks and hours goes to the standard output (``--workers 0``: nothing is run). A run that has no time left
(``--seconds``) ends at the hour that it has reached; its line says so, and it is run again by the next call.

Columns: *effective*, the time of steps that were not lost, over all time (the published definition); *pace*, those
steps against the steps that the same machines make undisturbed: what a slow rank costs is in it; *automatic*, faults
that were named rightly and after which the job went on, nobody having done anything; precision and recall of verdicts.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from megascale_ops.schema.policy import JobPolicy
from megascale_ops.sim.faults import draw
from megascale_ops.sim.mesh import Layout
from megascale_ops.sim.report import Report
from megascale_ops.sim.score import FaultLine
from megascale_ops.sim.settings import Settings, checked, spares_for
from megascale_ops.sim.simulate import simulate
from megascale_ops.sim.steps import StepModel

_NO_EVICTION = JobPolicy(check_suspects=False, actions={"cuda_error": "restart", "straggler": "warn"})
_HANGS = ("silent", "not_joined", "sleeping", "stuck", "gpu_stuck", "data_stall")
_TIMEOUT_ONLY = JobPolicy(absent_patience_s=600.0, stuck_patience_s=600.0, actions=dict.fromkeys(_HANGS, "restart"))
_ONE_PATIENCE = JobPolicy(stuck_patience_s=540.0)

# What each feature takes where all are on. A checkpoint beside the training: 0.013 to 0.028 s of stall and 3.4 to 6.8 s
# until 10 GB a GPU are written; restored from memory in 0.65 s, from a cold disk in 6.5 (results/checkpoint_h200.txt).
# Ranks that start from warm processes: 1.7 to 2.3 s with two GPUs (results/restart_stages_h200.txt); 30 s, for the
# process groups of more than 10,000 GPUs take less than that (MegaScale, NSDI'24, 3.5).
EVERYTHING: Mapping[str, Any] = {
    "start_s": 30.0, "load_s": 10.0, "checkpoint_every_s": 60.0, "checkpoint_stall_s": 0.05, "checkpoint_write_s": 10.0,
}  # fmt: skip
_SLOW = {"faults": ("llama3", "fail-slow")}

# By name: what differs from everything on, and in words.
ROWS: Mapping[str, tuple[dict[str, Any], str]] = {
    "all": ({}, "everything on"),
    "patience-60": (
        {"policy": JobPolicy(absent_patience_s=60.0)},
        "everything on, and every hang is acted upon after one minute, whatever it shows",
    ),
    "patience-540": ({"policy": _ONE_PATIENCE}, "everything on, and every hang is left alone for nine minutes"),
    "often": ({"checkpoint_every_s": 12.0}, "everything on, a checkpoint every other step (Young and Daly)"),
    "quick": (
        {"checkpoint_every_s": 12.0, "start_s": 10.0, "load_s": 3.0},
        "the same, and starts and loads take 13 s instead of 40: what 97 % would take",
    ),
    "cold": (
        {"start_s": 90.0, "load_s": 60.0},
        "without warm restarts: processes start cold, load from shared storage",
    ),
    "slow-saves": ({"checkpoint_every_s": 1800.0, "checkpoint_write_s": 60.0}, "a checkpoint every half hour"),
    "sync-saves": (
        {"checkpoint_every_s": 1800.0, "checkpoint_stall_s": 60.0, "checkpoint_write_s": 0.0},
        "the same, and ranks wait a minute until it is written",
    ),
    "no-eviction": ({"policy": _NO_EVICTION}, "no node is checked or let go: restarts only"),
    "no-spares": ({"spares": 0}, "without spare nodes"),
    "no-checks": ({"policy": JobPolicy(check_suspects=False)}, "without the self-check of a suspected node"),
    "timeout-only": ({"policy": _TIMEOUT_ONLY}, "hangs end by a time-out of ten minutes, whoever is to blame"),
    "slow": (_SLOW, "everything on, slow ranks beside (one a day in 4,000)"),
    "slow-left": (
        {**_SLOW, "policy": JobPolicy(actions={"straggler": "warn"})},
        "slow ranks beside, and nothing is done about them",
    ),
    "byterobust": ({"faults": ("byterobust",)}, "everything on, ByteRobust's mix of symptoms"),
    "assumed": (
        {name: Settings.__struct_defaults__[Settings.__struct_fields__.index(name)] for name in EVERYTHING},
        "the simulator's own defaults: half an hour between checkpoints, starts and loads of a minute",
    ),
}


class Line(msgspec.Struct, frozen=True):
    """What one run came to.

    ``settings``: as text, what differs from the simulator's defaults; a line with others is of another row.
    ``hours``: asked for; ``reached``: simulated. Counts of faults are without those that are too new to count.
    """

    row: str
    seed: int
    ranks: int
    faults_of: int
    hours: float
    reached: float
    settings: str
    effective: float
    by_ledger: float
    pace: float
    faults: int
    right: int
    automatic: int
    named: int
    named_rightly: int
    restarts: int
    evictions: int
    state: str
    lost: dict[str, float]  # by the ledger's row, seconds
    cpu_s: float

    @property
    def key(self) -> tuple[str, int, int, int, float, str]:
        """Which run it is."""
        return self.row, self.seed, self.ranks, self.faults_of, self.hours, self.settings


def main() -> None:
    """Run what was asked for and is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="of these: %(default)s")
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--pp", type=int, default=0, help="pipeline stages; 0: 8, or as many as fit")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument(
        "--faults-of", type=int, default=0, help="as many faults as a cluster of so many ranks has; 0: of --ranks"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: only the table")
    parser.add_argument("--seconds", type=float, default=0.0, help="end all runs so many seconds from now; 0: never")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "simulate_days.jsonl")
    asked = parser.parse_args()
    rows = [name.strip() for name in asked.rows.split(",")]
    unknown = [name for name in rows if name not in ROWS]
    if unknown:
        sys.exit(f"there is no row {unknown[0]!r}: take some of {', '.join(ROWS)}")
    try:
        seeds = [int(seed) for seed in asked.seeds.split(",")]
    except ValueError:
        sys.exit(f"seeds {asked.seeds!r} can't be read: give whole numbers with commas")
    known = read(asked.results)
    wanted = [
        (name, seed, settings_of(name, seed, asked.ranks, asked.hours, asked.pp)) for seed in seeds for name in rows
    ]
    missing = [one for one in wanted if not _is_there(known, *one, asked.faults_of)]
    if asked.workers and missing:
        _run_all(missing, asked, known)
    print("\n".join(table(rows, [line for line in known.values() if _is_asked(line, asked, wanted)])))


def _run_all(missing: Sequence[tuple[str, int, Settings]], asked: argparse.Namespace, known: "Known") -> None:
    """Run these side by side, and append what came of each."""
    until_s = time.monotonic() + asked.seconds if asked.seconds else 0.0
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(measure, *one, asked.faults_of, until_s) for one in missing]
        for done in as_completed(runs):
            line = done.result()
            if line is None:
                continue
            with asked.results.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
            known[line.key] = line
            print(f"{line.row}, seed {line.seed}: {line.reached:g} h in {line.cpu_s:.0f} s of CPU", file=sys.stderr)


Known = dict[tuple[str, int, int, int, float, str], Line]


def read(path: Path) -> Known:
    """Return what was measured: of each run the line that came furthest, the later of two."""
    found: Known = {}
    for text in path.read_bytes().splitlines() if path.exists() else ():
        line = msgspec.json.decode(text, type=Line)
        before = found.get(line.key)
        if before is None or line.reached >= before.reached:
            found[line.key] = line
    return found


def settings_of(row: str, seed: int, ranks: int, hours: float, pp: int) -> Settings:
    """Return what a row simulates."""
    changes = {**EVERYTHING, **ROWS[row][0], "ranks": ranks, "hours": hours, "seed": seed, "pp": pp}
    return msgspec.structs.replace(Settings(), **changes)


def _text_of(settings: Settings) -> str:
    """Return what differs from the defaults, but for what a line says anyway."""
    changed = _changes(settings, Settings(ranks=settings.ranks, hours=settings.hours, seed=settings.seed))
    if "policy" in changed:
        changed["policy"] = _changes(settings.policy, JobPolicy())
    return msgspec.json.encode(changed, order="deterministic").decode()


def _changes(one: msgspec.Struct, other: msgspec.Struct) -> dict[str, Any]:
    """Return the fields in which two differ, by value: what came from another process has other objects."""
    both = ((name, getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return {name: mine for name, mine, others in both if mine != others}


def _is_there(known: Known, row: str, seed: int, settings: Settings, faults_of: int) -> bool:
    line = known.get((row, seed, settings.ranks, faults_of, settings.hours, _text_of(settings)))
    return line is not None and (line.reached >= line.hours or line.state in ("failed", "stopped", "finished"))


def _is_asked(line: Line, asked: argparse.Namespace, wanted: Sequence[tuple[str, int, Settings]]) -> bool:
    if (line.ranks, line.faults_of, line.hours) != (asked.ranks, asked.faults_of, asked.hours):
        return False
    return any((line.row, line.seed, line.settings) == (row, seed, _text_of(one)) for row, seed, one in wanted)


def measure(row: str, seed: int, settings: Settings, faults_of: int, until_s: float) -> Line | None:
    """Run one row with one seed; None: there was no time left for it.

    ``faults_of``: a smaller cluster gets the faults of one of so many ranks, at the same places of it, and as many
    spares as that one needs in the time (a machine that breaks is away for a day). What a fault costs hardly depends on
    the number of ranks, and how many there are a day is what a row is about.
    """
    if until_s and time.monotonic() > until_s:
        return None
    began_s = time.process_time()
    simulated, named = settings, []
    if faults_of:
        large = checked(msgspec.structs.replace(settings, ranks=faults_of))
        named = draw(large, np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0]))
        spares = spares_for(large, min(1.0, settings.hours / 24.0)) if settings.spares < 0 else settings.spares
        simulated = msgspec.structs.replace(settings, faults=(), spares=spares)
    report = simulate(simulated, named, ends_early=(lambda: time.monotonic() > until_s) if until_s else None)
    return _line(row, settings, faults_of, report, time.process_time() - began_s)


def _line(row: str, settings: Settings, faults_of: int, report: Report, cpu_s: float) -> Line:
    # A job that is over makes no more steps: what is left of the time is lost, until somebody starts it again.
    whole_s = report.hours * 3600.0
    share = report.wall_s / whole_s
    counted = [fault for fault in report.faults if not fault.is_pending]
    named = [one for one in report.incidents if one.is_named]
    return Line(
        row=row,
        seed=settings.seed,
        ranks=settings.ranks,
        faults_of=faults_of,
        hours=settings.hours,
        reached=report.hours,
        settings=_text_of(settings),
        effective=round(report.true_effective * share, 5),
        by_ledger=round(report.effective * share, 5),
        pace=round(report.steps * undisturbed_s(settings) / whole_s, 5),
        faults=len(counted),
        right=sum(fault.is_right for fault in counted),
        automatic=sum(_is_automatic(fault, report) for fault in counted),
        named=len(named),
        named_rightly=sum(one.is_right for one in named),
        restarts=report.restarts,
        evictions=report.evictions,
        state=report.state,
        lost={name: seconds for name, seconds in report.rows.items() if seconds and name != "train"},
        cpu_s=round(cpu_s, 1),
    )


def _is_automatic(fault: FaultLine, report: Report) -> bool:
    """Return whether a fault was named rightly and the job went on after it, or was about to when the time was over."""
    steps_again = any(at_s > fault.at_s for at_s, _step in report.progress)
    return fault.is_right and (steps_again or report.state not in ("failed", "stopped", "finished"))


def undisturbed_s(settings: Settings) -> float:
    """Return what a step takes where nothing goes wrong and nothing is saved: the mean of 64."""
    settings = checked(settings)
    layout = Layout(settings)
    model = StepModel(settings, layout, np.random.default_rng(np.random.SeedSequence(settings.seed).spawn(3)[1]))
    model.place(list(range(settings.nodes)))
    return fmean(model.make(step, {}, 0.0, 0.0, 2.0).wall_s for step in range(64))


def table(rows: Sequence[str], lines: Sequence[Line]) -> Iterator[str]:
    """Yield the table: means over the seeds, with the least and the most effective time; counts of all seeds."""
    yield (
        "| what | seeds | hours each | effective (least to most) | pace | faults | automatic | precision | recall "
        "| restarts | evictions | CPU s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        mine = [line for line in lines if line.row == row]
        if not mine:
            continue
        effective = [line.effective for line in mine]
        reached = sorted({round(line.reached, 1) for line in mine})
        faults = sum(line.faults for line in mine)
        yield " | ".join(
            (
                f"| {ROWS[row][1]}",
                str(len(mine)),
                f"{reached[0]:g}" + (f" to {reached[-1]:g}" if len(reached) > 1 else ""),
                f"{fmean(effective):.2%} ({min(effective):.2%} to {max(effective):.2%})",
                f"{fmean(line.pace for line in mine):.2%}",
                str(faults),
                _share(sum(line.automatic for line in mine), faults),
                _share(sum(line.named_rightly for line in mine), sum(line.named for line in mine)),
                _share(sum(line.right for line in mine), faults),
                f"{fmean(line.restarts for line in mine):.1f}",
                f"{fmean(line.evictions for line in mine):.1f}",
                f"{fmean(line.cpu_s for line in mine):.0f} |",
            )
        )
    yield ""
    yield "Lost, share of all time by the controller's ledger:"
    for row in rows:
        mine = [line for line in lines if line.row == row]
        names = sorted({name for line in mine for name in line.lost})
        shares = {name: fmean(line.lost.get(name, 0.0) / (line.reached * 3600.0) for line in mine) for name in names}
        if mine:
            yield f"  {row}: " + ", ".join(f"{name} {share:.2%}" for name, share in shares.items() if share >= 5e-5)


def _share(some: int, of_all: int) -> str:
    return f"{some / of_all:.1%} ({some} of {of_all})" if of_all else "-"


if __name__ == "__main__":
    main()
