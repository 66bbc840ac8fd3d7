# SPDX-License-Identifier: Apache-2.0
"""A Perfetto trace, decoded with the generated classes: whole arrows, nested slices, known tracks, stated order."""

import os
from pathlib import Path

import msgspec
import pytest

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.trace.choosing import Chosen
from megascale_ops.trace.clocks import align
from megascale_ops.trace.matching import Key, Meeting, meet, newest_of
from megascale_ops.trace.picture import Picture
from megascale_ops.trace.rank_records import NS, RankRecords, make_rank_records
from megascale_ops.trace.wire import stamp, varint
from megascale_ops.trace.writing import Written, write
from tests.fakes.decoded_trace import Decoded, assert_arrows_whole, decode
from tests.fakes.recorded_job import BOOTED_S, MS, recorded_job

GOLDEN = Path(__file__).parents[2] / "golden" / "trace" / "small.txt"


def picture(all_records: list[RankRecords], incident: Incident | None = None) -> Picture:
    """Return the picture of all these ranks."""
    meetings: dict[Key, Meeting] = {}
    for records in all_records:
        meet(meetings, records.identity.rank, newest_of(records).items())
    by_rank = {records.identity.rank: records for records in all_records}
    chosen = tuple(Chosen(rank, "asked for") for rank in by_rank)
    return Picture("toy", chosen, by_rank, align(all_records), meetings, len(all_records), incident)


def written(
    folder: Path,
    all_records: list[RankRecords],
    last: int = 20,
    limit_bytes: int = 10**9,
    incident: Incident | None = None,
) -> tuple[Written, Decoded]:
    """Write all these ranks and decode the file."""
    path = folder / "toy.pftrace"
    done = write(
        path,
        "perfetto",
        picture(all_records, incident).draw,
        [one.identity.rank for one in all_records],
        last,
        limit_bytes,
    )
    assert path.stat().st_size == done.size_bytes
    return done, decode(path.read_bytes())


def as_text(trace: Decoded) -> str:
    """Return a trace as a person reads it: groups, their tracks, and what is on them in microseconds."""
    begin_ns = min(one.begin_ns for one in trace.slices)
    lines = []
    for group in sorted((one for one in trace.tracks.values() if not one.parent), key=lambda one: one.place):
        lines.append(group.name)
        children = [one for one in trace.tracks.values() if one.parent == group.uuid]
        for track in sorted(children, key=lambda one: one.place):
            lines.append(f"  {track.name}" + (f" [{track.unit}]" if track.unit else ""))
            for one in (one for one in trace.slices if one.track == track.uuid):
                args = ", ".join(f"{key}={value}" for key, value in one.args.items() if "clock" not in key)
                when = f"{(one.begin_ns - begin_ns) / 1000:.1f}"
                when += "" if one.is_instant else f" +{(one.end_ns - one.begin_ns) / 1000:.1f}"
                arrows = "".join(f" ->{arrow}" for arrow in one.arrows_out) + "".join(f" <-{x}" for x in one.arrows_in)
                lines.append(f"    {'  ' * one.depth}{when} {one.name}{arrows}" + (f" ({args})" if args else ""))
            samples = [(at_ns, value) for number, at_ns, value in trace.samples if number == track.uuid]
            lines += [f"    {(at_ns - begin_ns) / 1000:.1f} {value:g}" for at_ns, value in samples]
    return "\n".join(lines) + "\n"


def test_a_small_trace_reads_as_it_should(tmp_path: Path) -> None:
    """Two ranks, two steps, rank 1 comes 20 ms late (MEGASCALE_UPDATE_GOLDEN=1 writes the file anew)."""
    _, trace = written(tmp_path, recorded_job(("a", "b"), steps=2, late={0: 0.0, 1: 20.0}))

    text = as_text(trace)

    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_every_arrow_has_both_its_ends(tmp_path: Path) -> None:
    """Of 8 ranks on two nodes, 300 steps: seven arrows for each collective, all forward in time, between ranks."""
    done, trace = written(tmp_path, recorded_job("aaaabbbb", steps=300, ahead_s={"b": -77.0}), last=300)

    assert assert_arrows_whole(trace) == done.arrows == 7 * 300
    assert done.slices == sum(not one.is_instant for one in trace.slices)


def test_slices_nest_and_bear_their_arguments(tmp_path: Path) -> None:
    """A collective holds waiting and moving, side by side and as long together as itself."""
    _, trace = written(tmp_path, recorded_job(("a", "a"), steps=2, late={0: 0.0, 1: 20.0}))

    outer, waiting, moving = trace.on("rank 0", "group 0 (host calls)")[:3]
    assert outer.args == {
        "communicator": "0", "bytes": 4096, "last arrival": "rank 1", "seen on ranks": 2, "seq": 0,
    }  # fmt: skip
    assert (outer.depth, waiting.depth, moving.depth) == (0, 1, 1)
    assert (waiting.begin_ns, waiting.end_ns, moving.end_ns) == (outer.begin_ns, moving.begin_ns, outer.end_ns)
    assert waiting.end_ns - waiting.begin_ns == 20 * MS
    (mark,) = [
        one for one in trace.on("rank 1", "group 0 (host calls)") if one.is_instant and one.begin_ns < moving.end_ns
    ]
    assert mark.name == "last to arrive"
    assert moving.arrows_in == mark.arrows_out


def test_groups_stand_in_the_order_of_ranks_and_tracks_in_ours(tmp_path: Path) -> None:
    """The job first, then rank after rank, whatever order they came in; process numbers are unique."""
    _, trace = written(tmp_path, list(reversed(recorded_job("abab", steps=2))))

    groups = sorted((one for one in trace.tracks.values() if one.pid), key=lambda one: one.place)
    assert [group.name.partition(" (")[0] for group in groups] == ["job toy", "rank 0", "rank 1", "rank 2", "rank 3"]
    assert len({group.pid for group in groups}) == len({group.place for group in groups}) == len(groups)
    children = sorted((one for one in trace.tracks.values() if one.parent == groups[1].uuid), key=lambda one: one.place)
    assert [one.name for one in children] == [
        "steps", "parts of the step", "group 0 (host calls)", "step time", "waiting share", "loss",
    ]  # fmt: skip
    assert len({one.place for one in children}) == len(children)


def test_clocks_and_choice_are_in_the_file(tmp_path: Path) -> None:
    """The file has the accuracy of its clocks and the time of day."""
    _, trace = written(tmp_path, recorded_job("ab", steps=5, ahead_s={"b": 9.0}))

    assert trace.attributes["megascale: clock residual p99, ns"] == 0
    assert trace.attributes["megascale: clock of b"] == "collectives, 9000000000 ns"
    (about,) = trace.on("job toy", "about this trace")
    assert about.args["ranks"] == "ranks 0-1 (asked for)"
    boottime, realtime = trace.clocks[6], trace.clocks[1]
    assert realtime - boottime == pytest.approx(1_800_000_000 * NS - (BOOTED_S - 5.0) * NS, abs=1000)


def test_a_wall_clock_far_behind_draws_both_nodes(tmp_path: Path) -> None:
    """Node b shares no collective and its wall clock lags by a year: both have their steps, on one clock."""
    all_records = recorded_job(("a", "b"), steps=3)
    behind = msgspec.structs.replace(
        all_records[1].identity, started_wall_s=all_records[1].identity.started_wall_s - 365 * 86_400
    )
    alone = make_rank_records(behind, all_records[1].steps, ())

    _, trace = written(tmp_path, [all_records[0], alone])

    steps = [trace.on(f"rank {rank}", "steps") for rank in range(2)]
    assert [[one.end_ns - one.begin_ns for one in of_rank] for of_rank in steps] == [[100 * MS] * 3] * 2
    assert steps[0][0].begin_ns - steps[1][0].begin_ns == 365 * 86_400 * NS


def test_an_incident_is_marked(tmp_path: Path) -> None:
    """Its moments have a track of their own, the culprit its name, the verdict a place in the file."""
    marks = Marks(detected=1_800_000_005.2, stopped=1_800_000_005.3, stepped=1_800_000_900.0)
    verdict = Verdict("straggler", "rank 1 is late", 0.9, culprits=(1,))

    _, trace = written(tmp_path, recorded_job("aa"), incident=Incident("toy-1", "toy", 1, marks=marks, verdict=verdict))

    assert [one.name for one in trace.on("job toy", "incident toy-1")] == ["detected", "stopped"]
    assert trace.attributes["megascale: verdict"] == "straggler: rank 1 is late"
    assert [one.name for one in trace.tracks.values() if one.name.endswith(", culprit")] == [
        "rank 1 (node a, local rank 1, dp 0 tp 1), culprit"
    ]


def test_a_limit_keeps_the_newest_steps_and_says_what_is_left_out(tmp_path: Path) -> None:
    """Half of what all would take: the file is smaller than asked for, and still whole."""
    all_records = recorded_job("aabb", steps=200)
    everything, _ = written(tmp_path, all_records, last=200)

    done, trace = written(tmp_path, all_records, last=200, limit_bytes=everything.size_bytes // 2)

    assert done.size_bytes <= everything.size_bytes // 2
    assert (done.last_step, done.first_step) == (
        199,
        200 - sum(one.name.startswith("step ") for one in trace.on("rank 0", "steps")),
    )
    assert done.left_out[0].startswith("all but the last ")
    assert assert_arrows_whole(trace) == done.arrows > 0


def test_a_tighter_limit_keeps_the_most_important_ranks(tmp_path: Path) -> None:
    """Where one step of all does not fit, the first that were chosen are drawn."""
    all_records = recorded_job(["a"] * 64, steps=5)

    done, trace = written(tmp_path, all_records, limit_bytes=12_000)

    assert done.size_bytes <= 12_000
    assert done.ranks[0] == 0
    assert len(done.ranks) < 64
    assert done.left_out[1] == f"ranks {done.ranks[-1] + 1}-63, to stay below 0 MB"
    assert assert_arrows_whole(trace) == done.arrows


def test_a_limit_below_everything_is_one_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    """Not even one step of one rank fits into a kilobyte."""
    with pytest.raises(MegascaleError, match=r"one step of one rank takes more than 1,000 bytes"):
        written(tmp_path, recorded_job("aa"), limit_bytes=1000)

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """The folder went away; nothing half-written stays."""
    with pytest.raises(UsageError, match=r"gone/toy.pftrace can't be written: No such file"):
        written(tmp_path / "gone", recorded_job("aa"))


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """Written beside and renamed: who has the old one open never sees half of the new."""
    path = tmp_path / "toy.pftrace"
    path.write_bytes(b"old")

    with pytest.raises(MegascaleError):
        written(tmp_path, recorded_job("aa"), limit_bytes=1000)

    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    "number", [0, 1, 127, 128, 16_383, 16_384, 2**42 - 1, 2**42, 2**49, 2**56 - 1, 2**56, 2**64 - 1]
)
def test_numbers_are_encoded_as_protobuf_does(number: int) -> None:
    """Seven bits a byte, the lowest first, the shortest form; also through the fast way for time stamps."""
    expected = bytearray()
    rest = number
    while rest > 127:
        expected.append(rest & 127 | 128)
        rest >>= 7
    expected.append(rest)

    assert varint(number) == bytes(expected)
    assert stamp(number) == bytes(expected)
