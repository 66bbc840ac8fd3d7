# SPDX-License-Identifier: Apache-2.0
"""Is a bad node named, and a good one not: faults drawn at random, put into a node, judged by the self-check itself.

Four kinds, in one table. *Real*: a run of ``megascale-ops diagnose`` on this machine, with the fault around it (a
disk over FUSE that is slow, damages or hangs; a full file system, one without inodes; few open files; a small
/dev/shm). What this machine has anyhow is found by a run without a fault first and counts as neither. *Drawn*: readings
of a fleet of nodes with GPUs as healthy ones differ (H200, benchmarks/results/diagnose_h200.txt), one of them changed,
through the checks' own ``judge`` and the fleet's comparison. *GPU* (``gpu_faults.py``): a GPU of this machine, drawn at
random, slowed by a second process, until ``--gpu-seconds`` are over. *Host* (``host_faults.py``): the checks' own
``measure`` beside real neighbours, limits, clocks and links of this machine.

Named: the thing with the fault is found bad (or warned of), and nothing else is. A clean run: nothing is.

    python benchmarks/diagnose_faults.py --seed 7 --trials 20 --clean 50 > benchmarks/results/diagnose_faults.txt
    python benchmarks/diagnose_faults.py --kinds drawn --trials 20 --clean 50
    python benchmarks/diagnose_faults.py --kinds host --trials 20 --clean 50 [--only link]
    python benchmarks/diagnose_faults.py --kinds gpu --trials 20 --clean 50 --gpu-seconds 400 [--only gemm,nccl]
"""

import argparse
import contextlib
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megascale_ops.diagnostics.check import Reading  # noqa: E402  after the path is set
from megascale_ops.diagnostics.figures import KINDS, shown  # noqa: E402  after the path is set
from megascale_ops.diagnostics.fleet import compare  # noqa: E402  after the path is set
from megascale_ops.diagnostics.judgement import result_of  # noqa: E402  after the path is set
from megascale_ops.diagnostics.report import VERSION, CheckFinding, Fact, Figure, NodeReport  # noqa: E402  as above
from megascale_ops.diagnostics.table import modules  # noqa: E402  after the path is set

SICK_DISK = ROOT / "benchmarks" / "scripts" / "sick_disk.py"
# A check that hangs takes its deadline, and this machine's neighbours take their time.
RUN_S = 180.0
MODEL = "NVIDIA H200"
GPUS = 8
# By figure: what a healthy one does, and how far healthy ones differ, as shares; twice what two GPUs differed by.
RATES = {
    "gemm_bf16": ("gemm", 665e12, 0.004, 0.0005),
    "hbm_copy": ("hbm", 4.26e12, 0.001, 0.0005),
    "pcie_to_gpu": ("pcie", 55.4e9, 0.003, 0.001),
    "pcie_from_gpu": ("pcie", 55.3e9, 0.002, 0.001),
    "nvlink_both_ways": ("nvlink", 764e9, 0.004, 0.002),
}


class Trial(NamedTuple):
    """One fault: what of is to be named, and what was; of a GPU's check also what it measured."""

    expected: str
    named: tuple[str, ...]
    texts: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def is_right(self) -> bool:
        """Return whether that was named, and nothing else."""
        return bool(self.named) and set(self.named) == {self.expected}


Fault = Callable[[random.Random], Trial]
Rows = dict[str, tuple[str, list[Trial]]]
Clean = dict[str, list[Trial]]


def found_in(report: NodeReport) -> list[CheckFinding]:
    """Return what a report warns of or finds bad."""
    return [one for result in report.results for one in result.findings if one.severity != "note"]


# --- drawn: readings of a fleet, judged


def healthy_gpus(draw: random.Random) -> dict[str, Reading]:
    """Return the readings of one healthy node's checks of GPUs, by check."""
    figures: dict[str, list[Figure]] = {}
    for name, (check, usual, between, within) in RATES.items():
        for number in range(GPUS):
            value = usual * draw.gauss(1, between)
            samples = tuple(value * draw.gauss(1, within) for _ in range(10))
            figures.setdefault(check, []).append(Figure(name, f"GPU {number}", median(samples), samples, MODEL))
    readings = {check: Reading(tuple(held)) for check, held in figures.items()}
    health, versions = [], []
    for number in range(GPUS):
        label = f"GPU {number}"
        numbers = {"pcie_width": 16, "pcie_width_most": 16, "nvlinks": 18, "nvlinks_active": 18, "gpu_processes": 0}
        health += [Figure(name, label, float(value)) for name, value in numbers.items()]
        versions += [Fact("uuid", label, f"GPU-{draw.getrandbits(64):x}"), Fact("vbios", label, "96.00.AF", "GPU")]
    readings["gpu_health"] = Reading(tuple(health), tuple(versions))
    readings["agreement"] = Reading((), tuple(Fact("product_digest", f"GPU {at}", "5f1c", MODEL) for at in range(GPUS)))
    readings["clock"] = Reading(
        (Figure("clock_offset", "node", draw.gauss(0, 1e-3)), Figure("clock_error", "node", 1e-3)),
        (Fact("clock_synced", "node", "yes"),),
    )
    return readings


def report_of(node: str, readings: dict[str, Reading]) -> NodeReport:
    """Judge a node's readings as the self-check does."""
    results = []
    for name, reading in readings.items():
        module = modules()[name][1]
        results.append(result_of(module.CHECK, reading, module.judge, 1.0))
    return NodeReport(VERSION, "benchmark", node, "quick", 0.0, 1.0, tuple(results))


def fleet(draw: random.Random) -> dict[str, dict[str, Reading]]:
    """Return the readings of 2 to 32 healthy nodes."""
    return {f"n{number:02}": healthy_gpus(draw) for number in range(draw.randint(2, 32))}


def judged(readings: dict[str, dict[str, Reading]], expected: str) -> Trial:
    """Judge each node by itself and all of them together; ``expected`` is NODE/THING."""
    reports = [report_of(node, held) for node, held in readings.items()]
    found = {f"{report.node}/{one.of}": one.text for report in reports for one in found_in(report)}
    found |= {one.of: one.text for one in compare(reports).findings if one.severity != "note"}
    return Trial(expected, tuple(found), tuple(found.values()))


def changed(
    draw: random.Random, check: str, change: Callable[[Figure | Fact], Figure | Fact], names: tuple[str, ...]
) -> Trial:
    """Change what one thing of one node tells, and judge the fleet."""
    readings = fleet(draw)
    node = draw.choice(sorted(readings))
    reading = readings[node][check]
    of = draw.choice(sorted({one.of for one in (*reading.figures, *reading.facts)}))

    def over(one: Figure | Fact) -> Figure | Fact:
        return change(one) if one.of == of and one.name in names else one

    figures, facts = tuple(map(over, reading.figures)), tuple(map(over, reading.facts))
    readings[node][check] = Reading(figures, facts)  # type: ignore[arg-type]  # each is what it was
    return judged(readings, f"{node}/{of}")


def slow_gpu(draw: random.Random) -> Trial:
    """One GPU is 5 to 30 % slower in one figure."""
    name = draw.choice(sorted(RATES))
    factor = 1 - draw.uniform(0.06, 0.30)

    def slower(one: Figure | Fact) -> Figure | Fact:
        assert isinstance(one, Figure)
        samples = tuple(value * factor for value in one.samples)
        return Figure(one.name, one.of, one.value * factor, samples, one.peers)

    return changed(draw, RATES[name][0], slower, (name,))


def slow_node(draw: random.Random) -> Trial:
    """All GPUs of one node are slower alike, which it can't know of itself: the fleet does."""
    readings = fleet(draw)
    while len(readings) < 5:
        readings = fleet(draw)
    node, name = draw.choice(sorted(readings)), draw.choice(sorted(RATES))
    check, factor = RATES[name][0], 1 - draw.uniform(0.06, 0.30)
    readings[node][check] = Reading(
        tuple(
            Figure(one.name, one.of, one.value * factor, tuple(value * factor for value in one.samples), one.peers)
            if one.name == name
            else one
            for one in readings[node][check].figures
        )
    )
    trial = judged(readings, node)
    return Trial(node, tuple(dict.fromkeys(one.partition("/")[0] for one in trial.named)), trial.texts)


def with_value(name: str, value: float) -> Callable[[Figure | Fact], Figure | Fact]:
    """Return what gives a figure another value."""
    return lambda one: Figure(name, one.of, value, peers=one.peers)


def with_text(name: str, value: str) -> Callable[[Figure | Fact], Figure | Fact]:
    """Return what gives a fact another text."""
    return lambda one: Fact(name, one.of, value, one.peers)


DRAWN: dict[str, tuple[str, Fault]] = {
    "one GPU 6 to 30 % slow in one figure": ("reading", slow_gpu),
    "all GPUs of a node 6 to 30 % slow": ("reading", slow_node),
    "a product that differs in a bit": (
        "reading",
        lambda draw: changed(draw, "agreement", with_text("product_digest", "5f1d"), ("product_digest",)),
    ),
    "half of the PCIe lanes": (
        "reading",
        lambda draw: changed(draw, "gpu_health", with_value("pcie_width", 8.0), ("pcie_width",)),
    ),
    "an NVLink that is down": (
        "reading",
        lambda draw: changed(draw, "gpu_health", with_value("nvlinks_active", 17.0), ("nvlinks_active",)),
    ),
    "another VBIOS": ("reading", lambda draw: changed(draw, "gpu_health", with_text("vbios", "96.00.99"), ("vbios",))),
    "a clock 0.2 to 60 s off": (
        "reading",
        lambda draw: changed(draw, "clock", with_value("clock_offset", draw.uniform(0.2, 60)), ("clock_offset",)),
    ),
}


# --- real: the verb on this machine


class Around(NamedTuple):
    """What surrounds a run: options, what is done in its process before, a command in front of it."""

    options: tuple[str, ...]
    before: Callable[[], None] | None = None
    prefix: tuple[str, ...] = ()


def run(around: Around) -> NodeReport:
    """Run the self-check once."""
    command = [*around.prefix, sys.executable, "-m", "megascale_ops.cli", "diagnose", "--json", "--name", "node"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agents"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*command, *around.options],
        capture_output=True,
        timeout=RUN_S,
        check=False,
        preexec_fn=around.before,
        env=env,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(around.options)}: {done.stderr.decode(errors='replace')[-500:]}")
    return msgspec.json.decode(done.stdout, type=NodeReport)


@contextlib.contextmanager
def sick_disk(rate: float = 0.0, *, damages: bool = False, hangs: bool = False) -> Iterator[str]:
    """Yield a folder on such a disk."""
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as folder:
        given = [str(SICK_DISK), folder, str(rate), str(int(damages)), str(int(hangs))]
        with subprocess.Popen(
            [sys.executable, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as disk:
            assert disk.stdout is not None
            assert disk.stdin is not None
            if disk.stdout.readline() != "mounted\n":
                raise PermissionError("a file system can't be mounted over FUSE here")
            try:
                yield folder
            finally:
                disk.stdin.close()
                try:
                    disk.wait(10)
                except subprocess.TimeoutExpired:
                    disk.kill()


@contextlib.contextmanager
def small_file_system(options: str) -> Iterator[str]:
    """Yield a folder that is a file system of its own, in memory."""
    with tempfile.TemporaryDirectory(prefix="bench-room-") as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
        if made.returncode:
            raise PermissionError("a file system can't be mounted here")
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=False)


def named_in(report: NodeReport, standing: set[tuple[str, str]], expected: str) -> Trial:
    """Return what a run found beyond what this machine has anyhow."""
    found = [
        one for result in report.results for one in result.findings if one.severity != "note"
        and (result.check, one.of) not in standing
    ]  # fmt: skip
    return Trial(expected, tuple(one.of for one in found), tuple(one.text for one in found))


def slow_disk(draw: random.Random) -> Trial:
    """A disk that takes 10 to 70 MB/s."""
    with sick_disk(draw.uniform(10e6, 70e6)) as folder:
        return named_in(run(Around(("--check", "disk", "--path", folder))), set(), folder)


def damaging_disk(_draw: random.Random) -> Trial:
    """A disk that gives back something else than it was given."""
    with sick_disk(damages=True) as folder:
        return named_in(run(Around(("--check", "disk", "--path", folder))), set(), folder)


def hanging_disk(_draw: random.Random) -> Trial:
    """A disk that never says that a write is safe."""
    with sick_disk(hangs=True) as folder:
        return named_in(run(Around(("--check", "disk", "--path", folder))), set(), "node")


def full_file_system(draw: random.Random) -> Trial:
    """A file system with 0.1 to 0.9 % left."""
    size, standing = draw.randint(40, 200) << 20, standing_of("file_systems")
    with small_file_system(f"size={size}") as folder:
        with Path(folder, "fill").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, int(size * (1 - draw.uniform(0.001, 0.009))) // 4096 * 4096)
        return named_in(run(Around(("--check", "file_systems", "--path", folder))), standing, folder)


def no_inodes(draw: random.Random) -> Trial:
    """A file system with room and without inodes."""
    inodes, standing = draw.randint(200, 1000), standing_of("file_systems")
    # 11 GiB: enough room that nothing is said of that; memory in use is what is written, which is nothing.
    with small_file_system(f"size=11g,nr_inodes={inodes}") as folder:
        with contextlib.suppress(OSError):
            for number in range(inodes):
                Path(folder, str(number)).touch()
        return named_in(run(Around(("--check", "file_systems", "--path", folder))), standing, folder)


def few_files(draw: random.Random) -> Trial:
    """A low limit of open files."""
    most = draw.randint(256, 4000)
    around = Around(("--check", "limits"), lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)))
    return _of_the_limit(named_in(run(around), set(), "node"), "files")


def small_shm(draw: random.Random) -> Trial:
    """A /dev/shm of 64 to 512 MiB, in a mount namespace of the run's own."""
    size = draw.choice((64, 128, 256, 512))
    script = f'mount -t tmpfs -o size={size}m none /dev/shm && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    return _of_the_limit(named_in(run(Around(("--check", "limits"), prefix=prefix)), set(), "node"), "shared memory")


def _of_the_limit(trial: Trial, word: str) -> Trial:
    """Return what is said of one limit: all of them are of the node, and some may be low here anyhow."""
    chosen = [(of, text) for of, text in zip(trial.named, trial.texts, strict=True) if word in text]
    return Trial(trial.expected, tuple(of for of, _ in chosen), tuple(text for _, text in chosen))


_standing: dict[str, set[tuple[str, str]]] = {}


def standing_of(*checks: str) -> set[tuple[str, str]]:
    """Return what is found on this machine without a fault: check and thing."""
    key = " ".join(checks)
    if key not in _standing:
        report = run(Around(tuple(option for check in checks for option in ("--check", check))))
        _standing[key] = {(result.check, one.of) for result in report.results for one in result.findings}
    return _standing[key]


REAL: dict[str, tuple[str, Fault]] = {
    "a disk of 10 to 70 MB/s": ("FUSE", slow_disk),
    "a disk that damages a byte": ("FUSE", damaging_disk),
    "a disk that never syncs": ("FUSE", hanging_disk),
    "a file system with less than 1 % left": ("tmpfs", full_file_system),
    "a file system without inodes": ("tmpfs", no_inodes),
    "256 to 4,000 open files": ("setrlimit", few_files),
    "a /dev/shm of 64 to 512 MiB": ("mount namespace", small_shm),
}
HOST_CHECKS = ("cpu", "memory", "numa", "disk", "file_systems", "swap", "clock", "limits", "kernel_log")


# --- the table


def table(rows: Rows, clean: Clean) -> Iterator[str]:
    """Yield the table of what was named, then the clean runs, then each trial that went wrong."""
    yield "| fault | injected by | trials | named, and nothing else |"
    yield "|---|---|---|---|"
    for name, (how, trials) in rows.items():
        yield f"| {name} | {how} | {len(trials)} | {sum(one.is_right for one in trials)} |"
    yield ""
    yield "| clean | runs | with something named |"
    yield "|---|---|---|"
    for name, trials in clean.items():
        yield f"| {name} | {len(trials)} | {sum(bool(one.named) for one in trials)} |"
    for name, (_, trials) in rows.items():
        for one in trials:
            if not one.is_right:
                yield f"\nwrong: {name}: {one.expected} expected, named {one.named}: {one.texts[:3]}"
    for name, trials in clean.items():
        for one in trials:
            if one.named:
                yield f"\nnamed in a clean run ({name}): {one.named}: {one.texts[:3]}"


def spread(clean: Clean) -> Iterator[str]:
    """Yield how far each figure of a GPU's check went from run to run, where nothing was injected."""
    values: dict[tuple[str, str], list[float]] = {}  # by name of the figure, and what it is of
    for trials in clean.values():
        for one in (figure for trial in trials for figure in trial.figures):
            if (kind := KINDS.get(one.name)) is not None and kind.bar:
                values.setdefault((one.name, one.of), []).append(one.value)
    if values:
        yield "\n| figure, clean runs | of | runs | median | nine of ten within | all within |"
        yield "|---|---|---|---|---|---|"
    for (name, of), held in values.items():
        middle = median(held)
        off = sorted(abs(value / middle - 1) for value in held)
        most = off[-1 - len(off) // 10]
        yield f"| {KINDS[name].what} | {of} | {len(held)} | {shown(name, middle)} | {most:.2%} | {off[-1]:.2%} |"


def of_this_machine(draw: random.Random, trials: int, runs: int, rows: Rows, clean: Clean, only: str) -> None:
    """Inject what this machine permits, drawn one by one from all of them: no fault has its own quiet minute."""
    wanted = [name for name in REAL if only in name for _ in range(trials)]
    draw.shuffle(wanted)
    for name in wanted:
        how, fault = REAL[name]
        try:
            trial = fault(draw)
        except PermissionError as error:
            print(f"# {name}: not injected: {error}", file=sys.stderr)
            continue
        rows.setdefault(name, (how, []))[1].append(trial)
        print(f"# {name}: {'named' if trial.is_right else trial}", file=sys.stderr, flush=True)
    if not runs:
        return
    standing = standing_of(*HOST_CHECKS)
    around = Around(tuple(option for check in HOST_CHECKS for option in ("--check", check)))
    host = clean["this machine, all checks of the host"] = []
    for number in range(runs):
        host.append(named_in(run(around), standing, ""))
        print(f"# clean {number + 1}: {host[-1].texts or 'nothing'}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Draw, inject, judge; the exit code says whether all went right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--trials", type=int, default=20, help="of each fault that is drawn; real ones a quarter")
    parser.add_argument("--clean", type=int, default=50)
    parser.add_argument("--kinds", default="real,drawn")
    parser.add_argument("--only", default="", help="faults of this machine with this word in their names")
    parser.add_argument("--gpu-seconds", type=float, default=120.0)
    options = parser.parse_args(arguments)
    draw, kinds = random.Random(options.seed), options.kinds.split(",")
    rows: Rows = {}
    clean: Clean = {}
    if "drawn" in kinds:
        for name, (how, fault) in DRAWN.items():
            rows[name] = how, [fault(draw) for _ in range(options.trials)]
        clean["fleets of 2 to 32 nodes with 8 GPUs"] = [judged(fleet(draw), "") for _ in range(options.clean)]
    if "real" in kinds:
        of_this_machine(draw, max(1, options.trials // 4), options.clean, rows, clean, options.only)
    if "host" in kinds:
        from benchmarks.host_faults import of_the_host

        of_the_host(draw, options.trials, options.clean, options.only, rows, clean)
    if "gpu" in kinds:
        from benchmarks.gpu_faults import gpu_trials

        until_s = time.monotonic() + options.gpu_seconds
        for name, trial in gpu_trials(draw, options.trials, options.clean, options.only, until_s):
            if trial.expected:
                rows.setdefault(name, ("a second process", []))[1].append(trial)
            else:
                clean.setdefault(f"the GPUs of this machine, by {name}", []).append(trial)
            print(f"# {name}: {trial.expected or 'nothing'} expected, named {trial.named}", file=sys.stderr, flush=True)
    given = f"--seed {options.seed} --trials {options.trials} --clean {options.clean} --kinds {options.kinds}"
    given += f" --only '{options.only}'" if options.only else ""
    print(f"$ python benchmarks/diagnose_faults.py {given}\n")
    print("\n".join(table(rows, clean)))
    print("\n".join(spread(clean)))
    wrong = any(not one.is_right for _, trials in rows.values() for one in trials)
    return int(wrong or any(one.named for trials in clean.values() for one in trials))


if __name__ == "__main__":
    sys.exit(main())
