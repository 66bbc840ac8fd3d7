# SPDX-License-Identifier: Apache-2.0
"""The operators' own launchers on emulated ranks: what they would put on streams goes to the emulator.

    ranks = EmulatedRanks(4, torch.bfloat16, seed=7)
    outs = ranks.call(lambda workspace: gemm_rs(workspace, ...))   # the host's part, once per rank
    ranks.run()                                                    # the kernels of all ranks at the same time

`ag_gemm.launch` and its kind run unchanged, so sizes, offsets and the order of arguments are tested too. Only what
needs a device is replaced: a kernel's launch and a copy are noted, the number of multiprocessors is a number we pass,
and the driver's write into a flag is a kernel of one line with the same memory barrier.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from megascale_kernels.device.layout import layout
from megascale_kernels.device.progress import RING_WORDS
from megascale_kernels.emulate import Call, Host, Launch, World, copy
from megascale_kernels.errors import WorkspaceTooSmall
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Result = TypeVar("_Result")


def emulated_threads() -> set[threading.Thread]:
    """Return the threads of emulated programs that live; a process has others, which other tests may have begun."""
    return {thread for thread in threading.enumerate() if thread.name.endswith("(_live)")}


KERNELS = (
    ("ag_gemm.launch", "ag_gemm_kernel"),
    ("ag_gemm.push", "announce_kernel"),
    ("ag_gemm.decomposed", "await_shards_kernel"),
    ("gemm_rs.launch", "gemm_rs_kernel"),
    ("gemm_ar", "gemm_ar_kernel"),
    ("ag_gemm.all_gather", "all_gather_kernel"),
    ("gemm_rs.decomposed", "add_partials_kernel"),
    ("gemm_rs.decomposed", "announce_kernel"),
    ("device.barrier", "barrier_kernel"),
    ("moe.launch", "route_kernel"),
    ("moe.plain_launch", "dispatch_kernel"),
    ("moe.plain_launch", "combine_kernel"),
    ("moe.layer_steps", "announce_kernel"),
    ("moe.gradient_launch", "take_rows_kernel"),
    ("moe.gradient_launch", "gather_kernel"),
    ("moe.gradient_launch", "swiglu_backward_kernel"),
    ("moe.gradient_launch", "gates_kernel"),
    ("moe.gradient_launch", "weight_gradient_kernel"),
    ("attention.launch", "attention_kernel"),
    ("attention.launch", "announce_kernel"),
    ("attention.backward_launch", "key_gradients_kernel"),
    ("attention.backward_launch", "query_gradients_kernel"),
    ("attention.backward_launch", "row_sums_kernel"),
    ("attention.partial_sums", "sum_partials_kernel"),
    ("attention.partial_sums", "announce_kernel"),
)
PRODUCTS = ("ag_gemm.decomposed", "gemm_rs.decomposed")  # whose products are cuBLAS's, `matmul_into`
MOST_PAIRS = 16  # that a routing program looks at together: few, so that small blocks take several turns
PUSH_COLS = 128  # elements a pushing CTA moves at once: few, so that small shards take several turns


ADD_BLOCK = 128  # elements of a sum that a CTA adds at once, likewise


@triton.jit
def stream_write(flag_ptr, stamp) -> None:  # noqa: ANN001 (Triton infers types)
    """What the driver's write of a stream does: a barrier for all before it on the stream, then the word."""
    tl.atomic_xchg(flag_ptr, stamp, sem="release", scope="sys")


class EmulatedWorkspace:
    """What launchers ask of a `Workspace`, over a world of the emulator."""

    def __init__(self, ranks: "EmulatedRanks", rank: int) -> None:
        world = ranks.world
        self.layout = world.layout
        self.memory, self.peers, self.status = world.words[rank], world.peers[rank], world.status[rank]
        self.board = world.board(rank)
        self.rank, self.world_size = rank, world.world_size
        self.deadline_s = world.deadline_us / 1e6
        self.dtype = ranks.dtype
        self.progress, self.trace = True, ranks.trace
        self.trace_words = torch.zeros(2 * ranks.ctas * RING_WORDS if ranks.trace else 1, dtype=torch.int32)
        self.slot = self.launches = 0
        self._ranks = ranks
        self.native = self.products = None  # the emulator launches
        self.device = torch.device("cpu")

    def plan(self, _key: object, make: Callable[[], Any]) -> Any:  # noqa: ANN401 (whatever is planned)
        """Plan each launch anew: a plan keeps nothing that a test could not change."""
        return make()

    def compile(self, _key: object, _warm: Callable[[], None]) -> None:
        """Nothing is compiled."""

    def need(self, bytes_needed: int, channels: int, what: str) -> None:
        """Refuse what does not fit."""
        if bytes_needed > self.layout.data_bytes or channels > self.layout.channels:
            raise WorkspaceTooSmall(what)

    def begin(self, _key: object, _warm: Callable[[], None]) -> int:
        """Take the next slot, or always the same one."""
        self.slot = (self.slot + 1) % self._ranks.slots
        self.launches += 1
        return self.slot

    def is_capturing(self) -> bool:
        """Nothing is captured without a GPU."""
        return False

    def counts_on_device(self) -> bool:
        """As if graphs had been captured."""
        return self._ranks.counted

    def local(self, slot: int, shape: Sequence[int]) -> Tensor:
        """This rank's data slot."""
        return self.peer(self.rank, slot, shape)

    def peer(self, rank: int, slot: int, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A rank's data slot."""
        return self._ranks.world.data(rank, slot, shape, self.dtype, offset)

    def announce(self, peer: int, slot: int, channel: int, signature: int) -> None:
        """Write this launch's stamp into a peer's flag, behind what the stream has done so far."""
        flag = self.layout.flags(slot) + self.rank * self.layout.channels + channel
        words = self._ranks.world.words[peer][flag : flag + 1]
        self._ranks.put(Launch(self.rank, stream_write, 1, (words, self.launches << 12 | signature)))

    def copying(self) -> AbstractContextManager[None]:
        """The copy stream, behind what the compute stream has done so far."""
        return self._ranks.on_stream("copy", after="compute")

    def join_copies(self) -> None:
        """The compute stream waits for the copies."""
        self._ranks.put(Call(self.rank, lambda _: None, "join", "compute", ("copy",)))


class EmulatedRanks:
    """Several ranks, each with a workspace, whose launches and copies run when `run` is called.

    Args:
        world_size: how many.
        dtype: of what they send.
        data_bytes: of a data slot.
        channels: flags per source rank.
        ctas: multiprocessors of each rank.
        slots: data slots taken in turn; 1 is a fault.
        counted: the device counts the launches, as with CUDA graphs.
        trace: record the times of tiles.
        options: of the `World` (seed, schedule, stragglers, drop...).
    """

    def __init__(
        self,
        world_size: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        data_bytes: int = 1 << 16,
        channels: int = 32,
        ctas: int = 3,
        slots: int = 2,
        counted: bool = False,
        trace: bool = False,
        **options: Any,  # noqa: ANN401 (passed on)
    ) -> None:
        self.world = World(layout(world_size, channels, data_bytes), **options)
        self.dtype, self.ctas, self.slots, self.counted, self.trace = dtype, ctas, slots, counted, trace
        self.workspaces: list[Any] = [EmulatedWorkspace(self, rank) for rank in range(world_size)]
        self._operations: list[Launch | Call] = []
        self._stream, self._after, self._rank = "compute", "", 0

    def call(self, host: Callable[[Any], _Result], ranks: Sequence[int] | None = None) -> list[_Result]:
        """Let each rank's host make a call with its workspace; what each returned."""
        results = []
        for rank in range(len(self.workspaces)) if ranks is None else ranks:
            self._rank = rank
            with self._noting():
                results.append(host(self.workspaces[rank]))
        return results

    def run(self) -> None:
        """Run what was called so far, on all ranks at the same time."""
        operations, self._operations = self._operations, []
        self.world.launch(operations)

    def called(self, rank: int) -> list[str]:
        """The names of what a rank's host has called and `run` has not run yet, in that order."""
        return [operation.name for operation in self._operations if operation.rank == rank]

    def faults(self) -> list[dict[str, int]]:
        """Every rank's fault record; empty ones where there is none."""
        return [self.world.fault(rank) for rank in range(len(self.workspaces))]

    def put(self, operation: Launch | Call) -> None:
        """Put an operation on the running stream."""
        if operation.stream != "compute" or self._stream != "compute":
            operation = operation._replace(stream=self._stream, after=(self._after,) if self._after else ())
            self._after = ""
        self._operations.append(operation)

    @contextmanager
    def on_stream(self, stream: str, after: str) -> Iterator[None]:
        """Put operations on another stream, the first one behind all on a second stream."""
        self._stream, self._after = stream, after
        try:
            yield
        finally:
            self._stream, self._after = "compute", ""

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name in KERNELS:
                place = import_module(f"megascale_kernels.{module}")
                stack.enter_context(patch.object(place, name, _Noted(self, getattr(place, name))))
                if hasattr(place, "processors"):
                    stack.enter_context(patch.object(place, "processors", lambda _: self.ctas))
            for module in PRODUCTS:
                place = import_module(f"megascale_kernels.{module}")
                stack.enter_context(patch.object(place, "matmul_into", self._multiply))
            place = import_module("megascale_kernels.gemm_rs.decomposed")
            stack.enter_context(patch.object(place, "BLOCK", ADD_BLOCK))
            place = import_module("megascale_kernels.ag_gemm.launch")
            stack.enter_context(patch.object(place, "PUSH_COLS", PUSH_COLS))
            place = import_module("megascale_kernels.moe.launch")
            stack.enter_context(patch.object(place, "MOST_PAIRS", MOST_PAIRS))
            stack.enter_context(_NotedCopies(self))
            yield

    def _multiply(self, out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
        """A product of cuBLAS's on the running stream: it reads its operands, then writes all of its output."""

        def product(host: Host) -> None:
            given = [host.read(tensor) for tensor in (x, w)]
            result = torch.mm(*given) if bias is None else torch.addmm(host.read(bias), *given)
            host.write(out, result)

        self.put(Call(self.rank, product, "cublas", "compute"))

    @property
    def rank(self) -> int:
        """The rank whose host is calling."""
        return self._rank


class _Noted:
    """Stands where a kernel stood: a launch is put on the stream of the rank that calls."""

    def __init__(self, ranks: EmulatedRanks, kernel: Any) -> None:  # noqa: ANN401 (Triton has no types)
        self._ranks, self._kernel = ranks, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """As of a jit function: what launches it on a grid."""

        def launch(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (a kernel's arguments)
            self._ranks.put(Launch(self._ranks.rank, self._kernel, grid, args, kwargs))

        return launch


class _NotedCopies(TorchFunctionMode):
    """Tensor.copy_ becomes a copy on the stream of the rank that calls."""

    def __init__(self, ranks: EmulatedRanks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Called for every function of torch."""
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        self._ranks.put(copy(self._ranks.rank, args[0], args[1]))
        return args[0]
