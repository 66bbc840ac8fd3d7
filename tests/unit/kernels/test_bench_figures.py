# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic, its table and its picture. MEGASCALE_UPDATE_GOLDEN=1 writes the table anew."""

import csv
import math
import os
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from megascale_kernels.bench import beside, rows
from megascale_kernels.bench.beside import Compared
from megascale_kernels.bench.report import Facts, Report
from megascale_kernels.bench.rows import Row, config_text, efficiency, geometric_mean, summary
from megascale_kernels.bench.shapes import MODELS, ROWS, SCALES, Shape, wanted
from megascale_kernels.planning.config import Config

from tests.fixtures.script_module import script_module

GOLDEN = Path(__file__).parents[2] / "golden" / "kernels" / "bench_table.txt"
PLOT = Path(__file__).parents[3] / "kernels" / "benchmarks" / "plot.py"
NAN = math.nan

FAST = Row(
    Shape("LLaMA-70B", "global", 8192, 7168, 8192), 1.250e-3, 1.270e-3, 0.364e-3, 1.605e-3, 1.306e-3, 1.302e-3,
    config_text(Config()), 2.1e-3, 2.1e-3,
)  # fmt: skip
SERIAL = Row(
    Shape("LLaMA-7B", "tp8", 512, 1376, 4096), 0.021e-3, 0.021e-3, 0.024e-3, 0.050e-3, 0.110e-3, 0.051e-3, "serial",
    1.9e-3, 1.9e-3,
)  # fmt: skip
BROKEN = Row(
    Shape("given", "-", 64, 128, 256), NAN, NAN, NAN, NAN, NAN, NAN, "128x256x64/4 g8", math.inf, math.inf,
    "failed: TileTimeout: rank 1 ...",
)  # fmt: skip
FACTS = Facts("python -m megascale_kernels.bench ag_gemm --gpus 4", "4 x NVIDIA H200", "torch 2.11.0", "2026-01-01 UTC")


def test_what_stands_beside_the_default_is_told_of_its_time() -> None:
    """A way that is the default, or failed, is a dash and counts in no mean; gains and losses name their shapes."""
    names = ["block_n=128", "tail_split=1"]
    one = Compared(FAST.shape, Config(), 2e-3, 1e-3, {"block_n=128": 0.9e-3, "tail_split=1": NAN})
    other = Compared(SERIAL.shape, Config(), 2e-3, 1e-3, {"block_n=128": 1.6e-3, "tail_split=1": 1e-3}, "a note")

    assert beside.text_row(one).split() == [
        *("LLaMA-70B", "global", "8192", "7168", "8192"), *("2.0000", "1.0000", "0.9000", "0.900", "-", "-"),
        *config_text(Config()).split(),
    ]  # fmt: skip
    assert len(beside.text_row(one).split("  128x256")[0]) == len(beside.heading(names).removesuffix("  config"))
    assert beside.csv_row(other)[5:] == ["2.00000", "1.00000", "1.60000", "1.00000", config_text(Config()), "a note"]
    assert beside.summary([one, other], names) == [
        (
            "block_n=128: 1.200 of the default's time (geometric mean of 2), 0.900 at LLaMA-70B global M 8192 to 1.600 "
            "at LLaMA-7B tp8 M 512; less than 0.98 on 1"
        ),
        (
            "tail_split=1: 1.000 of the default's time (geometric mean of 1), 1.000 at LLaMA-7B tp8 M 512 to 1.000 at "
            "LLaMA-7B tp8 M 512; less than 0.98 on 0"
        ),
        "failed: 1 of 2 shapes",
    ]


def test_efficiency_is_flux_equation_2() -> None:
    """0 is serial, 1 hides everything, slower than serial is negative; nothing to hide is no number."""
    assert efficiency(1.5, 1.0, 1.5) == 0
    assert efficiency(1.0, 1.0, 1.5) == 1
    assert efficiency(2.0, 1.0, 1.5) == -1
    assert math.isnan(efficiency(1.0, 1.0, 1.0))


def test_a_row_derives_what_the_table_shows() -> None:
    """The product is the mean of before and after; the bound is the longer of product and communication."""
    assert FAST.mean_gemm_s == pytest.approx(1.260e-3)
    assert FAST.speedup == pytest.approx(1.605 / 1.302)
    assert FAST.over_torch == pytest.approx(1.306 / 1.302)
    assert FAST.efficiency == pytest.approx(1 - (1.302 - 1.260) / (1.605 - 1.260))
    assert FAST.torch_efficiency == pytest.approx(1 - (1.306 - 1.260) / (1.605 - 1.260))
    assert FAST.of_bound == pytest.approx(1.260 / 1.302)
    assert SERIAL.of_bound == pytest.approx(0.024 / 0.051)


def test_the_table_reads_as_it_should() -> None:
    """Head, legend, rows that worked and one that did not, summary: the golden file."""
    lines = [*FACTS.lines(), *rows.LEGEND.splitlines(), "", rows.heading()]
    lines += [rows.text_row(row) for row in (FAST, SERIAL, BROKEN)]
    text = "\n".join([*lines, "", *summary([FAST, SERIAL, BROKEN])]) + "\n"

    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")

    assert text == GOLDEN.read_text(encoding="utf-8")


def test_rows_are_in_the_files_as_soon_as_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is on the screen is in the file; the CSV has the same rows with more digits."""
    out = tmp_path / "new" / "ag_gemm.txt"
    report = Report(out, is_speaker=True)
    report.begin_table(FACTS)

    report.row(FAST)
    after_one = out.read_text(encoding="utf-8")
    report.row(BROKEN)
    report.end_table(["left out (budget of 1 s): x"])

    assert after_one.startswith("$ python -m megascale_kernels.bench ag_gemm --gpus 4\n4 x NVIDIA H200; torch 2.11.0")
    assert after_one.splitlines()[-1] == rows.text_row(FAST)
    assert out.read_text(encoding="utf-8") == capsys.readouterr().out
    table = list(csv.DictReader(out.with_suffix(".csv").read_text(encoding="utf-8").splitlines()))
    assert [row["shape"] for row in table] == ["LLaMA-70B", "given"]
    assert float(table[0]["efficiency"]) == pytest.approx(FAST.efficiency, abs=1e-4)
    assert table[1]["note"] == BROKEN.note


def test_only_rank_0_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others measure and keep quiet, and touch no file."""
    report = Report(tmp_path / "out.txt", is_speaker=False)

    report.begin_table(FACTS)
    report.row(FAST)

    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_the_summary_of_nothing_is_empty() -> None:
    """A run that measured nothing has no mean and no worst."""
    assert summary([]) == []
    assert summary([BROKEN]) == ["failed: 1 of 1 shapes"]
    assert math.isnan(geometric_mean([]))
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_a_configuration_is_told_in_few_letters() -> None:
    """Tile, stages, order; then what is not as usual."""
    assert config_text(None) == "serial"
    assert config_text(Config()) == "128x256x64/4 g8"
    assert config_text(Config(carrier="sm", comm_ctas=8, splits=4)) == "128x256x64/4 g8 sm comm_ctas=8 splits=4"
    assert config_text(Config(kernel="hopper", tail_split=1)) == "128x256x64/4 g8 hopper tail_split=1"


def test_all_shapes_are_those_of_the_models() -> None:
    """Six models, two scales, five M; gather: K is H, N a share of I; scatter the other way round."""
    gathers = wanted("ag_gemm", None, ROWS, SCALES, 4)
    scatters = wanted("gemm_rs", None, ROWS, SCALES, 4)

    assert len(gathers) == len(scatters) == len(MODELS) * 2 * 5 == 60
    assert Shape("LLaMA-70B", "global", 8192, 7168, 8192) in gathers
    assert Shape("LLaMA-70B", "tp8", 8192, 3584, 8192) in gathers
    assert Shape("LLaMA-70B", "global", 8192, 8192, 7168) in scatters
    assert Shape("GPT-3", "tp8", 512, 12288, 6144) in scatters


def test_shapes_can_be_asked_for() -> None:
    """By the model's short name, or by sizes."""
    assert wanted("ag_gemm", "70B,512x256x128", (4096,), ("tp8", "global"), 4) == [
        Shape("given", "-", 512, 256, 128),
        Shape("LLaMA-70B", "global", 4096, 7168, 8192),
        Shape("LLaMA-70B", "tp8", 4096, 3584, 8192),
    ]
    with pytest.raises(ValueError, match="--shapes 71B: not MxNxK, and not one of LLaMA-7B"):
        wanted("ag_gemm", "71B", ROWS, SCALES, 4)
    with pytest.raises(ValueError, match="multiple of the 4 GPUs"):
        wanted("ag_gemm", "510x256x128", ROWS, SCALES, 4)


def test_the_picture_has_a_dot_for_every_figure(tmp_path: Path) -> None:
    """Two shapes and two contenders in two panels are eight marks and two in the legend; failed shapes have none."""
    report = Report(tmp_path / "ag_gemm_4gpu.txt", is_speaker=True)
    report.begin_table(FACTS)
    for row in (FAST, SERIAL, BROKEN):
        report.row(row)

    code = script_module(PLOT).main([str(tmp_path / "ag_gemm_4gpu.csv"), str(tmp_path / "picture.svg")])

    assert code == 0
    picture = ET.parse(tmp_path / "picture.svg").getroot()  # noqa: S314 - written a line above
    kinds = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert kinds.count("circle") + kinds.count("path") == 8 + 2
    assert "ag gemm 4gpu" in [element.text for element in picture.iter()]


def test_the_picture_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 2."""
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")

    assert script_module(PLOT).main([str(tmp_path / "other.csv"), str(tmp_path / "p.svg")]) == 2
    assert script_module(PLOT).main([str(tmp_path / "missing.csv"), str(tmp_path / "p.svg")]) == 2
    assert "no rows of" in capsys.readouterr().err
