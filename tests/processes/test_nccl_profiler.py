# SPDX-License-Identifier: Apache-2.0
"""The NCCL profiler plugin, called by a C program as NCCL would, through each version of the interface."""

import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from megascale_ops.blackbox import nccl_codes, nccl_queue, nccl_words
from megascale_ops.schema.gpu_queue import GpuQueue
from tests.fakes.nccl_host import STEP, Binaries, Played, compiled, play
from tests.matrix import wide

# One worker for all of them: what is built for one is used by all.
pytestmark = pytest.mark.processes

COLL, P2P, KERNEL_CH, CE_COLL = 1 << 1, 1 << 2, 1 << 6, 1 << 12
ALL_VERSIONS = range(1, 8)
TIMED_VERSIONS = range(4, 8)


@pytest.fixture(
    scope="module",
    params=wide(["", "address,undefined", "thread"], keep=["", "address,undefined"]),
    ids=["plain", "asan", "tsan"],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Binaries:
    """Plugin, host and second plugin: plain, and under the sanitizers."""
    return compiled(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Binaries:
    """The same without sanitizers, for what is about time."""
    return compiled(tmp_path_factory, "")


@pytest.mark.parametrize("abi", ALL_VERSIONS)
def test_every_version_tells_what_nccl_was_given_to_do(built: Binaries, tmp_path: Path, abi: int) -> None:
    """Communicator, function, number, bytes, algorithm, protocol and peer come through each interface unharmed."""
    played = play(built, tmp_path, abi, "well")

    said = played.finish()

    records = played.box.nccl()
    colls = [one for one in records if one.function == "AllReduce"]
    assert said["mask"] == [COLL | P2P | (KERNEL_CH if abi >= 3 else 0) | (CE_COLL if abi >= 6 else 0)]
    assert [one.seq for one in colls] == list(range(5))
    for one in colls:
        assert (one.communicator, one.bytes_moved, one.datatype) == (0xABCDEF, 4 * (1000 + one.seq), "ncclFloat32")
        assert (one.algorithm, one.protocol, one.channels, one.peer) == ("RING", "SIMPLE", 4, -1)
    others = [(one.function, one.peer, one.seq, one.bytes_moved) for one in records if one.peer >= 0]
    assert others == [("Recv", 5, 0, 154), ("Send", 5, 0, 154), ("Recv", 6, 0, 154), ("Send", 6, 0, 154)]
    assert {one.step for one in records} == {STEP}
    assert all(one.is_done for one in records)
    (communicator,) = played.box.communicators()
    assert (communicator.id, communicator.name, communicator.rank) == (0xABCDEF, "dp", 3)
    assert (communicator.nranks, communicator.nnodes) == ((8, 2) if abi >= 4 else (0, 0))
    assert communicator.closed_mono_ns > communicator.opened_mono_ns
    state = played.box.profiler()
    assert state is not None
    assert (state.abi, state.records, state.open_communicators, state.complaint) == (abi, len(records), 0, "")
    assert (state.dropped_late, state.dropped_busy, state.dropped_no_box, state.dropped_no_context) == (0, 0, 0, 0)


@pytest.mark.parametrize("abi", TIMED_VERSIONS)
def test_gpu_times_are_exact_to_each_other_and_near_the_hosts(built: Binaries, tmp_path: Path, abi: int) -> None:
    """From the first channel's start to the last one's end, by the GPU's clock; placed where the host saw them."""
    played = play(built, tmp_path, abi, "well")

    played.finish()

    for one in played.box.nccl():
        if one.function == "AlltoAll":
            continue
        channels = 4 if one.peer < 0 else 2
        assert one.is_timed
        assert one.gpu_ended_mono_ns - one.gpu_started_mono_ns == 5000 + 10 * (channels - 1)
        assert one.started_channels == one.ended_channels == 2**channels - 1
        # A minute: the host may be held up on a busy machine; clocks that are not put together are years apart.
        assert -1000 <= one.gpu_started_mono_ns - one.enqueued_mono_ns < 60_000_000_000


def test_without_the_gpus_clock_the_hosts_stands_for_it_and_is_marked(built: Binaries, tmp_path: Path) -> None:
    """Version 3 knows channels and no clock; versions 1 and 2 know no channels; copy engines have no kernel."""
    for abi in (2, 3, 6):
        (tmp_path / str(abi)).mkdir(mode=0o700)
    found = {}

    for abi in (2, 3, 6):
        played = play(built, tmp_path / str(abi), abi, "well")
        played.finish()
        found[abi] = played.box.nccl()

    assert all(one.flags & nccl_codes.FLAG_UNTIMED and one.gpu_started_mono_ns == 0 for one in found[2])
    assert all(one.flags & nccl_codes.FLAG_HOST_CLOCK and not one.is_timed for one in found[3])
    assert all(one.enqueued_mono_ns < one.gpu_started_mono_ns < one.gpu_ended_mono_ns for one in found[3])
    copied = found[6][-1]
    assert (copied.function, copied.seq, copied.is_timed) == ("AlltoAll", 9, False)
    assert copied.flags & nccl_codes.FLAG_COPY_ENGINE
    assert copied.enqueued_mono_ns == copied.gpu_started_mono_ns < copied.gpu_ended_mono_ns


def queue_of(played: Played) -> GpuQueue | None:
    """What the GPU has before it, by what stands in the box now."""
    names = nccl_words.names_of(played.box.communicators())
    return nccl_queue.queue_of(played.box.nccl(), time.monotonic_ns(), names)


@pytest.mark.parametrize("abi", range(3, 8))
def test_a_gpu_that_has_not_begun_a_collective_is_seen(built: Binaries, tmp_path: Path, abi: int) -> None:
    """By each interface that tells channels: nothing begun, then inside another communicator, then all ended."""
    dp, tp = f"{0xABCDEF:016x}", f"{0xBEEF:016x}"
    played = play(built, tmp_path, abi, "never")
    seen = []

    for word in ("waits", "inside", "over"):
        played.wait_for(word)
        seen.append(queue_of(played))
        played.say()
    played.finish()

    waits, inside, over = seen
    assert waits is not None
    assert inside is not None
    assert over is not None
    assert [(one.communicator, one.function, one.seq, one.begun) for one in waits.operations] == [
        (dp, "AllReduce", 2, False)
    ]
    assert [(one.communicator, one.begun) for one in inside.operations] == [(dp, False), (tp, True)]
    assert [one for one in over.operations if one.communicator == dp] == []
    assert len({waits.state, inside.state, over.state}) == 3


def test_what_an_interface_does_not_tell_is_not_guessed(plain: Binaries, tmp_path: Path) -> None:
    """NCCL up to 2.25 knows no channels: whether its GPU has begun is not known."""
    played = play(plain, tmp_path, 2, "never")

    for word in ("waits", "inside", "over"):
        played.wait_for(word)
        assert queue_of(played) is None
        played.say()
    played.finish()


@pytest.mark.parametrize("abi", ALL_VERSIONS)
def test_no_order_of_calls_does_harm(built: Binaries, tmp_path: Path, abi: int) -> None:
    """Unknown handles, ends before starts, calls after finalize and after 3,000 others: counted, never believed."""
    played = play(built, tmp_path, abi, "badly")

    played.say()
    played.finish()

    records, state = played.box.nccl(), played.box.profiler()
    assert state is not None
    assert [one.seq for one in records if one.communicator == 2] == list(range(3000 - len(records), 3000))
    assert len(records) == 2048
    assert state.dropped_no_context == 2
    assert state.dropped_late == (2 if abi >= 2 else 0)
    names = [one.name for one in played.box.communicators() if one.id == 2]
    long = "a name that is much longer than the room there is for names of communicators in a black box"
    assert names == [long[:71] if abi >= 4 else "dp"]


@pytest.mark.parametrize("abi", [1, 3, 5])
def test_what_is_strange_is_written_as_it_came(built: Binaries, tmp_path: Path, abi: int) -> None:
    """Words that we do not know are "Unknown"; the first end of a channel counts; an end before its start is marked."""
    played = play(built, tmp_path, abi, "badly")

    played.wait_for("middle")
    strange, *others = played.box.nccl()
    played.say()
    played.finish()

    assert (strange.function, strange.datatype, strange.bytes_moved) == ("Unknown", "Unknown", 1000)
    assert (strange.algorithm, strange.protocol) == (("RING", "SIMPLE") if abi == 1 else ("Unknown", "Unknown"))
    if abi == 5:
        crossed, backwards = others
        assert crossed.started_channels == crossed.ended_channels == 1 | 1 << 63
        assert crossed.gpu_ended_mono_ns - crossed.gpu_started_mono_ns == 300
        assert not crossed.is_done  # four channels were announced
        assert backwards.flags & nccl_codes.FLAG_DOUBTFUL
        assert backwards.gpu_ended_mono_ns == backwards.gpu_started_mono_ns
        assert not backwards.is_timed


@pytest.mark.parametrize("abi", [3, 5])
def test_a_kernel_that_runs_again_ends_again(built: Binaries, tmp_path: Path, abi: int) -> None:
    """A handle that is used for several runs of a kernel: the record is done when the last of them is."""
    played = play(built, tmp_path, abi, "again")

    played.finish()

    (record,) = played.box.nccl()
    assert record.is_done
    assert record.started_channels == record.ended_channels == 15
    if abi == 5:
        assert record.gpu_ended_mono_ns - record.gpu_started_mono_ns == 2_000_000 + 5030


@pytest.mark.parametrize("abi", TIMED_VERSIONS)
def test_a_gpu_clock_that_jumps_is_put_in_its_place_again(built: Binaries, tmp_path: Path, abi: int) -> None:
    """Between two records it went from anywhere to anywhere: each has its duration, after it was enqueued."""
    played = play(built, tmp_path, abi, "clocks")

    played.finish()

    records = played.box.nccl()
    assert [one.seq for one in records] == list(range(5))
    assert all(one.is_timed for one in records)
    assert {one.gpu_ended_mono_ns - one.gpu_started_mono_ns for one in records} == {5030}
    # A minute: the host may be held up on a busy machine.
    assert all(abs(one.gpu_started_mono_ns - one.enqueued_mono_ns) < 60_000_000_000 for one in records)


def test_threads_do_not_disturb_each_other(built: Binaries, tmp_path: Path) -> None:
    """Four threads with collectives, two more with the channels of one: every record is there, once, and whole."""
    played = play(built, tmp_path, 5, "threads")

    played.finish()

    records, state = played.box.nccl(), played.box.profiler()
    assert state is not None
    assert state.records - state.dropped_busy == len(records) or state.dropped_busy
    whole = [one for one in records if one.is_done and one.number > 0]
    # Two threads at one slot at the same moment are rare and counted.
    assert len(whole) >= 800 - state.dropped_busy
    counts = Counter((one.communicator, one.seq) for one in whole)
    assert set(counts.values()) <= {1, 2}
    for one in whole:
        # Another thread's kernel may be the one that began first, by its own clock, in the same record: not here.
        assert one.gpu_ended_mono_ns - one.gpu_started_mono_ns == 5030 or state.dropped_busy


def test_a_box_that_comes_later_is_found(built: Binaries, tmp_path: Path) -> None:
    """What was enqueued before is lost and counted; the communicator made before is in the box."""
    played = Played(built, tmp_path, 5, "later")
    played.say()
    played.wait_for("started")

    played.make_box()
    played.say()
    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert [one.seq for one in played.box.nccl()] == [1]
    assert [(one.name, one.nranks) for one in played.box.communicators()] == [("early", 2)]
    assert (state.dropped_no_box, state.mask, state.abi) == (1, COLL | P2P | KERNEL_CH, 5)


def test_the_box_of_another_process_is_not_touched(plain: Binaries, tmp_path: Path) -> None:
    """A box of the round before, or of the parent, carries another pid."""
    played = Played(plain, tmp_path, 5, "later")
    played.make_box(pid=1)
    before = played.box.raw()

    played.say()
    played.wait_for("started")

    assert played.box.raw() == before
    played._proc.kill()
    played._proc.communicate()


def test_a_forked_child_does_not_write(built: Binaries, tmp_path: Path) -> None:
    """It shares the mapping and is not the rank."""
    played = play(built, tmp_path, 5, "forks")

    played.finish()

    assert [one.seq for one in played.box.nccl()] == [0, 1]


@pytest.mark.parametrize("how", ["adapt", "fixed", ""])
def test_what_is_recorded_gives_way_to_the_budget(plain: Binaries, tmp_path: Path, how: str) -> None:
    """Over budget the channels go first, then sends and receives, then every second collective, the same for all.

    NCCL is asked for less only where that is wished; else its calls are answered with nothing.
    """
    variables = {"MEGASCALE_PROFILER_BUDGET": "0.0001", "MEGASCALE_PROFILER_MASK": how}
    played = play(plain, tmp_path, 5, "overload", variables)

    said = played.finish()

    state = played.box.profiler()
    assert state is not None
    everything = COLL | P2P | KERNEL_CH
    if how == "adapt":
        assert said["mask"] == [everything, everything, COLL | P2P, COLL] or said["mask"][-1] == COLL
    else:
        assert said["mask"] == [everything] * 4
    assert all(one.flags & nccl_codes.FLAG_DONE for one in played.box.nccl(last=5))
    assert state.budget_ppm == 1
    assert state.level >= 3
    assert state.share_ppm > 1
    assert state.unsampled > 0
    assert {one.seq % 2 for one in played.box.nccl(last=5)} == {0}
    assert state.records + state.unsampled == said["driven"][0]
    assert played.box.nccl(last=1)[0].flags & nccl_codes.FLAG_UNTIMED


def test_steps_down_at_once_and_up_after_calm(plain: Binaries, tmp_path: Path) -> None:
    """Every look over budget is a step down; 16 calm ones after the first failure, 32 after the next, are one up."""
    played = Played(plain, tmp_path, 5, "decide")
    played.say()

    for share, budget, times in [(400, 500, 9), (600, 500, 1), (100, 500, 15), (100, 500, 1), (501, 500, 1),
                                 (100, 500, 20), (300, 500, 1), (100, 500, 31), (100, 500, 1), (900, 500, 50),
                                 (100, 500, 512), (0, 500, 512 * 12)]:  # fmt: skip
        played.say(f"{share} {budget} {times}")
    out, _ = played._proc.communicate(timeout=180)

    steps = [tuple(map(int, line.split())) for line in out.splitlines()]
    assert [level for level, _ in steps] == [0, 1, 1, 0, 1, 1, 1, 1, 0, 12, 11, 0]
    assert [wait for _, wait in steps[:9]] == [8, 16, 16, 16, 32, 32, 32, 32, 32]
    assert steps[-1] == (0, 8)


@pytest.mark.parametrize("text", ["-1", " -0.5", "lots", "0,5", "0.5.5", "101", "1" * 30, "nan", "½"])
def test_a_budget_that_is_none_is_told_once(plain: Binaries, tmp_path: Path, text: str) -> None:
    """The plugin goes on with 0.5 per cent and says so, on stderr and in the box."""
    played = play(plain, tmp_path, 5, "well", {"MEGASCALE_PROFILER_BUDGET": text})

    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert state.budget_ppm == 5000
    assert state.complaint in played.complaints
    assert "MEGASCALE_PROFILER_BUDGET is no number from 0 to 100" in state.complaint


@pytest.mark.parametrize("abi", [3, 4, 5, 6])
def test_a_second_plugin_gets_its_own_calls_with_its_own_handles(built: Binaries, tmp_path: Path, abi: int) -> None:
    """It wants proxy steps: these and their ancestors come to it, our channels do not, and we record as ever."""
    counts = tmp_path / "counts"
    proxy_step = 1 << 4
    variables = {"CHAINED_MASK": str(proxy_step), "CHAINED_COUNTS": str(counts)}
    played = play(built, tmp_path, abi, "hierarchy", {**variables, "MEGASCALE_CHAIN_PROFILER": str(built.chained)})

    said = played.finish()

    inits, stops, records, finals, foreign, *starts = map(int, counts.read_text().split())
    state = played.box.profiler()
    assert state is not None
    assert said["mask"] == [COLL | P2P | KERNEL_CH | proxy_step | (CE_COLL if abi >= 6 else 0)]
    assert (inits, finals, foreign) == (1, 1, 10)
    top = 9 if abi >= 5 else 0  # the collective's call, or its group
    assert {bit: count for bit, count in enumerate(starts) if count} == dict.fromkeys((top, 1, 3, 4), 10)
    assert (stops, records) == (40, 20)
    assert [(one.seq, one.is_done) for one in played.box.nccl()] == [(seq, True) for seq in range(10)]
    assert (state.is_chained, state.chain_lost) == (True, 0)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MEGASCALE_CHAIN_PROFILER": "/nowhere.so"}, "can't be loaded: /nowhere.so"),
        ({"MEGASCALE_CHAIN_PROFILER": "nobody"}, "can't be loaded: libnccl-profiler-nobody.so"),
        ({"CHAINED_FAILS": "1"}, "could not begin"),
    ],
)
def test_a_second_plugin_that_fails_is_left_out(
    plain: Binaries, tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    """One sentence, and our own records as ever."""
    usual = {"CHAINED_MASK": "127", "CHAINED_COUNTS": "/dev/null", "MEGASCALE_CHAIN_PROFILER": str(plain.chained)}
    played = play(plain, tmp_path, 5, "hierarchy", {**usual, **variables})

    said = played.finish()

    state = played.box.profiler()
    assert state is not None
    assert said["mask"] == [COLL | P2P | KERNEL_CH]
    assert words in state.complaint
    assert not state.is_chained
    assert len(played.box.nccl()) == 10


def test_what_a_second_plugin_lacks_is_named(plain: Binaries, tmp_path: Path) -> None:
    """It is there, by its name, and can't be loaded: not another name is told that was tried after it."""
    source = tmp_path / "broken.c"
    source.write_text("extern int nobody_has_this(void); int call(void) { return nobody_has_this(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libbroken.so", source], check=True, timeout=120)
    variables = {"MEGASCALE_CHAIN_PROFILER": "libbroken.so", "LD_LIBRARY_PATH": str(tmp_path)}
    played = play(plain, tmp_path, 5, "hierarchy", variables)

    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert "libbroken.so: undefined symbol: nobody_has_this" in state.complaint


def test_a_second_plugin_that_fails_for_one_communicator_keeps_the_others(plain: Binaries, tmp_path: Path) -> None:
    """What it has asked for goes on coming: NCCL has one mask for all communicators."""
    counts = tmp_path / "counts"
    proxy_step = 1 << 4
    variables = {"CHAINED_MASK": str(proxy_step), "CHAINED_COUNTS": str(counts), "CHAINED_FAILS": "2"}
    played = play(plain, tmp_path, 5, "second", {**variables, "MEGASCALE_CHAIN_PROFILER": str(plain.chained)})

    said = played.finish()

    inits, _, _, finals, _, *starts = map(int, counts.read_text().split())
    assert said["mask"] == [COLL | P2P | KERNEL_CH | proxy_step]
    assert (inits, finals, starts[4]) == (2, 1, 10)


def test_our_own_plugin_is_not_chained_behind_itself(plain: Binaries, tmp_path: Path) -> None:
    """A user who names it there gets one sentence and one record of each collective, not a stack that overflows."""
    played = play(plain, tmp_path, 5, "hierarchy", {"MEGASCALE_CHAIN_PROFILER": str(plain.plugin)})

    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert state.complaint == "MEGASCALE_CHAIN_PROFILER names this plugin itself, which is not loaded twice"
    assert not state.is_chained
    assert len(played.box.nccl()) == 10


def test_a_second_plugin_of_another_version_is_left_out(plain: Binaries, tmp_path: Path) -> None:
    """NCCL has chosen version 7, and the other plugin ends at 6."""
    usual = {"CHAINED_MASK": "127", "CHAINED_COUNTS": "/dev/null", "MEGASCALE_CHAIN_PROFILER": str(plain.chained)}
    played = play(plain, tmp_path, 7, "hierarchy", usual)

    played.finish()

    state = played.box.profiler()
    assert state is not None
    assert state.complaint == "the plugin of MEGASCALE_CHAIN_PROFILER has no ncclProfiler_v7"


@pytest.mark.alone  # CPU time, but of cores whose caches no other process uses
def test_a_call_takes_less_than_a_microsecond(plain: Binaries, tmp_path: Path) -> None:
    """Start and stop of a collective, and the three calls of a channel, in CPU time; a tenth of the 2 us allowed."""
    played = play(plain, tmp_path, 5, "bench", {"MEGASCALE_PROFILER_BUDGET": "100"})

    said = played.finish()

    # 1,000 ns: five times what an idle machine needs.
    assert said["coll"][0] < 1000
    assert said["channel"][0] < 1000


def test_a_process_that_is_no_rank_is_asked_for_nothing(plain: Binaries, tmp_path: Path) -> None:
    """Where the runner has told nothing, NCCL has nothing to tell either."""
    played = Played(plain, tmp_path, 5, "well", {"RANK": ""})

    played.say()
    said = played.finish()

    assert said["mask"] == [0]
