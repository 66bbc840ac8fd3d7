# SPDX-License-Identifier: Apache-2.0
"""From a rank's death (or freezing) to the first new step of all ranks: ours beside torchrun and NVIDIA's launcher.

The same script, unchanged, two ranks on one machine, steps of 50 ms. The launchers take turns (A B C A B C ...) so that
a noisy minute hits all of them; every trial is a launch of its own, killed once. ``floor`` is what a cold restart can't
avoid: both ranks started by hand, to their first step. With ``--touch-gb`` a process that has touched as much is killed
at that moment: giving 4 GB back takes the kernel a quarter of a second, on a core that the new ranks start on. The last
column is what the launcher itself takes: from the fault until the processes of all new ranks exist (to 10 ms; spare
processes of ``--warm`` exist before it). It does not depend on how fast the machine starts Pythons in that minute.

    python benchmarks/restart.py --runs 20 --ft-launcher /path/to/venv/bin/ft_launcher > benchmarks/results/restart.txt
    python benchmarks/restart.py --fault freeze --runs 5
    python benchmarks/restart.py --runs 20 --touch-gb 4
    python benchmarks/restart.py --in-a-row 100 [--touch-gb 4]
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

SCRIPT = Path(__file__).parent / "scripts" / "stepper.py"
# torchrun's restart hangs one time in four (torch issue 135712); after this long it counts as failed.
HANG_S = 30.0
# 40 steps before the fault: patience has been learned and the warm pool is full.
STEPS_BEFORE = 40
BOX_ROOT = f"/dev/shm/megascale-bench-{os.getpid()}"  # noqa: S108  black boxes live there; removed after each trial


class Trial(NamedTuple):
    """Seconds from the fault to the first new step of the slowest rank; None when it never came."""

    total_s: float | None
    named_s: float | None
    started_s: float | None  # until the processes of all new ranks existed


def rows(folder: Path, rank: int) -> list[tuple[float, int, int]]:
    """Return (clock, pid, step) of a rank, whole lines only."""
    path = folder / f"rank-{rank}"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        fields = line.split()
        if len(fields) == 4:
            found.append((float(fields[0]), int(fields[1]), int(fields[3])))
    return found


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(folder: Path, ft_launcher: str, fault: str) -> dict[str, list[str]]:
    """Return how each launcher starts the script."""
    ours = [sys.executable, "-m", "megascale_ops.cli.main", "run", "--job=bench", "--quiet", "--nproc-per-node=2"]
    ours += [f"--run-dir={folder / 'run'}", f"--box-root={BOX_ROOT}"]
    ours += ["--policy", "restarts_per_hour=1000", "--policy", "restarts_per_cause_per_hour=1000"]
    known = {
        "ours": [*ours, "--", str(SCRIPT)],
        "ours --warm": [*ours, "--warm", "--", str(SCRIPT)],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--max-restarts=5", str(SCRIPT)),
        ],
    }
    if ft_launcher:
        settings = folder / "ft.yaml"
        settings.write_text(
            "fault_tolerance:\n  initial_rank_heartbeat_timeout: 60\n  rank_heartbeat_timeout: 10\n"
            "  workload_check_interval: 1\n  rank_termination_signal: SIGKILL\n  log_level: ERROR\n"
        )
        known["ft_launcher"] = [
            *(str(Path(ft_launcher).with_name("python")), ft_launcher, "--nproc-per-node=2", "--nnodes=1"),
            *("--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
            *(f"--ft-cfg-path={settings}", str(SCRIPT)),
        ]
    if fault == "freeze":
        del known["torchrun"]  # sees a frozen rank only by the process group's time-out, 30 minutes
    return known


def trial(name: str, fault: str, touch_gb: float, ft_launcher: str) -> Trial:
    """Launch, wait for steps, hurt rank 1, wait for new steps of both ranks."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    env = {**os.environ, "BENCH_DIR": str(folder), "TOUCH_GB": str(touch_gb), "OMP_NUM_THREADS": "1"}
    if name == "ft_launcher":
        env["FT_CLIENT"] = "1" if fault == "freeze" else ""
        env["PYTHONPATH"] = ""
    with (folder / "log").open("wb") as log:
        command = commands(folder, ft_launcher, fault)[name]
        proc = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        return measure(folder, proc, fault, settle_s=6.0 if "warm" in name else 0.5)
    finally:
        proc.send_signal(signal.SIGTERM)
        try:
            proc.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(proc.pid, signal.SIGKILL)
            proc.wait(10)
        _kill_what_is_left(folder)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(BOX_ROOT, ignore_errors=True)


def _kill_what_is_left(folder: Path) -> None:
    """Kill this trial's processes wherever they hang now; another benchmark beside this one keeps its own."""
    for proc in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if proc.environ().get("BENCH_DIR") == str(folder):
                proc.kill()


def measure(folder: Path, proc: "subprocess.Popen[bytes]", fault: str, settle_s: float) -> Trial:
    """Return how long it took."""
    end = time.monotonic() + 90
    while not all(len(rows(folder, rank)) >= STEPS_BEFORE for rank in (0, 1)):
        if time.monotonic() > end or proc.poll() is not None:
            raise SystemExit("the launch never made its first steps:\n" + (folder / "log").read_text()[-2000:])
        time.sleep(0.05)
    time.sleep(settle_s)
    before = {rows(folder, rank)[-1][1] for rank in (0, 1)}
    victim = rows(folder, 1)[-1][1]
    hurt, hurt_booted = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    fresh = new_steps(folder, before, proc, HANG_S)
    if fresh is None:
        return Trial(None, None, None)
    started = max(started_booted_s(rows(folder, rank)[-1][1]) for rank in (0, 1))
    return Trial(fresh - hurt, named_after(folder / "log", folder), started - hurt_booted)


def started_booted_s(pid: int) -> float:
    """Return when a process was started, seconds since the machine was, in the kernel's ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def in_a_row(kills: int, touch_gb: float) -> list[float | None]:
    """Kill a rank of the same run again and again; return seconds to the first new step of both ranks.

    Each rank touches its memory after its first step, so every one that is killed holds it.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    env = {**os.environ, "BENCH_DIR": str(folder), "TOUCH_GB": str(touch_gb), "OMP_NUM_THREADS": "1"}
    env["TOUCH_EACH_LIFE"] = "1" if touch_gb else ""
    found: list[float | None] = []
    with (folder / "log").open("wb") as log:
        command = commands(folder, "", "kill")["ours"]
        proc = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        fresh = new_steps(folder, set(), proc, 90)
        for number in range(kills):
            time.sleep(0.3)
            end = time.monotonic() + HANG_S
            while rows(folder, number % 2)[-1][2] == 0 and time.monotonic() < end:  # it still touches its memory
                time.sleep(0.05)
            before = {pid for rank in (0, 1) for _, pid, _ in rows(folder, rank)}
            victim = rows(folder, number % 2)[-1][1]
            hurt = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            fresh = new_steps(folder, before, proc, HANG_S)
            found.append(None if fresh is None else fresh - hurt)
            if fresh is None:
                break
    finally:
        proc.send_signal(signal.SIGTERM)
        proc.wait(40)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(BOX_ROOT, ignore_errors=True)
    return found


def new_steps(folder: Path, before: set[int], proc: "subprocess.Popen[bytes]", patience_s: float) -> float | None:
    """Return when both ranks had made a step in processes that are not in ``before``; None when they never did."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end and proc.poll() is None:
        fresh = [[clock for clock, pid, _ in rows(folder, rank) if pid not in before] for rank in (0, 1)]
        if all(fresh):
            return max(clocks[0] for clocks in fresh)
        time.sleep(0.01)
    return None


def named_after(log: Path, folder: Path) -> float | None:
    """Return detection to naming as our own incident tells it, when there is one."""
    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli.main", "why", "bench-1", "--json", f"--run-dir={folder / 'run'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    marks = dict(re.findall(r'"(began|named)":\s*([\d.]+)', done.stdout)) if done.returncode == 0 else {}
    return float(marks["named"]) - float(marks["began"]) if len(marks) == 2 and log.exists() else None


def import_floor() -> float:
    """Return seconds from starting two Pythons together until both have imported torch."""
    begin = time.monotonic()
    procs = [
        subprocess.Popen([sys.executable, "-c", "import torch, time; print(time.monotonic())"], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    return max(float(proc.communicate(timeout=60)[0]) for proc in procs) - begin


HOLD_MEMORY = "import sys, torch; held = torch.ones(int(float(sys.argv[1]) * (1 << 28))); print(); input()"


@contextlib.contextmanager
def held_memory(gigabytes: float) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that has touched so much memory."""
    command = [sys.executable, "-c", HOLD_MEMORY, str(gigabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield holder
        finally:
            holder.kill()


def script_floor(touch_gb: float) -> float:
    """Return seconds from starting both ranks by hand, with a store that is up already, to the first step of both.

    What the script itself imports after torch is in it: the first optimizer imports ``torch._dynamo``.
    """
    if touch_gb:
        with held_memory(touch_gb) as holder:
            holder.kill()
            return script_floor(0.0)
    from torch.distributed import TCPStore

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "BENCH_DIR": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    begin = time.monotonic()
    procs = [subprocess.Popen([sys.executable, "-u", str(SCRIPT)], env={**env, "RANK": str(rank)}) for rank in (0, 1)]
    try:
        first = new_steps(folder, set(), procs[0], 60)
        if first is None:
            raise SystemExit("the script makes no steps without a launcher")
        return first - begin
    finally:
        for proc in procs:
            proc.kill()
            proc.wait()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(BOX_ROOT, ignore_errors=True)


def main() -> None:
    """Take turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--fault", choices=["kill", "freeze"], default="kill")
    parser.add_argument("--touch-gb", type=float, default=0.0)
    parser.add_argument("--ft-launcher", default="")
    parser.add_argument("--only", default="", help="names of launchers, comma separated")
    parser.add_argument("--in-a-row", type=int, default=0, help="kill one run of ours so often instead")
    options = parser.parse_args()
    if options.in_a_row:
        times = in_a_row(options.in_a_row, options.touch_gb)
        good = [seconds for seconds in times if seconds is not None]
        held = f" with {options.touch_gb:g} GB touched" if options.touch_gb else ""
        print(f"one run of ours, a rank{held} SIGKILLed {options.in_a_row} times in a row")
        print(
            f"recovered {len(good)}/{options.in_a_row}, median {statistics.median(good):.3f} s, max {max(good):.3f} s"
        )
        return
    chosen = options.only.split(",") if options.only else list(commands(Path(), "", options.fault))
    if options.ft_launcher and not options.only:
        chosen.append("ft_launcher")
    found: dict[str, list[Trial]] = {name: [] for name in chosen}
    imports: list[float] = []
    floors: list[float] = []
    freeing: list[float] = []
    for number in range(options.runs):
        imports.append(import_floor())
        floors.append(script_floor(0.0))
        freeing.append(script_floor(options.touch_gb) if options.touch_gb else floors[-1])
        for name in chosen:
            result = trial(name, options.fault, options.touch_gb, options.ft_launcher)
            found[name].append(result)
            print(f"# run {number + 1}: {name}: {result.total_s}", file=sys.stderr, flush=True)
    base = statistics.median(freeing)
    print(f"{options.fault} of rank 1 of 2, 50 ms steps, {options.touch_gb:g} GB touched, {options.runs} runs in turn")
    print(f"two Pythons start and import torch: median {statistics.median(imports):.3f} s")
    print(f"both ranks started by hand, to the first step of both: median {statistics.median(floors):.3f} s")
    if options.touch_gb:
        print(f"the same while {options.touch_gb:g} GB are given back: median {base:.3f} s")
    print()
    print(
        f"{'launcher':<14}{'recovered':>11}{'median s':>10}{'max s':>9}{'over floor':>12}{'ratio to ours':>15}"
        f"{'restarted in s':>16}"
    )
    ours = statistics.median([t.total_s for t in found.get("ours", []) if t.total_s is not None] or [float("nan")])
    for name, trials in found.items():
        times = [t.total_s for t in trials if t.total_s is not None]
        middle = statistics.median(times) if times else float("nan")
        started = statistics.median([t.started_s for t in trials if t.started_s is not None] or [float("nan")])
        print(
            f"{name:<14}{len(times):>7}/{len(trials)}{middle:>10.3f}{max(times, default=float('nan')):>9.3f}"
            f"{middle - base:>12.3f}{middle / ours:>15.2f}" + (f"{started:>16.2f}" if started > 0 else f"{'-':>16}")
        )
    named = [t.named_s for name in found if name.startswith("ours") for t in found[name] if t.named_s is not None]
    if named:
        print(f"\nours: fault to verdict: median {statistics.median(named):.3f} s, max {max(named):.3f} s")


if __name__ == "__main__":
    main()
