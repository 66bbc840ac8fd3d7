# SPDX-License-Identifier: Apache-2.0
"""What takes the place of the peers when one rank's kernel runs alone on a GPU.

All ranks share the GPU and lend their memory; only rank 0 runs. In an all-gather its peers' rows lie in its buffer from
the start, and a `Conductor`, on the stream on which this rank would copy, raises their flags by the timetable of
`gather_schedule`. In a reduce-scatter every rank does the same at the same time: when rank 0 sends a tile to rank s,
rank -s sends it the same tile of its own. So in a `mirror` what rank 0 announces to s raises its own flag of -s.

What is left out: the bytes that arrive and leave meanwhile (8 % of what memory can do; a scatter's are written to
memory at least), ranks that begin at different times, GPUs of one host that share its power and heat.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from megascale_kernels import Workspace
from megascale_kernels.autotune.handout import from_rank_zero
from megascale_kernels.bench.ranks import environments, free_port, place, wait
from megascale_kernels.bench.report import Report
from megascale_kernels.bench.request import UserError, shapes_of
from megascale_kernels.bench.shapes import ROWS, SCALES, Shape
from megascale_kernels.device.layout import SIGNATURE_BITS, SLOTS
from megascale_kernels.device.signals import now_ns
from megascale_kernels.planning.gather_schedule import COPY_S, LINK_BYTES_PER_S
from torch import Tensor

# The package's names of these modules are the operators': functions.
gather = importlib.import_module("megascale_kernels.ag_gemm.launch")
scatter = importlib.import_module("megascale_kernels.gemm_rs.launch")
Group = dist.ProcessGroup
DEADLINE_S = 900.0  # for all of it
SOON_NS = 1500  # a flag is up so long after the kernel before it on the stream has ended
TILE_ROWS = 128  # of every configuration that is rehearsed


class Arrival(NamedTuple):
    """One unit of a peer's rows: whose, which, when it is there (seconds from the beginning)."""

    source: int
    unit: int
    time_s: float


def timetable(m_shard: int, unit_rows: int, row_bytes: int, ranks: int) -> Iterator[Arrival]:
    """When each unit reaches rank 0: one copy after the other, the next rank's first."""
    copies, rows = 0, 0
    for source in range(1, ranks):
        for unit, first in enumerate(range(0, m_shard, unit_rows)):
            copies += 1
            rows += min(unit_rows, m_shard - first)
            yield Arrival(source, unit, copies * COPY_S + rows * row_bytes / LINK_BYTES_PER_S)


@triton.jit(do_not_specialize=("offset_ns",))
def pace(begun_ptr, offset_ns, BEGINS: tl.constexpr):
    """Note the time, or wait until so many nanoseconds after it."""
    begun_ns = now_ns()
    if BEGINS:
        tl.store(begun_ptr, begun_ns)
    else:
        begun_ns = tl.load(begun_ptr)
    while now_ns() - begun_ns < offset_ns:
        pass


class Conductor:
    """Takes the place of `push_by_copy_engine`: nothing is copied, flags come up in time."""

    def __init__(self) -> None:
        self.begun = torch.zeros(1, dtype=torch.int64, device="cuda")

    def __call__(
        self, x: Tensor, workspace: Workspace, slot: int, unit_rows: int, announce: int, pitch: int | None = None
    ) -> None:
        """Queue the flags of this launch."""
        del pitch
        layout, handle = workspace.layout, workspace.handle
        assert handle is not None  # made on a GPU
        stamp = (workspace.launches & 0xFFFFF) << SIGNATURE_BITS | announce
        with workspace.copying():
            pace[(1,)](self.begun, 0, BEGINS=True, num_warps=1)
            row_bytes = x.shape[1] * x.element_size()
            for source, unit, time_s in timetable(x.shape[0], unit_rows, row_bytes, workspace.world_size):
                first = layout.flags(slot) + source * layout.channels
                flags = handle.get_buffer(workspace.rank, [layout.channels], torch.uint32, first)
                pace[(1,)](self.begun, int(time_s * 1e9) - SOON_NS, BEGINS=False, num_warps=1)
                handle.stream_write_value32(flags, unit, stamp)


def mirror(workspace: Workspace) -> Tensor:
    """Addresses of the peers with which rank 0's announcement to s lies where -s would announce to rank 0.

    A kernel also says hello to its peers, at words before the flags: those land on the last flags of another rank,
    which no tile of a shard has.
    """
    ranks, flag_bytes = workspace.world_size, 4 * workspace.layout.channels
    own = int(workspace.peers[0])
    addresses = [own + (ranks - peer) % ranks * flag_bytes for peer in range(ranks)]
    return torch.tensor(addresses, dtype=torch.int64, device=workspace.device)


@contextmanager
def stand_ins(operator: str, workspace: Workspace) -> Iterator[None]:
    """Let rank 0's launches of an operator run without its peers."""
    if workspace.world_size == 1:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(workspace, "meet"))
        # Copies and the peers' addresses are parts of a plan: Triton launches what stands in for them.
        stack.enter_context(mock.patch.object(workspace, "native", None))
        if operator == "ag_gemm":
            stack.enter_context(mock.patch.object(gather, "push_by_copy_engine", Conductor()))
        else:
            stack.enter_context(mock.patch.object(workspace, "peers", mirror(workspace)))
        yield


def tensors(shape: Shape, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """Our rows, the weight, and the rows that every peer has: these lie in our buffer, where they would arrive."""
    m_shard = shape.m // workspace.world_size
    x, peers = (torch.randn(m_shard, shape.k, device="cuda").bfloat16() for _ in range(2))
    w = torch.randn(shape.n, shape.k, device="cuda").mul_(0.02).bfloat16().T
    pitch = -(-m_shard // TILE_ROWS) * TILE_ROWS
    for slot in range(SLOTS if workspace.world_size > 1 else 0):
        workspace.local(slot, (workspace.world_size, pitch, shape.k))[1:, :m_shard].copy_(
            peers.expand(workspace.world_size - 1, -1, -1)
        )
    return x, w, peers


def partials(shape: Shape, workspace: Workspace) -> Tensor:
    """The sum, in fp32, of the peers' partials of our rows: these lie in our buffer, where they would arrive."""
    m_shard, others = shape.m // workspace.world_size, workspace.world_size - 1
    theirs = torch.randn(others, m_shard, shape.n, device="cuda").bfloat16()
    for slot in range(SLOTS if others else 0):
        workspace.local(slot, theirs.shape).copy_(theirs)
    return theirs.float().sum(0)


def parser(about: str, most_ranks: int, fewest_ranks: int) -> argparse.ArgumentParser:
    """The command line of a rehearsal, but for the operator."""
    made = argparse.ArgumentParser(description=about.split("\n", maxsplit=1)[0])
    choices = range(fewest_ranks, most_ranks + 1)
    made.add_argument(
        "--ranks", type=int, default=4, choices=choices, metavar=f"{fewest_ranks}..{most_ranks}",
        help="how many there seem to be; the default is %(default)s",
    )  # fmt: skip
    made.add_argument("--shapes", help="as the benchmark's")
    made.add_argument("--m", default=",".join(map(str, ROWS)), help="rows for the models, comma-separated")
    made.add_argument("--scale", default=",".join(SCALES), help="global: sizes over the ranks; tp8: over eight")
    made.add_argument("--rounds", type=int, default=8, help="how many times each contender is timed per shape")
    made.add_argument("--out", type=Path, help="write the table here too")
    made.set_defaults(soak=None, random=None, seed=None, rows=None)  # needed by the benchmark's readers of them
    return made


def run(script: Path, options: argparse.Namespace, perform: Callable[[list[Shape], Workspace, Group], None]) -> int:
    """Start the ranks, or be one: rank 0 performs, with its own process group; the others only lend their memory."""
    try:
        shapes = shapes_of(options, options.ranks)
    except UserError as error:
        sys.exit(f"{script.name}: {error}")
    if options.rounds < 1:
        sys.exit(f"{script.name}: --rounds {options.rounds}: give 1 or more")
    if not torch.cuda.is_available():
        sys.exit(f"{script.name}: it needs a CUDA GPU, and torch sees none on this machine")
    if "RANK" not in os.environ:
        try:
            Report(options.out, is_speaker=True)
        except OSError as error:
            sys.exit(f"{script.name}: --out: {error}")
        command = [sys.executable, str(script), *sys.argv[1:]]
        ranks = environments(options.ranks, free_port(), dict(os.environ))
        return wait([subprocess.Popen(command, env=environment) for environment in ranks], DEADLINE_S)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(place(rank, options.ranks, 1))
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    solo = dist.new_group([0], backend="nccl")
    columns = max(shape.k if options.operator == "ag_gemm" else shape.n for shape in shapes)
    kind = "max_gather_cols" if options.operator == "ag_gemm" else "max_scatter_cols"
    workspace = Workspace(max_rows=max(shape.m for shape in shapes), deadline_s=5.0, **{kind: columns})
    if rank == 0:
        perform(shapes, workspace, solo)
    from_rank_zero(workspace.group, rank, options.ranks, "done", "end of the rehearsal", deadline_s=DEADLINE_S)
    dist.destroy_process_group()
    return 0
