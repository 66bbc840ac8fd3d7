# SPDX-License-Identifier: Apache-2.0
"""The ways to run a step: torch's tensor and sequence parallelism and ours, eager, compiled and in CUDA graphs.

    torch-eager       parallelize_module with SequenceParallel, ColwiseParallel and RowwiseParallel
    torch-compiled    the same under torch.compile
    torch-async       the same with torch's async TP: inductor puts fused operators over symmetric memory in place
    torch-graph       torch-eager, forward and backward captured in one CUDA graph
    ours-eager        ColumnParallelLinear and RowParallelLinear, a plain RMSNorm
    ours-compiled     the same under torch.compile
    ours-saved        ours-compiled, the gathered input kept for the backward as torch keeps it, not gathered again
    ours-swiglu       ours-saved, with this package's `swiglu` between the layers
    ours-fused        ours-saved, SwiGLU in the row-parallel layer: its gradient is taken inside the product
    ours-gated        ours-saved, both layers as one `GatedMLP`: SwiGLU is taken inside the products, both ways
    ours-cudagraphs   ours-compiled under torch.compile(mode="reduce-overhead")
    ours-graph        ours-eager, forward and backward captured in one CUDA graph
    alone-compiled    the products of one rank by cuBLAS and the pointwise parts under torch.compile, no communication:
                      wrong results, and the time of a way that would hide everything

Compiled variants are compiled block by block, as is usual for equal layers: one block's code serves all. A step ends
with all gradients of this rank finished; those of the norms, which every rank has, are summed over ranks in one
all-reduce, for torch as for ours. There is no optimizer step.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from megascale_kernels.autotune.contest import settle
from megascale_kernels.bench.request import UserError
from megascale_kernels.bench.rows import config_text
from megascale_kernels.bench.training.alone import AloneLinear
from megascale_kernels.bench.training.model import Block, BlockWeights, GatedBlock, Task
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.torch_api.activations import swiglu
from megascale_kernels.torch_api.gated_mlp import GatedMLP
from megascale_kernels.torch_api.layers import ColumnParallelLinear, RowParallelLinear

VARIANTS = (
    "torch-eager", "torch-compiled", "torch-async", "torch-graph",
    "ours-eager", "ours-compiled", "ours-saved", "ours-swiglu", "ours-fused", "ours-gated",
    "ours-cudagraphs", "ours-graph",
    "alone-compiled",
)  # fmt: skip
WARM_STEPS = 3  # before a capture: they compile kernels and make communicators
FUSED = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter")
EPSILON = 1e-5


class Place(NamedTuple):
    """Where variants run.

    Attributes:
        mesh: the ranks.
        workspace: makes a workspace for a task: graphs have their own, since one that was captured begins each eager
            launch with a barrier.
    """

    mesh: DeviceMesh
    workspace: Callable[[Task, str], Workspace]


class Left(NamedTuple):
    """What a step leaves beside the gradients of its leaves.

    Attributes:
        out: [M / W, d].
        norm_gradients: those of all norms, summed over ranks, [blocks, d].
    """

    out: Tensor
    norm_gradients: Tensor


class Step:
    """One forward and backward of a stack of blocks.

    Args:
        stack: the blocks.
        task: its tensors.
        group: the ranks.
        before: called before each step.
    """

    def __init__(
        self, stack: nn.Module, task: Task, group: dist.ProcessGroup, before: Callable[[], object] | None = None
    ) -> None:
        self.stack, self.task, self.group, self.before = stack, task, group, before
        self.x = task.x.detach().requires_grad_()
        self.norms = [parameter for name, parameter in stack.named_parameters() if ".norm." in name]
        self.left: Left | None = None

    def __call__(self) -> None:
        """Run it."""
        self.clear()
        if self.before is not None:
            self.before()
        out = self.stack(self.x)
        out.backward(self.task.gradient)
        gradients = torch.stack([_local(norm.grad) for norm in self.norms])
        if any(_is_partial(norm.grad) for norm in self.norms):
            dist.all_reduce(gradients, group=self.group)
        self.left = Left(out.detach(), gradients)

    def clear(self) -> None:
        """Give back what the last step left."""
        for leaf in (self.x, *self.stack.parameters()):
            leaf.grad = None
        self.left = None

    def results(self) -> dict[str, list[Tensor]]:
        """What the last step left, by kind: output, and the gradients of input, norms, up and down projections."""
        by_kind = {
            kind: [_local(parameter.grad) for name, parameter in self.stack.named_parameters() if f".{kind}." in name]
            for kind in ("up", "down")
        }
        assert self.left is not None  # a step was run
        return {"out": [self.left.out], "x": [_local(self.x.grad)], "norm": [self.left.norm_gradients], **by_kind}


class Prepared(NamedTuple):
    """A variant that is ready to run.

    Attributes:
        run: one step.
        step: where its results are.
        workspace: ours, to be checked after it ran; None for torch's variants.
        note: what the compiler made of it, where that is not told by its name.
    """

    run: Callable[[], object]
    step: Step
    workspace: Workspace | None
    note: str = ""


def prepare(name: str, task: Task, place: Place) -> Prepared:
    """Build a variant and run it until it is warm. Collective; any error means that the variant does not work here.

    Raises:
        UserError: it needs a GPU.
    """
    whose, _, how = name.partition("-")
    group = place.mesh.get_group()
    if how != "eager" and task.x.device.type != "cuda":
        raise UserError("it needs a CUDA GPU")
    workspace = None
    if whose == "torch":
        blocks: list[nn.Module] = [_torch_block(weights, task, place.mesh) for weights in task.weights]
    elif whose == "alone":
        blocks = [*_alone_blocks(task, place.mesh.size())]
    else:
        workspace = place.workspace(task, how)
        blocks = [_our_block(weights, task, workspace, how) for weights in task.weights]
    for block in blocks:
        _compile(block, how, group)
    mark = torch.compiler.cudagraph_mark_step_begin if how == "cudagraphs" else None
    step = Step(nn.Sequential(*blocks), task, group, mark)
    if workspace is not None:
        settle(step, workspace)  # the operators' first calls of a shape find out how it runs
    if how == "graph":
        return Prepared(_captured(step), step, workspace, "" if workspace is None else ways(workspace))
    skipped = _skipped()
    for _ in range(WARM_STEPS if how == "cudagraphs" else 1):  # that one warms up, records, and replays
        step()
    note = "" if workspace is None else ways(workspace)
    if how == "async":
        note = f"{_fused(step)} fused operators a step"
    elif how == "cudagraphs" and _skipped() > skipped:
        note += f"; torch made no CUDA graph of {_skipped() - skipped} of its graphs"
    return Prepared(step, step, workspace, note)


def ways(workspace: Workspace) -> str:
    """How the operators of a workspace run, as contests have found it: two runs may differ in that."""
    told = []
    for key, held in workspace.planned.contests.items():
        if held is not None:
            config = config_text(held.best if not key.behind or held.best is None else held.best.config)
            fused = bool(key.behind) and held.best is not None and held.best.is_fused
            behind = f", {key.behind} {'fused' if fused else 'apart'}" if key.behind else ""
            told.append(f"{key.call.operator} {key.call.m}x{key.call.n}x{key.call.k}: {config}{behind}")
    return "; ".join(sorted(told))


def _skipped() -> int:
    """How many compiled graphs torch has run without a CUDA graph, though it was asked to make one."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def _fused(step: Step) -> int:
    """How many of torch's fused operators a step calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(entry.count for entry in profile.key_averages() if entry.key in FUSED)


def _compile(block: nn.Module, how: str, group: dist.ProcessGroup) -> None:
    ways: dict[str, dict[str, Any]] = {
        "compiled": {}, "saved": {}, "swiglu": {}, "fused": {}, "gated": {},
        "async": {"options": {"_micro_pipeline_tp": True}},
        "cudagraphs": {"mode": "reduce-overhead"},
    }  # fmt: skip
    if how not in ways:
        return
    if how == "async":
        import torch.distributed._symmetric_memory as symm_mem

        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer torch needs it no more
            symm_mem.enable_symm_mem_for_group(group.group_name)
    block.compile(dynamic=False, **ways[how])


def _captured(step: Step) -> Callable[[], object]:
    """Forward and backward in a CUDA graph; its replay."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    step.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL looks at its events meanwhile
        step()
    graph.replay()
    return graph.replay


def _torch_block(weights: BlockWeights, task: Task, mesh: DeviceMesh) -> Block:
    with torch.device("meta"):
        norm = nn.RMSNorm(task.hidden, EPSILON)
        up = nn.Linear(task.hidden, weights.up.shape[0] * mesh.size(), bias=False)
        down = nn.Linear(task.inner, task.hidden, bias=False)
    norm.weight = nn.Parameter(weights.norm)
    up.weight = _sharded(weights.up, mesh, Shard(0))
    down.weight = _sharded(weights.down, mesh, Shard(1))
    block = Block(norm, up, down, task.activation)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(block, mesh, plan)
    return block


def _alone_blocks(task: Task, world_size: int) -> list[Block]:
    elsewhere = task.x.repeat(world_size, 1)
    blocks = []
    for weights in task.weights:
        with torch.device("meta"):
            norm = nn.RMSNorm(task.hidden, EPSILON)
        norm.weight = nn.Parameter(weights.norm)
        up = AloneLinear(weights.up, elsewhere, world_size, gathers=True)
        down = AloneLinear(weights.down, elsewhere, world_size, gathers=False)
        blocks.append(Block(norm, up, down, task.activation))
    return blocks


def _our_block(weights: BlockWeights, task: Task, workspace: Workspace, how: str) -> nn.Module:
    save = how in ("saved", "swiglu", "fused", "gated")
    fused = how == "fused" and task.activation == "swiglu"
    with torch.device("meta"):
        norm = nn.RMSNorm(task.hidden, EPSILON)
    if how == "gated" and task.activation == "swiglu":
        mlp = GatedMLP(task.hidden, task.inner, workspace, bias=False, save_gathered=save, device="meta")
        for layer, weight in ((norm, weights.norm), (mlp.up, weights.up), (mlp.down, weights.down)):
            layer.weight = nn.Parameter(weight)
        return GatedBlock(norm, mlp)
    wide = weights.up.shape[0] * workspace.world_size
    up = ColumnParallelLinear(task.hidden, wide, workspace, bias=False, save_gathered=save, device="meta")
    down = RowParallelLinear(task.inner, task.hidden, workspace, bias=False, gated=fused, device="meta")
    for layer, weight in ((norm, weights.norm), (up, weights.up), (down, weights.down)):
        layer.weight = nn.Parameter(weight)
    between = {"swiglu": swiglu, "fused": _nothing if fused else None}.get(how)
    return Block(norm, up, down, task.activation, between)


def _nothing(wide: Tensor) -> Tensor:
    """What lies between the layers where the second has SwiGLU in it."""
    return wide


def _sharded(local: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # every parameter takes part in the step
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_partial(gradient: Tensor | None) -> bool:
    """Whether a norm's gradient is that of this rank's rows alone."""
    return not isinstance(gradient, DTensor) or any(isinstance(one, Partial) for one in gradient.placements)
