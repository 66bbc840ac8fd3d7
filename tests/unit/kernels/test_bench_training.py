# SPDX-License-Identifier: Apache-2.0
"""`bench train`: its command line, its arithmetic and its table, as far as no ranks are needed."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from megascale_kernels.bench.__main__ import main
from megascale_kernels.bench.report import Facts, Report
from megascale_kernels.bench.request import UserError
from megascale_kernels.bench.training import table
from megascale_kernels.bench.training.arguments import ROWS, SHORT, Request, Size, parser, read
from megascale_kernels.bench.training.model import draw_task
from megascale_kernels.bench.training.steps import KINDS, MOST_STEPS, distance, loss, sentence, steps_for
from megascale_kernels.bench.training.table import Line, best, over_torch, summary
from megascale_kernels.bench.training.variants import VARIANTS, ways
from megascale_kernels.dispatch.dispatch import Contested
from megascale_kernels.dispatch.serial import Call
from megascale_kernels.planning.config import Config

NAN = math.nan


def asked(arguments: str, seen: int = 2, environment: dict[str, str] | None = None) -> Request:
    """What a command line asks for on a machine with so many GPUs."""
    return read(parser().parse_args(arguments.split()), environment or {}, seen)


def test_everything_is_measured_unless_less_is_asked_for() -> None:
    """Three models at five M in the order that tells most first; all variants; as many ranks as GPUs."""
    request = asked("")

    assert len(request.sizes) == len(SHORT) * len(ROWS)
    assert request.sizes[:3] == (
        Size("Llama-3.1-8B", 4096, 14336, 4096),
        Size("Llama-3.1-70B", 8192, 28672, 4096),
        Size("Qwen3-32B", 5120, 25600, 4096),
    )
    assert (request.variants, request.ranks, request.device) == (VARIANTS, 2, "cuda")


def test_less_can_be_asked_for() -> None:
    """Models by short or full name, sizes of one's own, some variants; torchrun's ranks."""
    request = asked("--models 70b,Llama-2-13B --m 1024 --variants ours-eager,torch-async")
    assert [(size.name, size.m) for size in request.sizes] == [("Llama-3.1-70B", 1024), ("Llama-2-13B", 1024)]
    assert request.variants == ("ours-eager", "torch-async")
    assert asked("--d 64 --f 128 --m 32", 4).sizes == (Size("given", 64, 128, 32),)
    assert asked("", 8, {"RANK": "3", "WORLD_SIZE": "4"}).ranks == 4
    assert asked("--device cpu", 0).ranks == 2


@pytest.mark.parametrize(
    ("arguments", "seen", "words"),
    [
        ("--gpus 2", 0, "it needs 2 CUDA GPUs, and torch sees 0 on this machine; --device cpu tries it out over gloo"),
        ("", 0, "it needs CUDA GPUs, and torch sees 0"),
        ("--gpus 1", 2, "--gpus 1: layers are split among 2 to 8 ranks"),
        ("--gpus 9 --device cpu", 0, "--gpus 9: layers are split among 2 to 8 ranks"),
        ("--models 9B", 2, "--models 9B: choose from 8B, 70B, 32B, Llama-3.2-1B"),
        ("--d 64", 2, "--d and --f are the two sizes of one MLP: give both"),
        ("--d 64 --f 128 --models 8B", 2, "--models and --d say two things"),
        ("--d 64 --f 129", 2, "f a multiple of 2 ranks"),
        ("--d 0 --f 128", 2, "give positive sizes"),
        ("--m 12,x", 2, "--m 12,x: give whole numbers"),
        ("--m 1023", 2, "--m 1023: give positive multiples of the 2 ranks"),
        ("--variants ours-fast", 2, "--variants ours-fast: choose from torch-eager"),
        ("--rounds 0", 2, "must be positive numbers"),
        ("--budget-s nan", 2, "must be positive numbers"),
        ("--out a.csv", 2, "the CSV beside the table has that name"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: str, seen: int, words: str) -> None:
    """One sentence that names the option and what would do."""
    with pytest.raises(UserError, match=words):
        asked(arguments, seen)


def test_torchrun_s_number_of_ranks_is_not_contradicted() -> None:
    """As in the other benchmarks."""
    with pytest.raises(UserError, match="torchrun started 4 ranks: leave --gpus out"):
        asked("--gpus 2", 4, {"RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, exit code 2, no process started."""
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--gpus", "2"]) == 2
    assert capsys.readouterr().err.startswith("python -m megascale_kernels.bench train: it needs 2 CUDA GPUs")
    assert main(["train", "--device", "cpu", "--out", "/proc/nowhere/table.txt"]) == 2
    assert "--out: [Errno 2] No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(("activation", "widths"), [("swiglu", 2), ("gelu", 1)])
def test_a_task_is_this_rank_s_share(activation: str, widths: int) -> None:
    """Rows and features over ranks; a gated activation has two widths in one weight; ranks draw apart."""
    tasks = [
        draw_task(
            16, 24, 8, blocks=3, activation=activation, rank=rank, world_size=2, device=torch.device("cpu"),
            dtype=torch.float32,
        )
        for rank in (0, 0, 1)
    ]  # fmt: skip

    weights = tasks[0].weights[2]
    assert (len(tasks[0].weights), tasks[0].x.shape, tasks[0].gradient.shape) == (3, (4, 16), (4, 16))
    assert (weights.norm.shape, weights.up.shape, weights.down.shape) == ((16,), (widths * 12, 16), (16, 12))
    assert torch.equal(tasks[0].x, tasks[1].x)
    assert not torch.equal(tasks[0].x, tasks[2].x)


def test_steps_in_a_turn_fill_it() -> None:
    """Short steps many, up to a limit, long ones one; a variant that failed has one too."""
    assert [steps_for(seconds) for seconds in (0.001, 0.02, 0.05, 3.0)] == [MOST_STEPS, 8, 3, 1]
    assert [steps_for(seconds) for seconds in (math.inf, NAN, 0.0)] == [1, 1, 1]


def test_the_distance_is_the_largest_of_any_kind() -> None:
    """One gradient that is off counts, and a number that is none is infinitely far."""
    reference = {kind: [torch.ones(8), torch.ones(8)] for kind in KINDS}
    near = {**reference, "up": [torch.ones(8), torch.ones(8) * 1.1]}
    broken = {**reference, "norm": [torch.ones(8), torch.full((8,), NAN)]}

    assert distance(reference, reference) == 0
    assert distance(near, reference) == pytest.approx(0.1 / math.sqrt(2))
    assert distance(broken, reference) == math.inf
    assert loss({"out": [torch.full((4,), 2.0)]}, torch.ones(4)) == 8.0


def test_an_error_becomes_a_sentence() -> None:
    """One line; what we refuse ourselves stands for itself."""
    assert sentence(RuntimeError("\n  out of memory \nand more")) == "RuntimeError: out of memory"
    assert sentence(UserError("it needs a CUDA GPU")) == "it needs a CUDA GPU"
    assert len(sentence(RuntimeError("x" * 9999))) < 300


SMALL, LARGE = Size("Llama-3.1-8B", 4096, 14336, 1024), Size("Llama-3.1-8B", 4096, 14336, 8192)


def lines_of(size: Size, **milliseconds: float) -> list[Line]:
    """Lines by variant, `ours_eager=2.0`."""
    return [Line(size, name.replace("_", "-"), ms / 1e3, 1e-3, "") for name, ms in milliseconds.items()]


AT_LARGE = lines_of(LARGE, torch_eager=4.0, torch_async=3.6, torch_compiled=3.8, ours_eager=3.0, ours_compiled=2.9)
AT_SMALL = lines_of(SMALL, torch_eager=2.0, torch_async=NAN, torch_graph=1.0, ours_eager=1.5, ours_graph=1.25)


def test_ours_is_held_against_the_best_that_torch_can_do() -> None:
    """A variant without a time is no best."""
    fastest = best(AT_LARGE, "torch"), best(AT_LARGE, "ours")
    assert [line.variant for line in fastest if line] == ["torch-async", "ours-compiled"]
    assert best(lines_of(LARGE, torch_eager=NAN), "torch") is None
    assert over_torch(AT_LARGE)[3] == pytest.approx(1.2)
    assert all(map(math.isnan, over_torch(lines_of(LARGE, ours_eager=1.0))))


def test_the_summary_gives_means_for_large_rows_and_for_all() -> None:
    """3.6 / 2.9 at M 8192 and 1.0 / 1.25 at M 1024; like against like where both have a time."""
    text = "\n".join(summary([AT_LARGE, AT_SMALL]))

    assert f"M >= 4096: the best of ours over the best of torch's: {3.6 / 2.9:.3f} (geometric mean of 1)" in text
    assert f"all M: the best of ours over the best of torch's: {math.sqrt(3.6 / 2.9 * 0.8):.3f}" in text
    assert "worst 0.800 at Llama-3.1-8B M 1024 (ours-graph, torch-graph)" in text
    assert f"all M: ours-eager over torch-eager: {math.sqrt(4 / 3 * 4 / 3):.3f} (of 2)" in text
    assert f"M >= 4096: ours-compiled over torch-async: {3.6 / 2.9:.3f} (of 1)" in text
    assert summary([]) == []
    assert summary([lines_of(LARGE, torch_eager=1.0)]) == []


def test_a_step_without_communication_is_a_bound_and_no_contender() -> None:
    """It is nobody's best, and both are held against it."""
    lines = [*AT_LARGE, *lines_of(LARGE, alone_compiled=2.5)]
    text = "\n".join(summary([lines, AT_SMALL]))

    assert f"the best of ours over the best of torch's: {3.6 / 2.9:.3f}" in text
    bound = f"{3.6 / 2.5:.3f} over the best of torch's (of 1), {2.9 / 2.5:.3f} over the best of ours (of 1)"
    assert f"M >= 4096: the same without communication: {bound}" in text
    assert "without communication" not in "\n".join(summary([AT_LARGE]))


def test_the_table_tells_times_and_what_did_not_work(tmp_path: Path) -> None:
    """Milliseconds, tokens a second and the ratio; a sentence in the place of figures."""
    report = Report(tmp_path / "train.txt", is_speaker=True)
    facts = Facts("python -m megascale_kernels.bench train", "2 x NVIDIA H100", "torch 2.11.0", "now")
    report.begin(facts, table.legend(asked("")), table.heading(), table.CSV_HEADING)
    lines = [*AT_LARGE, Line(LARGE, "ours-graph", NAN, NAN, "RuntimeError: out of luck")]

    for line, ratio in zip(lines, over_torch(lines), strict=True):
        report.both(table.text_line(line, ratio), table.csv_line(line, ratio))

    text = (tmp_path / "train.txt").read_text(encoding="utf-8").splitlines()
    assert "all gradients, no optimizer" in text[3]
    assert text[-2].split() == [
        "Llama-3.1-8B", "4096", "14336", "8192", "ours-compiled", "2.900", "2824828", "1.241", "1.0e-03",
    ]  # fmt: skip
    assert text[-1].endswith("ours-graph        RuntimeError: out of luck")
    cells = list(csv.DictReader((tmp_path / "train.csv").read_text(encoding="utf-8").splitlines()))
    assert (cells[1]["variant"], cells[1]["step_ms"], cells[1]["over_best_torch"]) == (
        "torch-async",
        "3.60000",
        "1.0000",
    )
    assert cells[-1]["note"] == "RuntimeError: out of luck"


def test_the_ways_that_operators_found_stand_beside_their_times() -> None:
    """One a shape; a shape that needed no contest has none."""
    found = Config(kernel="cublas", pieces=2)
    contests = {
        Contested(Call("gemm_rs", 8192, 4096, 7168), is_nk=True, rows=0): SimpleNamespace(best=None),
        Contested(Call("ag_gemm", 8192, 14336, 4096), is_nk=True, rows=0): SimpleNamespace(best=found),
        Contested(Call("ag_gemm", 64, 64, 64), is_nk=True, rows=0): None,
    }
    workspace: Any = SimpleNamespace(planned=SimpleNamespace(contests=contests))

    assert ways(workspace) == "ag_gemm 8192x14336x4096: cublas pieces=2; gemm_rs 8192x4096x7168: serial"
