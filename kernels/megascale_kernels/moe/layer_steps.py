# SPDX-License-Identifier: Apache-2.0
"""One launch of a MoE layer after the other: what forward and backward share of preparing and making them.

A *step* is one launch of the workspace. All that stays the same is prepared once; a call hands over the addresses of
up to five tensors. A step that *moves* has its first tensor, tokens of this rank, copied to all peers by copy engine,
in units with a flag each, while its kernel runs.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import MAX_CTAS, MET, SLOTS, signature
from megascale_kernels.device.primitives import rank_copy_data
from megascale_kernels.launching.native import Launcher
from megascale_kernels.launching.ready import Copy, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.kernels.dispatch_kernel import BY_DEVICE, BY_HOST, TELLING
from megascale_kernels.moe.kernels.walk import UNITS
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Sizes

IDS = 4  # which of a call's tensors the experts of tokens are, behind those that `ready` names


def _compiled_before() -> None:
    """Do nothing: a launch compiles its kernels when it is made."""


class Step:
    """One launch: its kernel with everything that stays the same.

    Args:
        kernel: the jit function.
        grid: programs, at most `layout.MAX_CTAS` where they talk to ranks.
        operator: index into `layout.OPERATORS`; 0 for a kernel that talks to no rank.
        stamp: the signature that two ranks must agree on.
        constants: compile-time arguments and options.
        sources: which of a call's tensors a parameter's address is.
        arguments: run-time arguments by slot and `counted`.
        moves: the first tensor is copied to all peers.
        fills: its programs may leave no room on the device for a kernel that announces a copy.
        opens: it tells the copy stream when the next launch's copies may begin (`routing.let_copies_begin`).
        early: where the step before it opens, its copies begin then, and it ends behind them itself
            (`dispatch_kernel.await_own_copies`), so that nothing stands between it and its neighbours on the stream.
        remake: the same step for other tensors.
    """

    def __init__(
        self, kernel: Any, grid: int, operator: int, stamp: int, constants: dict[str, Any], sources: dict[str, int],  # noqa: ANN401 - Triton's
        arguments: Callable[[int, int], tuple[Any, ...]], remake: "Callable[..., Step]", *, moves: bool = False,
        fills: bool = False, opens: bool = False, early: bool = False,
    ) -> None:  # fmt: skip
        assert operator == 0 or grid <= MAX_CTAS  # each program that talks to ranks has a line of the board
        self.kernel, self.grid, self.operator, self.stamp = kernel, grid, operator, stamp
        self.moves, self.fills, self.opens, self.early = moves, fills, opens, early
        self.constants, self.sources, self.remake = constants, sources, remake
        self.arguments: Callable[[int, int], tuple[Any, ...]] | None = arguments
        self.ready: list[Any] = [None] * SLOTS


class Steps:
    """What all steps of one layer, size and number of tokens share.

    Args:
        sizes: what all ranks agree on.
        tokens: of this rank.
        workspace: whose launches they are.
        config: how to run, `MoeConfig.resolved`.
    """

    def __init__(self, sizes: Sizes, tokens: int, workspace: Workspace, config: MoeConfig) -> None:
        self.sizes, self.tokens, self.workspace, self.config = sizes, tokens, workspace, config
        self.unit_tokens = -(-sizes.pitch // config.units)
        self.key: object = None
        self.opened = -1  # the last launch that opened

    @property
    def chosen(self) -> dict[str, int]:
        """Where a step that carries tokens finds their experts among a call's tensors, if it looks at them."""
        return {"ids_ptr": IDS} if self.config.selective else {}

    @property
    def variant(self) -> int:
        """What flags and tables depend on besides sizes, as a number."""
        return self.config.code + 101 * self.sizes.top_k + 40009 * self.sizes.experts + 50021 * self.sizes.shards

    def stamp(self, operator: int) -> int:
        """The signature of one of the steps."""
        sizes = self.sizes
        return signature(operator, sizes.pitch, sizes.hidden, sizes.inner, self.variant)

    def channel(self, slot: int, operator: int) -> tuple[Any, ...]:
        """What a step's kernel opens its channel with."""
        return channel_arguments(self.workspace, slot, self.stamp(operator))

    def room_for_tokens(self, what: str) -> None:
        """Refuse tokens that do not fit.

        Raises:
            WorkspaceTooSmall: the message gives the sizes that would.
        """
        sizes = self.sizes
        tokens = sizes.world_size * sizes.pitch * sizes.hidden * self.workspace.dtype.itemsize
        self.workspace.need(tokens, 1 + self.config.units, what)

    def prepare(self, key: object, steps: tuple[Step, ...], element_bytes: int) -> None:
        """Compile on all ranks, and lay the launches out."""
        self.key = key
        self.workspace.compile(key, lambda: self._warm(steps))
        native = self.workspace.native
        for step in steps:
            if native is not None:
                step.ready = [self._laid(native, step, slot, element_bytes) for slot in range(SLOTS)]
            step.arguments = None  # no caller's memory is kept

    def _laid(self, native: Launcher, step: Step, slot: int, element_bytes: int) -> object | None:
        assert step.arguments is not None  # nobody has taken them
        arguments = step.arguments(slot, TELLING.value if step.early else BY_HOST.value)
        workspace = self.workspace
        gate = workspace.addresses[workspace.rank] + 4 * MET.value if step.early else 0
        told = workspace.flag_address(workspace.rank, slot, UNITS.value) if step.early else 0
        return ready(
            native, step.kernel, arguments, step.constants, (step.grid,), step.sources,
            self._copies(slot, element_bytes) if step.moves else [],
            follows=bool(step.constants.get("FOLLOWS")), gate=gate, told=told,
        )  # fmt: skip

    def _warm(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            assert step.arguments is not None  # it is compiled before it is laid out
            for slot in range(SLOTS):
                step.kernel.warmup(*step.arguments(slot, 0), grid=(step.grid,), **step.constants)
            for last in (False, True) if step.moves else ():
                announce_kernel.warmup(
                    *self.channel(0, step.operator), 0, 0, LAST=last, OPERATOR=step.operator,
                    PROGRESS=self.workspace.progress, TRACE=False, num_warps=1, enable_fp_fusion=True, grid=(1,),
                )  # fmt: skip

    # --- copies --------------------------------------------------------------------------------------------------

    def _units(self) -> list[tuple[int, int, int]]:
        """(peer, first token, tokens) of every unit, the nearest reader first; a unit may have none."""
        workspace = self.workspace
        units = []
        for step in range(1, workspace.world_size):
            peer = (workspace.rank - step) % workspace.world_size
            for unit in range(self.config.units):
                first = min(unit * self.unit_tokens, self.tokens)
                units.append((peer, first, min(self.unit_tokens, self.tokens - first)))
        return units

    def _copies(self, slot: int, element_bytes: int) -> list[Copy]:
        workspace, row_bytes = self.workspace, self.sizes.hidden * element_bytes
        return [
            (
                first * row_bytes,
                count * row_bytes,
                workspace.data_address(peer, slot) + (workspace.rank * self.sizes.pitch + first) * row_bytes,
                workspace.flag_address(peer, slot, UNITS.value + index % self.config.units),
            )
            for index, (peer, first, count) in enumerate(self._units())
        ]

    def _push(self, step: Step, x: Tensor, slot: int, counted: int) -> None:
        """Copy this rank's tokens to every peer on the copy stream, each unit announced, empty ones too."""
        workspace, sizes = self.workspace, self.sizes
        units = self._units()
        with workspace.copying():
            for index, (peer, first, count) in enumerate(units):
                unit = UNITS.value + index % self.config.units
                if count:
                    place = (workspace.rank * sizes.pitch + first) * sizes.hidden
                    target = workspace.peer(peer, slot, (count, sizes.hidden), place)
                    rank_copy_data(target, x[first : first + count])
                if not counted:
                    workspace.announce(peer, slot, unit, step.stamp)
                    continue
                announce_kernel[(1,)](
                    *self.channel(slot, step.operator), peer, unit, LAST=index == len(units) - 1,
                    OPERATOR=step.operator, PROGRESS=workspace.progress, TRACE=False, num_warps=1,
                    enable_fp_fusion=True,
                )  # fmt: skip

    # --- launching -----------------------------------------------------------------------------------------------

    def launch(
        self, step: Step, x: Tensor, w: Tensor, out: Tensor, more: Tensor | None = None, ids: Tensor | None = None
    ) -> int:
        """Launch a step on the current stream, with tensors like those that it was made for.

        Where kernels announce copies, a step that fills the device begins behind its rank's own announcements: were
        they to run beside it, each rank could wait in it for the other's.

        Returns:
            its slot, whose data are this rank's until it begins the next launch.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        made = step.ready[workspace.slot ^ 1]
        copies = step.moves and workspace.world_size > 1
        if made is not None and not workspace.counts_on_device():
            slot = workspace.next_slot()
            is_behind = self.opened + 1 != workspace.launches
            if step.opens:
                self.opened = workspace.launches
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (x, w, out, more, ids)]
            workspace.launch_at(made, step.stamp, *addresses, join=copies and not step.early, behind=is_behind)
            return slot
        given = (x, w, out, more) if ids is None else (x, w, out, more, ids)
        arguments = step.remake(*given).arguments
        assert arguments is not None  # it was made just now
        slot = workspace.begin(self.key, _compiled_before)
        counted = BY_DEVICE.value if copies and workspace.counts_on_device() else BY_HOST.value
        is_behind = bool(counted) and step.fills
        if copies:
            self._push(step, x, slot, counted)
        if is_behind:
            workspace.join_copies()
        step.kernel[(step.grid,)](*arguments(slot, counted), **step.constants)
        if copies and not is_behind:
            workspace.join_copies()
        return slot

    def launch_local(self, step: Step, slot: int, *tensors: Tensor) -> None:
        """Launch a kernel that talks to no rank, on the current stream.

        Args:
            step: made with operator 0.
            slot: whose data it reads, if it reads any.
            tensors: whose addresses differ between calls.
        """
        made = step.ready[slot]
        if made is not None:
            self.workspace.launch_at(made, 0, *(tensor.data_ptr() for tensor in tensors), join=False)
            return
        arguments = step.remake(*tensors).arguments
        assert arguments is not None  # it was made just now
        step.kernel[(step.grid,)](*arguments(slot, 0), **step.constants)
