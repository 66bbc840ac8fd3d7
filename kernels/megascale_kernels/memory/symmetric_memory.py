# SPDX-License-Identifier: Apache-2.0
"""One allocation per rank that all ranks of a host reach: how large it is, how it is made, and views of it.

The offsets are the same on every rank (`device/layout.py`), so a peer's word is found from the peer's base address
alone. On the CPU no kernel runs and nothing is shared: there is memory for this rank's control words and board, so
that faults and boards are read the same way everywhere.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.device.layout import FAULT_WORDS, MAX_RANKS, PROGRESS_WORDS, Layout, layout
from megascale_kernels.errors import Unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory

# A shard begins at a multiple of the tile height in the gather buffer; the tallest tile of any configuration has 256
# rows.
PADDING_ROWS = 256
# Parts of cut tiles announce themselves on this rank's own flags: 147 tiles, 5 parts, 2 consumers at most.
MOST_CUT_PARTS = 1536
# Contests that are under way at a time, and the room of one: two readings a turn, of 16 bytes each. None is
# from torch's allocator: what that gives out while a graph is recorded belongs to the graph.
CLOCKS, CLOCK_WORDS = 64, 288
SMALLEST_TILE = 64  # rows and columns of the smallest tile any configuration uses: it bounds the number of flags


def layout_for(world_size: int, max_rows: int, cols: int, element_bytes: int) -> Layout:
    """The layout that serves every configuration up to a size.

    Args:
        world_size: ranks in the group.
        max_rows: largest M over all ranks.
        cols: the longest row that is sent, elements. The backward of a gather is a scatter of rows as long.
        element_bytes: bytes of one element.
    """
    tiles = -(-max_rows // SMALLEST_TILE) * -(-cols // SMALLEST_TILE)
    data_bytes = (max_rows + world_size * PADDING_ROWS) * cols * element_bytes
    return layout(world_size, max(tiles, MOST_CUT_PARTS), data_bytes)


def check_device(device: torch.device) -> None:
    """Refuse a device without such memory: kernels need CUDA, the serial path also runs on the CPU.

    Raises:
        Unsupported: another kind of device, or a number that torch does not see.
    """
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"Workspace(device={str(device)!r}): the operators run on cuda and on cpu")
    seen = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and seen <= (device.index or 0):
        raise Unsupported(
            f"Workspace(device={str(device)!r}): torch sees {seen} CUDA devices here; device='cpu' takes the "
            "serial path"
        )


class SymmetricMemory:
    """This rank's part of the memory of a group, and the way to the peers' parts.

    Attributes:
        group: the process group.
        rank: this rank within it.
        world_size: its ranks.
        device: where the memory lies.
        dtype: element type of the data slots.
        layout: where everything lies in it, once it is allocated.
        memory: this rank's part, int32.
        addresses: base address of every rank's part.
        peers: the same as a tensor, int64.
        clocks: room for the GPU's clock, [`CLOCKS`, `CLOCK_WORDS`] int64 (`autotune/contest.py`).
        status: the fault record, in host memory that the device writes.
        handle: torch's handle of the rendezvous; None on the CPU, which shares nothing.
        slot: the data slot of the last launch.
        launches: launches so far, as the host made them.
    """

    layout: Layout
    memory: Tensor
    addresses: list[int]
    peers: Tensor
    clocks: Tensor
    status: Tensor

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device, self.dtype = device, dtype
        self.handle: _SymmetricMemory | None = None
        self.slot = 0
        self.launches = 0
        self._peer_flags: dict[tuple[int, int], Tensor] = {}

    def check_group(self) -> None:
        """Refuse a group that cannot share memory.

        Raises:
            Unsupported: this process is not in it, or it has more ranks than a host has GPUs.
        """
        if self.rank < 0:
            raise Unsupported("Workspace: this process is not in the group, and only the group's own ranks make one")
        if self.world_size > MAX_RANKS:
            raise Unsupported(
                f"Workspace: {self.world_size} ranks, but the kernels serve one host of at most {MAX_RANKS}"
            )

    def allocate(self, layout: Layout) -> None:
        """Take the memory and meet the peers; on CUDA every rank of the group must call it.

        Raises:
            Unsupported: no peer access between the GPUs.
        """
        self.layout = layout
        words = layout.bytes // 4
        own = MAX_RANKS + CLOCKS * CLOCK_WORDS  # 64-bit words of this rank alone, behind what peers reach
        if self.device.type != "cuda":
            self.memory = torch.zeros(min(words, layout.progress + PROGRESS_WORDS), dtype=torch.int32)
            self.addresses = [self.memory.data_ptr()] * self.world_size
            self.peers = torch.tensor(self.addresses, dtype=torch.int64)
            self.status = torch.zeros(FAULT_WORDS, dtype=torch.int32)
            self.clocks = torch.zeros(CLOCKS, CLOCK_WORDS, dtype=torch.int64)
            return
        import torch.distributed._symmetric_memory as symm_mem

        self.memory = symm_mem.empty(words + 2 * own, dtype=torch.int32, device=self.device)
        self.memory.zero_()
        torch.cuda.synchronize(self.device)
        try:
            self.handle = symm_mem.rendezvous(self.memory, self.group.group_name)
        except RuntimeError as error:
            raise Unsupported(
                f"Workspace: rank {self.rank} cannot share memory with its peers (GPUs of one host with peer "
                f"access are needed): {str(error).splitlines()[0]}"
            ) from error
        self.addresses = [int(address) for address in self.handle.buffer_ptrs]
        self.status = torch.zeros(FAULT_WORDS, dtype=torch.int32, pin_memory=True)
        dist.barrier(self.group, device_ids=[self.device.index or torch.cuda.current_device()])
        private = self.memory[words:].view(torch.int64)
        self.peers = private[: self.world_size]
        self.peers.copy_(torch.tensor(self.addresses, dtype=torch.int64))
        self.clocks = private[MAX_RANKS:].view(CLOCKS, CLOCK_WORDS)

    def clear(self) -> None:
        """Forget all launches and their fault; data and board stay."""
        self.memory[: self.layout.progress].zero_()
        self.status.zero_()
        self.slot, self.launches = 0, 0

    # --- views -------------------------------------------------------------------------------------------------

    def local(self, slot: int, shape: Sequence[int]) -> Tensor:
        """This rank's data slot as a tensor of `shape`."""
        return self.peer(self.rank, slot, shape)

    def peer(self, rank: int, slot: int, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A rank's data slot as a tensor of `shape`, beginning `offset` elements in."""
        assert self.handle is not None  # on the CPU no kernel runs
        first = self.layout.data(slot) // self.dtype.itemsize + offset
        view: Tensor = self.handle.get_buffer(rank, list(shape), self.dtype, first)
        return view

    def data_address(self, rank: int, slot: int) -> int:
        """Address of the first byte of a rank's data slot."""
        return self.addresses[rank] + self.layout.data(slot)

    def flag_address(self, peer: int, slot: int, channel: int) -> int:
        """Address of this rank's flag on a peer."""
        return self.addresses[peer] + 4 * (self.layout.flags(slot) + self.rank * self.layout.channels + channel)

    def own_board(self) -> Tensor:
        """This rank's board."""
        return self.memory[self.layout.progress : self.layout.progress + PROGRESS_WORDS]

    def board_of(self, rank: int) -> Tensor | None:
        """A copy of a rank's board (it outlives the rank), None where it is out of reach."""
        if self.handle is None or rank < 0:
            return None
        board: Tensor = self.handle.get_buffer(rank, [PROGRESS_WORDS], torch.int32, self.layout.progress)
        return board.cpu()

    def write_flag(self, peer: int, slot: int, channel: int, stamp: int) -> None:
        """Write a stamp into this rank's flag on a peer, behind what the current stream has done so far.

        The write has the memory barrier that the driver's stream operations have by default: a reader that sees the
        stamp sees the copies before it.
        """
        assert self.handle is not None  # on the CPU no kernel runs
        if (peer, slot) not in self._peer_flags:
            first = self.layout.flags(slot) + self.rank * self.layout.channels
            flags = self.handle.get_buffer(peer, [self.layout.channels], torch.uint32, first)
            self._peer_flags[peer, slot] = flags
        self.handle.stream_write_value32(self._peer_flags[peer, slot], channel, stamp)
