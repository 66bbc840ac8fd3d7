# SPDX-License-Identifier: Apache-2.0
"""A configuration, wherever it comes from, is taken or refused in one sentence; no user sees a traceback."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.cli import run
from megascale_ops.cli.config import configuration
from megascale_ops.cli.config.settings import settings_of
from megascale_ops.cli.sources import locate
from megascale_ops.errors import UsageError
from megascale_ops.runner import meeting, plan
from megascale_ops.runner.plan import Machine
from tests.fakes.mutations import fuzzed, mutated

TOML = b"""# a comment
[run]
nproc_per_node = "2"
warm = true
stop_grace_s = 30.0
env = { A = "b" }

[run.policy]
silence_floor_s = 8.0
max_restarts = 3

[controller]
listen = "127.0.0.1:7070"
store = "sqlite:///ops.db"

[agent]
controller = "http://127.0.0.1:7070"
labels = ["a", 1979-05-27T07:32:00Z, 0x1F, 1e9, nan]
"""
VARIABLES = [
    name
    for section in configuration.SECTIONS
    for setting in settings_of(configuration.struct_of(section))
    for name in configuration.variables_of(section, setting)
]


def refusal(path: Path | None, environ: dict[str, str]) -> str:
    """What all programs say of a file and an environment; nothing when they take it."""
    said = ""
    for section in configuration.SECTIONS:
        try:
            configuration.load(section, config_path=path, environ=environ)
        except UsageError as error:
            said += str(error)
    try:
        configuration.effective(path, environ)
    except UsageError as error:
        said += str(error)
    return said


@fuzzed
@given(data=mutated([TOML]))
def test_a_configuration_file_is_taken_or_refused(tmp_path: Path, data: bytes) -> None:
    """UsageError is the only way out, also for depth, numbers without measure and what is no text."""
    path = tmp_path / "config.toml"
    path.write_bytes(data)

    assert len(refusal(path, {})) < 100_000


ODD = ["9" * 400, "9" * 5000, "1e999", "nan", "-inf", "[" * 3000, "-1", "0x1"]
values = st.text(max_size=40) | st.sampled_from(ODD)


@fuzzed
@given(environ=st.dictionaries(st.sampled_from(VARIABLES), values, max_size=4))
def test_an_environment_is_taken_or_refused(environ: dict[str, str]) -> None:
    """The same for what comes as text."""
    assert len(refusal(None, environ)) < 100_000


@fuzzed
@given(
    number=st.sampled_from(["9" * 400, "-" + "9" * 400, "1e400", "9" * 5000, "0x" + "f" * 5000, "nan"]), data=st.data()
)
def test_a_number_without_measure_is_refused(tmp_path: Path, number: str, data: st.DataObject) -> None:
    """In any setting of any section."""
    section = data.draw(st.sampled_from(list(configuration.SECTIONS)))
    setting = data.draw(st.sampled_from(settings_of(configuration.struct_of(section))))
    path = tmp_path / "config.toml"
    path.write_text("".join(f"[{'.'.join((section, *setting.path[:-1]))}]\n{setting.path[-1]} = {number}\n"))

    refusal(path, {})


@fuzzed
@given(text=mutated([b"2", b"1:4", b"host:29500", b"[::1]:80", b"auto", b"0:3,1:2"]))
def test_options_that_are_read_by_hand_are_taken_or_refused(text: bytes) -> None:
    """Numbers of nodes and ranks, and addresses."""
    given = text.decode(errors="surrogateescape")
    machine = Machine("node", 4, 0, "/root", "stamp", "python")
    readers = (plan.parse_nnodes, plan.parse_ranks, meeting.is_loopback, meeting._split)
    for read in (*readers, lambda said: plan.parse_nproc(said, machine), lambda said: run._streams("--tee", said)):
        with contextlib.suppress(UsageError):
            read(given)


@pytest.mark.timeout(60)
def test_no_file_is_waited_for_or_read_without_end(tmp_path: Path) -> None:
    """A FIFO without a writer and an endless device, for a configuration and for what a run says of its controller."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / locate.CONTROLLER_FILE).symlink_to("/dev/zero")

    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="configuration file"):
            configuration.load("run", config_path=path, environ={})
    assert locate.read_whereabouts(tmp_path) is None


def test_what_is_right_is_taken(tmp_path: Path) -> None:
    """Negative control: a file of known settings is read to its end."""
    path = tmp_path / "config.toml"
    path.write_text("[run]\nstop_grace_s = 31.0\n[run.policy]\nsilence_floor_s = 8\n")

    loaded, origins = configuration.load("run", config_path=path, environ={})

    assert (loaded.stop_grace_s, loaded.policy.silence_floor_s) == (31.0, 8.0)
    assert origins["stop_grace_s"] == f"file {path}"
