# SPDX-License-Identifier: Apache-2.0
"""Waits that must not restart a job: one rank does something undeclared, the other stands in a collective.

Each job is a real `megascale-ops run` of two ranks over Gloo (`chaos`' workload, steps of 50 ms, the policy that users
have) in a run folder of its own; what rank 0 does meanwhile is in `megascale_ops/chaos/legitimate.py`. A wait is held
before the fifth step (start), after six (early), after a hundred (mid), after the last one (end) and when the process
group is destroyed and the other rank gone (after); on a quiet machine and beside ten busy processes. A restart or an
exit code that is not 0 is a failure, and the exit code of this script tells it.

With ``--hangs`` the same is done with ranks that hang in truth: when is that named, and when acted upon?

    python benchmarks/legitimate_waits.py --parallel 6 --durations 15,60 --where early,mid,end --runs 3 --out rows.jsonl
    python benchmarks/legitimate_waits.py --only http_silent,one_call --loaded --out rows.jsonl --evidence folder
    python benchmarks/legitimate_waits.py --hangs --hang-limit-s 900 --out hangs.jsonl
    python benchmarks/legitimate_waits.py --table rows.jsonl

``--out`` is a file of a line a job: the same call again holds what is missing, with ``--redo`` also what went wrong.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megascale_ops.chaos.faults import BY_NAME, Fault
from megascale_ops.chaos.job import Job, Plan
from megascale_ops.chaos.legitimate import WAITS
from megascale_ops.chaos.outside import burn, inject
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Incident

# (step at which it happens, steps in all)
WHERE = {"start": (3, 60), "early": (6, 60), "mid": (100, 160), "end": (60, 60), "after": (61, 60)}
HANGS = (
    *("sigstop", "stuck_loop", "gil_held", "sleep_syscall", "lock_twice", "pipe_unfed", "http_unanswered"),
    *("child_stopped", "loader_hung", "collective_skipped", "collectives_swapped"),
)
BUSY = 10
# 1 s: jobs that run for minutes are not looked at more often; the journal has the times of events.
LOOK_S = 1.0
# 5 s: two ranks import torch in as long when no others start.
STAGGER_S = 5.0
# Beside the wait itself: start, steps, end; with ten busy processes a rank has a sixth of a core.
QUIET_S, LOADED_S = 240.0, 900.0


class Case(msgspec.Struct, frozen=True):
    """What is held."""

    name: str
    seconds: float
    where: str
    loaded: bool
    run: int


class Told(msgspec.Struct, frozen=True):
    """One incident; seconds count from the beginning of the wait, -1: never."""

    state: str
    named: str
    ranks: tuple[int, ...]
    sure: float
    detected_s: float
    named_s: float
    ordered_s: float
    reason: str
    done: str


class Row(msgspec.Struct, frozen=True):
    """What came of one job."""

    case: Case
    restarts: int = 0
    exit_code: int | None = None
    lasted_s: float = -1.0  # from the beginning of the wait to rank 0's next step, or to the end of the job
    told: tuple[Told, ...] = ()
    problem: str = ""
    version: str = ""

    @property
    def wrong(self) -> bool:
        """Whether a healthy job was hurt."""
        return not self.problem and (self.restarts > 0 or self.exit_code != 0)


class Bench:
    """All jobs of one call."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.stop = threading.Event()
        self._turn = threading.Lock()
        self._file = threading.Lock()
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        self.version = done.stdout.strip()

    def check(self) -> None:
        """Raise when the user wants to stop."""
        if self.stop.is_set():
            raise MegascaleError("stopped")

    def hold(self, case: Case) -> Row:
        """Hold one job, and keep what came of it."""
        with self._turn:
            self.stop.wait(self.options.stagger_s)
        if self.stop.is_set():
            return Row(case, problem="stopped")
        with tempfile.TemporaryDirectory(prefix="waits-", ignore_cleanup_errors=True) as folder:
            try:
                with Job(Plan(self.check, nproc=2, rank=0), self.fault(case), Path(folder)) as job:
                    row = self._watch(job, case)
            except MegascaleError as error:
                row = Row(case, problem=str(error), version=self.version)
        if row.problem != "stopped":
            self._keep(row)
        return row

    def fault(self, case: Case) -> Fault:
        """Return the row of the matrix, as long and at the place that is asked for, with the users' policy."""
        at, steps = WHERE[case.where]
        row = BY_NAME[case.name]
        own = [each for each in row.arguments if not each.startswith("--seconds")]
        if case.name in HANGS:
            return row._replace(at=at, steps=steps, policy=tuple(self.options.policy))
        own.append(f"--seconds={case.seconds:g}")
        return row._replace(at=at, steps=steps, arguments=tuple(own), policy=tuple(self.options.policy))

    def _watch(self, job: Job, case: Case) -> Row:
        """Wait for the end of the job; of a hang: until the ranks were started anew, or the limit."""
        hang = case.name in HANGS
        limit_s = self.options.hang_limit_s if hang else case.seconds * (4.0 if case.loaded else 2.0)
        limit_s += LOADED_S if case.loaded else QUIET_S
        end = time.monotonic() + limit_s
        struck_s = 0.0
        while not job.ended() and time.monotonic() < end:
            self.check()
            time.sleep(LOOK_S)
            if not job.fault.inside and not struck_s and job.everyone_at(job.fault.at):
                struck_s = time.time()
                inject(job)
            if hang:
                job.poll_incidents()
                struck_s = struck_s or job.struck_at()
                if struck_s and (restarts_of(job) or time.time() > struck_s + self.options.hang_limit_s):
                    break
        ended_s = time.time()
        code = job.procs[-1].poll()
        job.read_journal()
        struck_s = struck_s or job.struck_at()
        problem = "" if struck_s else f"it never happened: {' / '.join(job.output().splitlines()[-3:])}"
        found = job.incidents()
        row = Row(
            case,
            restarts=restarts_of(job),
            exit_code=code,
            lasted_s=lasted_s(job, struck_s, ended_s),
            told=tuple(told(each, struck_s) for each in found),
            problem=problem,
            version=self.version,
        )
        if self.options.evidence and (row.wrong or row.problem):
            self._keep_evidence(job, case, found)
        return row

    def _keep(self, row: Row) -> None:
        print(line_of([row]), flush=True)
        if self.options.out:
            with self._file, self.options.out.open("ab") as out:
                out.write(msgspec.json.encode(row) + b"\n")

    def _keep_evidence(self, job: Job, case: Case, found: list[Incident]) -> None:
        """Write what the job printed and what it says of each incident."""
        load = "loaded" if case.loaded else "quiet"
        folder = self.options.evidence / f"{case.name}-{case.seconds:g}-{case.where}-{load}-{case.run}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "output").write_text(job.output(), encoding="utf-8")
        for each in found:
            command = [sys.executable, "-m", "megascale_ops.cli.main", "why", each.id, "--json"]
            command += [f"--run-dir={job.folder / 'run'}"]
            done = subprocess.run(command, env=job.env, capture_output=True, timeout=60, check=False)
            (folder / f"{each.id}.json").write_bytes(done.stdout or done.stderr)


def restarts_of(job: Job) -> int:
    """Return how often ranks were started anew, by their own record and by what was printed."""
    lives = [len({row.pid for row in rows}) for rows in job.steps().values()]
    rounds = [int(number) for number in re.findall(r"in round (\d+)", job.output())]
    return max([*lives, *rounds, 1]) - 1


def lasted_s(job: Job, struck_s: float, ended_s: float) -> float:
    """Return how long the wait took."""
    after = [row.wall_s for row in job.steps().get(0, []) if row.wall_s > struck_s]
    return round(min(after, default=ended_s) - struck_s, 1)


def told(incident: Incident, struck_s: float) -> Told:
    """Return the short form of an incident."""
    verdict, marks = incident.verdict, incident.marks

    def since(wall_s: float) -> float:
        return round(wall_s - struck_s, 1) if wall_s else -1.0

    return Told(
        state=incident.state,
        named=verdict.fault if verdict else "",
        ranks=verdict.culprits if verdict else (),
        sure=verdict.confidence if verdict else 0.0,
        detected_s=since(marks.detected),
        named_s=since(marks.named),
        ordered_s=since(marks.ordered),
        reason=verdict.reason if verdict else "",
        done=incident.done,
    )


def line_of(rows: list[Row]) -> str:
    """Return the line of all runs of a case."""
    case = rows[0].case
    held = [row for row in rows if not row.problem]
    load = "loaded" if case.loaded else "quiet"
    seconds = "ever" if case.name in HANGS else f"{case.seconds:g}"
    head = f"{case.name:20s} {seconds:>4s} {case.where:5s} {load:6s}"
    if not held:
        return f"{head} not held: {rows[0].problem[:90]}"
    codes = ",".join(sorted({"-" if row.exit_code is None else str(row.exit_code) for row in held}))
    lasted = "-".join(sorted({f"{row.lasted_s:.0f}" for row in held}, key=float)[:: len(held) - 1 or 1])
    said = sorted({said_of(each) for row in held for each in row.told})
    restarts = sum(row.restarts for row in held)
    return f"{head} {len(held):4d} {restarts:8d} {codes:>4s} {lasted:>7s}  {'; '.join(said)[:200]}"


HEAD = (
    f"{'what rank 0 does':20s}    s where load   held restarts exit lasted s  what was told, when after its beginning"
)


def said_of(each: Told) -> str:
    """Return an incident in a few words."""
    ranks = ",".join(map(str, each.ranks)) or "-"
    acted = f", acted +{each.ordered_s:.0f} s" if each.ordered_s >= 0 else ""
    return f"{each.state} {each.named or '?'} r{ranks} {each.sure:.0%} named +{each.named_s:.0f} s{acted}"


def table(rows: list[Row], *, hangs: bool) -> str:
    """Return all cases, a line each, and what they add up to."""
    lines = [line_of(list(group)) for _, group in itertools.groupby(sorted(rows, key=_order), key=_order)]
    held = [row for row in rows if not row.problem]
    hurt = sum(row.restarts > 0 for row in held)
    ended = sum(row.exit_code != 0 for row in held)
    total = f"{len(held)} jobs held, {len(rows) - len(held)} could not be: "
    if hangs:
        right = sum(any(0 in each.ranks for each in row.told) for row in held)
        total += f"rank 0 named in {right}, {hurt} acted upon"
    else:
        warned = sum(bool(row.told) for row in held)
        total += f"{hurt} restarted, {ended} ended with another code than 0, {warned} with any incident or warning"
    return "\n".join([HEAD, *lines, "", total])


def _order(row: Row) -> tuple[object, ...]:
    names = [*WAITS, *HANGS]
    case = row.case
    return case.loaded, case.seconds, list(WHERE).index(case.where), names.index(case.name)


def read(path: Path | None) -> dict[Case, Row]:
    """Return what a file holds; of a case that was held again the newest."""
    if path is None or not path.exists():
        return {}
    found = [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines() if line]
    return {row.case: row for row in found}


@contextlib.contextmanager
def load(*, wanted: bool) -> Iterator[None]:
    """Keep the machine busy where wanted."""
    cores = sorted(os.sched_getaffinity(0))
    busy = [burn(cores[number % len(cores)], dict(os.environ)) for number in range(BUSY if wanted else 0)]
    try:
        yield
    finally:
        for proc in busy:
            proc.kill()
            proc.wait()


def read_options() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names, comma separated")
    parser.add_argument("--durations", default="15", help="seconds, comma separated")
    parser.add_argument("--where", default="mid", help=f"of {','.join(WHERE)}")
    parser.add_argument("--loaded", action="store_true", help="beside ten busy processes")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--stagger-s", type=float, default=STAGGER_S, help="between two starts")
    parser.add_argument("--policy", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--hangs", action="store_true", help="ranks that hang in truth")
    parser.add_argument("--hang-limit-s", type=float, default=60.0, help="how long to look at a hang")
    parser.add_argument("--out", type=Path, help="a line of JSON a job; held jobs are not held again")
    parser.add_argument("--redo", action="store_true", help="hold again what went wrong")
    parser.add_argument("--evidence", type=Path, help="folder for all that is known of what went wrong")
    parser.add_argument("--table", type=Path, help="only print the table of such a file")
    options = parser.parse_args()
    known = HANGS if options.hangs else tuple(WAITS)
    options.names = options.only.split(",") if options.only else list(known)
    options.places = options.where.split(",")
    for word, words in [*((name, known) for name in options.names), *((place, WHERE) for place in options.places)]:
        if word not in words:
            parser.error(f"unknown name {word!r}: one of {', '.join(words)}")
    try:
        options.seconds = [0.0] if options.hangs else [float(each) for each in options.durations.split(",")]
    except ValueError:
        parser.error(f"--durations {options.durations!r}: seconds, comma separated")
    return options


def wanted_cases(options: argparse.Namespace) -> list[Case]:
    """Return every job that is asked for: the first run of each before the second of any."""
    runs = itertools.product(range(options.runs), options.seconds, options.places, options.names)
    cases = [Case(name, seconds, where, options.loaded, run) for run, seconds, where, name in runs]
    late = {"end", "after"}
    return [case for case in cases if case.where not in late or (case.name in WAITS and WAITS[case.name].last)]


def main() -> int:
    """Hold what is missing, print the table."""
    options = read_options()
    if options.table:
        print(table(list(read(options.table).values()), hangs=options.hangs))
        return 0
    had = read(options.out)
    wanted = wanted_cases(options)
    missing = [case for case in wanted if case not in had or had[case].problem or (options.redo and had[case].wrong)]
    bench = Bench(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: bench.stop.set())
    with load(wanted=options.loaded), concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        rows = list(pool.map(bench.hold, missing))
    rows = [row for row in {**had, **{row.case: row for row in rows}}.values() if row.case in set(wanted)]
    print("\n" + table(rows, hangs=options.hangs))
    if bench.stop.is_set():
        return 130
    return int(not options.hangs and any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
