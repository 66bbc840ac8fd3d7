# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of an all-gather on one GPU, as far as it needs none: its clock, and what it says without one."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from megascale_kernels.config import Config
from megascale_kernels.costs import H200, gather_launch
from megascale_kernels.gather_plan import arrivals

from tests.fixtures.script_module import script_module

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "kernels" / "benchmarks" / "rehearse.py"


@pytest.fixture(scope="module")
def rehearsal() -> ModuleType:
    """The script, as a module."""
    return script_module(SCRIPT)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_flags_come_up_when_the_plan_says_that_rows_arrive(rehearsal: ModuleType, ranks: int, splits: int) -> None:
    """Else a rehearsal would judge a plan by another timetable than it was made for."""
    m_shard, k = 1024, 4096
    launch = gather_launch(m_shard, 2048, k, ranks, Config(kernel="hopper", splits=splits), H200)
    planned = sorted(set(arrivals(launch, launch.blocks_n)) - {0.0})

    kept = list(rehearsal.timetable(m_shard, m_shard // splits, 2 * k, ranks))

    assert [arrival.time_s for arrival in kept] == pytest.approx(planned)
    assert [(one.source, one.unit) for one in kept] == [(s, u) for s in range(1, ranks) for u in range(splits)]


def test_what_was_measured_is_found_by_shape_and_configuration(rehearsal: ModuleType) -> None:
    """The committed table for four GPUs, in seconds."""
    there = rehearsal.measured_there(SCRIPT.parent / "results" / "ag_gemm_4gpu.csv")

    assert there["LLaMA-70B", "global", 8192]["128x256x64/4 g16 hopper"] == pytest.approx(1.263e-3, rel=0.001)
    assert rehearsal.measured_there(None) == {}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--shapes=x", "--shapes x: not MxNxK"),
        ("--against=nowhere.csv", "No such file or directory: 'nowhere.csv'"),
        (f"--against={__file__}", "is no CSV of the benchmark"),
        ("--rounds=0", "--rounds 0: give 1 or more"),
        ("--m=8", "CUDA GPU"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(argument: str, said: str) -> None:
    """No traceback, on a machine without a GPU or with a word that is no shape."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), argument], capture_output=True, text=True, timeout=120, check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )  # fmt: skip

    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
