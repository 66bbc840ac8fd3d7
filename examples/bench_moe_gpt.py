# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of `train_moe_gpt.py`'s model, beside the same model on torch's collectives and torch's async TP.

    torchrun --nproc-per-node 2 examples/bench_moe_gpt.py --out moe_gpt.txt
    torchrun --nproc-per-node 2 examples/bench_moe_gpt.py --width 64 --heads 4 --sequence-length 64 ...     # on a CPU

Variants, all with the same weights, text, optimizer and gradients, trained in turn:

    collectives   K and V gathered, then torch's attention; torch's ColwiseParallel and RowwiseParallel; experts between
                  two all-to-alls with grouped products (NCCL and cuBLAS, on a CPU Gloo)
    compiled      the same, MLPs and head compiled by inductor (GPU)
    async-tp      the same, MLPs compiled with torch's async TP (GPU)
    ours          the overlap kernels, as the example trains

A step is forward, backward, the sum of gradients that all ranks hold in common, and AdamW. Times are those of steps one
after another from an idle device, the median over rounds of the slower rank; losses of the first steps stand beside
each other, and a variant whose losses are not the first one's within noise is said to be wrong.
"""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import train_moe_gpt as example
from megascale_kernels import MoELayer, Workspace, moe_experts, shard_sequence
from megascale_kernels.attention import sdpa
from megascale_kernels.attention.problem import read_problem
from megascale_kernels.autotune.contest import settle
from megascale_kernels.bench.report import facts
from megascale_kernels.bench.training.variants import FUSED
from megascale_kernels.reference import all_gather, reduce_scatter
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VARIANTS = ("collectives", "compiled", "async-tp", "ours")
NEEDS_GPU = ("compiled", "async-tp")
COLLECTIVE_S = 120
# Losses of bf16 steps round differently: curves within this are one curve.
NOISE = 0.1


def parse_arguments() -> argparse.Namespace:
    """The command line: sizes as in the example, with defaults that fill two GPUs for some 30 ms a step."""
    parser = argparse.ArgumentParser(description="Tokens a second of the example with experts, in turn with torch's.")
    for name, default in (
        ("--batch-size", 4), ("--sequence-length", 4096), ("--layers", 4), ("--width", 2048), ("--heads", 16),
        ("--kv-heads", 4), ("--experts", 16), ("--top-k", 2), ("--seed", 0), ("--rounds", 5), ("--steps", 4),
        ("--loss-steps", 10), ("--mixture-every", 2),
    ):  # fmt: skip
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss that keeps experts busy")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a kernel waits for a peer")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--budget-s", type=float, default=120.0, help="no variant is prepared, no round begun after")
    parser.add_argument("--out", type=Path, help="write what is printed here too")
    return parser.parse_args()


def complaint(args: argparse.Namespace, ranks: int) -> str | None:
    """What is wrong with the request, in one sentence; None when nothing is."""
    unknown = set(args.variants.split(",")) - set(VARIANTS)
    if unknown:
        return f"--variants {','.join(sorted(unknown))}: choose from {', '.join(VARIANTS)}"
    sizes = (args.batch_size, args.layers, args.width, args.heads, args.kv_heads, args.rounds, args.steps)
    if min(*sizes, args.loss_steps, args.top_k, args.mixture_every) < 1 or not 0 < args.budget_s < math.inf:
        return "sizes, rounds, steps and the budget are positive numbers"
    if args.sequence_length < 1 or args.sequence_length % (2 * ranks):
        return f"--sequence-length {args.sequence_length} can't be cut into {2 * ranks} equal parts"
    if args.experts % ranks or args.top_k > args.experts:
        return f"--experts {args.experts} can't be dealt out to {ranks} ranks, or are fewer than --top-k {args.top_k}"
    if args.width % args.heads or args.heads % args.kv_heads or 4 * args.width % ranks:
        return f"--width {args.width}, --heads {args.heads}, --kv-heads {args.kv_heads}: each divides the one before it"
    return None


# --- the same model on torch's collectives --------------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Rows of all ranks; their gradients are summed by the owners."""

    @staticmethod
    def forward(_: object, rows: Tensor) -> Tensor:
        return all_gather(rows)

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return reduce_scatter(grad)


class GatheredAttention(nn.Module):
    """K and V of all ranks by one all-gather, then torch's own attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This rank's queries, keys and values, [B, T / ranks, heads, D], to the output, of q's shape."""
        ranks = distributed.get_world_size()
        problem = read_problem(q, k, v, ranks, None, None, causal=True, zigzag=True)
        rows = torch.cat([k.flatten(0, 1).flatten(1), v.flatten(0, 1).flatten(1)], dim=1)
        shards = _Gathered.apply(rows).view(ranks, problem.batch, -1, rows.shape[1])
        both = sdpa.whole_sequence(shards, problem).view(problem.batch, -1, 2, problem.kv_heads, problem.head_dim)
        return sdpa.attend(q, both[:, :, 0], both[:, :, 1], problem, distributed.get_rank(), None)


class TorchPerceptron(nn.Module):
    """The example's tensor-parallel perceptron by torch's parallel styles, with its weights."""

    def __init__(self, ours: example.Perceptron, mesh: DeviceMesh) -> None:
        super().__init__()
        width, inner = ours.up.weight.shape[1], ours.up.weight.shape[0] * mesh.size()
        with torch.device("meta"):
            self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        for layer, weight, dim in ((self.up, ours.up.weight, 0), (self.down, ours.down.weight, 1)):
            layer.weight = nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Shard(dim)], run_check=False))
        plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(self, mesh, plan)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T / ranks, C) to the same."""
        return self.down(nn.functional.gelu(self.up(x_BTC.flatten(0, 1)))).view_as(x_BTC)


def on_collectives(gpt: example.GPT, mesh: DeviceMesh, compiled: dict[str, Any] | None) -> None:
    """Put torch's parts in the place of ours, with the same weights."""
    for block in gpt.blocks:
        block.attention.attend = GatheredAttention()
        if isinstance(block.mlp, MoELayer):
            moe = block.mlp
            moe.run_experts = partial(_serial_experts, moe)
            continue
        block.mlp = TorchPerceptron(block.mlp, mesh)
        if compiled is not None:
            block.mlp.compile(dynamic=False, **compiled)


def _serial_experts(moe: MoELayer, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    return moe_experts(tokens, ids, gates, moe.w_in, moe.w_out, moe.workspace, fused=False)


# --- training -------------------------------------------------------------------------------------------------------


class Training:
    """One variant: its model, its optimizers, its step.

    Args:
        name: of `VARIANTS`.
        args: the command line.
        workspace: for our kernels, and for what experts need of the group.
        mesh: all ranks.
        text: to train on.
    """

    def __init__(
        self, name: str, args: argparse.Namespace, workspace: Workspace, mesh: DeviceMesh, text: Tensor
    ) -> None:
        self.args, self.workspace, self.text, self.steps = args, workspace, text, 0
        torch.manual_seed(args.seed * mesh.size() + mesh.get_local_rank())  # what is cut must not begin alike
        self.gpt = example.GPT(args, workspace).to(workspace.device, workspace.dtype)
        self.cut = example.cut_dimensions(self.gpt)
        example.start_alike(self.gpt, self.cut)
        if name == "async-tp":
            import torch.distributed._symmetric_memory as symm_mem

            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer torch needs it no more
                symm_mem.enable_symm_mem_for_group(mesh.get_group().group_name)
        if name != "ours":
            ways: dict[str, dict[str, Any] | None] = {
                "collectives": None, "compiled": {}, "async-tp": {"options": {"_micro_pipeline_tp": True}}
            }  # fmt: skip
            on_collectives(self.gpt, mesh, ways[name])
        by_kind: dict[bool, list[nn.Parameter]] = {}
        for parameter in self.gpt.parameters():
            by_kind.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        self.optimizers = [torch.optim.AdamW(kind, lr=args.learning_rate) for kind in by_kind.values()]

    def step(self) -> Tensor:
        """Train one step: this rank's part of the mean loss of all tokens."""
        args, rank, ranks = self.args, self.workspace.rank, self.workspace.world_size
        self.steps += 1
        sequences = example.windows(self.text, args, self.steps)
        inputs, targets = (shard_sequence(part, rank, ranks).to(self.workspace.device) for part in sequences)
        scores = self.gpt(inputs).float().flatten(0, 1)
        rows = args.batch_size * args.sequence_length
        loss = nn.functional.cross_entropy(scores, targets.flatten(), reduction="sum") / rows
        (loss + args.balance * self.gpt.balance_loss() / ranks).backward()
        example.sum_gradients(self.gpt, self.cut)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def losses(self, count: int) -> list[float]:
        """The mean losses of the next steps. Collective."""
        found = torch.stack([self.step() for _ in range(count)])
        distributed.all_reduce(found)
        return [float(loss) for loss in found]

    def fused(self) -> int:
        """How many of torch's fused operators a step calls."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.step()
        return sum(entry.count for entry in profile.key_averages() if entry.key in FUSED)


class Line(NamedTuple):
    """What came of a variant.

    Attributes:
        name: which.
        step_s: seconds of a step, NaN where there is none.
        losses: of its first steps.
        note: what there is to say.
    """

    name: str
    step_s: float
    losses: list[float]
    note: str


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks. Collective."""
    one = torch.tensor([value], dtype=torch.float64, device=device)
    distributed.all_reduce(one, op=distributed.ReduceOp.MAX)
    return float(one)


def attempt(make: Callable[[], Any], device: torch.device) -> tuple[Any, str]:
    """What a call gives, or why it fails on any rank. Collective."""
    made, note = None, ""
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - a variant may fail in any way; its line says how
        note = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
    if largest(float(bool(note)), device):
        return None, note or "failed on another rank"
    return made, ""


def timed(training: Training, steps: int, device: torch.device) -> float:
    """Seconds a step, of the slower rank: steps one after another from an idle device and a meeting. Collective."""
    largest(0.0, device)
    began = time.perf_counter()
    for _ in range(steps):
        training.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return largest((time.perf_counter() - began) / steps, device)


def prepared(
    name: str, args: argparse.Namespace, workspace: Workspace, mesh: DeviceMesh, text: Tensor
) -> tuple[Training, list[float]]:
    """A variant that has trained its first steps, and their losses; its operators have found their ways. Collective."""
    training = Training(name, args, workspace, mesh, text)
    losses = training.losses(args.loss_steps)
    if name == "ours" and workspace.device.type == "cuda":
        settle(training.step, workspace)
    return training, losses


def measure(args: argparse.Namespace, device: torch.device) -> list[Line]:
    """Prepare the variants one after another, then train them in turn. Collective."""
    began = time.monotonic()
    ranks = distributed.get_world_size()
    kv_size = args.width // args.heads * args.kv_heads
    workspace = Workspace(
        max_rows=args.batch_size * args.sequence_length, max_gather_cols=max(args.width, 2 * kv_size),
        max_scatter_cols=args.width, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        deadline_s=args.deadline, device=device,
    )  # fmt: skip
    mesh, text = init_device_mesh(device.type, (ranks,)), example.read_standard_library()
    ready: dict[str, Training] = {}
    lines: dict[str, Line] = {}
    for name in args.variants.split(","):
        late = largest(time.monotonic() - began, device) > args.budget_s
        note = f"left out (budget of {args.budget_s:g} s)" if late else ""
        if name in NEEDS_GPU and device.type != "cuda":
            note = "it needs a GPU"
        made = None
        if not note:
            made, note = attempt(partial(prepared, name, args, workspace, mesh, text), device)
        if made is not None:
            ready[name] = made[0]
            note = f"{made[0].fused()} fused operators a step" if name == "async-tp" else ""
        lines[name] = Line(name, math.nan, made[1] if made is not None else [], note)
    taken: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for turn in range(1 + args.rounds):
        if turn > 1 and largest(time.monotonic() - began, device) > args.budget_s:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(timed(ready[name], args.steps, device))
    for name, times in taken.items():
        lines[name] = lines[name]._replace(step_s=median(times[1:] or times))
    workspace.check()
    workspace.close()
    return list(lines.values())


def judged(lines: list[Line]) -> list[Line]:
    """The lines with what is wrong with their losses: the first variant's are what the others' must be."""
    first = next((line.losses for line in lines if line.losses), [])
    found = []
    for line in lines:
        gaps = [abs(one - other) for one, other in zip(line.losses, first, strict=False)]  # none where it did not run
        far = [gap for gap in gaps if not gap < NOISE]  # written so that NaN is far
        wrong = f"wrong: losses {far[0]:.3f} away" if far else ""
        found.append(line._replace(note="; ".join(filter(None, (line.note, wrong)))))
    return found


def table(args: argparse.Namespace, lines: list[Line]) -> list[str]:
    """The lines as text, tokens a second over all ranks, beside the fastest of torch's variants."""
    tokens = args.batch_size * args.sequence_length
    torch_s = min((line.step_s for line in lines if line.name != "ours" and line.step_s > 0), default=math.nan)
    sizes = (
        f"layers {args.layers}, width {args.width}, heads {args.heads} of which keys {args.kv_heads}, experts "
        f"{args.experts} top {args.top_k}, {args.batch_size} sequences of {args.sequence_length} tokens"
    )
    said = [
        sizes,
        f"{'variant':<14}{'ms/step':>10}{'tokens/s':>12}{'over torch':>12}{'loss 1':>9}{'last':>9}  note",
    ]
    for line in lines:
        ends = f"{line.losses[0]:>9.3f}{line.losses[-1]:>9.3f}" if line.losses else f"{'-':>9}{'-':>9}"
        said.append(
            f"{line.name:<14}{line.step_s * 1e3:>10.3f}{tokens / line.step_s:>12.0f}{torch_s / line.step_s:>12.3f}"
            f"{ends}  {line.note}".rstrip()
        )
    return said


def main() -> int:
    """One rank: 0 when all went well, 1 when a variant failed or was wrong, 2 for a request that makes no sense."""
    args = parse_arguments()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    wrong = complaint(args, ranks)
    if wrong is None and "RANK" not in os.environ:
        wrong = "no ranks: start it with torchrun --nproc-per-node GPUS examples/bench_moe_gpt.py"
    if wrong is not None:
        if rank == 0:
            print(wrong, file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # several ranks share the cores of a small machine
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    lines = judged(measure(args, device))
    if rank == 0:
        said = [*facts("examples/bench_moe_gpt.py " + " ".join(sys.argv[1:]), ranks).lines(), *table(args, lines)]
        print("\n".join(said), flush=True)
        if args.out is not None:
            args.out.write_text("\n".join(said) + "\n", encoding="utf-8")
    distributed.destroy_process_group()
    return int(any(word in line.note for line in lines for word in ("wrong", "failed")))


if __name__ == "__main__":
    sys.exit(main())
