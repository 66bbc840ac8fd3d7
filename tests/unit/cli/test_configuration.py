# SPDX-License-Identifier: Apache-2.0
"""Where settings come from, which source wins, and what is said about a wrong one."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megascale_ops.cli.config.configuration import SECTIONS, effective, load, load_struct
from megascale_ops.cli.main import main
from megascale_ops.errors import UsageError


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A nested table."""

    silence_floor_s: float = 5.0
    max_restarts: int = -1


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A program's settings, of every kind that ours use."""

    url: str
    box_root: str | None = None
    nproc: int = 1
    warm: bool = False
    folder: Path = Path("/nowhere")
    filters: tuple[int, ...] = ()
    policy: Policy = Policy()

    def __post_init__(self) -> None:
        """Refuse what no type can say."""
        if self.nproc == 0:
            raise UsageError("nproc must not be zero")


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a configuration file."""

    def write(text: str) -> Path:
        path = tmp_path / "ops.toml"
        path.write_text(text)
        return path

    return write


def test_each_source_beats_the_one_before_it(config_file: Callable[[str], Path]) -> None:
    """Defaults, file, environment, command line: the later wins for each setting on its own, and is remembered."""
    path = config_file('[run]\nurl = "file"\nnproc = 2\nwarm = true\n[run.policy]\nsilence_floor_s = 8\n')
    environ = {"MEGASCALE_RUN_NPROC": "3", "MEGASCALE_RUN_POLICY_MAX_RESTARTS": "7"}

    config, origins = load_struct(Config, "run", {"url": "cli", "nproc": None}, path, environ)

    assert config == Config(url="cli", nproc=3, warm=True, policy=Policy(silence_floor_s=8.0, max_restarts=7))
    assert origins["url"] == "command line"
    assert origins["nproc"] == "environment MEGASCALE_RUN_NPROC"
    assert origins["warm"] == f"file {path}"
    assert origins["policy.silence_floor_s"] == f"file {path}"
    assert origins["box_root"] == "default"


def test_environment_text_is_read_as_the_settings_type() -> None:
    """Numbers, booleans, paths and comma separated lists are understood; an empty variable is not set."""
    environ = {
        "MEGASCALE_RUN_URL": "u",
        "MEGASCALE_RUN_NPROC": "4",
        "MEGASCALE_RUN_WARM": "true",
        "MEGASCALE_RUN_FOLDER": "/tmp/x",
        "MEGASCALE_RUN_FILTERS": "0, 3",
        "MEGASCALE_RUN_BOX_ROOT": "",
    }

    config, _ = load_struct(Config, "run", {}, None, environ)

    assert config == Config(url="u", nproc=4, warm=True, folder=Path("/tmp/x"), filters=(0, 3))


def test_a_shared_variable_serves_every_program_unless_its_own_is_set() -> None:
    """MEGASCALE_BOX_ROOT reaches every program; MEGASCALE_RUN_BOX_ROOT only this one, and is stronger."""
    shared = {"MEGASCALE_RUN_URL": "u", "MEGASCALE_BOX_ROOT": "all"}

    assert load_struct(Config, "run", {}, None, shared)[0].box_root == "all"
    assert load_struct(Config, "run", {}, None, {**shared, "MEGASCALE_RUN_BOX_ROOT": "own"})[0].box_root == "own"


def test_what_a_rank_inherits_is_no_setting() -> None:
    """A program started inside a rank finds MEGASCALE_RUN_DIR and its like, and takes none of them for a typo."""
    environ = {"MEGASCALE_RUN_DIR": "/x", "MEGASCALE_RUN_ID": "y", "MEGASCALE_RUNNER_PID": "1"}

    config, _ = load_struct(Config, "run", {"url": "u"}, None, environ)

    assert config == Config(url="u")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[run]\nnprok = 1\n", r"section \[run\]: unknown key 'nprok': did you mean 'nproc'\?"),
        ("[run.policy]\nmax_restart = 1\n", r"unknown key 'policy.max_restart': did you mean 'policy.max_restarts'\?"),
        ("[run]\nsilence_floor_s = 1\n", r"unknown key 'silence_floor_s': did you mean 'policy.silence_floor_s'\?"),
        ("[runn]\n", r"unknown section 'runn': did you mean 'run'\?"),
        ("run = 3\n", r"'run' must be a section, \[run\]"),
        ("[run]\npolicy = 3\n", "'policy' must be a table"),
        ('[run]\nnproc = "two"\n', r"run.nproc = 'two' \(file .*\) can't be used: expected int, got str"),
        ("[run]\nnproc = 0\n", r"section \[run\]: nproc must not be zero"),
        ("[run\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, sentence: str, config_file: Callable[[str], Path]) -> None:
    """Unknown keys, wrong types and broken files are refused with what, where and the nearest right name."""
    path = config_file(text)

    with pytest.raises(UsageError, match=sentence):
        load_struct(Config, "run", {"url": "u"}, path, {})


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """A file that does not exist is named."""
    with pytest.raises(UsageError, match=r"ops.toml: no such file"):
        load_struct(Config, "run", {"url": "u"}, tmp_path / "ops.toml", {})


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"MEGASCALE_RUN_NPROK": "1"}, "'MEGASCALE_RUN_NPROK': did you mean 'MEGASCALE_RUN_NPROC'"),
        ({"MEGASCALE_RUN_NPROC": "many"}, r"run.nproc = 'many' \(environment MEGASCALE_RUN_NPROC\) can't be used"),
    ],
)
def test_a_wrong_variable_is_one_sentence(environ: dict[str, str], sentence: str) -> None:
    """The environment is held to the same rules as the file."""
    with pytest.raises(UsageError, match=sentence):
        load_struct(Config, "run", {"url": "u"}, None, environ)


def test_an_unknown_value_of_the_command_line_is_refused() -> None:
    """A verb that passes a name the struct does not have is told so."""
    with pytest.raises(UsageError, match="options of run: unknown key 'nprocs'"):
        load_struct(Config, "run", {"url": "u", "nprocs": 2}, None, {})


def test_a_required_setting_names_every_way_to_give_it() -> None:
    """What has no default says how it can be given."""
    with pytest.raises(UsageError, match=r"`run` needs url: give --url, MEGASCALE_RUN_URL, or url in \[run\]"):
        load_struct(Config, "run", {}, None, {})


@pytest.mark.parametrize("section", list(SECTIONS))
def test_every_program_has_a_section_that_loads(section: str) -> None:
    """The structs named in the table exist, and load from their defaults where nothing is required."""
    config, origins = load(section, {"controller": "http://127.0.0.1:7070"} if section == "agent" else {}, None, {})

    assert config is not None
    assert set(origins.values()) <= {"default", "command line"}


def test_effective_lists_every_setting_with_its_origin(config_file: Callable[[str], Path]) -> None:
    """``config show`` prints all sections, also settings that were not given."""
    path = config_file("[run.policy]\nrestarts_per_hour = 3\n")

    rows = {f"{row.section}.{row.name}": row for row in effective(path, {"MEGASCALE_CONTROLLER": "http://c:1"})}

    assert rows["run.policy.restarts_per_hour"].value == 3
    assert rows["run.policy.restarts_per_hour"].origin == f"file {path}"
    assert rows["agent.controller"].origin == "environment MEGASCALE_CONTROLLER"
    assert rows["run.warm"].origin == "default"


def test_every_setting_has_one_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Of its option or of its struct; ``config show`` has it for people and for programs."""
    assert main(["config", "show", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)

    without = [f"{row['section']}.{row['name']}" for row in rows if not row["help"].strip() or "\n" in row["help"]]

    assert not without
    assert len(rows) > 70
    assert main(["config", "show", "agent"]) == 0
    text = capsys.readouterr().out
    assert all(row["help"][:25] in text for row in rows if row["section"] == "agent")
