# SPDX-License-Identifier: Apache-2.0
"""The self-check on real GPUs: how far its figures differ from run to run, how long it takes, and a slowed GPU named.

Where ``$OUT`` is set the reports are left there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import pytest

from megascale_ops.diagnostics.figures import KINDS, shown
from megascale_ops.diagnostics.gpu.devices import devices
from megascale_ops.diagnostics.report import NodeReport

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: a GPU is judged by its equals"),
]

# Products on the first GPU until it is killed.
WORK = """
import torch
a = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
print("begun", flush=True)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""
# The GPU's own figures: those that a run repeats ten times.
RATES = (
    *("gemm_bf16", "hbm_copy", "pcie_to_gpu", "pcie_from_gpu", "nvlink_one_way", "nvlink_both_ways"),
    *("all_reduce", "all_gather", "all_to_all"),
)
# What was asked of GEMM, HBM, PCIe, NVLink and all-reduce, from run to run.
SPREAD = 0.03


def diagnose(*options: str, name: str) -> tuple[int, NodeReport]:
    """Run the verb; return its exit code and report, which is kept in ``$OUT`` as well."""
    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", "diagnose", "--json", *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    if "OUT" in os.environ:
        Path(os.environ["OUT"], f"{name}.json").write_text(done.stdout, encoding="utf-8")
    return done.returncode, msgspec.json.decode(done.stdout, type=NodeReport)


def rates(report: NodeReport) -> dict[tuple[str, str], float]:
    """Return the rates of GPUs by figure and what they are of."""
    return {(one.name, one.of): one.value for each in report.results for one in each.figures if one.name in RATES}


def bad(report: NodeReport) -> list[str]:
    """Return what was found bad."""
    return [one.text for each in report.results for one in each.findings if one.severity == "bad"]


@contextmanager
def slowed() -> Iterator[None]:
    """Keep the first GPU busy from another process."""
    with subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield
        finally:
            process.kill()


def test_a_quick_check_measures_everything_and_names_no_good_gpu() -> None:
    """Every check that GPUs of this machine allow is made, and nothing bad is found; the seconds are printed."""
    _, report = diagnose("--quick", name="quick")

    print(f"quick: {report.seconds:.1f} s: {', '.join(f'{one.check} {one.seconds:.1f}' for one in report.results)}")
    for (name, of), value in rates(report).items():
        print(f"{name} of {of}: {shown(name, value)}")
    made = {one.check: one for one in report.results if one.status != "unmeasured"}
    assert {"gpu_health", "gemm", "agreement", "hbm", "hbm_pattern", "pcie", "nvlink", "nccl"} <= made.keys()
    assert {name for name, _ in rates(report)} == set(RATES)
    assert bad(report) == []


def test_figures_are_the_same_from_run_to_run() -> None:
    """Two runs: the largest difference of each figure; ten repetitions in each run."""
    checks = [f"--check={name}" for name in ("gemm", "hbm", "pcie", "nvlink", "nccl")]
    runs = [rates(diagnose(*checks, name=f"repeated-{run}")[1]) for run in range(2)]

    spreads = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        spreads[key] = (max(values) - min(values)) / median(values)
        print(f"{key[0]} of {key[1]}: {shown(key[0], median(values))}, spread {spreads[key]:.2%} over {len(runs)} runs")
    if "OUT" in os.environ:
        told = {f"{name} of {of}": spread for (name, of), spread in spreads.items()}
        Path(os.environ["OUT"], "spreads.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    asked = {key: spread for key, spread in spreads.items() if key[0] not in ("all_gather", "all_to_all")}
    assert max(asked.values()) < SPREAD


def test_a_gpu_that_another_process_slows_is_named() -> None:
    """By the check of matrix products, against its equal; and the other one is not."""
    first, second = (one.label for one in devices()[0][:2])

    with slowed():
        code, report = diagnose("--check=gemm", "--check=gpu_health", name="slowed")

    print(bad(report))
    assert code == 1
    assert any(text.startswith(f"{first}: {KINDS['gemm_bf16'].what}") for text in bad(report))
    assert not any(text.startswith(f"{second}: ") for text in bad(report))
