# SPDX-License-Identifier: Apache-2.0
"""What watching NCCL costs: the same collectives and training steps under three launchers, in turn.

    python benchmarks/nccl_profiler.py [--gpus 2] [--rounds 4]
    python benchmarks/nccl_profiler.py --within [--gpus 2] [--rounds 1]

``torchrun`` has nothing of ours, ``off`` is ``megascale-ops run --nccl-profiler=off`` (recorder and agent, no plugin),
``on`` has the plugin too. NCCL takes a plugin when it starts, so each is a launch of its own: A B C A B C. Told is the
median over all blocks of all rounds, microseconds an operation or milliseconds a step, and what ours adds. Needs GPUs.

Launches differ from each other by more than a small operation's microseconds, so ``--within`` measures the plugin alone
in one process: paused, thinned, with the channels of all operations, in turn; told are median differences
to the paused blocks on both sides, and how thinning had settled (how many are timed, the callbacks' share).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "nccl_load.py"
VARIANTS = ("torchrun", "off", "on")
LAUNCH_S = 240
STATES = 3  # of the plugin, in turn: paused, thinned, all with channels


def command_of(variant: str, gpus: int, folder: Path) -> list[str]:
    """Return how the script is launched."""
    if variant == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", str(SCRIPT)]
    run = [sys.executable, "-m", "megascale_ops.cli.main", "run", f"--nproc-per-node={gpus}"]
    return [*run, f"--nccl-profiler={variant}", f"--run-dir={folder / 'run'}", "--", str(SCRIPT)]


def measure(variant: str, gpus: int, **environ: str) -> dict[str, list[float]]:
    """Launch once and return what rank 0 measured.

    Raises:
        SystemExit: the launch failed; its output is told.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out.json"
        # The stacks of all ranks when it takes too long, dumped shortly before it is ended.
        env = {**os.environ, "BENCH_OUT": str(out), "BENCH_DUMP_S": str(LAUNCH_S - 10), **environ}
        log = Path(name) / "log"
        with log.open("wb") as told:
            proc = subprocess.Popen(command_of(variant, gpus, Path(name)), env=env, stdout=told, stderr=told)
            try:
                code = str(proc.wait(LAUNCH_S))
            except subprocess.TimeoutExpired:
                proc.send_signal(signal.SIGINT)  # the launcher ends its ranks, which hold the GPUs
                proc.wait(30)
                code = f"none within {LAUNCH_S} s"
        if not out.exists():
            end = log.read_text(encoding="utf-8", errors="replace")[-6000:]
            raise SystemExit(f"{variant} measured nothing (exit code: {code}):\n{end}")
        told_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(*(line for line in told_lines if " timed, level " in line), sep="\n", file=sys.stderr)
        found: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def within(gpus: int, rounds: int) -> None:
    """Measure the plugin against itself, paused, and print a table."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, blocks in measure("on", gpus, BENCH_WITHIN="1", MEGASCALE_PROFILER_THIN_AFTER="0").items():
            found.setdefault(name, []).extend(blocks)
    print(f"{gpus} GPUs, {rounds} rounds, three states in turn within one process\n")
    print("| operation | paused | thinned: adds (standard error) | all with channels: adds (standard error) |")
    print("|---|---|---|---|")
    for name, blocks in found.items():
        unit, scale = ("ms", 1e3) if name.startswith("step") else ("us", 1e6)
        off = blocks[0::STATES]
        # Each against the mean of the paused blocks before and behind it, so that a slow drift cancels.
        around = [(one + two) / 2 for one, two in zip(off, [*off[1:], off[-1]], strict=True)]
        cells = [added(blocks[state::STATES], around, unit, scale) for state in range(1, STATES)]
        print(f"| {name} | {statistics.median(off) * scale:.2f} {unit} | {' | '.join(cells)} |")


def added(blocks: list[float], paused: list[float], unit: str, scale: float) -> str:
    """Return what a state adds to the paused one, in words."""
    adds = [on - off for on, off in zip(blocks, paused, strict=True)]
    low, _, high = statistics.quantiles(adds, n=4)
    error = 1.2533 * (high - low) / 1.349 / len(adds) ** 0.5  # of a median, by the quartiles
    add = statistics.median(adds)
    return f"{add * scale:+.3f} ({error * scale:.3f}) {unit}, {add / statistics.median(paused):+.2%}"


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--within", action="store_true")
    options = parser.parse_args()
    if options.within:
        within(options.gpus, options.rounds)
        return
    found: dict[str, dict[str, list[float]]] = {}
    spread: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            for name, blocks in measure(variant, options.gpus).items():
                found.setdefault(name, {}).setdefault(variant, []).extend(blocks)
                spread.setdefault(name, {}).setdefault(variant, []).append(statistics.median(blocks))
    print(f"{options.gpus} GPUs, {options.rounds} rounds, medians; in brackets the spread of the rounds' medians\n")
    print("| operation | torchrun | plugin off | plugin on | plugin adds | all of ours adds |")
    print("|---|---|---|---|---|---|")
    for name, variants in found.items():
        unit, scale = ("ms", 1e3) if name.startswith("step") else ("us", 1e6)
        bare, off, on = (statistics.median(variants[variant]) for variant in VARIANTS)
        widths = [(max(one) - min(one)) * scale for one in (spread[name][variant] for variant in VARIANTS)]
        cells = [f"{value * scale:.2f} [{w:.2f}]" for value, w in zip((bare, off, on), widths, strict=True)]
        adds = f"{(on - off) * scale:+.2f} {unit}, {on / off - 1:+.2%}"
        print(f"| {name} | {' | '.join(cells)} | {adds} | {(on - bare) * scale:+.2f} {unit}, {on / bare - 1:+.2%} |")


if __name__ == "__main__":
    main()
