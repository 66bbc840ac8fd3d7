# SPDX-License-Identifier: Apache-2.0
"""Folded heartbeats are what they were, whatever they hold; what is no folding of ours gets one sentence."""

import gzip
import lzma
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale_ops.errors import UsageError
from megascale_ops.replay import files
from megascale_ops.replay.files import Recording, pack, parse, read_recording
from megascale_ops.replay.folding import Folding
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import Progress, RankReport
from megascale_ops.schema.recording.entries import PLAIN_VERSION, RECORDING_VERSION, Beat, Header

REAL = Path(__file__).parents[2] / "real" / "recordings"
HEADER = Header(PLAIN_VERSION, 1.0, 1_700_000_000.0)
_encode, _decode = msgspec.json.encode, msgspec.json.decode

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 0.5, 1.0]) | st.sampled_from(["", "a", "-"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "-"]), inner, max_size=2),
    max_leaves=6,
)
ranks = st.fixed_dictionaries(
    {"rank": st.integers(0, 4)}, optional={"a": values, "b": values, "-": values, "progress": values}
)
heartbeats = st.fixed_dictionaries(
    {"node": st.sampled_from(["n", "m"]), "agent_id": st.just("x")},
    optional={
        "jobs": st.lists(
            st.fixed_dictionaries(
                {"job": st.sampled_from(["j", "k"])}, optional={"ranks": st.lists(ranks, max_size=4)}
            ),
            max_size=2,
        )
    },
)


_TWICE = [{"job": "j", "ranks": [{"rank": 0, "a": None}]}, {"job": "j", "ranks": [{"rank": 0}]}]


@settings(max_examples=150, deadline=None)
@given(st.lists(heartbeats, max_size=6))
@example([{"node": "n", "agent_id": "x", "jobs": _TWICE}])
def test_any_heartbeats_come_back_as_they_were(told: list[dict[str, object]]) -> None:
    """In order; keys come and go, ranks and jobs are told twice, and some have the key that stands for what is gone."""
    lines = [_encode({"kind": "heartbeat", "t": 1.0, "m": one}) for one in told]
    folding, unfolding = Folding(), Folding()

    back = [unfolding.unfold(folding.fold(line), "x") for line in lines]

    assert [_without_empty(line) for line in back] == [_without_empty(line) for line in lines]


def _without_empty(line: bytes) -> object:
    """Return a line's value; a report without ranks is one with none."""
    entry = _decode(line)
    for report in entry["m"].get("jobs", ()):
        if not report.get("ranks"):
            report.pop("ranks", None)
    return entry


@pytest.mark.parametrize("path", sorted(REAL.glob("*.recording")), ids=lambda path: path.stem)
def test_a_real_recording_is_folded_to_the_same_and_less(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entries' own types; small ones are not folded, so that an older program reads them."""
    whole = read_recording(path)
    plain = pack(whole)
    monkeypatch.setattr(files, "_SMALL_BYTES", 0)
    folded = pack(whole)

    assert parse(plain, "plain").header.recording == PLAIN_VERSION
    assert parse(folded, "folded").header.recording == RECORDING_VERSION
    assert parse(folded, "folded").entries == parse(plain, "plain").entries == whole.entries
    assert len(lzma.decompress(folded)) < len(lzma.decompress(plain)) * 0.8


def test_ranks_that_go_on_alike_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 nodes of eight ranks for a minute: a fifth of the lines' bytes, of the file three fifths; 64: half."""
    beats = [
        Beat(
            float(second),
            Heartbeat(
                f"n{node}", "x", second + 1, 1000.0 * node + second, 0.0,
                jobs=(JobReport("j", 1, ranks=tuple(_rank(node * 8 + local, second) for local in range(8))),),
            ),
        )
        for second in range(60)
        for node in range(16)
    ]  # fmt: skip
    recording = Recording(HEADER, tuple(beats))
    plain = pack(recording)
    monkeypatch.setattr(files, "_SMALL_BYTES", 0)
    folded = pack(recording)

    assert parse(folded, "x").entries == recording.entries
    assert len(lzma.decompress(folded)) < len(lzma.decompress(plain)) / 5
    assert len(folded) < len(plain) * 0.6


def _rank(rank: int, second: int) -> RankReport:
    progress = Progress(state="running", step=second, phase="forward", moved_mono_s=1000.0 * (rank // 8) + second)
    return RankReport(rank=rank, local_rank=rank % 8, pid=1000 + rank, round=1, progress=progress)


GOOD = (
    '{"kind":"heartbeat","t":1,"m":{"node":"n","agent_id":"x","seq":1,"mono_s":1,"wall_s":1,'
    '"jobs":[{"job":"j","round":1,'
)


@pytest.mark.parametrize(
    "folded",
    [
        pytest.param("[7,8]", id="ranks that go on as nothing"),
        pytest.param("[[0,{}],1000000000]", id="a thousand million ranks"),
        pytest.param('[["0",{}]]', id="a rank that is no number"),
        pytest.param("[[0]]", id="no difference"),
        pytest.param('[[0,"x"]]', id="a difference that is none"),
        pytest.param('[[0,{"-":7}]]', id="what is gone is no list"),
        pytest.param('[[0,{"a":"' + "x" * 100_000 + '"}],100]', id="more than a heartbeat may have"),
        pytest.param("7", id="no list"),
    ],
)
def test_what_can_not_be_unfolded_gets_one_sentence(folded: str) -> None:
    """Of a file that was damaged or made up: it names the line, and no memory is filled."""
    header = f'{{"recording":{RECORDING_VERSION},"began_mono_s":1,"began_wall_s":1}}'
    raw = gzip.compress(f'{header}\n{GOOD}"folded":{folded}}}]}}}}\n'.encode())

    with pytest.raises(UsageError, match=r"sent.recording: line 2 is no entry of a recording"):
        parse(raw, "sent.recording")


def test_many_small_lines_that_unfold_to_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred bytes may stand for a heartbeat of a megabyte: what is unfolded is counted."""
    monkeypatch.setattr(files, "MOST_BYTES", 2_000_000)
    header = f'{{"recording":{RECORDING_VERSION},"began_mono_s":1,"began_wall_s":1}}'
    first = GOOD + '"folded":[[0,{"local_rank":0,"pid":1,"round":1,"gpu":"' + "x" * 100 + '"}],300]}]}}'
    lines = [header, first, *[GOOD + '"folded":[[0,{}],300]}]}}'] * 100]

    with pytest.raises(UsageError, match=r"more than 1 MiB when unfolded"):
        parse(gzip.compress("".join(f"{line}\n" for line in lines).encode()), "sent.recording")
