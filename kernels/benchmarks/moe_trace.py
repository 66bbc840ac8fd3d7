# SPDX-License-Identifier: Apache-2.0
"""Record a whole MoE layer on GPUs, every tile with arrows, and draw it.

    torchrun --nproc-per-node 2 kernels/benchmarks/moe_trace.py record --out trace_moe
    python kernels/benchmarks/moe_trace.py draw trace_moe.json trace_moe.svg

`record` writes a dump for each rank, all of them as JSON for https://ui.perfetto.dev, and the picture. The layer runs
by the kernels in plain Triton, which record the jobs of layer 1 as well, and its copies are queued one by one, so that
events tell when each ends. `draw` needs no GPU: a row for each copy engine and for some of the programs, time from left
to right, an arrow from what arrived to what waited for it.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

COLOURS = {
    ("moe_dispatch", "tile"): "#0b6e8f", ("moe_combine", "tile"): "#7a4fa3", ("moe_dispatch", "wait"): "#e8c34a",
    ("moe_combine", "wait"): "#e8c34a", ("moe_dispatch", "copy"): "#d1762a", ("moe_combine", "push"): "#5a9e4b",
}  # fmt: skip
LEGEND = (
    ("moe_dispatch", "copy", "tokens by copy engine"), ("moe_dispatch", "tile", "layer 0: gather + product + SwiGLU"),
    ("moe_combine", "tile", "layer 1: product"), ("moe_combine", "push", "add up and send"),
    ("moe_dispatch", "wait", "wait"),
)  # fmt: skip
LEFT, TOP, ROW, WIDTH, BETWEEN = 196, 62, 15, 900, 24
MOST_ARROWS = 48
SLEEP_CYCLES = 15_000_000  # some 8 ms: more than Python needs for three launches and their copies
STYLE = 'font-family="Helvetica, Arial, sans-serif"'


class Lane(NamedTuple):
    """A row of the picture: one thread of one rank."""

    rank: int
    thread: int
    name: str
    y: int


def lanes_of(trace: dict[str, Any], programs: int) -> list[Lane]:
    """Copy engines, and of each rank and role some programs spread evenly, from top to bottom."""
    names: dict[int, dict[int, str]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names.setdefault(event["pid"], {})[event["tid"]] = event["args"]["name"].partition(" (SM")[0]
    found, y = [], TOP
    for rank, threads in sorted(names.items()):
        for role in ("copy engine", "compute", "communicate"):
            of_role = [thread for thread, name in sorted(threads.items()) if name.startswith(role)]
            step = max(1, len(of_role) // programs)
            for thread in of_role[::step][:programs]:
                found.append(Lane(rank, thread, f"rank {rank}: {threads[thread]}", y))
                y += ROW
        y += BETWEEN
    return found


def draw(trace: dict[str, Any], programs: int = 6, title: str = "") -> str:
    """The picture as SVG.

    Args:
        trace: as `chrome_trace` made it.
        programs: rows of a rank and role, at most.
        title: a line above.

    Raises:
        ValueError: there is no MoE layer in the trace.
    """
    spans = [
        event for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["args"]["operator"], event["cat"]) in COLOURS
    ]  # fmt: skip
    if not spans:
        raise ValueError("this trace holds no tile of a MoE layer")
    begin, end = min(one["ts"] for one in spans), max(one["ts"] + one["dur"] for one in spans)
    scale = WIDTH / max(end - begin, 1e-9)
    lanes = {(lane.rank, lane.thread): lane for lane in lanes_of(trace, programs)}
    height = max(lane.y for lane in lanes.values()) + ROW + 46
    size = f'width="{LEFT + WIDTH + 20}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {STYLE} font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
        *_legend(),
    ]
    for lane in lanes.values():
        lines += [f'<text x="{LEFT - 6}" y="{lane.y + 10}" text-anchor="end">{escape(lane.name)}</text>']
    # Waits lie within tiles and are drawn upon them.
    for one in sorted(spans, key=lambda span: span["cat"] == "wait"):
        lane = lanes.get((one["pid"], one["tid"]))
        if lane is not None:
            x, wide = LEFT + (one["ts"] - begin) * scale, max(one["dur"] * scale, 0.4)
            colour = COLOURS[one["args"]["operator"], one["cat"]]
            lines.append(
                f'<rect x="{x:.2f}" y="{lane.y}" width="{wide:.2f}" height="{ROW - 3}" fill="{colour}" '
                'stroke="white" stroke-width="0.3"/>'
            )
    lines += _arrows(trace, lanes, begin, scale)
    lines += _axis(end - begin, scale, height - 30)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = LEFT
    for operator, kind, words in LEGEND:
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{COLOURS[operator, kind]}"/>'
        yield f'<text x="{x + 16}" y="44">{words}</text>'
        x += 30 + 6 * len(words)


def _arrows(trace: dict[str, Any], lanes: dict[tuple[int, int], Lane], begin: float, scale: float) -> Iterator[str]:
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in ("s", "f") and (event["pid"], event["tid"]) in lanes:
            ends.setdefault(event["id"], {})[event["ph"]] = event
    whole = [pair for pair in ends.values() if len(pair) == 2]
    for pair in whole[:: max(1, len(whole) // MOST_ARROWS)]:
        (x1, y1), (x2, y2) = (
            (LEFT + (pair[phase]["ts"] - begin) * scale, lanes[pair[phase]["pid"], pair[phase]["tid"]].y + ROW / 2)
            for phase in ("s", "f")
        )
        yield f'<path d="M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}" stroke="#222" stroke-width="0.6" opacity="0.55"/>'
        yield f'<circle cx="{x2:.1f}" cy="{y2:.1f}" r="1.6" fill="#222"/>'


def _axis(span_us: float, scale: float, y: int) -> Iterator[str]:
    step = next(
        one for one in (10**power * digit for power in range(-3, 9) for digit in (1, 2, 5)) if one * 10 >= span_us
    )
    for tick in range(int(span_us / step) + 1):
        x = LEFT + tick * step * scale
        yield f'<path d="M{x:.1f},{y} v5" stroke="#333"/>'
        yield f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{tick * step:g}</text>'
    yield f'<text x="{LEFT - 6}" y="{y + 18}" text-anchor="end">microseconds</text>'


def record(options: argparse.Namespace) -> int:
    """One rank: run the layer, record the last of several, merge and draw on rank 0."""
    import torch
    import torch.distributed as dist
    from megascale_kernels import MoeConfig, Workspace
    from megascale_kernels.bench.moe.measure import operands
    from megascale_kernels.bench.moe.moe_shapes import MoeShape
    from megascale_kernels.device.layout import SLOTS
    from megascale_kernels.moe.launch import planned
    from megascale_kernels.moe.tables import Sizes
    from megascale_kernels.moe.trace_shapes import layer_shapes
    from megascale_kernels.tracing import chrome_trace, load_trace, save_trace
    from megascale_kernels.tracing.clock_ping import measure_offsets

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = MoeShape(
        "given", options.experts, options.top_k, options.hidden, options.inner, options.tokens, options.std
    )
    sizes = Sizes(ranks, shape.tokens // ranks, shape.top_k, shape.experts // ranks, shape.hidden, shape.inner)
    config = MoeConfig(kernel="triton").resolved(sizes)
    workspace = Workspace(
        max_rows=shape.tokens, max_gather_cols=shape.hidden, trace=True, adaptive=False, deadline_s=10.0
    )  # fmt: skip
    given = operands(shape, workspace, 0)
    out = torch.empty_like(given.x)
    plan = planned(*given, out, sizes, workspace, config)
    for step in plan.steps:
        step.ready = [None] * SLOTS  # launched from Python, copy by copy
    for _ in range(3):
        plan.run(*given, out)
    workspace.check()
    offsets = measure_offsets(workspace)
    workspace.trace_words.zero_()
    dist.barrier()
    torch.cuda.synchronize()
    # The host queues the whole layer, copy by copy, while the GPUs sleep; then all begin together.
    torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 - it has no public name
    dist.all_reduce(torch.zeros(1, device="cuda"))
    copies = _TimedCopies(workspace)
    plan.run(*given, out)
    workspace.check()
    first = workspace.launches - 2
    shapes = layer_shapes(plan.buffers.routing, sizes, config, rank, first)
    path = f"{options.out}.rank{rank}.trace"
    save_trace(workspace, path, offset=offsets[rank], shapes=shapes, chunks=copies.chunks(first + 1))
    dist.barrier()
    if rank == 0:
        trace = chrome_trace(load_trace(f"{options.out}.rank{other}.trace") for other in range(ranks))
        Path(f"{options.out}.json").write_text(json.dumps(trace), encoding="utf-8")
        gpus = f"{ranks} x {torch.cuda.get_device_name()}"
        title = f"{shape.label.removeprefix('given ')}, {gpus}, plain Triton kernels, recorded"
        Path(f"{options.out}.svg").write_text(draw(trace, title=title), encoding="utf-8")
        print(f"{options.out}.json: {trace['otherData']}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


class _TimedCopies:
    """Notes when each announced copy of a workspace ends: an event behind each, from an anchor on the GPU's clock."""

    def __init__(self, workspace: Any) -> None:  # noqa: ANN401 - a Workspace, of a package that is imported late
        import torch

        self.torch, self.units = torch, []
        self.clock = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.anchor = self._event()
        workspace.note_time(self.clock)
        self.anchor.record()
        self.began = self._event()
        announce, copying = workspace.announce, workspace.copying

        @contextmanager
        def begun() -> Iterator[None]:
            with copying():
                self.began.record()
                yield

        def noted(peer: int, slot: int, channel: int, signature: int) -> None:
            announce(peer, slot, channel, signature)
            self.units.append((peer, channel, self._event()))
            self.units[-1][2].record()

        workspace.announce, workspace.copying = noted, begun

    def _event(self) -> Any:  # noqa: ANN401 - as above
        return self.torch.cuda.Event(enable_timing=True)

    def chunks(self, launch: int) -> list[Any]:
        """The copies of a launch; one begins where the one before it ended."""
        from megascale_kernels.moe.kernels.walk import UNITS
        from megascale_kernels.tracing import chunk_of

        found, before_ms = [], self.anchor.elapsed_time(self.began)
        for peer, channel, event in self.units:
            end_ms = self.anchor.elapsed_time(event)
            found.append(chunk_of(launch, peer, channel - UNITS.value, int(self.clock), before_ms, end_ms))
            before_ms = end_ms
        return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="Record a MoE layer on GPUs and draw it, or draw a recorded one.")
    verbs = made.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="under torchrun")
    recording.add_argument("--out", default="trace_moe", help="what names of files begin with")
    for name, default in (
        ("--tokens", 8192), ("--experts", 16), ("--top-k", 2), ("--hidden", 2048), ("--inner", 2048)
    ):  # fmt: skip
        recording.add_argument(name, type=int, default=default)
    recording.add_argument("--std", type=float, default=0.0, help="standard deviation of the experts' shares")
    drawing = verbs.add_parser("draw")
    drawing.add_argument("trace", type=Path, help="JSON that record wrote")
    drawing.add_argument("picture", type=Path, help="the SVG to write")
    drawing.add_argument("--programs", type=int, default=6, help="rows of a rank and role (default 6)")
    drawing.add_argument("--title", default="")
    return made


def main() -> int:
    """Run the command: 0 when it worked, 2 for a request that makes no sense."""
    options = parser().parse_args()
    if options.verb == "record":
        if "LOCAL_RANK" in os.environ:
            return record(options)
        print("moe_trace: no ranks: start record with torchrun --nproc-per-node GPUS", file=sys.stderr)
        return 2
    try:
        trace = json.loads(options.trace.read_text(encoding="utf-8"))
        options.picture.write_text(draw(trace, max(1, options.programs), options.title), encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"moe_trace: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
