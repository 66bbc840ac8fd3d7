# SPDX-License-Identifier: Apache-2.0
"""`python -m megascale_kernels.bench train`: start the ranks, measure size after size, write down what came out."""

import gc
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megascale_kernels.bench.ranks import place, start
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.request import PROGRAM, TRAIN, UserError
from megascale_kernels.bench.training import table
from megascale_kernels.bench.training.arguments import Request, Size, parser, read
from megascale_kernels.bench.training.model import Task, draw_task
from megascale_kernels.bench.training.steps import WRONG, copied, distance, loss, sentence, time_in_turn
from megascale_kernels.bench.training.table import Line
from megascale_kernels.bench.training.variants import Place, Prepared, prepare
from megascale_kernels.memory.workspace import Workspace

SLACK_S = 300.0  # beyond the budget: start, the size in hand with its compilations, the end
COLLECTIVE_S = 180.0  # ranks compile at their own pace
TILE_S = 60.0  # one rank may still compile while the other's kernel waits for its rows


def main(arguments: list[str]) -> int:
    """Run the command: 0 when all went well, 1 when a variant was wrong, 2 for a request that cannot be served."""
    options = parser().parse_args(arguments)
    try:
        request = read(options, dict(os.environ), torch.cuda.device_count())
        if "RANK" in os.environ:
            return run_rank(request, shlex.join([*PROGRAM.split(), TRAIN, *arguments]))
        Report(request.out, is_speaker=True)  # that it can be written is better known before ranks are started
    except (UserError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            named = "--out: " if isinstance(error, OSError) else ""
            print(f"{PROGRAM} {TRAIN}: {named}{error}", file=sys.stderr)
        return 2
    return start([TRAIN, *arguments], request.ranks, request.budget_s + SLACK_S)


def run_rank(request: Request, command: str) -> int:
    """One rank's part."""
    started_s = time.monotonic()
    device = torch.device("cpu")
    if request.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        device = torch.device("cuda", place(local, request.ranks, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    try:
        return Measuring(request, device, started_s).run(command)
    finally:
        dist.destroy_process_group()


def refuse_to_fall_back() -> None:
    """Let a variant that is compiled too often fail: torch would go on eagerly, and say so in a log alone."""
    config = torch._dynamo.config  # noqa: SLF001 - it has no public name
    if hasattr(config, "fail_on_recompile_limit_hit"):
        config.fail_on_recompile_limit_hit = True


class Measuring:
    """One run on this rank.

    Args:
        request: what was asked for.
        device: this rank's.
        started_s: `time.monotonic()` when the budget began.
    """

    def __init__(self, request: Request, device: torch.device, started_s: float) -> None:
        self.request, self.device, self.started_s = request, device, started_s
        self.report = Report(request.out, is_speaker=dist.get_rank() == 0)
        refuse_to_fall_back()
        if device.type == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // request.ranks))
        self.mesh = init_device_mesh(device.type, (request.ranks,))
        self.group = self.mesh.get_group()
        # The CPU's libraries know float32 best, and the comparison is exact there.
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.workspaces: dict[str, Workspace] = {}

    def run(self, command: str) -> int:
        """Measure all sizes; 1 when a variant's results were wrong."""
        head = facts(command, self.request.ranks)
        self.report.begin(head, table.legend(self.request), table.heading(), table.CSV_HEADING)
        done: list[list[Line]] = []
        for size in self.request.sizes:
            if self.time_is_up():
                break
            done.append(self.measure(size))
            self.clear()
        self.report.line()
        for text in table.summary(done):
            self.report.line(text)
        left = self.request.sizes[len(done) :]
        if left:
            named = ", ".join(size.label for size in left)
            self.report.line(f"left out (budget of {self.request.budget_s:g} s): {named}")
        return int(any(line.note.startswith("wrong") for lines in done for line in lines))

    def measure(self, size: Size) -> list[Line]:
        """All variants at one size, into the report."""
        task = draw_task(
            size.hidden, size.inner, size.m, blocks=self.request.blocks, activation=self.request.activation,
            rank=dist.get_rank(), world_size=self.request.ranks, device=self.device, dtype=self.dtype,
        )  # fmt: skip
        ready, notes, apart = self.get_ready(task)
        seconds, errors = time_in_turn(ready, rounds=self.request.rounds, group=self.group, device=self.device)
        lines = []
        for name in self.request.variants:
            step_s = seconds.get(name, math.inf)
            note = notes.get(name, "")
            if name in seconds and math.isinf(step_s):
                note = errors.get(name, "it failed on another rank")
            lines.append(
                Line(size, name, step_s if math.isfinite(step_s) else math.nan, apart.get(name, math.nan), note)
            )
        for line, ratio in zip(lines, table.over_torch(lines), strict=True):
            self.report.both(table.text_line(line, ratio), table.csv_line(line, ratio))
        return lines

    def clear(self) -> None:
        """Give back what one size took, compiled graphs included: each size would count against their limit."""
        self.workspaces.clear()
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def get_ready(self, task: Task) -> tuple[dict[str, Prepared], dict[str, str], dict[str, float]]:
        """The variants that work and are right, what is wrong with the others, and how far apart results are."""
        ready: dict[str, Prepared] = {}
        notes: dict[str, str] = {}
        apart: dict[str, float] = {}
        reference: dict[str, list[Tensor]] | None = None
        for name in self.request.variants:
            if self.time_is_up():
                notes[name] = f"left out (budget of {self.request.budget_s:g} s)"
                continue
            prepared, note = self.attempt(partial(prepare, name, task, self.place()))
            if prepared is None:
                notes[name] = note
                self.workspaces.clear()  # a fault stays in a workspace: what comes after gets another
                continue
            if name.startswith(table.ALONE):
                prepared.step.clear()
                ready[name], notes[name] = prepared, "a bound: no communication"
                continue
            found = prepared.step.results()
            if reference is None:  # of torch-eager, unless it was not asked for
                reference = copied(found)
            apart[name], apart_loss = self.compare(found, reference, task)
            prepared.step.clear()
            if max(apart[name], apart_loss) > WRONG:
                notes[name] = f"wrong: {apart[name]:.1e} away in gradients, {apart_loss:.1e} in the loss"
                continue
            ready[name], notes[name] = prepared, prepared.note
        return ready, notes, apart

    def compare(
        self, found: dict[str, list[Tensor]], reference: dict[str, list[Tensor]], task: Task
    ) -> tuple[float, float]:
        """Relative distances of output and gradients, and of the loss; the largest over ranks."""
        # A sum of random signs is as large as the root of their number: that is what the loss is measured by.
        scale = math.sqrt(task.gradient.numel()) * float(reference["out"][0].float().square().mean().sqrt())
        gap = abs(loss(found, task.gradient) - loss(reference, task.gradient)) / scale
        table_ = torch.tensor([distance(found, reference), gap], dtype=torch.float64, device=self.device)
        dist.all_reduce(table_, op=dist.ReduceOp.MAX, group=self.group)
        both: list[float] = table_.tolist()
        return both[0], both[1]

    def attempt(self, make: Callable[[], Prepared]) -> tuple[Prepared | None, str]:
        """A variant, or why it does not work; all ranks get the same answer. Collective."""
        prepared, note = None, ""
        try:
            prepared = make()
            if prepared.workspace is not None:
                prepared.workspace.check()
            elif self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a variant may fail in any way; the table says how
            note = sentence(error)
        failed = torch.tensor([float(bool(note))], device=self.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        if not float(failed):
            return prepared, ""
        return None, note or "it failed on another rank"

    def place(self) -> Place:
        """Where variants run."""
        return Place(self.mesh, self.workspace)

    def workspace(self, task: Task, how: str) -> Workspace:
        """The workspace of a way to run: each kind of graph has its own, all others share one."""
        kind = how if how in ("graph", "cudagraphs") else ""
        if kind not in self.workspaces:
            self.workspaces[kind] = Workspace(
                self.group, max_rows=task.m, max_gather_cols=task.hidden, max_scatter_cols=task.hidden,
                dtype=self.dtype, device=self.device, deadline_s=TILE_S,
            )  # fmt: skip
        return self.workspaces[kind]

    def time_is_up(self) -> bool:
        """Whether rank 0's time is up; all ranks get the same answer. Collective."""
        mine = dist.get_rank() == 0 and time.monotonic() - self.started_s > self.request.budget_s
        up = torch.tensor([float(mine)], device=self.device)
        dist.all_reduce(up, op=dist.ReduceOp.MAX, group=self.group)
        return bool(float(up))
