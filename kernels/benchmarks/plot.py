# SPDX-License-Identifier: Apache-2.0
"""Draw a benchmark's CSV: speed-up over serial and overlap efficiency per shape, ours beside torch's fused operator.

`python kernels/benchmarks/plot.py RESULT.csv PICTURE.svg`. The SVG is written by hand: two panels of dots, one column
per model and scale, M growing to the right within it. A line at 1 in the upper panel is the serial path; in the lower
panel 0 is the serial path and 1 hides all communication.
"""

import argparse
import csv
import math
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

STEP = 11  # pixels per shape
GAP = 16  # between models
LEFT, RIGHT, TOP = 58, 16, 62
PANEL = 190  # height of a panel
BETWEEN = 34
OURS, TORCH, GREY, INK = "#0b6e8f", "#d1762a", "#d8d8d8", "#333333"
STYLE = 'font-family="Helvetica, Arial, sans-serif"'


class Point(NamedTuple):
    """One shape: where it stands and what was measured."""

    x: float
    row: dict[str, str]

    def figure(self, name: str) -> float:
        """A figure of the row; NaN where there is none."""
        return float(self.row[name] or "nan")


class Panel(NamedTuple):
    """One of the two: where it begins, what its axis spans, which columns it shows."""

    top: int
    low: float
    high: float
    tick: float
    title: str
    ours: str
    torch: str

    def y(self, value: float) -> float:
        """The height of a value, kept within the panel."""
        return self.top + PANEL * (self.high - min(max(value, self.low), self.high)) / (self.high - self.low)


def place(rows: list[dict[str, str]]) -> tuple[list[list[Point]], float]:
    """Each model's points, and how wide the picture is."""
    x, groups = float(LEFT + GAP / 2), []
    for _, members in groupby(rows, key=lambda row: (row["scale"], row["shape"])):
        points = []
        for row in members:
            points.append(Point(x + STEP / 2, row))
            x += STEP
        groups.append(points)
        x += GAP
    return groups, x + RIGHT


def panels(points: list[Point]) -> tuple[Panel, Panel]:
    """The axes, wide enough for what was measured, and no wider than readers need."""
    speeds = [point.figure(name) for point in points for name in ("speedup", "torch_speedup")]
    finite = [speed for speed in speeds if math.isfinite(speed)]
    highest, lowest = min(max([1.2, *finite]), 2.5), max(min([0.9, *finite]), 0.5)
    tick = 0.1 if highest - lowest < 1 else 0.25
    low, high = math.floor(lowest / tick + 1e-9) * tick, math.ceil(highest / tick - 1e-9) * tick
    upper = Panel(TOP, low, high, tick, "speed-up over serial", "speedup", "torch_speedup")
    lower = Panel(TOP + PANEL + BETWEEN, -0.5, 1.25, 0.25, "overlap efficiency E", "efficiency", "torch_efficiency")
    return upper, lower


def axis(panel: Panel, width: float, reference: tuple[float, ...]) -> Iterator[str]:
    """Grid lines, numbers and title of a panel."""
    ticks = round((panel.high - panel.low) / panel.tick)
    for number in range(ticks + 1):
        value = panel.low + number * panel.tick
        y = panel.y(value)
        is_reference = any(math.isclose(value, mark, abs_tol=1e-9) for mark in reference)
        colour, thick = (INK, 1.2) if is_reference else (GREY, 0.6)
        yield stroke((LEFT, width - RIGHT), (y, y), colour, thick)
        yield text(LEFT - 6, y + 3.5, f"{value:.2f}", anchor="end", size=10)
    middle = panel.top + PANEL / 2
    yield text(14, middle, panel.title, anchor="middle", size=11, turn=-90)


def dots(panel: Panel, points: list[Point]) -> Iterator[str]:
    """Torch's and our figure of every shape; what lies outside the panel is an arrowhead at its edge."""
    for name, colour, filled in ((panel.torch, TORCH, False), (panel.ours, OURS, True)):
        for point in points:
            value = point.figure(name)
            if not math.isfinite(value):
                continue
            x, y = point.x, panel.y(value)
            if not panel.low <= value <= panel.high:
                down = 4 if value < panel.low else -4
                yield f'<path d="M{x - 3.5:.1f} {y - down:.1f} h7 l-3.5 {down} z" fill="{colour}"/>'
            elif filled:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>'
            else:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="white" stroke="{colour}" stroke-width="1.4"/>'


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, turn: int = 0) -> str:
    """One line of words."""
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{INK}"{turned}>{escape(words)}</text>'


def stroke(xs: tuple[float, float], ys: tuple[float, float], colour: str, thick: float) -> str:
    """A straight line."""
    ends = f'x1="{xs[0]:.1f}" x2="{xs[1]:.1f}" y1="{ys[0]:.1f}" y2="{ys[1]:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{thick}"/>'


def names(groups: list[list[Point]], bottom: float) -> Iterator[str]:
    """Below: the values of M and the models; a stroke where the scale changes."""
    yield text(LEFT - 6, bottom + 16, "M", anchor="end", size=10)
    for points in groups:
        for point in points:
            yield text(point.x + 3.5, bottom + 8, point.row["m"], anchor="end", size=9, turn=-60)
        middle = (points[0].x + points[-1].x) / 2
        yield text(middle, bottom + 48, points[0].row["shape"].removeprefix("LLaMA-"), anchor="middle", size=10)
    for scale, members in groupby(groups, key=lambda points: points[0].row["scale"]):
        inside = [point for points in members for point in points]
        words = {"global": "sizes divided by the GPUs in use", "tp8": "sizes divided by eight"}.get(scale, "")
        yield text((inside[0].x + inside[-1].x) / 2, bottom + 66, words, anchor="middle", size=11)
        if inside[0].x > LEFT + GAP:
            x = inside[0].x - (STEP + GAP) / 2
            yield stroke((x, x), (TOP, bottom + 66), INK, 0.8)


def picture(rows: list[dict[str, str]], title: str) -> str:
    """The SVG."""
    for row in rows:
        row["torch_speedup"] = str(float(row["serial_ms"]) / float(row["torch_ms"]))
    groups, width = place(rows)
    width = max(width, 420)
    points = [point for group in groups for point in group]
    upper, lower = panels(points)
    bottom = lower.top + PANEL
    height = bottom + 78
    size = f'width="{width:.0f}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height}" {STYLE}>',
        f'<rect {size} fill="white"/>',
        text(LEFT, 22, title, size=14),
        f'<circle cx="{LEFT + 5}" cy="40" r="3.4" fill="{OURS}"/>', text(LEFT + 14, 44, "ours"),
        f'<circle cx="{LEFT + 65}" cy="40" r="3" fill="white" stroke="{TORCH}" stroke-width="1.4"/>',
        text(LEFT + 74, 44, "torch's fused operator"),
        *axis(upper, width, (1.0,)), *axis(lower, width, (0.0, 1.0)),
        *dots(upper, points), *dots(lower, points), *names(groups, bottom), "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that have numbers.

    Raises:
        ValueError: there is none, or it is not a benchmark's CSV.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"speedup", "efficiency", "torch_ms", "m", "shape", "scale"} <= rows[0].keys():
        raise ValueError(f"{path}: no rows of `python -m megascale_kernels.bench`")
    return sorted((row for row in rows if not row["note"]), key=lambda row: row["scale"])


def main(arguments: list[str] | None = None) -> int:
    """Draw; 0 when it worked, 2 when the file is not what it should be."""
    parser = argparse.ArgumentParser(description="Draw a benchmark's CSV as SVG.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--title", help="default: the CSV's name")
    options = parser.parse_args(arguments)
    try:
        rows = read(options.csv)
    except (OSError, ValueError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    options.svg.write_text(picture(rows, options.title or options.csv.stem.replace("_", " ")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
