# SPDX-License-Identifier: Apache-2.0
"""A launch line of torchrun's under ``megascale-ops run``: every option works, or one sentence says why it does not."""

import logging
from collections.abc import Callable

import pytest

from megascale_ops.cli.run import NEEDLESS, WITHOUT_EFFECT, run
from megascale_ops.errors import UsageError
from megascale_ops.runner.config import RunConfig

Run = Callable[..., RunConfig]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Run:
    """Return a function that gives options to the verb and returns what the runner would have been told."""
    started: list[RunConfig] = []
    monkeypatch.setattr("megascale_ops.cli.logs.configure", lambda *_: None)
    monkeypatch.setattr("megascale_ops.runner.main.run", lambda config, _command, **_: started.append(config) or 0)
    caplog.set_level(logging.INFO)

    def give(*options: str) -> RunConfig:
        run.main([*options, "--", "train.py"], standalone_mode=False)
        return started.pop()

    return give


def _given(name: str) -> tuple[str, ...]:
    option = f"--{name.replace('_', '-')}"
    return (option,) if name in {"standalone", "run_path", "virtual_local_rank"} else (option, "x")


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
    """Whatever the torchrun of the installed torch takes, `run` takes too, in both spellings."""
    from torch.distributed.run import get_args_parser

    ours = {name for param in run.params for name in (*param.opts, *param.secondary_opts)}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}

    assert {name.replace("_", "-") for name in theirs} - ours <= {"-h", "--help"}


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
