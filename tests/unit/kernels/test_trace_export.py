# SPDX-License-Identifier: Apache-2.0
"""Dumps of several ranks become one trace: whole, on one clock, with arrows that are true.

The whole of a small trace is compared with a golden file: MEGASCALE_UPDATE_GOLDEN=1 writes it anew.
"""

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megascale_kernels.planning.config import Config
from megascale_kernels.progress.board_format import (
    COMMUNICATE,
    COMPUTE,
    LAUNCH_BEGIN,
    NOTIFY,
    OPERATORS,
    RING_WORDS,
    TILE_BEGIN,
    TILE_END,
    WAIT_BEGIN,
    WAIT_END,
)
from megascale_kernels.tracing import Chunk, Offset, Shape, TraceDump, chrome_trace, chunk_of, load_trace, save_trace
from megascale_kernels.tracing.__main__ import main as tracing_main
from megascale_kernels.tracing.chrome import slices_of_rank
from megascale_kernels.tracing.dump import parse_dump, render_dump, units_of_tiles
from megascale_kernels.tracing.flows import arrows

from tests.fakes.boards import FakeBoard, FakeRing

GOLDEN = Path(__file__).parents[2] / "golden" / "kernels" / "trace.json"
NO_RING = [0] * RING_WORDS
BEGAN_NS = 1_750_000_000_000_000_000
AHEAD_NS = 5_000  # how far rank 1's clock is ahead


def dump_of(
    rank: int,
    *rings: list[int],
    world_size: int = 2,
    shapes: Mapping[int, Shape] | None = None,
    **facts: Any,  # noqa: ANN401
) -> TraceDump:
    """A dump through its bytes; rings are those of CTA 0: compute, communicate, then of CTA 1."""
    words = array("i", [word for ring in rings for word in ring])
    offset, chunks = facts.get("offset", Offset()), facts.get("chunks", ())
    return parse_dump(render_dump(words, rank, world_size, offset, shapes or {}, chunks))


def tile(
    begin: int, number: int, peer: int, *, wait: int = 0, notify: int | None = None, flag: int | None = None
) -> list[tuple[int, int, int, int]]:
    """A tile of ten nanoseconds; its flag has its number unless told."""
    flag = number if flag is None else flag
    events = [(begin, TILE_BEGIN, number, peer)]
    if wait:
        events += [(begin + 1, WAIT_BEGIN, flag, peer), (begin + 1 + wait, WAIT_END, flag, peer)]
    if notify is not None:
        events.append((begin + 8, NOTIFY, flag, notify))
    return [*events, (begin + 10, TILE_END, number, peer)]


def scatter(rank: int, began_ns: int = BEGAN_NS) -> list[int]:
    """A reduce-scatter of two ranks and two tiles: the peer's tile, then our own, by one CTA."""
    fake = FakeRing().marks([(began_ns, LAUNCH_BEGIN, 41, OPERATORS.index("gemm_rs"))])
    fake.marks(tile(began_ns + 10, 0, 1 - rank, notify=1 - rank, flag=0))
    fake.marks(tile(began_ns + 30, 1, rank, wait=5, flag=0))
    return fake.close().words


SCATTER = {41: Shape("gemm_rs", 2)}


def both() -> list[TraceDump]:
    """The two ranks of a reduce-scatter, on different clocks, rank 1 with a copy and a killed CTA."""
    killed = FakeRing().marks([(BEGAN_NS + AHEAD_NS + 12, TILE_BEGIN, 5, 0)]).words
    copy = Chunk(41, 0, 2, BEGAN_NS + AHEAD_NS + 3, BEGAN_NS + AHEAD_NS + 9)
    return [
        dump_of(0, scatter(0), shapes=SCATTER),
        dump_of(
            1,
            scatter(1, BEGAN_NS + AHEAD_NS),
            NO_RING,
            killed,
            shapes=SCATTER,
            offset=Offset(AHEAD_NS, 7),
            chunks=[copy],
        ),
    ]


def found_arrows(*dumps: TraceDump) -> set[tuple[int, int, int, int]]:
    """Arrows as (rank, tile or unit) of the notification, (rank, tile) of the wait."""
    by_rank = {dump.rank: dump for dump in dumps}
    found = arrows(by_rank, {rank: slices_of_rank(dump) for rank, dump in by_rank.items()})
    return {(arrow.source, arrow.notice.tile, arrow.target, arrow.wait.tile) for arrow in found}


def test_a_small_trace_looks_as_in_the_golden_file() -> None:
    """Every field of every event, times in microseconds after the first event."""
    text = json.dumps(chrome_trace(both()), indent=1) + "\n"

    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_trace_keeps_to_its_format() -> None:
    """Slices have all fields and nest, every arrow has two ends inside slices, every track has a name."""
    found = chrome_trace(both())
    events = found["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    names = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}

    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    for event in slices:
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["ts"] >= 0
        assert event["dur"] > 0
        assert (event["pid"], event["tid"]) in names
    for one in slices:
        for other in slices:
            if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                ends = sorted(((one["ts"], one["ts"] + one["dur"]), (other["ts"], other["ts"] + other["dur"])))
                assert ends[0][1] <= ends[1][0] + 1e-9 or ends[0][1] >= ends[1][1] - 1e-9
    for number in {event["id"] for event in events if event["ph"] in "sf"}:
        begin, end = (event for event in events if event.get("id") == number)
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"]
        for event in (begin, end):
            assert any(
                (one["pid"], one["tid"]) == (event["pid"], event["tid"])
                and one["ts"] <= event["ts"] < one["ts"] + one["dur"]
                for one in slices
            )
    assert found["otherData"]["slices with a flaw"] == 1


def test_an_arrow_against_time_is_left_out_and_counted() -> None:
    """Clocks that are wrong do not make an effect come before its cause."""
    late = dump_of(1, scatter(1, BEGAN_NS + 1000), shapes=SCATTER)

    facts = chrome_trace([dump_of(0, scatter(0), shapes=SCATTER), late])["otherData"]

    assert (facts["arrows"], facts["arrows against time, left out"]) == (1, 1)


def test_reduce_scatter_matches_by_the_flag() -> None:
    """Both sides record the flag, so nothing else need be known of the launch."""
    assert found_arrows(*both()) == {(0, 0, 1, 0), (1, 0, 0, 0)}
    assert found_arrows(*(dump._replace(shapes={}) for dump in both())) == {(0, 0, 1, 0), (1, 0, 0, 0)}


def test_reduce_scatter_matches_across_roles() -> None:
    """On Hopper a consumer notifies and the producer waits: arrows lead from role to role."""
    sends = FakeRing().marks(tile(5, 0, 1, notify=1, flag=3)).close(COMPUTE).words
    waits = FakeRing().marks(tile(30, 1, 1, wait=5, flag=3)).close(COMMUNICATE).words
    dumps = {0: dump_of(0, sends), 1: dump_of(1, NO_RING, waits)}

    (found,) = arrows(dumps, {rank: slices_of_rank(dump) for rank, dump in dumps.items()})

    assert (found.notice.role, found.wait.role) == ("compute", "communicate")
    assert (found.source, found.target, found.notice.tile, found.wait.tile) == (0, 1, 3, 3)


def test_all_reduce_matches_by_the_tile() -> None:
    """Every rank's wait for a tile gets an arrow from every other rank's."""
    events = [(5, NOTIFY, 3, 0), (6, WAIT_BEGIN, 3, 0), (9, WAIT_END, 3, 0)]
    rings = [FakeRing().marks(events).close(operator="gemm_ar").words for _ in range(3)]

    found = found_arrows(*(dump_of(rank, ring, world_size=3) for rank, ring in enumerate(rings)))

    assert found == {(source, 3, target, 3) for source in range(3) for target in range(3) if source != target}


def gather(units: int, shapes: Mapping[int, Shape] | None = None) -> list[TraceDump]:
    """Rank 0 pushes units to rank 1, which waits with its tiles 4 and 5."""
    begin = (1, LAUNCH_BEGIN, 7, OPERATORS.index("ag_gemm"))
    pushes = FakeRing().marks([begin, *((10 + unit, NOTIFY, unit, 1) for unit in range(units))]).close(1).words
    waits = FakeRing().marks([begin, *tile(20, 4, 0, wait=5), *tile(40, 5, 0, wait=5)]).close().words
    return [dump_of(0, NO_RING, pushes), dump_of(1, waits, shapes=shapes)]


def test_all_gather_matches_by_units() -> None:
    """A tile that reads two units gets two arrows; of a single unit nothing need be known."""
    shapes = {7: Shape("ag_gemm", 8, ((0, 0), (0, 1), (1, 1), (1, 1)))}

    assert found_arrows(*gather(2, shapes)) == {(0, 0, 1, 4), (0, 0, 1, 5), (0, 1, 1, 5)}
    assert found_arrows(*gather(1)) == {(0, 0, 1, 4), (0, 0, 1, 5)}
    assert found_arrows(*gather(2)) == set()


def test_copies_of_the_copy_engine_release_waits_too() -> None:
    """Chunks given by the host take the place of pushes."""
    chunk = chunk_of(7, 1, 0, anchor_ns=1, begin_ms=4e-6, end_ms=9e-6)
    copying, waiting = gather(0)

    assert chunk == Chunk(7, 1, 0, 5, 10)
    assert found_arrows(copying._replace(chunks=(chunk,)), waiting) == {(0, 0, 1, 4), (0, 0, 1, 5)}


def test_ranks_of_different_jobs_are_refused() -> None:
    """The same rank twice, or groups of different sizes."""
    with pytest.raises(ValueError, match="two of these traces are of rank 0"):
        chrome_trace([dump_of(0), dump_of(0)])
    with pytest.raises(ValueError, match=r"groups of \[2, 4\] ranks"):
        chrome_trace([dump_of(0), dump_of(1, world_size=4)])


def test_a_dump_comes_back(tmp_path: Path) -> None:
    """What a workspace recorded is in the file, the shape of the last launch taken from its board."""
    torch = pytest.importorskip("torch")
    board = FakeBoard("ag_gemm", 41, ctas=1, tiles=8, sizes=(192, 128, 64), world_size=2)
    config = Config(64, 128, group_m=1, splits=2)
    workspace = SimpleNamespace(
        trace=True,
        rank=0,
        world_size=2,
        board=board.words,
        trace_words=torch.tensor(NO_RING + scatter(0) + NO_RING, dtype=torch.int32),
    )

    save_trace(workspace, tmp_path / "rank0", config=config, offset=Offset(5, 1))  # type: ignore[arg-type]
    found = load_trace(tmp_path / "rank0")

    assert [(ring.cta, ring.role, len(ring.events)) for ring in found.rings] == [(0, "communicate", 8)]
    assert found.shapes == {41: Shape("ag_gemm", 8, ((0, 0), (0, 0), (1, 1)))}
    assert (found.rank, found.world_size, found.offset) == (0, 2, Offset(5, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]


def test_the_units_of_a_walk_with_all_shards_are_told_tile_by_tile() -> None:
    """Two shards of two row blocks, three columns, a unit a block: one column shard by shard, two with all rows."""
    config = Config(64, 128, group_m=8, splits=2)

    assert units_of_tiles(128, 384, config, 2, 1) == ((0, 0), (1, 1)) * 6
    assert units_of_tiles(128, 384, config, 2) == ((0, 0), (1, 1)) * 3
    assert units_of_tiles(128, 384, config._replace(group_m=1), 2, 1)[4:] == (*[(0, 0)] * 2, *[(1, 1)] * 2) * 2


def test_a_workspace_without_a_trace_says_so(tmp_path: Path) -> None:
    """Nothing recorded is the caller's mistake."""
    with pytest.raises(ValueError, match="make it with trace=True"):
        save_trace(SimpleNamespace(trace=False), tmp_path / "x")  # type: ignore[arg-type]


WHOLE = render_dump(array("i", scatter(0)), 0, 2, Offset(), SCATTER, [Chunk(41, 1, 0, 5, 6)])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_dump_is_refused_or_drawn(data: st.DataObject) -> None:
    """Cut or altered bytes give a ValueError of one line or a trace, never anything else."""
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, min(len(damaged) - 1, 300)))
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))

    refused = ""
    try:
        json.dumps(chrome_trace([parse_dump(bytes(damaged[:cut]))]))
    except ValueError as error:
        refused = str(error)

    assert "\n" not in refused


def test_the_command_merges_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file comes out, and a line says what is in it."""
    for rank in (0, 1):
        words = array("i", scatter(rank))
        (tmp_path / f"rank{rank}").write_bytes(render_dump(words, rank, 2, Offset(), SCATTER, ()))
    files = [str(tmp_path / f"rank{rank}") for rank in (0, 1)]

    assert tracing_main([*files, "-o", str(tmp_path / "out.json")]) == 0
    assert "arrows: 2" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) > 10


@pytest.mark.parametrize("bad", ["missing", "text", "short", "folder"])
def test_a_bad_file_costs_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    """No traceback, the name of the file, and no output file."""
    (tmp_path / "text").write_text("{}")
    (tmp_path / "short").write_bytes(WHOLE[:-1])
    (tmp_path / "folder").mkdir()

    assert tracing_main([str(tmp_path / bad), "-o", str(tmp_path / "out.json")]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / bad) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_an_output_that_cannot_be_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there."""
    (tmp_path / "rank0").write_bytes(WHOLE)

    assert tracing_main([str(tmp_path / "rank0"), "-o", str(tmp_path / "none" / "out.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_trace_takes_no_device_s_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets the trace as it is, the summary goes elsewhere, and the pipe stays a pipe: `-o /dev/null` as root."""
    (tmp_path / "rank0").write_bytes(WHOLE)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    code = tracing_main([str(tmp_path / "rank0"), "-o", str(tmp_path / "pipe")])

    assert (code, (tmp_path / "pipe").is_fifo()) == (0, True)
    assert os.read(reader, 20).startswith(b'{"traceEvents"')
    os.close(reader)
    out, err = capsys.readouterr()
    assert (out, err.count("events lost")) == ("", 1)


def test_a_link_to_an_output_stays_a_link(tmp_path: Path) -> None:
    """What the link points to gets the trace."""
    (tmp_path / "rank0").write_bytes(WHOLE)
    (tmp_path / "link").symlink_to(tmp_path / "out.json")

    assert tracing_main([str(tmp_path / "rank0"), "-o", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert "traceEvents" in json.loads((tmp_path / "out.json").read_text())


def test_an_output_without_a_name_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o ""` is a slip of a script, not a matter of Python's paths."""
    (tmp_path / "rank0").write_bytes(WHOLE)

    assert tracing_main([str(tmp_path / "rank0"), "-o", ""]) == 2
    assert capsys.readouterr().err == "'.' names no file to write\n"


def test_clocks_beyond_all_bounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged offset of 400 digits is said, rather than divided."""
    for rank, offset in enumerate((0, 10**400)):
        words = array("i", scatter(rank))
        (tmp_path / f"rank{rank}").write_bytes(render_dump(words, rank, 2, Offset(offset), SCATTER, ()))

    assert tracing_main([str(tmp_path / "rank0"), str(tmp_path / "rank1"), "-o", str(tmp_path / "out.json")]) == 2
    assert "rank1 is no trace" in capsys.readouterr().err


@pytest.mark.processes
def test_a_summary_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    """A closed pipe ends quietly, a full disk in one sentence, a name that is no UTF-8 is spelled out."""
    (tmp_path / "rank0").write_bytes(WHOLE)
    command = [sys.executable, "-m", "megascale_kernels.tracing", os.fsencode(tmp_path / "rank0"), "-o"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    odd = os.fsencode(tmp_path) + b"/odd\xff"
    read, write = os.pipe()
    os.close(read)

    def run(stdout: int) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, odd], env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=180, check=False
        )

    shown, closed = run(subprocess.PIPE), run(write)
    os.close(write)
    with Path("/dev/full").open("w") as full:
        left = run(full.fileno())

    assert (shown.returncode, shown.stdout.partition(":")[0]) == (0, f"{tmp_path}/odd\\udcff")
    assert (closed.returncode, closed.stderr) == (0, "")
    assert (left.returncode, left.stderr) == (2, "the summary cannot be written: No space left on device\n")
