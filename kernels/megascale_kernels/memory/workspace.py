# SPDX-License-Identifier: Apache-2.0
"""Launches over the memory that ranks share, which is made once and used by all of them.

One symmetric allocation and one rendezvous serve a process group and the largest sizes that will pass. Flags are
never reset and the launch number lives in device memory, so a launch costs no memset, no barrier and no host
synchronisation, and a captured CUDA graph counts on by itself. Two data slots are used in turn: when a rank reuses
a slot, every peer has begun, hence ended its reading of, the launch before the last.

That argument holds for launches in the order in which the host made them. A replayed graph breaks the turn, so a
workspace that was ever captured begins each graph, and each eager launch, with a *barrier* of all ranks.
"""

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, NoReturn, Self
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.device.layout import LINE, PROGRESS_WORDS, SIGNATURE_BITS
from megascale_kernels.device.stopwatch import hold_kernel, note_time_kernel
from megascale_kernels.errors import KernelError, Unsupported, WorkspaceTooSmall
from megascale_kernels.launching.native import Launcher, launcher
from megascale_kernels.launching.products import Products
from megascale_kernels.launching.ready import X, ready
from megascale_kernels.memory.agreement import Agreement, members_of
from megascale_kernels.memory.faults import fault_of
from megascale_kernels.memory.gates import Gates
from megascale_kernels.memory.graph_capture import capture_number
from megascale_kernels.memory.planned import Plan, Planned
from megascale_kernels.memory.symmetric_memory import SymmetricMemory, check_device, layout_for
from megascale_kernels.progress.board_format import HOST_WORD, PROGRESS_HEADER
from megascale_kernels.progress.publish import Published, publish

MAKING_S = 300.0  # ranks come to make a workspace up to minutes apart: they load weights
MOST_ELEMENTS = 1 << 46  # of one data slot: two of them in bytes pass the 48 bits of an address

NOTE = {"num_warps": 1, "enable_fp_fusion": True}
MOST_HELD_NS = 2_000_000  # a call is queued in a tenth of it; where the host takes longer, the GPU does not wait

OPERATOR_WORD = PROGRESS_HEADER.index("operator")

# Compiled graphs hold a workspace by its name: a graph's constants are numbers and texts. (torch names groups
# likewise.)
LIVE: "WeakValueDictionary[str, Workspace]" = WeakValueDictionary()
_NUMBERS = itertools.count()


def _stream_of(device: int) -> int:
    """The handle of the current stream; torch's public way to it makes an object first, at ten times the cost."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - see above
    return handle


class Workspace(SymmetricMemory):
    """Symmetric memory for the overlap operators of one process group.

    Args:
        group: the process group (tensor-parallel ranks of one host); None is the default group.
        max_rows: largest M over all ranks (rows of the gathered input, or of the input of a reduce-scatter).
        max_gather_cols: largest row length that is gathered (K of `ag_gemm`), elements; 0 when never used.
        max_scatter_cols: largest row length that is scattered (N of `gemm_rs`), elements; 0 when never used.
        dtype: element type of what is sent.
        deadline_s: how long one wait inside a kernel may take, seconds.
        progress: True keeps the board in device memory, False writes none, a tensor is the caller's own board
            (int32, `layout.PROGRESS_WORDS` words, device memory or mapped host memory; see `progress.map_board`).
        trace: record the times of every tile (see `tracing`).
        adaptive: where the model of an operator's time is not sure, the first calls of a shape try what may be fastest,
            the serial path included, and all ranks keep the fastest. Ways round differently, so two runs may differ in
            the last bits; False, or torch's deterministic mode, leaves the choice to the model.
        device: the device; the current CUDA device by default.

    Raises:
        ValueError: sizes, types or a deadline that make no sense.
        Unsupported: a group that this process is not in, no CUDA, no peer access, more ranks than `layout.MAX_RANKS`.
        RankMismatch: ranks make it with other sizes, of another type or elsewhere.
        TileTimeout: a rank did not come to make it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        max_rows: int,
        max_gather_cols: int = 0,
        max_scatter_cols: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        deadline_s: float = 30.0,
        progress: bool | Tensor = True,
        trace: bool = False,
        adaptive: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise Unsupported("Workspace needs torch.distributed: call init_process_group first")
        own_group = group if group is not None else dist.group.WORLD
        assert own_group is not None  # there is a default group: torch.distributed is initialised
        default = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(own_group, torch.device(default if device is None else device), dtype)
        self.deadline_s = deadline_s
        self.adaptive = adaptive
        self.planned = Planned()
        self._check(max_rows, max_gather_cols, max_scatter_cols)
        self.max_rows, self.max_gather_cols, self.max_scatter_cols = max_rows, max_gather_cols, max_scatter_cols
        self._scratch: Tensor | None = None
        self._gates: Gates | None = None
        self._in_graphs: list[Tensor] = []
        self.captured = False
        self._capture: int | None = None
        self.compiled: set[object] = set()
        self.broken: KernelError | None = None
        self.agreement = Agreement.of_group(self.group)
        self.members = members_of(self.group)
        self._beside: Workspace | None = None
        self.pid = os.getpid()
        self.name = f"workspace-{next(_NUMBERS)}"
        LIVE[self.name] = self
        self._compare()
        cols = max(max_gather_cols, max_scatter_cols)
        self.allocate(layout_for(self.world_size, max_rows, cols, dtype.itemsize))
        self._status = ctypes.c_int32.from_address(self.status.data_ptr())
        self._make_copy_stream()
        self.board = self._own_board(progress)
        self.progress = progress is not False
        self._published: Published | None = None
        if progress is True:
            self._publish()
        self.trace_words = self._trace(enabled=trace)
        self.trace = trace

    # --- making ------------------------------------------------------------------------------------------------

    def _check(self, max_rows: int, max_gather_cols: int, max_scatter_cols: int) -> None:
        self.check_group()
        sizes = (max_rows, max_gather_cols, max_scatter_cols)
        given = (
            f"Workspace(max_rows={max_rows}, max_gather_cols={max_gather_cols}, max_scatter_cols={max_scatter_cols})"
        )
        if not all(isinstance(size, Integral) for size in sizes):
            raise ValueError(f"{given}: sizes are whole numbers")
        if max_rows < 1 or max(max_gather_cols, max_scatter_cols) < 1 or min(sizes) < 0:
            raise ValueError(
                f"{given}: give the largest sizes that will pass; rows and at least one of the columns must be "
                "positive, none negative"
            )
        if max_rows * max(max_gather_cols, max_scatter_cols) > MOST_ELEMENTS:
            raise ValueError(f"{given}: these are sizes of one matrix product, and no machine has so much memory")
        check_device(self.device)
        if not 0 < self.deadline_s <= 2000:  # written so that NaN, which would wait for ever, is refused
            raise ValueError(f"Workspace(deadline_s={self.deadline_s}): a wait may take between 0 and 2000 seconds")
        # On the CPU no kernel runs, so tests and oracles may be more exact.
        exact = (torch.float32, torch.float64) if self.device.type == "cpu" else ()
        if self.dtype not in (torch.bfloat16, torch.float16, *exact):
            raise ValueError(f"Workspace(dtype={self.dtype}): the kernels take bfloat16 and float16")

    def _compare(self) -> None:
        """Compare sizes and dtype with all ranks: a rank finds its peers' words by its own sizes."""
        said = (
            f"Workspace(max_rows={self.max_rows}, max_gather_cols={self.max_gather_cols}, "
            f"max_scatter_cols={self.max_scatter_cols}, dtype={self.dtype}) on {self.device.type}"
        )
        self.agreement.compare(said, MAKING_S, lambda _: None)

    def _make_copy_stream(self) -> None:
        self.native: Launcher | None = None
        self.products: Products | None = None
        if self.device.type != "cuda":
            return
        self.native = launcher()
        if self.native is not None:
            self.products = Products(self.native, self.memory.device, self.dtype)
        self.copy_stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]  # torch gives it no types
            self.device, priority=-1
        )
        self._begun = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._device_index = self.memory.device.index
        for event in (self._begun, self._copied):
            event.record(self.copy_stream)  # it has a handle from its first use on
        self._side = (self.copy_stream.cuda_stream, self._begun.cuda_event, self._copied.cuda_event)

    def _own_board(self, progress: bool | Tensor) -> Tensor:
        if isinstance(progress, Tensor):
            if progress.dtype != torch.int32 or progress.numel() < PROGRESS_WORDS or not progress.is_contiguous():
                raise ValueError(
                    f"Workspace(progress=...): a board is {PROGRESS_WORDS} contiguous int32 words; got "
                    f"{progress.numel()} of {progress.dtype}"
                )
            return progress.view(-1)
        return self.own_board()

    def _publish(self) -> None:
        """Put the board where a supervisor looks for it, where there is one."""
        found = publish(self)
        if found is not None:
            self._published = found
            # Not at exit: a report on how the process ended reads the board then.
            finalize(self, found.close).atexit = False
            if found.words is not None:
                self.board = found.words

    def close(self) -> None:
        """Unpublish the board: this workspace is done with, and is not to be reported as waiting. Idempotent."""
        if self._published is not None:
            self._published.close()
        if self._beside is not None:
            self._beside.close()

    def _trace(self, *, enabled: bool) -> Tensor:
        if not enabled:
            return self.memory[:1]
        from megascale_kernels.device.layout import MAX_CTAS
        from megascale_kernels.device.progress import RING_WORDS

        return torch.zeros(MAX_CTAS * 2 * RING_WORDS, dtype=torch.int32, device=self.device)

    # --- room for a launch ---------------------------------------------------------------------------------------

    def scratch(self, elements: int) -> Tensor:
        """fp32 memory of this rank alone, for the parts of cut tiles; kept and grown, used by one launch at a time.

        It does not come from torch's allocator: what that gives out while a graph is recorded belongs to the graph.
        """
        if self._scratch is None or self._scratch.numel() < elements:
            import torch.distributed._symmetric_memory as symm_mem

            if self._scratch is not None and self.counts_on_device():
                self._in_graphs.append(self._scratch)  # a captured graph goes on writing there
            elif self._scratch is not None:
                torch.cuda.synchronize(self.device)  # launches that are under way write there
            self.planned.plans.clear()  # they would write into the old memory
            self._scratch = symm_mem.empty(elements, dtype=torch.float32, device=self.device)
        return self._scratch

    def need(self, bytes_needed: int, channels: int, what: str) -> None:
        """Refuse a launch that does not fit.

        Raises:
            WorkspaceTooSmall: the message gives the sizes that would fit.
        """
        if bytes_needed > self.layout.data_bytes or channels > self.layout.channels:
            raise WorkspaceTooSmall(
                f"{what} needs {bytes_needed} bytes and {channels} flags, but this workspace was made for "
                f"max_rows={self.max_rows}, max_gather_cols={self.max_gather_cols}, "
                f"max_scatter_cols={self.max_scatter_cols} ({self.layout.data_bytes} bytes, {self.layout.channels} "
                "flags): make it with larger sizes"
            )

    # --- launching ---------------------------------------------------------------------------------------------

    def plan(self, key: object, make: Callable[[], Plan]) -> Plan:
        """What was made for `key`, or is made now (`Planned.get`)."""
        return self.planned.get(key, make)

    def forget_plans(self) -> None:
        """Plan anew, and choose anew: what plans were made of has changed."""
        self.planned = Planned()

    def compile(self, key: object, warm: Callable[[], None]) -> None:
        """Compile on all ranks before any of them waits for a peer; done once for each `key`.

        Args:
            key: what decides the compiled code; the same on all ranks.
            warm: compiles the kernels without launching them.
        """
        if key in self.compiled:
            return
        self.check(synchronize=False)
        warm()
        self.compiled.add(key)
        self.meet(deadline_s=max(600.0, self.deadline_s))

    def next_slot(self) -> int:
        """Raise an earlier fault, and take the next slot; for launches whose number the host knows."""
        if self.broken is not None or self._status.value != 0 or os.getpid() != self.pid:
            self.check(synchronize=False)
        self.slot ^= 1
        self.launches += 1
        return self.slot

    def launch(
        self, made: object, signature: int, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, *, join: bool
    ) -> None:
        """Launch what `launching.ready` made, on the current stream.

        Args:
            made: copies, a kernel, or both.
            signature: of the launch, with whose stamp copies are announced.
            x: the first of the tensors whose addresses differ between calls; copies read it.
            w: the second.
            out: the third.
            bias: the fourth.
            join: the stream waits for the copies behind the kernel, as `join_copies` does.
        """
        bias_address = 0 if bias is None else bias.data_ptr()
        self.launch_at(made, signature, x.data_ptr(), w.data_ptr(), out.data_ptr(), bias_address, join=join)

    def launch_at(self, made: object, signature: int, *addresses: int, join: bool, behind: bool = False) -> None:
        """`launch` with any eight addresses; `behind`: copies that have a gate (`ready`) do not begin by it."""
        assert self.native is not None  # or nothing could have been made
        self.native.launch(
            made, _stream_of(self._device_index), *self._side, self.launches << SIGNATURE_BITS | signature,
            join + 2 * behind, *addresses,
        )  # fmt: skip

    def note_time(self, at: Tensor) -> None:
        """Have the GPU note its clock at `at`, int64, behind what is on the current stream; with `native`."""
        self._launch_simple(note_time_kernel, "at_ptr", at)

    def hold(self) -> int:
        """Let the current stream wait until the host calls `release` with what this returns, `MOST_HELD_NS` at most."""
        if self._gates is None:
            self._gates = Gates.of_host()
        gate = self._gates.close()
        self._launch_simple(hold_kernel, "gate_ptr", self._gates.words[gate : gate + 1], MOST_HELD_NS)
        return gate

    def release(self, gate: int) -> None:
        """Let the stream pass, now that what follows is queued."""
        assert self._gates is not None  # it was closed
        self._gates.open(gate)

    def _launch_simple(self, kernel: Any, pointer: str, at: Tensor, *numbers: int) -> None:  # noqa: ANN401 - Triton's JITFunction, which has no types
        """Launch a kernel of one warp that takes one address and numbers."""
        assert self.native is not None
        native = self.native
        key = (kernel.__name__, numbers)
        made = self.plan(key, lambda: ready(native, kernel, (at, *numbers), NOTE, (1,), {pointer: X}))
        if made is None:
            kernel[(1,)](at, *numbers, **NOTE)
        else:
            self.launch(made, 0, at, at, at, None, join=False)

    def begin(self, key: object, warm: Callable[[], None]) -> int:
        """Prepare a launch: raise an earlier fault, compile on all ranks before any waits, take the next slot.

        Args:
            key: what decides the compiled code; the same on all ranks.
            warm: compiles the kernels without launching them.

        Returns:
            the slot of this launch.
        """
        self.check(synchronize=False)
        capturing = self.is_capturing()
        self.captured |= capturing
        if key not in self.compiled:
            warm()
            self.compiled.add(key)
            self.meet(deadline_s=max(600.0, self.deadline_s))
        elif self.captured and not (capturing and self._met_in_this_capture()):
            self.meet()
        self.slot ^= 1
        self.launches += 1
        return self.slot

    def _met_in_this_capture(self) -> bool:
        """Whether this capture already holds a barrier; a driver without capture ids gets one in each launch."""
        number = capture_number(torch.cuda.current_stream(self.device).cuda_stream)
        met = number is not None and number == self._capture
        self._capture = number
        return met

    def meet(self, deadline_s: float | None = None) -> None:
        """Let every rank arrive here before any goes on (on the stream; the host does not wait)."""
        if self.world_size == 1 or self.device.type != "cuda":
            return
        from megascale_kernels.device.barrier import barrier

        barrier(self, deadline_s or self.deadline_s)

    def beside(self) -> "Workspace":
        """A second workspace, for a gather that runs beside an operator; all ranks make the first call together."""
        if self._beside is None:
            # In a thread of its own: torch may be recording the first backward as a graph, and what the recording
            # thread allocates belongs to the graph.
            with ThreadPoolExecutor(1) as beside:
                self._beside = beside.submit(self._make_beside).result(timeout=2 * MAKING_S)
        return self._beside

    def _make_beside(self) -> "Workspace":
        if self.device.type == "cuda":
            torch.cuda.set_device(self.memory.device)
        return Workspace(
            self.group,
            max_rows=self.max_rows,
            max_gather_cols=max(self.max_gather_cols, self.max_scatter_cols),
            dtype=self.dtype,
            deadline_s=self.deadline_s,
            progress=self.progress,
            adaptive=self.adaptive,
            device=self.device,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """The memory is shared between ranks: a copy of a module uses the same workspace."""
        return self

    def __copy__(self) -> Self:
        """Likewise; two that count the launches of one memory each for itself would take the same slot."""
        return self

    def __reduce__(self) -> NoReturn:
        """The memory and the group live in this process alone.

        Raises:
            TypeError: the message names what to save instead.
        """
        raise TypeError(
            "a Workspace is memory that running ranks share, so it cannot be pickled, nor can a module that holds one: "
            "save its state_dict() and make the module anew where you load it"
        )

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def counts_on_device(self) -> bool:
        """Whether only the device knows the launch number: in a captured graph, and ever after in this workspace."""
        return self.captured or self.is_capturing()

    def announce(self, peer: int, slot: int, channel: int, signature: int) -> None:
        """Write this launch's stamp into a peer's flag, behind what the current stream has done so far."""
        self.write_flag(peer, slot, channel, (self.launches & 0xFFFFF) << SIGNATURE_BITS | signature)

    def copying(self) -> AbstractContextManager[Any]:
        """The stream of the copy engine, behind what the current stream has done so far."""
        if self.device.type != "cuda":
            return nullcontext()
        self._begun.record()
        self.copy_stream.wait_event(self._begun)
        return torch.cuda.stream(self.copy_stream)

    def join_copies(self) -> None:
        """Make the current stream wait for the copies: their source may be reused after that."""
        self._copied.record(self.copy_stream)
        torch.cuda.current_stream().wait_event(self._copied)

    # --- faults ------------------------------------------------------------------------------------------------

    def check(self, *, synchronize: bool = True) -> None:
        """Raise what a kernel of this workspace left behind.

        Args:
            synchronize: wait for the launches so far; without it only what is already known is raised.

        Raises:
            TileTimeout: a wait passed its deadline here or on a peer.
            RankMismatch: a peer ran something else.
            KernelError: this is a forked child of the process that made it; it would take answers meant for it.
        """
        if os.getpid() != self.pid:
            raise KernelError(
                f"rank {self.rank}: process {self.pid} made this workspace, and this is process {os.getpid()}, forked "
                "from it: only the process that joined the group may call the operators"
            )
        if synchronize and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.broken is None and self._status.value != 0:
            self.broken = fault_of(self)
            self.broken.args = (f"{self.broken}{self.agreement.note}",)
        if self.broken is None and self._beside is not None:
            self._beside.check(synchronize=False)
        if self.broken is not None:
            raise self.broken

    def raise_earlier(self) -> None:
        """Raise what is known of an earlier fault, as `check` does: for calls that launch nothing of this workspace."""
        if self.broken is not None or self._status.value != 0 or os.getpid() != self.pid:
            self.check(synchronize=False)
        if self._beside is not None:
            self._beside.raise_earlier()

    def reset(self) -> None:
        """Make a workspace usable again after a fault; every rank of the group must call it.

        Raises:
            RuntimeError: the group itself no longer works (a dead peer): make a new group and a new workspace.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        self.clear()
        self.board[OPERATOR_WORD:HOST_WORD].zero_()  # a rank that launches nothing after this shows no launch
        self.board[LINE.value :].zero_()
        self.broken = None
        self.forget_plans()  # ranks that failed at different calls would decide a contest at different calls
        self.agreement.reset()
        if self._beside is not None:
            self._beside.reset()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
