# SPDX-License-Identifier: Apache-2.0
"""The benchmark's command line, its processes and its soak, as far as no GPU is needed."""

import os
import random
import subprocess
import sys
import time

import pytest
import torch
from megascale_kernels.bench import ranks, soak
from megascale_kernels.bench.__main__ import main
from megascale_kernels.bench.request import UserError, beside_of, config_of, parser, ranks_of, shapes_of
from megascale_kernels.planning.config import Config

pytestmark = pytest.mark.usefixtures("no_ranks")


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's torchrun is around us."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 2, no process started."""
    assert main(["ag_gemm", "--gpus", "4"]) == 2
    assert capsys.readouterr().err == (
        "python -m megascale_kernels.bench: it needs 4 CUDA GPUs, and torch sees 0 on this machine\n"
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "seen", "words"),
    [
        ("ag_gemm --gpus 4", {}, 2, "needs 4 CUDA GPUs, and torch sees 2"),
        ("ag_gemm", {}, 0, "needs 1 CUDA GPU, and torch sees 0"),
        ("ag_gemm --gpus 1", {}, 4, "nothing to overlap on one GPU"),
        ("ag_gemm --gpus 2", {"RANK": "0", "WORLD_SIZE": "4"}, 4, "torchrun started 4 ranks"),
        ("ag_gemm --gpus 2 --rounds 0", {}, 4, "must be positive"),
        ("ag_gemm --gpus 2 --soak 0", {}, 4, "must be positive"),
        ("ag_gemm --gpus 2 --soak 5", {}, 0, "needs 1 CUDA GPU, and torch sees 0"),
        ("ag_gemm --gpus -1 --compute-quality", {}, 4, "--gpus -1: give a positive number"),
        ("ag_gemm --gpus 0", {}, 4, "--gpus 0: give a positive number"),
        ("ag_gemm --gpus 2 --budget-s nan", {}, 4, "must be positive numbers"),
        ("ag_gemm --gpus 2 --tune-s inf", {}, 4, "must be positive numbers"),
        ("ag_gemm --gpus 2 --out found.csv", {}, 4, "found.csv: the CSV beside the table has that name"),
        ("ag_gemm --gpus 9 --soak 5", {}, 1, "--gpus 9: the kernels serve one host of at most 8 ranks"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: str, environment: dict[str, str], seen: int, words: str) -> None:
    """Before a process is started."""
    with pytest.raises(UserError, match=words):
        ranks_of(parser().parse_args(arguments.split()), environment, seen)


def test_the_number_of_ranks_comes_from_whoever_starts_them() -> None:
    """All GPUs, or as many as asked for, or torchrun's."""
    assert ranks_of(parser().parse_args(["ag_gemm"]), {}, 4) == 4
    assert ranks_of(parser().parse_args(["ag_gemm", "--gpus", "2"]), {}, 4) == 2
    assert ranks_of(parser().parse_args(["ag_gemm"]), {"RANK": "1", "WORLD_SIZE": "3"}, 4) == 3


def test_a_table_that_cannot_be_written_is_said_before_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after minutes on the GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("megascale_kernels.bench.__main__.start", lambda *_: pytest.fail("ranks were started"))

    assert main(["ag_gemm", "--out", "/proc/nowhere/table.txt"]) == 2
    assert "--out: [Errno 2] No such file or directory: '/proc/nowhere'" in capsys.readouterr().err


def test_only_a_soak_shares_a_gpu() -> None:
    """It times nothing."""
    assert ranks_of(parser().parse_args(["ag_gemm", "--gpus", "4", "--soak", "10"]), {}, 1) == 4
    with pytest.raises(UserError, match="needs 4 CUDA GPUs, and torch sees 1"):
        ranks_of(parser().parse_args(["ag_gemm", "--gpus", "4"]), {}, 1)


def test_a_soak_draws_its_own_shapes() -> None:
    """Three ranks may soak, though no model's rows divide among them."""
    assert shapes_of(parser().parse_args(["ag_gemm", "--gpus", "3", "--soak", "10"]), 3) == []
    with pytest.raises(UserError, match="a positive multiple of the 3 GPUs"):
        shapes_of(parser().parse_args(["ag_gemm", "--gpus", "3"]), 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ag_gemm --m 1,x", "--m 1,x"),
        ("ag_gemm --scale huge", "--scale huge: choose from global, tp8"),
        ("ag_gemm --shapes 1x2", "--shapes 1x2"),
    ],
)
def test_shapes_that_make_no_sense_are_named(arguments: str, words: str) -> None:
    """The message repeats the word and says what would do."""
    with pytest.raises(UserError, match=words):
        shapes_of(parser().parse_args(arguments.split()), 4)


def test_a_configuration_can_be_given() -> None:
    """Named fields, the rest as usual; what is wrong is named."""
    assert config_of(None) is None
    assert config_of("block_n=128,stages=3,push_tma=false") == Config(block_n=128, stages=3, push_tma=False)
    assert config_of("carrier=sm,comm_ctas=8") == Config(carrier="sm", comm_ctas=8)
    assert config_of("kernel=hopper,tail_split=none") == Config(kernel="hopper")
    for text, words in (
        ("blok=1", "choose from block_m"),
        ("stages=x", "stages is 'x'"),
        ("stages=²", "stages is '²'"),
        ("carrier=owl", "carrier"),
    ):
        with pytest.raises(UserError, match=words):
            config_of(text)


def test_ways_to_stand_beside_the_default_are_read_by_their_words() -> None:
    """Each by itself; a wrong one is named with its option, and so is a mode that compares other things."""

    def asked(words: str) -> dict[str, dict[str, object]]:
        return beside_of(parser().parse_args(["ag_gemm", *words.split()]))

    assert asked("") == {}
    assert asked("--beside planned=false,splits=2 --beside block_n=128") == {
        "planned=false,splits=2": {"planned": False, "splits": 2}, "block_n=128": {"block_n": 128}
    }  # fmt: skip
    for words, said in (
        ("--beside colour=1", "--beside colour=1: choose from block_m"),
        ("--beside splits=0", "--beside splits=0: a size below one"),
        ("--beside splits=2 --tune", "leave --tune out"),
        ("--beside splits=2 --soak 3", "leave --soak out"),
    ):
        with pytest.raises(UserError, match=said):
            asked(words)
    with pytest.raises(UserError, match="leave --beside out"):
        shapes_of(parser().parse_args(["ag_gemm", "--random", "3", "--beside", "splits=2"]), 2)


def test_every_rank_knows_its_place() -> None:
    """Ranks differ in their number alone; what the user set stays."""
    first, second = ranks.environments(2, 1234, {"NCCL_NVLS_ENABLE": "1", "HOME": "/h"})

    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "0", "1", "2")
    assert first["MASTER_PORT"] == "1234"
    assert first["NCCL_NVLS_ENABLE"] == "1"
    assert first["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def started(*scripts: str) -> list[subprocess.Popen[bytes]]:
    """Small Python processes."""
    return [subprocess.Popen([sys.executable, "-S", "-c", script]) for script in scripts]


@pytest.mark.processes
def test_the_result_is_rank_0_s() -> None:
    """All end by themselves."""
    assert ranks.wait(started("pass", "pass"), 60) == 0
    assert ranks.wait(started("raise SystemExit(3)", "pass"), 60) == 3


@pytest.mark.processes
def test_ranks_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After a failure the others get a little time, after the deadline none; nobody is left behind."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    hanging = "import time; time.sleep(600)"

    begun = time.monotonic()
    after_failure = started("raise SystemExit(1)", hanging)
    assert ranks.wait(after_failure, 60) == 1
    after_deadline = started(hanging, hanging)
    assert ranks.wait(after_deadline, 0.2) == 1

    assert time.monotonic() - begun < 30
    assert all(process.poll() is not None for process in after_failure + after_deadline)
    assert "ranks [0, 1] did not end in time" in capsys.readouterr().err


def test_equal_seeds_draw_equal_cases() -> None:
    """Ranks must agree on rows, sizes and configuration; all kinds of cases occur."""
    configs = soak.configs_for("ag_gemm", None)
    mine, theirs = random.Random(7), random.Random(7)  # noqa: S311 - shapes are not secrets

    cases = [soak.draw(mine, 4, configs) for _ in range(2000)]

    assert cases == [soak.draw(theirs, 4, configs) for _ in range(2000)]
    assert {case.config for case in cases} == set(configs)
    assert {case.late_rank for case in cases} == {-1, 0, 1, 2, 3}
    assert {case.is_poisoned for case in cases} == {True, False}
    assert {1, 128, 512} <= {case.shard_m for case in cases}
    assert {case.config for case in cases if case.shard_m == 1} == {configs[0]}


def test_a_scatter_is_not_soaked_with_an_all_gather_s_carrier() -> None:
    """Only the all-gather lets CTAs copy; a given configuration is taken as it is."""
    assert all(config.carrier == "copy_engine" for config in soak.configs_for("gemm_rs", None))
    assert soak.configs_for("gemm_rs", Config(stages=3)) == (Config(stages=3),)


def test_a_wrong_element_is_counted() -> None:
    """Rounding is not; another number, a sign, NaN and infinity are."""
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    out = exact.bfloat16()
    assert int(soak._wrong(out, exact, 1.0)) == 0

    out[3, 4] = float("nan")
    out[5, 6] = float("inf")
    out[7, 8] += 0.5

    assert int(soak._wrong(out, exact, 1.0)) == 3


@pytest.mark.parametrize(
    ("soaked", "words"),
    [
        (soak.Soaked(10, 1000, 0, 1, 0, 5, "", 2.0), "soak ag_gemm on 4 GPUs: ok: 10 iterations, 5 with a straggler"),
        (soak.Soaked(4, 1000, 0, 1, 0, 5, "", 2.0), "ok: 4 iterations of 10 (budget)"),
        (soak.Soaked(10, 1000, 7, 1, 0, 5, "", 2.0), "BAD: 10 iterations"),
        (soak.Soaked(10, 1000, 0, 1, 2, 5, "", 2.0), "BAD"),
        (soak.Soaked(3, 1000, -1, 1, -1, 5, "rank 2 stopped", 2.0), "; rank 2 stopped"),
    ],
)
def test_a_soak_says_its_result_in_one_line(soaked: soak.Soaked, words: str) -> None:
    """Good or bad first, then the counts."""
    line = soaked.line("ag_gemm", 4, 4, 10)

    assert words in line
    assert "\n" not in line


def test_a_soak_on_a_shared_gpu_says_so() -> None:
    """What four GPUs did and what one did for four ranks is not the same."""
    soaked = soak.Soaked(10, 1000, 0, 1, 0, 5, "", 2.0)

    assert soaked.line("gemm_rs", 4, 1, 10).startswith("soak gemm_rs on 4 ranks that share 1 GPU: ok:")
    assert soaked.line("gemm_rs", 4, 2, 10).startswith("soak gemm_rs on 4 ranks that share 2 GPUs: ok:")


def test_ranks_that_share_a_gpu_are_prepared_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes each for a host of its own; with a GPU each nothing is changed."""
    names = ("NCCL_HOSTID", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)

    assert ranks.place(3, 4, 4) == 3
    assert not any(name in os.environ for name in names)
    assert [ranks.place(rank, 4, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert os.environ["NCCL_HOSTID"] == "rank-3"
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"


@pytest.mark.processes
def test_the_command_runs_as_a_module() -> None:
    """`python -m megascale_kernels.bench --help` and `... .autotune --help` explain themselves."""
    for module in ("bench", "autotune"):
        done = subprocess.run(
            [sys.executable, "-m", f"megascale_kernels.{module}", "--help"],
            capture_output=True, text=True, timeout=180, check=True, env=dict(os.environ, PYTHONPATH="kernels"),
        )  # fmt: skip

        assert f"python -m megascale_kernels.{module}" in done.stdout
