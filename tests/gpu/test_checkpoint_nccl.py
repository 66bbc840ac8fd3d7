# SPDX-License-Identifier: Apache-2.0
"""A restore over NCCL: blocks travel from GPU to GPU, into tensors that are there."""

from pathlib import Path

import pytest

from tests.processes.test_checkpoint_ranks import play

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL wants one for each rank"),
]

SCRIPT = Path(__file__).parents[1] / "fixtures" / "checkpoint_loading_rank.py"


def test_two_gpus_share_the_reading_and_get_every_bit(tmp_path: Path) -> None:
    """Replicated by broadcast, sharded by rows and columns, scalars on the host: each file is read by one rank."""
    told = [(name, tmp_path / "checkpoints") for name in ("save", "restore", "restore replicated")]

    (_, whole, replicated), _ = play(tmp_path, *told, script=SCRIPT, environment={"TEST_DEVICE": "cuda"})

    for reports in (whole, replicated):
        assert [(report["step"], report["same"]) for report in reports] == [(1, True)] * 2
        assert not set(reports[0]["read"]) & set(reports[1]["read"])
    assert all(report["received"] >= 3 * 1_200_000 for report in replicated)
