# SPDX-License-Identifier: Apache-2.0
"""The main road on GPUs: NCCL ranks that spin in a kernel are stopped and replaced, warm workers included."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import Launch, until

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL wants one for each rank"),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Real runs, stopped and cleaned whatever the test does."""
    launched = Launch(tmp_path)
    yield launched
    launched.close()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("number", "named"), [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "frozen")])
def test_a_broken_nccl_rank_is_named_and_replaced(
    launch: Launch, number: signal.Signals, named: str, *, warm: bool
) -> None:
    """The survivor waits in an NCCL kernel for a peer that never comes; both are replaced and training goes on."""
    options = ("--warm",) if warm else ()
    run = launch.spawn(
        *("run", "--job=toy", "--nproc-per-node=2", *options, "--", str(SCRIPT), "--steps=100000"),
        *("--step-sleep=0.02", "--checkpoint-every=20", "--evaluate-every=100000"),
    )
    status = launch.until_step(400 if warm else 60, deadline_s=120)
    assert status.world_size == 2

    os.kill(launch.pid(1), number)
    incident = until(lambda: next((i for i in launch.incidents() if i.marks.stepped), None), "recovery", 60)
    run.send_signal(signal.SIGINT)

    assert launch.finish(run) == 130
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == (named, (1,))
    print(f"{named} {'warm' if warm else 'cold'}: {incident.marks.stepped - incident.marks.began:.2f} s")
    launch.assert_nothing_left()
