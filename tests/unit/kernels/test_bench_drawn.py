# SPDX-License-Identifier: Apache-2.0
"""Shapes drawn at random: which are drawn, and what is said of them."""

import csv
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

from megascale_kernels.bench import drawn_rows, drawn_sweep
from megascale_kernels.bench.drawn import BLOCK, LEAST_ROWS, MOST_COUNT, MOST_ROWS, MOVED, Drawn, draw, read_rows
from megascale_kernels.bench.drawn_rows import DrawnRow, Foretold, HostTimes
from megascale_kernels.bench.drawn_summary import summary
from megascale_kernels.bench.published import MODELS
from megascale_kernels.bench.report import Facts, Report
from megascale_kernels.bench.request import UserError, parser, shapes_of
from megascale_kernels.bench.rows import Row
from megascale_kernels.bench.shapes import OPERATORS, Shape
from megascale_kernels.bench.sweep import Plan

NAN = math.nan
UNTIMED = HostTimes()
FACTS = Facts("python -m megascale_kernels.bench ag_gemm --gpus 2 --random 4", "2 x NVIDIA H100", "torch 2.11.0", "now")


def test_the_same_seed_draws_the_same_shapes() -> None:
    """Every rank draws for itself; another seed, operator or number of ranks draws others; more begin with the same."""
    shapes = draw("ag_gemm", 100, 7, 2)

    assert draw("ag_gemm", 100, 7, 2) == shapes
    assert draw("ag_gemm", 30, 7, 2) == shapes[:30]
    for others in (draw("ag_gemm", 100, 8, 2), draw("gemm_rs", 100, 7, 2), draw("ag_gemm", 100, 7, 4)):
        assert len(set(others) & set(shapes)) < 5


@pytest.mark.parametrize("gpus", range(2, 9))
@pytest.mark.parametrize("operator", OPERATORS)
def test_shares_of_rows_and_layouts_are_exact(operator: str, gpus: int) -> None:
    """Half of M no multiple of 128, a quarter no multiple of 8 rows a rank, and half of each layout; all can run."""
    count = 20 * BLOCK

    found = draw(operator, count, 3, gpus)

    rows = [one.shape.m for one in found]
    assert sum(m % 128 != 0 for m in rows) == count / 2
    assert sum(m // gpus % 8 != 0 for m in rows) == count / 4
    assert sum(one.is_nk for one in found) == count / 2
    assert all(m % gpus == 0 and LEAST_ROWS <= m <= MOST_ROWS for m in rows)
    assert sum(m < 1024 for m in rows) > count / 5  # log-uniform: a third
    assert sum(m > 4096 for m in rows) > count / 5


@pytest.mark.parametrize("gpus", [2, 4, 7])
def test_rows_may_be_few(gpus: int) -> None:
    """M between two numbers, of all kinds; the same shares."""
    found = draw("gemm_rs", 5 * BLOCK, 3, gpus, read_rows("256-1023"))

    rows = [one.shape.m for one in found]
    assert all(256 <= m <= 1023 and m % gpus == 0 for m in rows)
    assert sum(m % 128 != 0 for m in rows) == 5 * BLOCK / 2
    assert len(set(rows)) > BLOCK


@pytest.mark.parametrize("text", ["256", "1023-256", "16-1023", "256-99999", "few-many", "-256--1"])
def test_rows_that_are_none_are_refused(text: str) -> None:
    """One sentence says what is meant."""
    with pytest.raises(UserError, match=r"--rows .*: give two numbers between 256 and 16384, as in 256-1023"):
        shapes_of(parser().parse_args(["ag_gemm", "--random", "4", f"--rows={text}"]), 2)
    with pytest.raises(UserError, match=r"no multiple of 128 lies there"):
        shapes_of(parser().parse_args(["ag_gemm", "--random", "4", "--rows", "300-310"]), 2)
    with pytest.raises(UserError, match=r"--rows says between which rows --random draws"):
        shapes_of(parser().parse_args(["ag_gemm", "--rows", "256-1023"]), 2)


@pytest.mark.parametrize("operator", OPERATORS)
def test_sizes_are_those_of_models_or_near(operator: str) -> None:
    """Three quarters are a model's over TP; the others have one size moved by a few percent, one in sixteen oddly."""
    count = 20 * BLOCK
    by_name = {model.name: model for model in MODELS}

    found = draw(operator, count, 5, 2)

    moved = [one for one in found if one.shape.scale.endswith("~")]
    assert len(moved) == count / 4
    assert sum(one.shape.n % 8 != 0 or one.shape.k % 8 != 0 for one in found) == count / BLOCK
    for one in found:
        hidden, inner = (one.shape.k, one.shape.n) if operator == "ag_gemm" else (one.shape.n, one.shape.k)
        model, share = by_name[one.shape.name], int(one.shape.scale.strip("TP~"))
        sizes = ((hidden, model.hidden), (inner, model.inner // share))
        assert sum(drawn != wanted for drawn, wanted in sizes) == one.shape.scale.endswith("~")
        assert all(abs(drawn - wanted) <= MOVED * wanted + 8 for drawn, wanted in sizes)
    assert {one.shape.scale.strip("~") for one in found} == {"TP2", "TP4", "TP8"}


def test_the_models_are_told_apart_and_their_sizes_divide() -> None:
    """At least twenty, no size twice, and each share among eight is one that the kernels can read."""
    assert (
        len({(model.hidden, model.inner) for model in MODELS}) == len({model.name for model in MODELS}) == len(MODELS)
    )
    assert len(MODELS) >= 20
    assert all(model.hidden % 8 == 0 and model.inner % 64 == 0 and "/" in model.source for model in MODELS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--random 0", f"--random 0: give a number of shapes between 1 and {MOST_COUNT}"),
        ("--random 99999999", "--random 99999999: give a number of shapes"),
        ("--random 5 --seed -1", "--seed -1: give a whole number, zero or more"),
        ("--seed 5", "--seed says which shapes --random draws: give --random COUNT too"),
        ("--random 5 --shapes 70B", "--random draws the shapes .* leave --shapes out"),
        ("--random 5 --m 4096", "leave --m out"),
        ("--random 5 --scale tp8", "leave --scale out"),
        ("--random 5 --tune", "leave --tune out"),
        ("--random 5 --config stages=3", "leave --config out"),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments: str, words: str) -> None:
    """One sentence that names the option."""
    with pytest.raises(UserError, match=words):
        shapes_of(parser().parse_args(["ag_gemm", *arguments.split()]), 2)


def test_the_command_line_draws() -> None:
    """The shapes of the default seed, and of a given one."""
    for arguments, seed in (("--random 9", 1), ("--random 9 --seed 4", 4)):
        asked = parser().parse_args(["gemm_rs", *arguments.split()])
        assert shapes_of(asked, 4) == [one.shape for one in draw("gemm_rs", 9, seed, 4)]


def row(name: str, m: int, serial_ms: float, ours_ms: float, *, choice: str = "128x256x64/4 g16 hopper",
        torch_ms: float = NAN, comm_ms: float = 0.5, kernel_ms: float = NAN, note: str = "",
        host: HostTimes = UNTIMED) -> DrawnRow:  # fmt: skip
    """A row whose product alone takes 1 ms."""
    shape = Shape(name, "TP4", m, 256, 512)
    times = [one / 1e3 for one in (1.0, 1.0, comm_ms, serial_ms, torch_ms, ours_ms)]
    figures = Row(shape, *times, choice, 2e-3, 2e-3, note)
    kernel_config = "" if math.isnan(kernel_ms) else "128x128x64/4 g16 hopper"
    return DrawnRow(Drawn(shape, is_nk=m % 2 == 0), figures, kernel_ms / 1e3, kernel_config, host)


GOOD = row("good", 8192, 1.5, 1.1, torch_ms=1.32, host=HostTimes(50e-6, 110e-6, 60e-6))
SLOW = row("slow", 2048, 1.5, 1.6, torch_ms=1.52, host=HostTimes(70e-6, 130e-6, 90e-6))
MISSED = row("missed", 300, 1.5, 1.5, choice="serial", kernel_ms=1.25)
CLOSE = row("close", 301, 1.2, 1.2, choice="serial", kernel_ms=1.19, comm_ms=0.1)
UNREADABLE = row("unreadable", 999, 1.4, 1.4, choice="serial")
BROKEN = row("broken", 999, NAN, NAN, note="wrong: 1.0e+00 away from the serial path")
ALL = [GOOD, SLOW, MISSED, CLOSE, UNREADABLE, BROKEN]


def test_the_summary_says_how_good_and_where_not() -> None:
    """Shares below serial, means, host times; each figure worked out by hand."""
    text = "\n".join(summary(ALL))

    mean = (1.5 / 1.1 * 1.5 / 1.6) ** (1 / 5)
    assert f"over serial: {mean:.3f} (geometric mean of 5); below 0.98: 1 of 5 (20.0%), below 0.95: 1 of 5" in text
    assert "over torch's fused operator: 1.068, ahead on 1 of 2 (50.0%), worst 0.950 at 2048x256x512 NK (slow" in text
    assert "it failed on 3" in text
    assert "median of 2 shapes: serial 60 us (most 70), torch 120 us (most 130), ours 75 us (most 90)" in text
    assert "failed: 1 of 6 shapes" in text


def test_efficiency_is_told_by_rows_and_by_communication() -> None:
    """E of `good` is 0.8, of `slow` -0.2, of serial 0; `close` communicates too little to count."""
    lines = summary(ALL)

    assert any(line.startswith("M 256-1023: 3 shapes, over serial 1.000") for line in lines)
    assert any(line.startswith("M 1024-4095: 1 shapes, over serial 0.938") and "E -0.20 on" in line for line in lines)
    assert any(line.startswith("communication less than 10%: 1 shapes") for line in lines)
    total = next(line for line in lines if line.startswith("communication 10% of serial or more: 4 shapes"))
    assert "E 0.15 on average, 0.00 in the median, 0.30 on average of the 2 where the kernel ran" in total


def test_wrong_choices_are_counted_with_what_they_cost() -> None:
    """A kernel that was not chosen and would have been 1.2 times as fast; one that was, and serial was faster."""
    lines = summary(ALL)

    serial, kernel, better = (
        next(line for line in lines if line.startswith(begin))
        for begin in ("serial was chosen", "the kernel was chosen", "with the faster")
    )
    assert serial.startswith("serial was chosen for 3 of 5 (60.0%), for 1 since no kernel can serve them")
    assert "more than 2% faster on 1, 1.200 times on average: 1.20 at 300x256x512 NK (missed TP4)" in serial
    assert kernel.startswith(
        "the kernel was chosen for 2; serial would have been more than 2% faster on 1, 1.067 times"
    )
    best = (1.5 / 1.1 * 1.5 / 1.25 * 1.2 / 1.19) ** (1 / 5)
    assert better.startswith(f"with the faster of the two on every shape: over serial {best:.3f} instead of")


def test_large_sizes_are_told_apart() -> None:
    """From 1,024 rows on; the smaller ones are latency and have lines of their own."""
    lines = summary(ALL)

    mean = (1.5 / 1.1 * 1.5 / 1.6) ** (1 / 2)
    wanted = f"M 1024 or more: over serial {mean:.3f}; below 0.98: 1 of 2 (50.0%), below 0.95: 1 of 2 (50.0%), ahead of"
    assert any(line.startswith(wanted) for line in lines)
    assert not any(line.startswith("M 1024 or more") for line in summary([MISSED]))


def test_the_cost_model_is_held_against_what_was_measured() -> None:
    """Of the kernel where it ran or would have run, and of the serial path; what was not foretold does not count."""
    told = [
        GOOD._replace(foretold=Foretold(1.1e-3 * 1.03, 1.5e-3 * 0.9)),
        MISSED._replace(foretold=Foretold(1.25e-3 * 0.96, 1.5e-3 * 1.1)),
        UNREADABLE,
    ]
    text = "\n".join(summary(told))

    assert "foretold our kernel to 3.5% (root mean square of 2), between -4% and +3%" in text
    assert "foretold the serial path to 10.0% (root mean square of 2), between -10% and +10%" in text


def test_the_worst_five_are_listed_the_worst_first() -> None:
    """Of more than five, five."""
    lines = summary([*ALL, *(row(f"m{m}", m, 1.5, 1.2) for m in (4096, 4098, 4100))])

    begun = lines.index("worst over serial:") + 1
    listed = lines[begun : begun + 6]
    assert listed[0].startswith("  0.938  2048x256x512 NK (slow TP4): 1.600 ms for 1.500, E -0.20, 128x256")
    assert [line.split()[0] for line in listed[1:5]] == ["1.000", "1.000", "1.000", "1.250"]
    assert not listed[5].startswith("  ")


def test_a_run_without_a_row_has_nothing_to_say() -> None:
    """No mean of nothing; a run in which torch never worked says so."""
    assert summary([]) == []
    assert summary([BROKEN]) == ["failed: 1 of 1 shapes"]
    assert "over torch's fused operator: it ran on no shape" in summary([MISSED])
    assert "the kernel would have been 2% faster nowhere" in "\n".join(summary([CLOSE]))


def test_the_table_and_its_csv_hold_what_was_measured(tmp_path: Path) -> None:
    """Seed in the head; a dash for what was not measured; the CSV has the columns of listed shapes, and more."""
    report = Report(tmp_path / "drawn.txt", is_speaker=True)
    drawn_rows.begin(report, FACTS, 200, 17)
    for one in (GOOD, MISSED, BROKEN):
        report.both(drawn_rows.text_row(one), drawn_rows.csv_row(one))

    lines = (tmp_path / "drawn.txt").read_text(encoding="utf-8").splitlines()
    assert lines[3].startswith("200 shapes at random, seed 17: M 256 to 16384")
    heading, good, missed, broken = lines[-4:]
    assert heading.split()[-4:] == ["us(serial)", "us(torch)", "us(ours)", "config"]
    assert good.split()[10:13] == ["1.320", "1.100", "-"]
    assert good.split()[-6:-3] == ["50", "110", "60"]
    assert missed.split()[12] == "1.250"
    assert missed.split()[-4:] == ["-", "-", "-", "serial"]
    assert broken.endswith("wrong: 1.0e+00 away from the serial path")
    table = list(csv.DictReader((tmp_path / "drawn.csv").read_text(encoding="utf-8").splitlines()))
    assert [one["layout"] for one in table] == ["NK", "NK", "KN"]
    assert (table[0]["host_torch_us"], table[1]["kernel_ms"], table[1]["kernel_config"]) == (
        "110.00", "1.25000", "128x128x64/4 g16 hopper",
    )  # fmt: skip
    assert float(table[0]["efficiency"]) == pytest.approx(0.8)


def test_what_the_budget_left_out_is_said() -> None:
    """How many, and the budget; nothing of the kind after a full run."""
    plan = Plan("ag_gemm", 8, 30.0, 0.0, None)

    assert drawn_sweep.ending(plan, 5, 200, {"rounds": 1.0})[1] == (
        "left out (budget of 30 s): the last 195 of 200 shapes"
    )
    assert drawn_sweep.ending(plan, 200, 200, {"rounds": 1.0}) == ["time: rounds 1 s"]


def test_host_time_is_the_median_of_calls_into_an_empty_queue() -> None:
    """Fifty calls, the queue emptied before every fifth and at the end; one slow call changes nothing."""
    ticks: list[float] = []
    events: list[str] = []

    def clock() -> float:
        ticks.append(1.0)
        pairs = len(ticks) // 2
        return pairs * 3.0 + (500.0 if pairs == 25 else 0.0)

    found = drawn_sweep.host_time(lambda: events.append("call"), lambda: events.append("wait"), clock)

    assert found == 3.0
    assert events == [*(["wait", *["call"] * 5] * 10), "wait"]


def test_host_times_are_taken_where_they_are_cheap() -> None:
    """Calls that keep the GPU busy for long are left out after the first shapes; a torch that failed costs nothing."""
    assert drawn_sweep.is_cheap(row("quick", 256, 0.5, 0.4, torch_ms=0.6)[1])
    assert not drawn_sweep.is_cheap(row("long", 256, 1.5, 1.4, torch_ms=1.6)[1])
    assert drawn_sweep.is_cheap(row("no torch", 256, 1.5, 1.4)[1])
