# SPDX-License-Identifier: Apache-2.0
"""`python -m megascale_kernels.bench attention`: start the ranks, measure case after case, write down what came out."""

import gc
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megascale_kernels.attention.problem import AttentionConfig
from megascale_kernels.autotune.timing import measure
from megascale_kernels.bench.drawn_sweep import host_time
from megascale_kernels.bench.ranks import place, start
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.request import ATTENTION, PROGRAM, UserError
from megascale_kernels.bench.sp_attention import figures
from megascale_kernels.bench.sp_attention.contenders import Contenders
from megascale_kernels.bench.sp_attention.figures import Timed
from megascale_kernels.bench.sp_attention.heads import Case
from megascale_kernels.bench.sp_attention.requests import Request, parser, read
from megascale_kernels.memory.workspace import Workspace

SLACK_S = 120.0  # beyond the budget: start, the case in hand, the end
TILE_S = 20.0  # one rank may still compile while the other's kernel waits
WRONG = 2e-2  # bf16 results of random operands are some 4e-3 apart
TRIALS = 3  # rounds that find torch's best backend
NAN = math.nan


def main(arguments: list[str]) -> int:
    """Run the command: 0 when all went well, 1 when a result was wrong, 2 for a request that cannot be served."""
    options = parser().parse_args(arguments)
    try:
        request = read(options, dict(os.environ), torch.cuda.device_count())
        if "RANK" in os.environ:
            return run_rank(request, shlex.join([*PROGRAM.split(), ATTENTION, *arguments]))
        Report(request.out, is_speaker=True)  # that it can be written is better known before ranks are started
    except (UserError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            named = "--out: " if isinstance(error, OSError) else ""
            print(f"{PROGRAM} {ATTENTION}: {named}{error}", file=sys.stderr)
        return 2
    return start([ATTENTION, *arguments], request.ranks, request.budget_s + SLACK_S)


def run_rank(request: Request, command: str) -> int:
    """One rank's part."""
    started_s = time.monotonic()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = torch.device("cuda", place(local, request.ranks, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    try:
        return Measuring(request, device, started_s).run(command)
    finally:
        dist.destroy_process_group()


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
        problems = [case.problem(request.ranks) for case in request.cases]
        rows = max(problem.rows for problem in problems) * request.ranks
        elements = max(2 * problem.rows * request.ranks * problem.kv_columns for problem in problems)
        self.workspace = Workspace(
            max_rows=rows, max_gather_cols=-(-elements // rows), deadline_s=TILE_S, adaptive=False, device=device
        )

    def run(self, command: str) -> int:
        """Measure all cases; 1 when a result was wrong."""
        report, request = self.report, self.request
        report.begin(facts(command, request.ranks), figures.LEGEND, figures.HEADING, figures.CSV_HEADING)
        done: list[Timed] = []
        asked = [(case, config) for case in request.cases for config in request.configs]
        for case, config in asked:
            if self.time_is_up():
                break
            done.append(self.measure(case, config))
            report.both(figures.text_row(done[-1]), figures.csv_row(done[-1]))
            gc.collect()
            torch.cuda.empty_cache()
        report.line()
        for text in figures.summary(done):
            report.line(text)
        if len(done) < len(asked):
            report.line(
                f"left out (budget of {request.budget_s:g} s): the last {len(asked) - len(done)} of {len(asked)}"
            )
        return int(any(row.note for row in done))

    def measure(self, case: Case, config: AttentionConfig | None) -> Timed:
        """One row."""
        request, workspace = self.request, self.workspace
        nothing = Timed(case, config, request.backward, request.ranks)
        contenders: list[Contenders] = []

        def prepare() -> None:
            contenders.append(Contenders(case, workspace, config, backward=request.backward))

        note = self.attempt(prepare)
        if note:
            return nothing._replace(note=note)
        ways = contenders[0]
        tried = measure(ways.backends(), rounds=TRIALS, group=workspace.group)
        backend = min(tried.seconds, key=lambda name: tried.seconds[name])
        if math.isinf(tried.seconds[backend]):
            return nothing._replace(note=f"no backend of torch serves it: {next(iter(tried.errors.values()), '')}")
        apart: list[float] = []
        note = self.attempt(lambda: apart.append(ways.distance(backend)))
        if note or apart[0] > WRONG:
            return nothing._replace(note=note or f"wrong: {apart[0]:.1e} from torch's")
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda: ways.torch(backend), "ours": ways.ours, "serial": lambda: ways.serial(backend),
            "copies": ways.copies(), "nccl": ways.nccl,
        }  # fmt: skip
        if not request.backward:
            calls["local"] = ways.local()
        found = measure(
            calls, rounds=request.rounds, group=workspace.group, check=workspace.check,
            risky=("ours", "local", "copies"),
        )  # fmt: skip
        seconds = {name: value if math.isfinite(value) else NAN for name, value in found.seconds.items()}
        if math.isnan(seconds["ours"]):
            self.mend()
            return nothing._replace(note=f"failed: {found.errors.get('ours', 'on another rank')}")
        host = self.worst([
            1e6 * host_time(call, torch.cuda.synchronize) for call in (ways.ours, lambda: ways.serial(backend))
        ] if seconds["ours"] * 50 < 1.0 else [NAN, NAN])  # fmt: skip
        return nothing._replace(
            ours_s=seconds["ours"], local_s=seconds.get("local", NAN), copies_s=seconds["copies"],
            comm_s=seconds["nccl"], serial_s=seconds["serial"], torch_s=seconds["torch"], backend=backend,
            host_us=host[0], serial_host_us=host[1], distance=apart[0],
        )  # fmt: skip

    def attempt(self, act: Callable[[], None]) -> str:
        """Do something that may fail on any rank; "" or why it did. Collective."""
        note = ""
        try:
            act()
            self.workspace.check()
        except Exception as error:  # noqa: BLE001 - whatever fails becomes the row's note
            note = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if self.worst([float(bool(note))])[0]:
            self.mend()
            return note or "failed on another rank"
        return ""

    def mend(self) -> None:
        """Make the workspace usable after a fault. Collective."""
        self.workspace.reset()

    def worst(self, values: list[float]) -> list[float]:
        """The largest over ranks of each. Collective."""
        table = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        found: list[float] = table.tolist()
        return found

    def time_is_up(self) -> bool:
        """Whether rank 0's time is up; all ranks get the same answer. Collective."""
        mine = dist.get_rank() == 0 and time.monotonic() - self.started_s > self.request.budget_s
        return self.worst([float(mine)])[0] > 0
