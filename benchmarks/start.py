# SPDX-License-Identifier: Apache-2.0
"""What a run costs to start and to end: seconds of CPU of all its processes, beside torchrun with the same script.

CPU time and not the clock, since it hardly depends on what else the machine does. The launchers take turns. ``start``
counts every process below a launcher as the kernel does when it has ended; ``by process`` is looked up in /proc while
it lives, so what a process takes to end is missing there, and stands in the last column.

    python benchmarks/start.py --runs 7 > benchmarks/results/start.txt
    git worktree add --detach ../before HEAD~3 && python benchmarks/start.py --before ../before
"""

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import psutil

SCRIPTS = {
    "nothing": "pass\n",
    "import torch": "import torch\n",
    "gloo": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    ),
}
BOX_ROOT = Path(f"/dev/shm/megascale-start-{os.getpid()}")  # noqa: S108  black boxes live there; removed at the end
PARTS = ("launcher", "controller", "agent", "ranks")
Found = dict[tuple[str, int, str], list[dict[str, float]]]  # by script, number of ranks and launcher
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_LOOK_EVERY_S = 0.02
# 300 s: a start takes 5 s on a machine that does nothing else.
_DEADLINE_S = 300.0


def command(name: str, ranks: int, folder: Path, script: Path) -> list[str]:
    """Return how a launcher starts the script."""
    if name == "torchrun":
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", f"--nproc-per-node={ranks}", str(script)),
        ]
    return [
        *(sys.executable, "-m", "megascale_ops.cli.main", "run", "--job=start", f"--nproc-per-node={ranks}"),
        *(f"--run-dir={folder / 'run'}", f"--box-root={BOX_ROOT}", "--", str(script)),
    ]


def part_of(line: list[str], *, is_root: bool) -> str:
    """Return which part of a run a process is, by its command line."""
    if is_root:
        return "launcher"
    verb = line[line.index("megascale_ops.cli.main") + 1] if "megascale_ops.cli.main" in line else ""
    return verb if verb in PARTS else "ranks"


def look(root: psutil.Process, seen: dict[int, tuple[str, float]]) -> None:
    """Note the CPU seconds of each process of a tree until now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                used = process.cpu_times()
                line = process.cmdline()  # one that is ending has none any more
                part = (
                    part_of(line, is_root=process.pid == root.pid) if line else seen.get(process.pid, ("ranks", 0.0))[0]
                )
                seen[process.pid] = part, used.user + used.system


def cpu_of_ended_s() -> float:
    """Return the CPU seconds of all ended children, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(line: list[str], env: Mapping[str, str], folder: Path) -> dict[str, float]:
    """Run one launch to its end; return CPU seconds: ``total``, and of each part as far as it was seen."""
    before_s = cpu_of_ended_s()
    seen: dict[int, tuple[str, float]] = {}
    # Elsewhere than here: `python -m` looks into the folder that it is started in first.
    child = subprocess.Popen(line, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    root = psutil.Process(child.pid)
    end_s = time.monotonic() + _DEADLINE_S
    while child.poll() is None:
        look(root, seen)
        time.sleep(_LOOK_EVERY_S)
        if time.monotonic() > end_s:
            child.kill()
    said = child.stderr.read() if child.stderr else b""
    if child.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {child.returncode}:\n{said.decode(errors='replace')}")
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)  # what a launcher left behind is ours to wait for, and counts as well
    found = dict.fromkeys(PARTS, 0.0)
    for part, used_s in seen.values():
        found[part] += used_s
    total_s = cpu_of_ended_s() - before_s
    return {"total": total_s, **found, "to end": total_s - sum(found.values())}


def main() -> None:
    """Take turns, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--before", type=Path, help="folder with another version of ours, to take turns with")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # then our modules, and not torch's, would be compiled at every start
    environments = {"torchrun": env, "ours": env}
    if options.before:
        folder = options.before.resolve()
        environments["before"] = {**env, "PYTHONPATH": f"{folder}:{folder / 'agents'}:{env.get('PYTHONPATH', '')}"}
    found: Found = defaultdict(list)
    try:
        # Ctrl-C shows what has been measured until then.
        with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="bench-start-") as scratch:
            for run in range(-1, options.runs):  # the first turn compiles what has changed, and counts for nothing
                take_turn(environments, options.ranks, Path(scratch), found if run >= 0 else defaultdict(list))
    finally:
        shutil.rmtree(BOX_ROOT, ignore_errors=True)
    print(f"$ python {' '.join(['benchmarks/start.py', *sys.argv[1:]])}")
    tell(found, list(environments), options.ranks)


def take_turn(environments: Mapping[str, Mapping[str, str]], ranks: list[int], scratch: Path, found: Found) -> None:
    """Launch every script with every number of ranks by every launcher, once."""
    for words, text in SCRIPTS.items():
        script = scratch / f"script_{words.replace(' ', '_')}.py"
        script.write_text(text)
        for count in ranks:
            for name, env in environments.items():
                found[words, count, name].append(measure(command(name, count, scratch, script), env, scratch))


def tell(found: Found, names: list[str], ranks: list[int]) -> None:
    """Print medians with their ratio to torchrun's, and where each goes."""
    runs = min(map(len, found.values()), default=0)
    if runs == 0 or len(found) < len(SCRIPTS) * len(ranks) * len(names):
        raise SystemExit("no turn came to its end")
    print(f"start: CPU seconds, medians of {runs} runs in turn (least to most), and their ratio to torchrun's\n")
    print(
        f"{'script':<14}{'ranks':>5}"
        + "".join(f"{name:>20}{'' if name == 'torchrun' else ' ratio':<6}" for name in names)
    )
    for words in SCRIPTS:
        for count in ranks:
            cells = []
            theirs_s = statistics.median(one["total"] for one in found[words, count, "torchrun"])
            for name in names:
                all_s = [one["total"] for one in found[words, count, name]]
                median_s = statistics.median(all_s)
                ratio = "" if name == "torchrun" else f"{median_s / theirs_s:6.2f}"
                cells.append(f"{f'{median_s:.2f} ({min(all_s):.2f}-{max(all_s):.2f})':>20}{ratio:<6}")
            print(f"{words:<14}{count:>5}" + "".join(cells))
    print(f"\n{'by process':<27}" + "".join(f"{part:>12}" for part in (*PARTS, "to end")))
    for (words, count, name), each in found.items():
        values = [statistics.median(one[part] for one in each) for part in (*PARTS, "to end")]
        print(f"{words:<14}{count:>2} {name:<10}" + "".join(f"{value:>12.2f}" for value in values))


if __name__ == "__main__":
    main()
