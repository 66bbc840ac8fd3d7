# SPDX-License-Identifier: Apache-2.0
"""The NCCL profiler plugin lives in the training process: no order of calls and no bytes in the box may break it."""

import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.nccl_host import Binaries, Played, compiled

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]

CALLS = int(os.environ.get("MEGASCALE_FUZZ_EXAMPLES", "60")) * 200
# Seeds that are played in every run; one more is drawn.
CORPUS = (1, 2, 3)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Binaries:
    """Everything under the sanitizers for addresses and undefined behaviour; the first finding ends the process."""
    return compiled(tmp_path_factory, "address,undefined")


def play_drawn(checked: Binaries, folder: Path, abi: int, seed: int, *, scribbles: bool) -> Played:
    """One run of drawn calls by four threads, to its end, which must be a good one."""
    folder.mkdir(mode=0o700)
    played = Played(checked, folder, abi, "drawn", {"MEGASCALE_PROFILER_BUDGET": "100"})
    played.make_box()
    played.say()
    played.say(f"{seed} 4 {CALLS // 4} {int(scribbles)}")
    assert played.finish()["calls"] == [CALLS // 4 * 4], f"abi {abi}, seed {seed}"
    return played


@pytest.mark.parametrize("abi", range(1, 8))
def test_no_order_of_calls_breaks_a_rank(checked: Binaries, tmp_path: Path, abi: int, drawn_seed: int) -> None:
    """Handles that were never given, ends before begins, closed communicators, odd words, in four threads at once."""
    for seed in (*CORPUS, drawn_seed):
        played = play_drawn(checked, tmp_path / str(seed), abi, seed, scribbles=False)

        state = played.box.profiler()
        assert state is not None, f"seed {seed}"
        assert len(played.box.nccl()) > 0, f"seed {seed}"
        assert len(played.box.communicators()) > 0, f"seed {seed}"


@pytest.mark.parametrize("abi", [3, 7])
def test_no_bytes_in_the_box_break_a_rank(checked: Binaries, tmp_path: Path, abi: int, drawn_seed: int) -> None:
    """Another process writes into the rings and the plugin's own page; a reader reads what is there."""
    for seed in (*CORPUS, drawn_seed):
        played = play_drawn(checked, tmp_path / str(seed), abi, seed, scribbles=True)

        played.box.nccl()
        played.box.communicators()
        played.box.profiler()
