# SPDX-License-Identifier: Apache-2.0
"""What the fuzzers have found once stays mended: one example of each kind."""

from pathlib import Path

import pytest
from megascale_agents.collectors.kernel_events import LineReader
from megascale_agents.collectors.kernel_log import KernelLog, parse
from megascale_agents.evidence import flight_recorder, py_spy, tracebacks
from megascale_agents.evidence.flight_recorder import NoAnswerError
from megascale_agents.ownership.rights import myself
from megascale_agents.ranks.blackboxes import ROUND_SUFFIX, read_round

from megascale_ops.checkpoint import manifest
from megascale_ops.checkpoint.manifest import FileEntry, Manifest, ManifestError
from megascale_ops.cli.config import configuration
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.runner.plan import parse_nnodes
from megascale_ops.runner.ranks.leftovers import read_round_file

NO_TEXT = b'{"job": "\xff"}'  # msgspec raises UnicodeDecodeError, which is none of its own errors
DEEP = b'{"x": ' + b"[" * 5000
DIGITS = "9" * 5000  # Python refuses to read so many


@pytest.mark.parametrize("data", [NO_TEXT, DEEP])
def test_a_round_file_that_is_no_text_ends_neither_agent_nor_runner(tmp_path: Path, data: bytes) -> None:
    """One sentence there, and here as if there were none."""
    path = tmp_path / f"n{ROUND_SUFFIX}"
    path.write_bytes(data)

    with pytest.raises(MegascaleError, match="is no round file"):
        read_round(str(tmp_path), "n", myself())
    assert read_round_file(path) is None


@pytest.mark.parametrize("data", [b'[{"thread_name": "\xff"}]', b"[" * 5000])
def test_what_py_spy_writes_may_be_no_text(data: bytes) -> None:
    """A thread may have any name."""
    with pytest.raises(NoAnswerError, match="can't be read"):
        py_spy.parse(data, 1)


def test_one_entry_that_is_no_text_costs_that_entry() -> None:
    """The others of the flight recorder are told."""
    dump = (
        b'{"entries": [{"profiling_name": "nccl:\xff"}, {"profiling_name": "nccl:all_reduce", "collective_seq_id": 3}]}'
    )

    found = flight_recorder.parse(dump)

    assert [fact.seq for fact in found.collectives] == [3]
    assert "1 of them can't be read" in found.text


def test_numbers_without_measure_in_texts_are_no_numbers(tmp_path: Path) -> None:
    """In the kernel's log, in what is remembered of it, and in a traceback."""
    xid = "4,1,1,-;NVRM: Xid (PCI:0000:18:00): 79, it fell"
    (tmp_path / "log").write_bytes(b"")
    (tmp_path / "memory").write_bytes(NO_TEXT)

    assert LineReader().read(parse(xid.replace("79", DIGITS).encode())) == []
    assert parse(xid.replace("4,1,", f"4,{DIGITS},").encode()) == []
    assert tracebacks.main_frames(f'Thread 0x1\n  File "a", line {DIGITS} in f'.encode()) == ()
    log = KernelLog(str(tmp_path / "log"), str(tmp_path / "memory"), "boot")
    assert log.poll_log() == []
    log.close()


@pytest.mark.parametrize("name", ["\x1b[2J", "a\x00b", "../x", "\u202e", "x" * 256])
def test_a_manifest_names_plain_files_only(name: str) -> None:
    """What it names is shown on terminals and asked of the file system."""
    raw = manifest.encode(Manifest(1, 1, 0.0, (FileEntry(name, 1, "sha256:" + "ab" * 32),)))

    with pytest.raises(ManifestError) as raised:
        manifest.decode(raw)

    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("[controller]\ntoken_file = 5", "a path is given as text"),
        (f"[run]\nstop_grace_s = {'9' * 400}", "beyond all measure"),
        (f"[run]\nstop_grace_s = {DIGITS}", "is not TOML"),
        (f"[run]\nstop_grace_s = 0x{'f' * 5000}", "a number of thousands of digits"),
        (f"[run]\nenv = {'[' * 5000}", "is not TOML"),
    ],
    ids=["a path", "400 digits", "5,000 digits", "5,000 hex digits", "depth"],
)
def test_a_setting_that_cannot_be_is_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    """Each of them was a traceback."""
    path = tmp_path / "config.toml"
    path.write_text(line)

    with pytest.raises(UsageError, match=sentence) as raised:
        configuration.load(line[1 : line.index("]")], config_path=path, environ={})

    assert "\n" not in str(raised.value)


def test_a_number_of_nodes_has_few_digits() -> None:
    """``--nnodes`` with thousands of them."""
    with pytest.raises(UsageError, match="can't be read"):
        parse_nnodes(DIGITS)
