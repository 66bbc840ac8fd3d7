# SPDX-License-Identifier: Apache-2.0
"""How soon a slow rank is named, how often a well one is, and what judging costs.

    python benchmarks/stragglers.py [--runs 20] [--clean-steps 2000] [--only slow_20|slow_5|clean|synthetic]

*Real*: runs of four DDP ranks on Gloo whose 50 ms steps are mostly sleep (``tests/fixtures/scripts/paced.py``); rank 2
sleeps 20 or 5 % of a step longer from step 100 on. Steps until named are those that the job had finished when the
warning was opened (*slow_20*, *slow_5*). Then one run without a slow rank (*clean*).

*Synthetic*: one tick of judgement with 12,288 ranks, each of which has told one step.
"""

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from megascale_ops.controller.slow_causes import verdict_of
from megascale_ops.controller.stragglers import Watch
from megascale_ops.schema.events import Incident
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import JobPolicy
from megascale_ops.schema.progress import StepWork

PACED = Path(__file__).parents[1] / "tests" / "fixtures" / "scripts" / "paced.py"
SLOW_FROM = 100
SLOW_RANK = 2
DEADLINE_S = 600.0
JOB = f"paced-{os.getpid()}"  # two runs of one name on one machine claim the same ranks, and are stopped


def run(*script: str) -> list[Incident]:
    """Run the paced script under the runner; return what was named a straggler."""
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        launch = ["run", "--nproc-per-node=4", f"--job={JOB}", f"--run-dir={name}/run", "--", str(PACED), *script]
        done = subprocess.run(
            _command(*launch),
            env=env,
            timeout=DEADLINE_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the run ended with {done.returncode}:\n{done.stdout.decode(errors='replace')[-4000:]}")
        listed = msgspec.json.decode(_answer(name, "incidents", "--json", f"--job={JOB}"))
        rows = listed["incidents"] if isinstance(listed, dict) else listed
        found = [msgspec.json.decode(_answer(name, "why", row["id"], "--json"), type=Incident) for row in rows]
    return [incident for incident in found if incident.verdict and incident.verdict.fault == "straggler"]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megascale_ops.cli.main", *arguments]


def _answer(folder: str, *arguments: str) -> bytes:
    command = _command(*arguments, f"--run-dir={folder}/run")
    return subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout


def measure_slow(share: float, limit: int, runs: int) -> None:
    """Print after how many steps rank 2 was named, run by run."""
    took: list[int] = []
    wrong = 0
    for _ in range(runs):
        found = run("--slow=forward", f"--share={share}", f"--at={SLOW_FROM}", f"--steps={SLOW_FROM + limit + 60}")
        right = [one for one in found if one.verdict and one.verdict.culprits == (SLOW_RANK,)]
        right = [one for one in right if one.step_before >= SLOW_FROM]
        wrong += len(found) - len(right)
        took.append(right[0].step_before - SLOW_FROM if right else -1)
    named = [steps for steps in took if 0 <= steps <= limit]
    median = statistics.median(named) if named else -1
    print(f"{share:4.0%} slower: named within {limit} steps in {len(named)} of {runs} runs, median {median}, "
          f"all {sorted(took)}; {wrong} false names", flush=True)  # fmt: skip


def measure_tick(ranks: int = 12_288, steps: int = 40) -> None:
    """Print how long a tick takes when every rank of a large job has told a step, also while one is slow."""
    order = random.Random(1)
    watch, policy = Watch(), JobPolicy()
    took_s = []
    gc.disable()
    for step in range(steps):
        works = []
        for rank in range(ranks):
            own_s = 0.9 + order.gauss(0.0, 0.01) + (0.2 if rank == SLOW_RANK and step > steps // 2 else 0.0)
            works.append(StepWork(step, wall_s=1.2, waiting_s=1.2 - own_s, forward_s=own_s))
        began_s = time.process_time()
        for rank, work in enumerate(works):
            watch.take(rank, "node", Mesh(), (work,))
        watch.advance(policy, ranks)
        verdicts = [verdict_of(group, rank, held, policy, 1) for group, rank, held in watch.held()]
        took_s.append(time.process_time() - began_s)
    gc.enable()
    took_s = sorted(took_s[5:])
    named = sorted(rank for verdict in verdicts for rank in verdict.culprits)
    print(f"one step of {ranks:,} ranks: {took_s[len(took_s) // 2] * 1e3:.0f} ms of a core at the median, "
          f"{took_s[-1] * 1e3:.0f} ms at the worst; named: {named}")  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--clean-steps", type=int, default=2000)
    parser.add_argument("--only", choices=["slow_20", "slow_5", "clean", "synthetic"])
    options = parser.parse_args()
    if options.only in {None, "synthetic"}:
        measure_tick()
    if options.only in {None, "slow_20"}:
        measure_slow(0.2, 20, options.runs)
    if options.only in {None, "slow_5"}:
        measure_slow(0.05, 100, options.runs)
    if options.only in {None, "clean"}:
        found = run(f"--steps={options.clean_steps}")
        print(f"{len(found)} false names in {options.clean_steps:,} clean steps of 4 ranks", flush=True)


if __name__ == "__main__":
    main()
