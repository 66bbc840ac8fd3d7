# SPDX-License-Identifier: Apache-2.0
"""Read files once and give every rank what it needs of them: the schedule, carried out.

Collective. In every round a rank takes the next block of each file that it reads, sends what others need of it, and
receives what it needs of blocks that others have read. Bytes travel over the process group: host memory over Gloo, GPU
memory over NCCL (then a block is copied to the GPU once and received where the tensors are).

A rank whose file turns out damaged or unreadable goes on sending, so that no other waits for it; all hear at the end.
A rank that dies ends the wait of its peers as the process group does, by the closed connection or its time-out.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import torch

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.loading import ranges, schedule
from megascale_ops.checkpoint.loading.landing import Landing, LandingField
from megascale_ops.checkpoint.loading.reading import ReadingThreads
from megascale_ops.checkpoint.loading.schedule import Transfer
from megascale_ops.checkpoint.loading.sources import Source
from megascale_ops.checkpoint.loading.stream import BlockStream, FileStream, LandingStream
from megascale_ops.checkpoint.loading.traffic import Traffic
from megascale_ops.checkpoint.manifest import Fault, FileEntry
from megascale_ops.checkpoint.ranks import Ranks

# Bytes between two that are needed are sent along below this: a message of its own for each scalar costs more.
_GAP_BYTES = 4096


class RankFault(NamedTuple):
    """What a rank found wrong with a file that it read; rank -1: none can open it. Late: it hangs."""

    rank: int
    fault: Fault
    is_late: bool = False


class _Told(msgspec.Struct, frozen=True):
    """One rank's part of what the schedule is made from."""

    needs: dict[int, tuple[tuple[int, int], ...]]
    held: tuple[int, ...] | None
    on_gpu: bool


class Exchange:
    """One collective pass over files of a checkpoint.

    Args:
        source: where this rank opens them.
        files: all files of the checkpoint, the same on every rank.
        ranks: who takes part.
        held: which files this rank can open, by name; None: all of them, which then holds for every rank.
        traffic: is added to.
        told: hears of bytes of this rank as they arrive; first of the sum, by ``expect``.
    """

    def __init__(
        self,
        source: Source,
        files: Sequence[FileEntry],
        ranks: Ranks,
        *,
        held: frozenset[str] | None = None,
        traffic: Traffic | None = None,
        told: Callable[[int], object] = lambda _: None,
        expect: Callable[[int], object] = lambda _: None,
        block_bytes: int = schedule.BLOCK_BYTES,
    ) -> None:
        self._source, self._files, self._ranks = source, files, ranks
        self._held, self._told, self._expect, self._block_bytes = held, told, expect, block_bytes
        self.traffic = traffic or Traffic()

    def run(self, wanted: Mapping[str, Sequence[Landing]]) -> list[RankFault]:
        """Fill all landings, by file; every rank must call, with whatever it needs.

        Returns:
            What is wrong, the same on every rank; where that is anything, what was filled means nothing.

        Raises:
            RuntimeError: of the process group, when a rank died or its time was over.
        """
        numbers = {entry.name: number for number, entry in enumerate(self._files)}
        mine = {
            numbers[name]: ranges.joined(((each.start, each.stop) for each in landings), _GAP_BYTES)
            for name, landings in wanted.items()
        }
        fields = {numbers[name]: LandingField(landings) for name, landings in wanted.items()}
        held = None if self._held is None else tuple(numbers[name] for name in sorted(self._held) if name in numbers)
        on_gpu = any(each.is_on_gpu for landings in wanted.values() for each in landings)
        said = _gathered(self._ranks, _Told({number: each for number, each in mine.items() if each}, held, on_gpu))
        needs = [each.needs for each in said]
        planned = schedule.plan(
            [entry.size_bytes for entry in self._files],
            needs,
            _holders(said, len(self._files)),
            block_bytes=self._block_bytes,
        )
        faults = [
            RankFault(-1, Fault(self._files[each.file].name, "missing", "no rank can open it"))
            for each in planned
            if not isinstance(each, Transfer)
        ]
        if faults:
            return faults
        transfers = [each for each in planned if isinstance(each, Transfer)]
        device = _device(self._ranks, wants_gpu=any(each.on_gpu for each in said))
        return self._carry_out(transfers, needs, fields, device)

    def _carry_out(
        self,
        transfers: Sequence[Transfer],
        needs: Sequence[schedule.Needs],
        fields: Mapping[int, LandingField],
        device: torch.device,
    ) -> list[RankFault]:
        me = self._ranks.rank
        rounds: defaultdict[int, list[Transfer]] = defaultdict(list)
        for each in transfers:
            if me == each.reader or me in each.receivers:
                for number in each.rounds(self._files[each.file].size_bytes, self._block_bytes):
                    rounds[number].append(each)
        self._expect(
            sum(
                self._files[each.file].size_bytes if me == each.reader else ranges.count(needs[me][each.file])
                for each in transfers
                if me == each.reader or me in each.receivers
            )
        )
        found: list[RankFault] = []
        with ExitStack() as stack:
            threads, streams = ReadingThreads(schedule.MOST_AT_ONCE), dict[int, FileStream]()
            stack.callback(threads.close)
            stack.callback(lambda: [stream.close() for stream in streams.values()])
            for number in sorted(rounds):
                # Those of the next round that begin are opened now, to be read while this round is sent.
                for each in (*rounds[number], *rounds.get(number + 1, ())):
                    if me == each.reader and each.file not in streams and each.first_round >= number:
                        streams[each.file] = self._opened(each, fields.get(each.file), threads, device)
                self._round(number, rounds[number], needs, fields, streams, device)
                for each in rounds[number]:
                    entry = self._files[each.file]
                    if me == each.reader and number + 1 == each.rounds(entry.size_bytes, self._block_bytes).stop:
                        found += self._finished(streams.pop(each.file), entry)
        return [each for share in self._ranks.gather(found) for each in share]

    def _opened(
        self, transfer: Transfer, field: LandingField | None, threads: ReadingThreads, device: torch.device
    ) -> FileStream:
        entry = self._files[transfer.file]
        is_alone = self._source.reads_pieces and not transfer.receivers
        if is_alone and field is not None and field.is_in_host_memory:
            return LandingStream(self._source, entry, self._block_bytes, threads, field)
        is_for_gpu = device.type == "cuda" or (field is not None and field.is_on_gpu)
        return BlockStream(self._source, entry, self._block_bytes, threads, pinned=is_for_gpu)

    def _finished(self, stream: FileStream, entry: FileEntry) -> list[RankFault]:
        fault = manifests.judge_file(entry, stream.close())
        self.traffic.read_bytes += stream.read_bytes
        self.traffic.read_by_file[entry.name] = stream.read_bytes
        return [RankFault(self._ranks.rank, fault, stream.is_late)] if fault else []

    def _round(
        self,
        number: int,
        transfers: Sequence[Transfer],
        needs: Sequence[schedule.Needs],
        fields: Mapping[int, LandingField],
        streams: Mapping[int, FileStream],
        device: torch.device,
    ) -> None:
        """Move every file in progress by one block."""
        me, messages, received = self._ranks.rank, _Messages(self._ranks), 0
        here: list[tuple[int, list[ranges.Range], torch.Tensor]] = []
        for each in transfers:
            at = (number - each.first_round) * self._block_bytes
            stop = min(at + self._block_bytes, self._files[each.file].size_bytes)
            mine = ranges.cut(needs[me].get(each.file, ()), at, stop)
            if me != each.reader:
                got = torch.empty(ranges.count(mine), dtype=torch.uint8, device=device)
                messages.receive(got, each)
                received += got.numel()
                here.append((each.file, mine, got))
                continue
            block = streams[each.file].take()
            self._told(stop - at)
            if block is None:
                continue
            if each.receivers:
                block = block.to(device)
                self._send(block, at, stop, each, needs, messages)
            here.append((each.file, mine, _packed(block, mine, at)))
        self.traffic.sent_bytes += messages.sent_bytes
        messages.wait()
        for file, mine, got in here:
            done = 0
            for start, stop in mine:
                fields[file].put(start, got[done : done + stop - start])
                done += stop - start
        self.traffic.received_bytes += received
        self._told(received)

    def _send(
        self,
        block: torch.Tensor,
        at: int,
        stop: int,
        transfer: Transfer,
        needs: Sequence[schedule.Needs],
        messages: "_Messages",
    ) -> None:
        for receiver in transfer.receivers:
            wanted = ranges.cut(needs[receiver][transfer.file], at, stop)
            messages.send(_packed(block, wanted, at), receiver, transfer)
            if transfer.to_all:
                return


class _Messages:
    """All messages of one round: broadcasts in the order of the schedule, then the others as one batch.

    Between two ranks they are in the same order on both, which is what matches them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._works: list[Any] = []
        self._batch: list[Any] = []
        self._kept: list[torch.Tensor] = []
        self.sent_bytes = 0

    def send(self, packed: torch.Tensor, receiver: int, transfer: Transfer) -> None:
        if not packed.numel():
            return
        self.sent_bytes += packed.numel()
        self._kept.append(packed)
        if transfer.to_all:
            self._broadcast(packed, transfer)
        else:
            from torch import distributed

            self._batch.append(self._operation(distributed.isend, packed, receiver))

    def receive(self, into: torch.Tensor, transfer: Transfer) -> None:
        if not into.numel():
            return
        if transfer.to_all:
            self._broadcast(into, transfer)
        else:
            from torch import distributed

            self._batch.append(self._operation(distributed.irecv, into, transfer.reader))

    def wait(self) -> None:
        """Until all have arrived.

        Raises:
            RuntimeError: a peer died, or the time of the process group was over.
        """
        from torch import distributed

        if self._batch:
            self._works += distributed.batch_isend_irecv(self._batch)
        for work in self._works:
            work.wait()

    def _operation(self, kind: Any, tensor: torch.Tensor, peer: int) -> Any:  # noqa: ANN401  torch's own
        from torch import distributed

        return distributed.P2POp(kind, tensor, group=self._ranks.process_group, group_peer=peer)

    def _broadcast(self, tensor: torch.Tensor, transfer: Transfer) -> None:
        from torch import distributed

        self._works.append(
            distributed.broadcast(tensor, group=self._ranks.process_group, group_src=transfer.reader, async_op=True)
        )


def _packed(block: torch.Tensor, wanted: Sequence[ranges.Range], at: int) -> torch.Tensor:
    """The wanted bytes of a block one after the other; without a copy where they are one piece."""
    pieces = [block[start - at : stop - at] for start, stop in wanted]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else block[:0]


def _gathered(ranks: Ranks, mine: _Told) -> list[_Told]:
    """What all ranks told; replicas tell the same bytes, which are decoded once."""
    raws = ranks.gather(msgspec.msgpack.encode(mine))
    decoded = {raw: msgspec.msgpack.decode(raw, type=_Told) for raw in set(raws)}
    return [decoded[raw] for raw in raws]


def _holders(said: Sequence[_Told], files: int) -> list[list[int]] | None:
    if all(each.held is None for each in said):
        return None
    held = [range(files) if each.held is None else set(each.held) for each in said]
    return [[rank for rank, have in enumerate(held) if file in have] for file in range(files)]


def _device(ranks: Ranks, *, wants_gpu: bool) -> torch.device:
    """Through which memory bytes travel: that of the GPU where the group can and a tensor is there, or it must."""
    if not ranks.distributed:
        return torch.device("cpu")
    from torch import distributed

    backends = str(distributed.get_backend_config(ranks.process_group))  # cpu:gloo,cuda:nccl
    can_gpu, can_cpu = "cuda:nccl" in backends, "cpu:" in backends
    if can_gpu and (wants_gpu or not can_cpu) and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        # NCCL makes its communicator at the first collective, for which all ranks must be there; what the ranks told
        # each other may have gone over Gloo, and messages between two ranks come next.
        distributed.all_reduce(torch.zeros(1, device=device), group=ranks.process_group)
        return device
    return torch.device("cpu")
