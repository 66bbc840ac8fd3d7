# SPDX-License-Identifier: Apache-2.0
"""Collectives from both sources of a black box: Python's calls, and what the NCCL profiler plugin saw on the GPU."""

from pathlib import Path

from megascale_ops.blackbox import nccl_codes
from megascale_ops.blackbox.layout import COMMUNICATORS, NCCL
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.trace.clocks import align
from megascale_ops.trace.matching import Key, Meeting, meet, newest_of
from megascale_ops.trace.rank_records import RankRecords, read_rank_records
from megascale_ops.trace.scene import Mark, Slice
from megascale_ops.trace.timeline import Scope, Timeline
from tests.fakes.recorded_job import BOOTED_S, MS, identity

COMMUNICATOR = 0xFEDC_BA98_7654_3210
AT_NS = round(BOOTED_S * 1e9)
DONE, UNTIMED, DOUBTFUL = nccl_codes.FLAG_DONE, nccl_codes.FLAG_UNTIMED, nccl_codes.FLAG_DOUBTFUL


class NcclBox:
    """A rank's box with records as the plugin in C writes them."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        mine: BoxIdentity = identity(rank, 2)
        writer = BoxWriter.create(folder, mine)
        writer.add_collective(CollectiveRecord("0", "all_reduce", 0, 64, AT_NS, AT_NS, AT_NS + 20_000))
        writer.set_now(0, "backward", now_mono_s=BOOTED_S + 1.0)
        writer.close()
        self.path = folder / f"{rank}.box"
        self._number = 0
        name = b"default_pg"
        self._write(COMMUNICATORS, 0, (COMMUNICATOR, AT_NS, 0, 2, rank, 1, 0, name))

    def add(self, seq: int, start_ms: float, end_ms: float, flags: int, function: str = "AllReduce") -> None:
        """Write one record; times in milliseconds after AT_NS, 0 where the GPU's time is not known."""
        started, ended = (AT_NS + round(ms * MS) if ms else 0 for ms in (start_ms, end_ms))
        code = nccl_codes.FUNCTIONS.index(function)
        fields = (
            seq,
            4096,
            AT_NS + seq * MS,
            started,
            ended,
            started,
            COMMUNICATOR,
            0,
            3,
            3,
            code,
            8,
            2,
            3,
            2,
            -1,
            0,
            flags,
        )
        self._write(NCCL, self._number, fields)
        self._number += 1

    def records(self) -> RankRecords:
        """Read it all."""
        with BoxReader(self.path) as box:
            return read_rank_records(box)

    def _write(self, ring: object, number: int, fields: tuple[object, ...]) -> None:
        with self.path.open("r+b") as file:
            file.seek(ring.offset + number * ring.stride)  # type: ignore[attr-defined]  # one of the rings
            file.write(ring.codec.pack(2 * number + 2, *fields))  # type: ignore[attr-defined]  # as above


def drawn(*all_records: RankRecords) -> Timeline:
    """Return the timeline of these ranks."""
    meetings: dict[Key, Meeting] = {}
    for records in all_records:
        meet(meetings, records.identity.rank, newest_of(records).items())
    return Timeline(all_records, align(all_records), Scope(20, meetings))


def on(timeline: Timeline, rank: int, name: str) -> list[Slice | Mark]:
    """Return what is on one track."""
    (track,) = (one.number for one in timeline.tracks if one.group == rank + 1 and one.name == name)
    events = [event for window in timeline.windows for event in timeline.events(window) if event.track == track]
    return [event for event in events if isinstance(event, Slice | Mark)]


def test_kernels_are_split_and_launches_are_not(tmp_path: Path) -> None:
    """Rank 1's kernel began 8 ms later: rank 0 waited; the calls in Python returned at once and say nothing."""
    boxes = [NcclBox(tmp_path, rank) for rank in range(2)]
    boxes[0].add(1, 2.0, 12.0, DONE)
    boxes[1].add(1, 10.0, 12.0, DONE)

    timeline = drawn(*(box.records() for box in boxes))

    (kernel,) = on(timeline, 0, "NCCL default_pg 76543210")
    assert isinstance(kernel, Slice)
    assert (kernel.name, kernel.begin_ns, kernel.end_ns) == ("AllReduce", AT_NS + 2 * MS, AT_NS + 12 * MS)
    assert [(part.name, part.end_ns - part.begin_ns) for part in kernel.inner if isinstance(part, Slice)] == [
        ("waiting", 8 * MS), ("moving", 2 * MS),
    ]  # fmt: skip
    (launch,) = on(timeline, 0, "group 0 (launches)")
    assert isinstance(launch, Slice)
    assert launch.inner == ()
    assert timeline.arrows.drawn == 1


def test_a_kernel_that_runs_is_open_although_some_channels_have_ended(tmp_path: Path) -> None:
    """The end in a record that is not done is that of one channel of many."""
    box = NcclBox(tmp_path, 0)
    box.add(1, 2.0, 3.0, 0)

    (kernel,) = on(drawn(box.records()), 0, "NCCL default_pg 76543210")

    assert isinstance(kernel, Slice)
    assert kernel.end_ns == round((BOOTED_S + 1.0) * 1e9)
    assert dict(kernel.args)["end"].startswith("not seen before")  # type: ignore[union-attr]  # a sentence


def test_what_hangs_is_open_although_others_were_enqueued_behind_it_untimed(tmp_path: Path) -> None:
    """Of many operations a second only some are timed: the last of those is the one to look at."""
    box = NcclBox(tmp_path, 0)
    box.add(1, 2.0, 0, 0)
    box.add(2, 0, 0, DONE | UNTIMED)

    (kernel,) = on(drawn(box.records()), 0, "NCCL default_pg 76543210")

    assert isinstance(kernel, Slice)
    assert dict(kernel.args)["end"].startswith("not seen before")  # type: ignore[union-attr]  # a sentence


def test_what_was_not_timed_is_a_mark_where_it_was_enqueued(tmp_path: Path) -> None:
    """To keep its budget the plugin leaves GPU times out; a doubtful time is none. Neither hangs."""
    box = NcclBox(tmp_path, 0)
    box.add(1, 9.0, 8.0, DONE | DOUBTFUL)
    box.add(2, 0, 0, DONE | UNTIMED)

    marks = on(drawn(box.records()), 0, "NCCL default_pg 76543210")

    assert [type(one) for one in marks] == [Mark, Mark]
    # In the order of time: the second was enqueued 2 ms after the beginning, the first began on the GPU at 9 ms.
    assert [(one.at_ns - AT_NS) // MS for one in marks if isinstance(one, Mark)] == [2, 9]


def test_sends_are_drawn_whole(tmp_path: Path) -> None:
    """Pairs have numbers of their own; nothing is matched across ranks."""
    box = NcclBox(tmp_path, 0)
    box.add(1, 2.0, 3.0, DONE, "Send")

    (send,) = on(drawn(box.records()), 0, "NCCL default_pg 76543210")

    assert isinstance(send, Slice)
    assert (send.inner, send.kin) == ((), 0)


def test_a_box_without_nccl_has_host_calls(tmp_path: Path) -> None:
    """On Gloo a call returns when the collective has ended; there it is what is compared."""
    folder = tmp_path / "boxes"
    folder.mkdir(mode=0o700)
    writer = BoxWriter.create(folder, identity(0, 1))
    writer.add_collective(CollectiveRecord("0", "all_reduce", 0, 64, AT_NS, AT_NS, AT_NS + 20_000))
    writer.close()

    with BoxReader(folder / "0.box") as box:
        records = read_rank_records(box)

    assert [span.source for span in records.spans] == ["host"]
