# SPDX-License-Identifier: Apache-2.0
"""Rehearsals on one GPU, as far as they need none: clock and mirror, and what they say without one."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megascale_kernels.device.layout import FLAGS_OFFSET, HELLO, HELLO_LINE, MAX_RANKS, SLOTS
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import H200, gather_launch
from megascale_kernels.planning.gather_schedule import arrivals

from tests.fixtures.script_module import script_module
from tests.processes.warmed import env_of_programs, play_script

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "kernels" / "benchmarks" / "rehearse.py"
BARE = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}


@pytest.fixture(scope="module")
def rehearsal() -> ModuleType:
    """The script, as a module."""
    return script_module(SCRIPT)


@pytest.fixture(scope="module")
def stand_ins() -> ModuleType:
    """What it lets take the peers' place."""
    return script_module(SCRIPT.with_name("stand_ins.py"))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_flags_come_up_when_the_plan_says_that_rows_arrive(stand_ins: ModuleType, ranks: int, splits: int) -> None:
    """Else a rehearsal would judge a plan by another timetable than it was made for."""
    m_shard, k = 1024, 4096
    launch = gather_launch(m_shard, 2048, k, ranks, Config(kernel="hopper", splits=splits), H200)
    planned = sorted(set(arrivals(launch, launch.blocks_n)) - {0.0})

    kept = list(stand_ins.timetable(m_shard, m_shard // splits, 2 * k, ranks))

    assert [arrival.time_s for arrival in kept] == pytest.approx(planned)
    assert [(one.source, one.unit) for one in kept] == [(s, u) for s in range(1, ranks) for u in range(splits)]


def test_what_was_measured_is_found_by_shape_and_configuration(rehearsal: ModuleType) -> None:
    """The committed table for four GPUs, in seconds."""
    there = rehearsal.measured_there(SCRIPT.parent / "results" / "ag_gemm_4gpu.csv")

    assert there["LLaMA-70B", "global", 8192]["128x256x64/4 g16 hopper"] == pytest.approx(1.263e-3, rel=0.001)
    assert rehearsal.measured_there(None) == {}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_in_a_mirror_a_rank_hears_of_its_own_tiles_as_of_its_peers(stand_ins: ModuleType, ranks: int) -> None:
    """What rank 0 announces to s is what -s announces to rank 0, and its greetings hit no flag that a tile has."""
    channels, flags, own = 1536, FLAGS_OFFSET, 1 << 20
    layout = SimpleNamespace(channels=channels)
    peers = torch.tensor([own, *[0] * (ranks - 1)])

    mirrored = stand_ins.mirror(
        SimpleNamespace(world_size=ranks, layout=layout, peers=peers, device=torch.device("cpu"))
    ).tolist()

    assert mirrored[0] == own
    for step in range(1, ranks):
        shift = (mirrored[step] - own) // 4  # a flag of ours, rank 0's, at s: its words, and then `shift`
        assert divmod(shift, channels) == (ranks - step, 0)
        for slot in range(SLOTS):
            greeting = HELLO.value + slot * MAX_RANKS * HELLO_LINE.value + shift - flags
            assert greeting % channels >= channels // 2


def alone(path: Path, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run it as a program of its own, as `play_script` does in a fork of what has imported torch."""
    return subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=120, check=False, env=BARE
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "arguments", "said", "is_cold"),
    [
        ("rehearse", ["--shapes=x"], "--shapes x: not MxNxK", True),
        ("rehearse", ["--against=nowhere.csv"], "No such file or directory: 'nowhere.csv'", False),
        ("rehearse", [f"--against={__file__}"], "is no CSV of the benchmark", False),
        ("rehearse", ["--rounds=0"], "--rounds 0: give 1 or more", False),
        ("rehearse", ["--m=8"], "CUDA GPU", False),
        ("last_wave", ["gemm_rs", "--shapes=x"], "--shapes x: not MxNxK", False),
        ("last_wave", ["gemm_rs", "--rounds=0"], "--rounds 0: give 1 or more", False),
        ("last_wave", ["ag_gemm", "--m=8"], "CUDA GPU", True),
    ],
)
def test_what_it_cannot_do_is_one_sentence(script: str, arguments: list[str], said: str, is_cold: bool) -> None:
    """No traceback, on a machine without a GPU or with a word that is no shape; as a program once for each script."""
    path = SCRIPT.with_stem(script)

    done = alone(path, arguments) if is_cold else play_script(path, arguments, env_of_programs() | BARE, 120)

    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
