# SPDX-License-Identifier: Apache-2.0
"""No secret of a user's comes out of a recording that was made anonymous, whatever field it stands in."""

import types
import typing
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale_ops.controller.embedded import JobRecord
from megascale_ops.replay.anonymous import anonymise
from megascale_ops.replay.drive import replay
from megascale_ops.replay.files import Recording, pack, parse, read_recording
from megascale_ops.replay.verdicts import judged
from megascale_ops.replay.vocabulary import vocabulary
from megascale_ops.schema.recording.entries import Entry, Header, Start

REAL = Path(__file__).parents[1] / "real" / "recordings"
# Letters and digits of several scripts, and what names, paths, addresses and texts are made of.
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789äßжλ日"
# A word of "a" and "0" alone may be the path of a trail, whose letters are its own phases.
_words = st.text(_LETTERS, min_size=9, max_size=16).filter(lambda word: not set(word) <= set("aA0"))
_secrets = st.one_of(
    _words,
    st.tuples(_words, st.sampled_from("-._/@:= |,#()"), _words).map("".join),
    st.tuples(_words, _words).map(lambda both: f"/home/{both[0]}/{both[1]}.py"),
    st.text("23456789", min_size=9, max_size=16),
    st.from_regex(r"(11[0-9]|12[0-6])\.(2[0-4][0-9]\.){2}1[0-9][0-9]", fullmatch=True),
    st.from_regex(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{12}", fullmatch=True),
    st.tuples(_words, st.sampled_from([":29500", "-7", ":1:5.ab", "_1", "@n"])).map("".join),
)


@lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=False)


def full(kind: Any, secret: str, record: bytes = b"{}") -> Any:  # noqa: ANN401, PLR0911  any type of the schema
    """Return the fullest value of a type: the secret in each string, one item in each collection, nothing left out."""
    origin, inner = typing.get_origin(kind), get_args(kind)
    if origin is typing.Literal:
        return inner[0]
    if origin in (typing.Union, types.UnionType):
        return full(next(one for one in inner if one is not type(None)), secret, record)
    if origin is tuple:
        return (full(inner[0], secret, record),)
    if origin is dict:
        return {full(inner[0], secret): full(inner[1], secret, record)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = _hints(kind)
        return kind(**{name: full(hints[name], secret, record) for name in kind.__struct_fields__})
    if kind is msgspec.Raw:
        return msgspec.Raw(record)
    return {str: secret, bool: True, int: 1, float: 1.0, bytes: b"\x00"}[kind]


def fullest(secret: str) -> Recording:
    """Return a recording with an entry of each kind."""
    record = msgspec.json.encode(full(JobRecord, secret))
    entries = tuple(full(kind, secret, record) for kind in get_args(Entry))
    return Recording(full(Header, secret), entries)


@lru_cache(maxsize=1)
def _always_there() -> bytes:
    """Return what is in every recording: names of fields, words of tables."""
    made = anonymise(fullest("q7q7q7q7q7"))
    return b"".join(map(msgspec.json.encode, (made.header, *made.entries)))


@settings(max_examples=25, deadline=None)
@given(secret=_secrets)
def test_a_secret_in_every_string_field_never_comes_out(secret: str) -> None:
    """Fields of all messages, keys of mappings, the job's record of the journal: each has it, and none afterwards."""
    assume(secret.encode() not in _always_there() and secret not in vocabulary())
    recording = fullest(secret)
    before = b"".join(map(msgspec.json.encode, (recording.header, *recording.entries)))

    made = anonymise(recording)

    after = b"".join(map(msgspec.json.encode, (made.header, *made.entries)))
    assert before.count(secret.encode()) > 200
    assert secret.encode() not in after
    for part in secret.replace("/", " ").replace("-", " ").replace(".", " ").replace(":", " ").split():
        if len(part) >= 9 and part not in vocabulary() and part.encode() not in _always_there():
            assert part.encode() not in after


@settings(max_examples=15, deadline=None)
@given(
    secret=_secrets, text=st.sampled_from(["{}", "error: {} failed", "File {}, line 3, in {}", "CUDA error\n{}\t[{}]"])
)
def test_a_secret_in_a_text_never_comes_out(secret: str, text: str) -> None:
    """With what stands around it, which stays."""
    assume(secret.encode() not in _always_there() and secret not in vocabulary())
    made = anonymise(fullest(text.replace("{}", secret)))

    after = b"".join(map(msgspec.json.encode, (made.header, *made.entries)))
    assert secret.encode() not in after
    assert parse(pack(made), "made").entries == made.entries


@pytest.mark.parametrize("path", sorted(REAL.glob("*.recording")), ids=lambda path: path.stem)
@settings(max_examples=1, deadline=None)
@given(node=_words, job=_words, host=_words)
def test_verdicts_are_the_same_before_and_after(path: Path, node: str, job: str, host: str) -> None:
    """Of what has really happened, with names that are drawn."""
    recording = read_recording(path)
    raw = b"\n".join(map(msgspec.json.encode, (recording.header, *recording.entries)))
    ascii_of = {name: name.encode("ascii", "ignore") or b"n" for name in (node, job, host)}
    for old, new in ((b'"node-1"', node), (b'"job"', job), (b"/path-1/", host)):
        quote = old[:1]
        raw = raw.replace(b":" + old, b":" + quote + b"x" + ascii_of[new] + quote)
    header, *entries = raw.split(b"\n")
    named = Recording(
        msgspec.json.decode(header, type=Header), tuple(msgspec.json.decode(entry, type=Entry) for entry in entries)
    )

    before = judged(replay(named).incidents)
    after = judged(replay(anonymise(named)).incidents)

    assert [one._replace(nodes=()) for one in after] == [one._replace(nodes=()) for one in before]
    assert [len(one.nodes) for one in after] == [len(one.nodes) for one in before]


def test_what_judges_look_for_stays() -> None:
    """The words of patterns, tables and exceptions; and no word that only a docstring has."""
    kept = vocabulary()

    for word in ("CUDA", "NCCL", "Traceback", "RuntimeError", "KeyboardInterrupt", "all_reduce", "watchdog", "killed"):
        assert word in kept
    for word in ("alice", "hunter2", "h11", "acme"):
        assert word not in kept


def test_a_start_is_among_the_entries() -> None:
    """The fullest recording has what was known at the beginning, with the record of its job."""
    starts = [entry for entry in fullest("a secret").entries if isinstance(entry, Start)]

    assert starts[0].agents[0].m.jobs[0].ranks[0].error is not None
    assert b"a secret" in bytes(next(iter(starts[0].records.values())))
