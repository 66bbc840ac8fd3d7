# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the kernels on the CPU, with real ranks: what its tables rest on."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.kernel_group import run_ranks
from tests.needed import needs

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

PROMISES = [
    "drawn_trials_are_right",
    "wrong_and_failed_operators_are_told_on_every_rank",
    "the_host_time_is_the_slower_rank_s",
    "both_steps_equal_the_whole_model",
    "a_variant_that_fails_on_one_rank_has_no_time_on_any",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What came of all promises on two ranks."""
    return run_ranks(
        "tests.fixtures.kernel_bench_promises", PROMISES, 2, tmp_path_factory.mktemp("bench"), backend="gloo",
        deadline_s=300,
    )  # fmt: skip


@pytest.mark.parametrize("promise", PROMISES)
def test_both_ranks_keep_their_promise(promise: str, outcomes: dict[str, dict[int, str]]) -> None:
    """What the promise's own docstring says is true on both ranks."""
    for rank, outcome in outcomes[promise].items():
        assert outcome == "kept", f"rank {rank}: {outcome}"


@pytest.mark.matrix  # that both steps are the whole model's, and how a time is taken, is in the promises above
def test_training_steps_are_measured_on_the_cpu(tmp_path: Path) -> None:
    """Torch's layers and ours, eager, have the same output and gradients; what needs a GPU says so."""
    out = tmp_path / "train.txt"
    options = {"device": "cpu", "gpus": 2, "d": 64, "f": 128, "m": 32, "blocks": 2, "rounds": 1, "out": out}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    done = subprocess.run(
        [sys.executable, "-m", "megascale_kernels.bench", "train", *arguments],
        capture_output=True, text=True, timeout=180, check=False, env={**environment, "PYTHONPATH": "kernels"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    lines = out.with_suffix(".csv").read_text(encoding="utf-8").splitlines()
    rows = {row["variant"]: row for row in csv.DictReader(lines)}
    eager = {"torch-eager", "ours-eager"}
    assert {name for name, row in rows.items() if float(row["step_ms"]) > 0} == eager
    assert float(rows["ours-eager"]["apart"]) < 1e-5
    assert {row["note"] for name, row in rows.items() if name not in eager} == {"it needs a CUDA GPU"}
    assert "ours-eager over torch-eager" in out.read_text(encoding="utf-8")


@pytest.mark.matrix  # test_moe_family: the schedules are right; test_moe_gpt_bench: a benchmark of layers as a program
def test_the_family_of_moe_schedules_is_measured_on_the_cpu(tmp_path: Path) -> None:
    """Every family has its rows, all that give the same do, and the CSV holds what the table holds."""
    out = tmp_path / "family.txt"
    arguments = ["--gpus", "2", "--device", "cpu", "--sizes", "8,2,64,48", "--tokens", "64", "--rounds", "1"]

    done = subprocess.run(
        [sys.executable, "-m", "megascale_kernels.bench", "moe-family", *arguments, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    assert {row["family"] for row in rows} == {
        "EPS-MoE", "ScMoE", "LocMoE", "Parm, mp 2 esp 1", "Parm, mp 2 esp 2"
    }  # fmt: skip
    assert all(float(row["forward_s"]) > 0 and float(row["both_s"]) > 0 and not row["note"] for row in rows)
    assert all(float(row["apart"]) < 1e-4 for row in rows if "at home" not in row["way"])
    assert "over first" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "2"], "torch sees 0 CUDA devices"),
        (["--device", "cpu", "--sizes", "8,9,64,48"], "EXPERTS,TOP_K,H,I"),
        (["--device", "cpu", "--sizes", "8,2,64,48", "--tokens", "63"], "multiples of the 2 ranks"),
        (["--device", "cpu", "--models", "Mixtral-8x7B", "--sizes", "8,2,64,48"], "give one of them"),
        (["--device", "cpu", "--tokens", "few"], "comma-separated numbers"),
    ],
)
def test_a_wrong_family_request_gets_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, with exit code 2, before a rank is started."""
    torch = pytest.importorskip("torch")
    from megascale_kernels.bench.moe_family.family_command import main

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert main(arguments) == 2
    assert said in capsys.readouterr().err
