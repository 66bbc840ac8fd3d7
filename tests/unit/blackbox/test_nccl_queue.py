# SPDX-License-Identifier: Apache-2.0
"""What a GPU has before it, out of the records of NCCL's plugin: what began, what did not, and what was not timed."""

import pytest

from megascale_ops.blackbox.nccl_codes import FLAG_COPY_ENGINE, FLAG_DONE, FLAG_UNTIMED
from megascale_ops.blackbox.nccl_queue import queue_of
from megascale_ops.blackbox.records import NcclRecord

DP, TP = 0xAA, 0xBB
NOW_NS = 20 * 10**9
NAMES = {DP: "dp", TP: "tp"}


def record(number: int, *, communicator: int = DP, begun: int = 0, over: bool = False, **more: object) -> NcclRecord:
    """An all_reduce that was enqueued as many seconds after the start as its number says."""
    fields: dict[str, object] = {
        "number": number, "communicator": communicator, "function": "AllReduce", "seq": number, "bytes_moved": 64,
        "enqueued_mono_ns": number * 10**9, "gpu_started_mono_ns": 0, "gpu_ended_mono_ns": 0, "gpu_clock_ns": 0,
        "step": 3, "channels": 4, "started_channels": 15 if over else begun, "ended_channels": 15 if over else 0,
        "datatype": "ncclFloat32", "algorithm": "RING", "protocol": "SIMPLE", "peer": -1, "root": 0,
        "flags": FLAG_DONE if over else 0,
    }  # fmt: skip
    return NcclRecord(**{**fields, **more})  # type: ignore[arg-type]  # fields of the record, by name


def test_what_was_given_to_the_gpu_and_has_not_begun_is_told() -> None:
    """After what has ended on its communicator, oldest first, with how long it waits."""
    records = [record(1, over=True), record(8), record(10), record(12, communicator=TP, begun=0b1)]

    found = queue_of(records, NOW_NS, NAMES)

    assert found is not None
    assert [(one.name, one.seq, one.begun, one.waited_s) for one in found.operations] == [
        ("dp", 8, False, 12.0),
        ("dp", 10, False, 10.0),
        ("tp", 12, True, 8.0),
    ]
    assert found.operations[0].communicator == f"{DP:016x}"
    assert not found.is_partial


def test_its_state_changes_when_the_gpu_moves_and_not_when_the_host_does() -> None:
    """A host that runs ahead enqueues more; a channel that begins, or a step that ends, is the GPU's."""
    before = queue_of([record(1, over=True), record(8)], NOW_NS, NAMES, (5,))
    enqueued = queue_of([record(1, over=True), record(8), record(9)], NOW_NS, NAMES, (5,))
    begun = queue_of([record(1, over=True), record(8, begun=0b1)], NOW_NS, NAMES, (5,))
    stepped = queue_of([record(1, over=True), record(8)], NOW_NS, NAMES, (6,))

    assert before is not None
    assert enqueued is not None
    assert begun is not None
    assert stepped is not None
    assert enqueued.state == before.state
    assert len({before.state, begun.state, stepped.state}) == 3


@pytest.mark.parametrize("flags", [FLAG_UNTIMED, FLAG_UNTIMED | FLAG_DONE, FLAG_COPY_ENGINE])
@pytest.mark.parametrize(("communicator", "partial"), [(TP, True), (DP, False)])
def test_what_was_not_timed_may_be_in_front(flags: int, communicator: int, *, partial: bool) -> None:
    """Thinned out, and on another communicator: its kernel may run or wait, and no record shows it."""
    hidden = record(7, communicator=communicator, flags=flags)
    records = [record(1, over=True), record(2, communicator=TP, over=True), hidden, record(8)]

    found = queue_of(records, NOW_NS, NAMES)

    assert found is not None
    assert [one.seq for one in found.operations] == [8]
    assert found.is_partial is partial


def test_what_was_not_timed_and_is_over_hides_nothing() -> None:
    """A later operation of its communicator has ended, and so has it; one given later is not in front."""
    over = [record(6, communicator=TP, flags=FLAG_UNTIMED), record(7, communicator=TP, over=True), record(8)]
    later = [record(1, over=True), record(8), record(9, communicator=TP, flags=FLAG_UNTIMED)]

    found = [queue_of(records, NOW_NS, NAMES) for records in (over, later)]

    assert [one is not None and one.is_partial for one in found] == [False, False]


@pytest.mark.parametrize("records", [[], [record(1, flags=FLAG_UNTIMED)], [record(1), record(2)]])
def test_where_no_begin_was_ever_seen_nothing_is_told(records: list[NcclRecord]) -> None:
    """No plugin, an interface without channels, or the very first collective: it may be that begins are not told."""
    assert queue_of(records, NOW_NS, NAMES) is None
