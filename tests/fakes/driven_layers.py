# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN401
# (kernels: their types are Triton's to infer; Triton has no types)
"""MoE layers on emulated ranks whose launches were laid out before: what `launcher.c` does, on emulated streams."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from megascale_kernels.emulate import Call, Launch, copy
from megascale_kernels.moe import launch as moe_launch
from megascale_kernels.moe import layer_steps
from torch import Tensor

from tests.fakes.emulated_ranks import EmulatedRanks, EmulatedWorkspace, stream_write
from tests.fakes.moe_cases import Layer, given
from tests.fakes.moe_layers import Ran

BITS = 12  # of a signature


class Laid(NamedTuple):
    """What `launching.ready` was asked for."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    grid: tuple[int]
    copies: tuple[Any, ...]
    follows: bool
    gate: int
    told: int


def lay(
    _native: object, kernel: Any, arguments: Any, constants: Any, grid: Any, _sources: object, copies: Sequence[Any],
    *, follows: bool, gate: int, told: int,
) -> Laid:  # fmt: skip
    """In the place of `launching.ready`."""
    return Laid(kernel, arguments, constants, grid, tuple(copies), follows, gate, told)


@triton.jit
def stream_wait(word_ptr, number) -> None:
    """What the driver's wait of a stream for a word does: until it is `number` or more."""
    seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
    while seen - number < 0:
        seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")


class DrivenWorkspace(EmulatedWorkspace):
    """A workspace whose launches the launcher makes.

    Attributes:
        known: tensors that copies read, by address.
        made: (what was laid out, whether the stream joins the copies, whether copies have no gate) of each launch.
    """

    def __init__(self, ranks: EmulatedRanks, rank: int) -> None:
        super().__init__(ranks, rank)
        self.native: Any = object()
        self.addresses = [words.data_ptr() for words in ranks.world.words]
        self.known: list[Tensor] = []
        self.made: list[tuple[Laid, bool, bool]] = []

    def next_slot(self) -> int:
        """Take the next slot."""
        return self.begin(None, lambda: None)

    def data_address(self, rank: int, slot: int) -> int:
        """As a workspace's."""
        return self.addresses[rank] + self.layout.data(slot)

    def flag_address(self, peer: int, slot: int, channel: int) -> int:
        """As a workspace's."""
        return self.addresses[peer] + 4 * (self.layout.flags(slot) + self.rank * self.layout.channels + channel)

    def bytes_at(self, address: int, count: int) -> Tensor:
        """Memory of any rank, or of a known tensor."""
        for tensor in (*self._ranks.world.words, *self.known):
            storage = tensor.untyped_storage()
            first = address - storage.data_ptr()
            if first >= 0 and first + count <= storage.nbytes():
                return torch.empty(0, dtype=torch.uint8).set_(storage, first, (count,))
        raise AssertionError(f"{count} bytes at {address} are nobody's")

    def word_at(self, address: int) -> Tensor:
        """A word."""
        return self.bytes_at(address, 4).view(torch.int32)

    def launch_at(self, made: Laid, signature: int, *addresses: int, join: bool, behind: bool = False) -> None:
        """Copies behind their gate or behind the stream, announced; the kernel; the join."""
        self.made.append((made, join, behind))
        stamp, put = self.launches << BITS | signature, self._ranks.put
        if made.copies:
            is_gated = made.gate != 0 and not behind
            with self._ranks.on_stream("copy", after="" if is_gated else "compute"):
                if is_gated:
                    put(Launch(self.rank, stream_wait, 1, (self.word_at(made.gate), self.launches - 1)))
                for first, count, target, flag in made.copies:
                    if count:
                        put(copy(self.rank, self.bytes_at(target, count), self.bytes_at(addresses[0] + first, count)))
                    put(Launch(self.rank, stream_write, 1, (self.word_at(flag), stamp)))
                if made.told:
                    put(Launch(self.rank, stream_write, 1, (self.word_at(made.told), stamp)))
        made.kernel[made.grid](*made.arguments, **made.constants)
        if join:
            self.join_copies()


class DrivenRanks(EmulatedRanks):
    """Ranks with such workspaces."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.workspaces = [DrivenWorkspace(self, rank) for rank in range(len(self.workspaces))]

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with patch.object(layer_steps, "ready", lay), super()._noting():
            yield


def driven(
    layer: Layer, *, launches: int = 2, data_bytes: int = 1 << 14, between: Callable[[Any], object] = lambda _: None,
    **options: Any,
) -> Ran:  # fmt: skip
    """Layers on all ranks without a pause in between, whose tokens are overwritten on the stream behind each.

    `between` is called with each rank's plan before it runs.
    """
    ranks = DrivenRanks(len(layer.tokens), layer.dtype, data_bytes=data_bytes, channels=64, **options)
    made, outs, kept = [], [], []
    for seed in range(launches):
        operands = given(layer, seed)
        lent = [mine._replace(x=mine.x.clone()) for mine in operands]
        out = [torch.full(mine.x.shape, float("nan"), dtype=layer.dtype) for mine in operands]

        def host(workspace: Any, lent: Any = lent, out: list[Tensor] = out) -> Any:
            mine = lent[workspace.rank]
            workspace.known.append(mine.x)
            plan = moe_launch.planned(*mine, out[workspace.rank], layer.sizes, workspace, layer.config)
            between(plan)
            plan.run(*mine, out[workspace.rank])
            ranks.put(Call(workspace.rank, lambda host: host.write(mine.x, float("nan")), "reuse of x", "compute"))
            return plan

        kept.append(ranks.call(host))
        made.append(operands)
        outs.append(out)
    ranks.run()
    return Ran(layer, ranks, made, outs, kept)
