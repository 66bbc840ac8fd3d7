# SPDX-License-Identifier: Apache-2.0
"""A launch line of torchrun's under ``megascale-ops run``: every option works, or one sentence says why it does not."""

import logging
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from megascale_ops.cli.main import program
from megascale_ops.cli.run import run
from megascale_ops.cli.sources.retention import Freed
from megascale_ops.cli.terminal.torchrun import FLAGS, NAMES, NEEDLESS, WITHOUT_EFFECT, WITHOUT_VARIABLE
from megascale_ops.errors import UsageError
from megascale_ops.runner.config import RunConfig

Run = Callable[..., RunConfig]
# What an older torch that we support has not.
YOUNG = {"shutdown_timeout", "log_line_prefix_template"}  # 2.12, 2.14


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Run:
    """Return a function that gives options to the verb and returns what the runner would have been told."""
    started: list[RunConfig] = []
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setattr("megascale_ops.runner.main.run", lambda config, _command, **_: started.append(config) or 0)
    monkeypatch.setattr("megascale_ops.cli.sources.retention.tidy", lambda *_: Freed(0, 0))  # not in our own folder
    caplog.set_level(logging.INFO)

    def give(*options: str) -> RunConfig:
        run.main([*options, "--", "train.py"], standalone_mode=False)
        return started.pop()

    return give


def _given(name: str) -> tuple[str, ...]:
    option = f"--{name.replace('_', '-')}"
    return (option,) if name in FLAGS else (option, "x")


@pytest.mark.parametrize("name", NEEDLESS)
def test_what_is_needless_is_taken_and_explained(launched: Run, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """The run is as it would be without the option, and one line says why nothing is lost."""
    assert launched(*_given(name)) == RunConfig()

    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == f"--{name.replace('_', '-')} is not needed: {NEEDLESS[name]}"


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_taken_and_warned_of(launched: Run, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A launch line carries over, and one warning says what of it does not."""
    assert launched(*_given(name)) == RunConfig()

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"--{name.replace('_', '-')} has no effect: {WITHOUT_EFFECT[name]}"


def test_every_option_of_torchrun_is_known() -> None:
    """Whatever the torchrun of the installed torch takes, `run` takes too, in all its spellings, and nothing else.

    A torch that brings another option fails this test: the option belongs into one of the tables.
    """
    from torch.distributed.run import get_args_parser

    ours = {name for param in run.params for name in (*param.opts, *param.secondary_opts)}
    theirs = {name.replace("_", "-") for action in get_args_parser()._actions for name in action.option_strings}
    names = {name.removeprefix("--").replace("-", "_") for name in theirs if name.startswith("--")} - {"help"}

    assert theirs - ours <= {"-h", "--help"}
    assert names - NAMES == set()


def test_options_come_from_the_variables_that_torchrun_reads() -> None:
    """Each option has the PET_ variable that torchrun has for it, and none where torchrun has none."""
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    theirs = {f"PET_{action.dest.upper()}" for action in actions if type(action).__name__ in {"env", "check_env"}}
    ours = {param.envvar for param in run.params if str(param.envvar).startswith("PET_")}

    assert theirs <= ours
    assert ours - theirs <= {f"PET_{name.upper()}" for name in YOUNG}
    assert not {f"PET_{name.upper()}" for name in WITHOUT_VARIABLE} & theirs


# What each option of torchrun becomes: its value, and the runner's setting, or the words of the one line about it.
MEANINGS: dict[str, tuple[str, dict[str, object] | str]] = {
    "--nnodes": ("1:3", {"nnodes": "1:3"}),
    "--nproc-per-node": ("4", {"nproc_per_node": "4"}),
    "--rdzv-backend": ("c10d", {"rdzv_backend": "c10d"}),
    "--rdzv-endpoint": ("h:29400", {"rdzv_endpoint": "h:29400"}),
    "--rdzv-id": ("9", {"job": "9"}),
    "--rdzv-conf": ("is_host=1", "--rdzv-conf is_host has no effect"),
    "--standalone": ("", "--standalone is not needed"),
    "--max-restarts": ("3", {"max_restarts": 3}),
    "--monitor-interval": ("0.5", {"monitor_interval_s": 0.5}),
    "--start-method": ("fork", "--start-method is not needed"),
    "--event-log-handler": ("null", "--event-log-handler has no effect"),
    "--role": ("trainer", {"role": "trainer"}),
    "--module": ("", {"module": True}),
    "--no-python": ("", {"no_python": True}),
    "--run-path": ("", "--run-path is not needed"),
    "--log-dir": ("/l", {"log_dir": "/l"}),
    "--redirects": ("3", {"quiet": True}),
    "--tee": ("3", "--tee is not needed"),
    "--local-ranks-filter": ("0,2", {"local_ranks_filter": "0,2"}),
    "--log-line-prefix-template": ("${rank}: ", {"log_line_prefix_template": "${rank}: "}),
    "--duplicate-stdout-filters": ("a", "--duplicate-stdout-filters has no effect"),
    "--duplicate-stderr-filters": ("a", "--duplicate-stderr-filters has no effect"),
    "--node-rank": ("1", {"node_rank": 1}),
    "--master-addr": ("h", {"master_addr": "h"}),
    "--master-port": ("29501", {"master_port": 29501}),
    "--local-addr": ("h", {"local_addr": "h"}),
    "--logs-specs": ("default", "--logs-specs is not needed"),
    "--numa-binding": ("node", "--numa-binding has no effect"),
    "--signals-to-handle": ("SIGTERM", "--signals-to-handle has no effect"),
    "--shutdown-timeout": ("12", {"stop_grace_s": 12.0}),
    "--virtual-local-rank": ("", {"virtual_local_rank": True}),
}


def test_every_option_of_torchrun_has_a_meaning_here() -> None:
    """The table above names all of the installed torch's, so a new one shows up here."""
    from torch.distributed.run import get_args_parser

    theirs = {next(name for name in action.option_strings if name.startswith("--"))
              for action in get_args_parser()._actions if action.option_strings}  # fmt: skip

    assert theirs - {"--help", "--print-completion"} <= set(MEANINGS)


@pytest.mark.parametrize("spelling", ["--print-completion", "--print_completion", "--print-c"])
def test_torchruns_option_for_completion_prints_ours_and_starts_nothing(spelling: str) -> None:
    """As torchrun does, it ends there, whatever else the line says; a shell that is not known is an error."""
    asked = CliRunner().invoke(program, ["run", spelling, "bash", "--", "no-such-script.py"])
    unknown = CliRunner().invoke(program, ["run", spelling, "tcsh"])

    assert asked.exit_code == 0
    assert "_MEGASCALE_OPS_COMPLETE=bash_complete" in asked.output
    assert unknown.exit_code == 2
    assert "'tcsh' is not one of" in unknown.output


@pytest.mark.parametrize("spelling", ["line", "underscores", "variable"])
@pytest.mark.parametrize("option", MEANINGS)
def test_an_option_means_what_the_table_says(
    launched: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, option: str, spelling: str
) -> None:
    """On the line in both spellings, and from its variable: the same setting, or the same one line."""
    value, meaning = MEANINGS[option]
    name = option.removeprefix("--").replace("-", "_")
    given: tuple[str, ...] = (option if spelling == "line" else f"--{name}", *([value] if value else []))
    if spelling == "variable" and name not in WITHOUT_VARIABLE:
        monkeypatch.setenv(f"PET_{name.upper()}", value or "1")
        given = ()

    told = launched(*given)

    if isinstance(meaning, dict):
        assert told == RunConfig(**meaning)  # type: ignore[arg-type]  # fields
        assert not caplog.records
    else:
        assert told == RunConfig()
        assert [record.getMessage().startswith(meaning.split()[0]) for record in caplog.records] == [True]
        assert meaning.partition(" ")[2].split()[-1] in caplog.records[0].getMessage()


def test_the_line_wins_over_torchruns_variable_and_ours_over_both(
    launched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PET_ is what torchrun takes where the line says nothing; MEGASCALE_RUN_ speaks of this program alone."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_ROLE", "theirs")
    monkeypatch.setenv("MEGASCALE_RUN_ROLE", "ours")

    assert launched() == RunConfig(nproc_per_node="3", role="ours")
    assert launched("--nproc-per-node=2") == RunConfig(nproc_per_node="2", role="ours")


def test_a_flag_of_torchruns_is_off_at_zero(launched: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PET_MODULE=0`` is as good as none."""
    monkeypatch.setenv("PET_MODULE", "0")
    monkeypatch.setenv("PET_STANDALONE", "0")

    assert launched() == RunConfig()


def test_a_variable_that_cannot_be_read_is_refused_by_its_name(launched: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence names the variable."""
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "often")

    with pytest.raises(click.UsageError, match="PET_MONITOR_INTERVAL"):
        launched()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--redirect=3",), {"quiet": True}),
        (("--nproc", "2"), {"nproc_per_node": "2"}),
        (("--nproc_per=2",), {"nproc_per_node": "2"}),
        (("--master-p=29501",), {"master_port": 29501}),
    ],
)
def test_abbreviations_that_torchrun_takes_are_taken(
    launched: Run, given: tuple[str, ...], expected: dict[str, object]
) -> None:
    """Argparse takes the beginning of a name where it is the only one."""
    assert launched(*given) == RunConfig(**expected)  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize("given", ["--n=1", "--rdzv=x", "--log=x", "--checkpoint=x"])
def test_beginnings_of_several_names_or_of_ours_are_refused(launched: Run, given: str) -> None:
    """Nothing is guessed, and ours are never abbreviated."""
    with pytest.raises(click.NoSuchOption):
        launched(given)


def test_a_node_is_named_by_one_option_everywhere(launched: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """``--node``, as for the agent and for tokens; the name that it had goes on working, and says so."""
    assert launched("--node=a").node_name == "a"
    assert capsys.readouterr().err == ""

    assert launched("--node-name", "b").node_name == "b"

    assert capsys.readouterr().err == "note: --node-name is called --node now; both work\n"


def test_a_node_is_not_named_by_a_number(launched: Run) -> None:
    """Torchrun takes ``--node 0`` for the beginning of --node-rank: that must not become a name without a word."""
    with pytest.raises(UsageError, match="--node 0 names the node: its number is --node-rank 0"):
        launched("--node=0")


def test_waits_of_torchruns_rendezvous_are_waits_of_ours(launched: Run) -> None:
    """``--rdzv-conf`` sets how long nodes are waited for, also in the quotes that a shell left in place."""
    told = launched("--rdzv-conf='join_timeout=5,last_call_timeout=1'").policy

    assert (told.join_timeout_s, told.last_call_s) == (5.0, 1.0)


@pytest.mark.parametrize("text", ["join_timeout", "=5", "join_timeout=soon"])
def test_a_configuration_that_cannot_be_read_is_refused(launched: Run, text: str) -> None:
    """One sentence, with what may be given."""
    with pytest.raises(UsageError, match=r"^--rdzv-conf .* can't be read"):
        launched("--rdzv-conf", text)


def test_log_settings_that_nobody_offers_are_refused(launched: Run) -> None:
    """As under torchrun, where the name must be an entry point of an installed package."""
    with pytest.raises(UsageError, match=r"^--logs-specs 'no_such' can't be used"):
        launched("--logs-specs=no_such")


@pytest.mark.parametrize("text", ["12", "12.5"])
def test_torchruns_shutdown_timeout_is_our_grace(launched: Run, text: str) -> None:
    """``--shutdown-timeout`` does what it does under torchrun."""
    assert launched("--shutdown_timeout", text).stop_grace_s == float(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {}),
        (("--redirects=0",), {}),
        (("-r", "3"), {"quiet": True}),
        (("--tee=3",), {}),
        (("-t", "0:3"), {}),
        (("-r", "3", "-t", "3"), {}),
        (("-r", "3", "-t", "3", "-q"), {"quiet": True}),
        (("-r", "1", "-t", "3"), {}),
        (("-r", "2", "-t", "2"), {}),
        (("-r", "0:3,1:1", "-t", "1:3,0:3"), {}),
        (("-r", "3", "-t", "0:3,2:3,3:0"), {"local_ranks_filter": "0,2"}),
        (("-r", "3", "-t", "0:3,2:3", "--local-ranks-filter=1,2"), {"local_ranks_filter": "2"}),
        (("-r", "3", "-t", "0:3", "--local-ranks-filter=1"), {"quiet": True, "local_ranks_filter": "1"}),
    ],
)
def test_redirects_and_tee_show_what_torchrun_shows(
    launched: Run, caplog: pytest.LogCaptureFixture, options: tuple[str, ...], expected: dict[str, object]
) -> None:
    """Everything is in files; on the terminal is what torchrun leaves there, and a needless --tee is answered."""
    assert launched(*options) == RunConfig(**expected)  # type: ignore[arg-type]  # fields

    is_needless = options[:1] in {("-t",), ("--tee=3",)}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["--tee is not needed"] * is_needless


@pytest.mark.parametrize("options", [("-r", "1"), ("-r", "2"), ("-r", "0:3,1:1"), ("-r", "3", "-t", "1")])
def test_redirects_of_one_stream_or_rank_are_warned_of(
    launched: Run, caplog: pytest.LogCaptureFixture, options: tuple[str, ...]
) -> None:
    """What would hide too much is not done instead: all is shown, and a sentence says so."""
    assert launched(*options) == RunConfig()

    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert warning.getMessage().startswith(f"--redirects {options[1]} has no effect: what ranks print is in files")


@pytest.mark.parametrize("options", [("-r", "4"), ("--redirects", "x"), ("-t", "0:4"), ("--tee", "0:3,")])
def test_streams_that_cannot_be_read_are_refused(launched: Run, options: tuple[str, ...]) -> None:
    """One sentence, with what may be given."""
    with pytest.raises(UsageError, match=r"^--(redirects|tee) '.*' can't be read: give 0, 1, 2 or 3"):
        launched(*options)
