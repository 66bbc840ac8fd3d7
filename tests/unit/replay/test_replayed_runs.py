# SPDX-License-Identifier: Apache-2.0
"""A recording, replayed, is judged as it was when it happened: whole, from the middle, smaller, without names."""

import shutil
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.replay.cutting import Block, Window, cut
from megascale_ops.replay.drive import replay
from megascale_ops.replay.export import contents, export
from megascale_ops.replay.files import Recording, pack, parse, read_blocks
from megascale_ops.replay.thinning import WAYS, thin
from megascale_ops.replay.verdicts import Judged, compare, judged, recorded_incidents
from megascale_ops.schema.policy_settings import read_settings
from megascale_ops.schema.recording.entries import BLOCK_SUFFIX, Beat, Joined, Start, Stepped
from megascale_ops.sim.machine import JOB
from tests.fakes.recorded_cluster import record

_KILLED = Judged("killed", (8,), ("node-00001",), "restart", is_warning=False)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Block]:
    """Blocks of two and a half minutes in which rank 8 is killed after one and a half; each heartbeat is spoken."""
    return record(tmp_path_factory.mktemp("killed"), ["killed@0.025"], every_heartbeat=True)[0]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[Block]:
    """Blocks of two and a half minutes in which rank 8 becomes slow."""
    return record(tmp_path_factory.mktemp("slow"), ["slow@0.012"])[0]


def said_of(recording: Recording, **settings: str) -> tuple[Judged, ...]:
    """Return what a replay says."""
    return judged(replay(recording, settings).incidents)


def without_numbers(verdicts: tuple[Judged, ...]) -> list[str]:
    """Return classes and actions alone."""
    return [f"{one.fault} {one.action}" for one in verdicts]


def test_a_replay_says_what_was_said_and_takes_no_time(killed: list[Block]) -> None:
    """The same class, rank, node and action, by orders and evidence of its own."""
    whole = cut(killed, JOB)

    done = replay(whole)

    assert judged(recorded_incidents(whole)) == (_KILLED,)
    assert judged(done.incidents) == (_KILLED,)
    assert done.span_s == pytest.approx(150.0, abs=2.0)
    assert not done.refused


def test_a_replay_may_begin_in_the_middle(killed: list[Block], slow: list[Block]) -> None:
    """Where a controller would go on that is started again: what was known then is in the recording."""
    for blocks in (killed, slow):
        began_s = blocks[0].header.began_wall_s

        middle = cut(blocks, JOB, Window(began_s + 35.0, began_s + 140.0))

        first = middle.entries[0]
        assert isinstance(first, Start)
        assert len(first.agents) == 3
        assert compare(judged(recorded_incidents(middle)), said_of(middle)).is_none
        assert middle.span_s < 115.0


def test_what_is_thinned_says_the_same_and_is_smaller(slow: list[Block]) -> None:
    """Of a slow rank its steps are needed; what takes them away is not what export chooses."""
    whole = cut(slow, JOB)
    sizes = {way.name: len(pack(thin(whole, way))) for way in WAYS}

    made = export(whole)

    assert sizes["ends"] < min(sizes["steps"], sizes["quiet"])
    assert max(sizes["steps"], sizes["quiet"]) < len(pack(whole))
    assert said_of(thin(whole, WAYS[0])) == ()
    assert made.recording.header.thinned == "steps"
    assert without_numbers(said_of(made.recording)) == ["straggler warn"]
    assert not made.notes


def test_fewer_heartbeats_leave_no_gap_and_a_lost_one_stays_lost(killed: list[Block]) -> None:
    """Numbers of what was merged are taken back; an agent that missed one is asked for all as before."""
    whole = cut(killed, JOB)
    beats = [entry for entry in whole.entries if isinstance(entry, Beat) and entry.m.node == "node-00000"]
    lost = beats[100]
    gap = whole._replace(entries=tuple(entry for entry in whole.entries if entry is not lost))

    def gaps(recording: Recording) -> int:
        seqs = [entry.m.seq for entry in recording.entries if isinstance(entry, Beat) and entry.m.node == "node-00000"]
        return sum(after != before + 1 for before, after in pairwise(seqs))

    assert gaps(whole) == 0
    assert gaps(thin(whole, WAYS[2])) == 0
    assert gaps(thin(gap, WAYS[2])) == 1
    assert len(thin(whole, WAYS[2]).entries) < len(whole.entries) * 0.8


def test_what_is_exported_has_no_name_left(killed: list[Block]) -> None:
    """Nodes by their ranks, the job as job; and it says the same of them."""
    made = export(cut(killed, JOB))

    held = contents(made.recording)

    assert held.is_anonymous
    assert held.job == "job"
    assert set(held.nodes) == {"node-1", "node-2", "node-3"}
    assert said_of(made.recording) == (_KILLED._replace(nodes=("node-2",)),)
    raw = b"".join(map(msgspec.json.encode, made.recording.entries))
    assert JOB.encode() not in raw
    assert b"node-0000" not in raw
    assert b"train.py" not in raw


def test_another_policy_is_tried_on_what_has_happened(killed: list[Block]) -> None:
    """With it the verdict is the same, and what is done about it is not."""
    whole = cut(killed, JOB)
    middle = cut(killed, JOB, Window(killed[2].header.began_wall_s, 4e9))

    for recording in (whole, middle):
        said = said_of(recording, **read_settings(["killed=stop"]))

        assert said == (_KILLED._replace(action="stop"),)


def test_time_that_goes_back_is_taken_in_the_order_of_the_file(killed: list[Block]) -> None:
    """A recording whose times are shuffled can be read and replayed; its wall clock may be stepped."""
    whole = cut(killed, JOB)
    back = [
        msgspec.structs.replace(entry, t=max(0.0, entry.t - 5.0)) if at % 7 == 0 else entry
        for at, entry in enumerate(whole.entries)
    ]
    back.insert(200, Stepped(back[200].t, 1_600_000_000.0))

    read = parse(pack(Recording(whole.header, tuple(back))), "shuffled")

    assert [entry.t for entry in read.entries] == sorted(entry.t for entry in read.entries)
    assert [one.fault for one in said_of(read)] == ["killed"]


def test_a_speed_is_kept_by_waiting(killed: list[Block]) -> None:
    """At ten times the speed 150 s of recording take 15, but for what the work takes."""
    waited: list[float] = []

    replay(cut(killed, JOB), speed=10.0, sleep=waited.append)

    assert max(waited) <= 15.0
    assert sum(one > 0 for one in waited) > len(waited) / 2


def test_blocks_of_two_lives_of_a_controller_are_one_recording(killed: list[Block]) -> None:
    """It was started again in between: its clock may begin anew, and its requests are counted from 1 again."""
    half = len(killed) // 2
    later = []
    for block in killed[half:]:
        recording = parse(block.raw, block.name)
        began_s = recording.header.began_mono_s - 9e3
        header = msgspec.structs.replace(recording.header, process="other", began_mono_s=began_s)
        later.append(Block(block.name, pack(recording._replace(header=header)), header))

    whole = cut([*killed[:half], *later], JOB)

    assert whole.span_s == pytest.approx(150.0, abs=3.0)
    assert said_of(whole) == (_KILLED,)


def test_blocks_whose_beginning_is_gone_are_cut_from_the_next_one(killed: list[Block]) -> None:
    """The ring drops the oldest: what goes on from it is no place to begin."""
    orphan = killed[1]
    header = msgspec.structs.replace(orphan.header, goes_on=True)

    made = cut([orphan._replace(header=header), *killed[2:]], JOB)

    assert made.header.began_wall_s == killed[2].header.began_wall_s


def test_a_job_that_is_not_recorded_is_told(killed: list[Block]) -> None:
    """Of another job nothing is cut out."""
    with pytest.raises(UsageError, match="tell nothing of job other"):
        cut(killed, "other")


def test_blocks_are_read_from_their_folder(tmp_path: Path, killed: list[Block]) -> None:
    """The earliest first; a folder without any gets one sentence."""
    for block in killed[:3]:
        (tmp_path / Path(block.name).name).write_bytes(block.raw)

    read = [path.name for path, _ in read_blocks(tmp_path, BLOCK_SUFFIX)]

    assert read == [Path(block.name).name for block in killed[:3]]
    shutil.rmtree(tmp_path)
    with pytest.raises(MegascaleError, match="nothing is recorded in"):
        read_blocks(tmp_path, BLOCK_SUFFIX)


@pytest.mark.parametrize("has_joins", [True, False])
def test_a_difference_is_told_where_there_is_one(killed: list[Block], has_joins: bool) -> None:
    """Without the runners' joins there is no job: what is missing is named; with them nothing is."""
    whole = cut(killed, JOB)
    left = whole._replace(entries=tuple(one for one in whole.entries if has_joins or not isinstance(one, Joined)))

    difference = compare(judged(recorded_incidents(whole)), said_of(left))

    assert difference.missing == (() if has_joins else (_KILLED,))
    assert difference.new == ()
