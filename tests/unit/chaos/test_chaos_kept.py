# SPDX-License-Identifier: Apache-2.0
"""What a first call has held a second one does not hold again, and a file that is none of ours is refused."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from megascale_ops.chaos import kept
from megascale_ops.chaos.faults import BY_NAME
from megascale_ops.chaos.score import Outcome
from megascale_ops.cli.chaos.verb import chaos
from megascale_ops.errors import UsageError

SIGKILL, SIGTERM = BY_NAME["sigkill"], BY_NAME["sigterm"]


def trial(fault: str = "sigkill", **changed: object) -> kept.Trial:
    """Return a trial of four ranks over Gloo of which rank 1 was killed, and found."""
    outcome = Outcome(fault, named="killed", ranks=(1,), acted=True, recovered=True, name_s=0.5)
    return kept.Trial(4, 1, "gloo", outcome, **changed)  # type: ignore[arg-type]


def test_what_was_added_is_read(tmp_path: Path) -> None:
    """In the order of adding, to the last field."""
    path = tmp_path / "trials.jsonl"
    trials = [trial(), trial("sigterm", version="0.1.0")]

    for each in trials:
        kept.add(path, each)

    assert kept.read(path) == trials


def test_a_file_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    """The first call begins with it."""
    assert kept.read(tmp_path / "trials.jsonl") == []


def test_a_line_that_was_cut_short_is_held_again(tmp_path: Path) -> None:
    """A call killed while it wrote costs its last trial, and the next one writes a whole line."""
    path = tmp_path / "trials.jsonl"
    kept.add(path, trial())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])

    assert kept.read(path) == [trial()]
    kept.add(path, trial("sigterm"))

    assert kept.read(path) == [trial(), trial("sigterm")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("hello\n", "line 2: not a trial of `chaos score`"),
        ("a file of somebody's, without an end", "line 2: not the beginning of a trial of `chaos score`"),
        ('{"nproc": "four"}\n', "line 2: not a trial of `chaos score`"),
        ('{"nproc":4,"rank":1,"backend":"gloo","outcome":{"fault":"flood"}}\n', "line 2: there is no fault 'flood'"),
    ],
)
def test_a_line_that_is_no_trial_is_refused_by_number(tmp_path: Path, line: str, sentence: str) -> None:
    """With the file's name, so that it need not be searched for."""
    path = tmp_path / "trials.jsonl"
    kept.add(path, trial())
    with path.open("a") as file:
        file.write(line)

    with pytest.raises(ValueError, match=sentence) as refused:
        kept.read(path)

    assert str(path) in str(refused.value)


def test_what_is_missing_comes_run_by_run() -> None:
    """Every row once before any row twice, so that a call that is cut short has seen all."""
    held = [trial().outcome, Outcome("sigterm", problem="the job never started")]

    assert kept.missing([SIGKILL, SIGTERM], 2, []) == [SIGKILL, SIGTERM, SIGKILL, SIGTERM]
    assert kept.missing([SIGKILL, SIGTERM], 2, held) == [SIGTERM, SIGKILL, SIGTERM]
    assert kept.missing([SIGKILL], 1, held) == []


def test_a_call_that_misses_nothing_shows_the_table(tmp_path: Path) -> None:
    """No trial is held: there is nothing to wait for."""
    path = tmp_path / "trials.jsonl"
    kept.add(path, trial())
    kept.add(path, trial())

    told = CliRunner().invoke(chaos, ["score", "--only", "sigkill", "--runs", "2", "--resume", str(path)])

    assert told.exit_code == 0, told.output
    assert "2 trials of each fault" in told.output
    assert "2/2" in told.output
    assert "2 of 2 trials right" in told.output


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ("hello\n", [], "line 1: not a trial"),
        ("", ["--nproc", "2"], "has trials of --launcher ours --nproc 4 --rank 1 --backend gloo"),
    ],
)
def test_a_file_of_other_trials_is_refused(tmp_path: Path, content: str, options: list[str], sentence: str) -> None:
    """Results of different kinds are not added up."""
    path = tmp_path / "trials.jsonl"
    path.write_text(content)
    if not content:
        kept.add(path, trial())

    told = CliRunner().invoke(chaos, ["score", "--only", "sigkill", "--resume", str(path), *options])

    assert isinstance(told.exception, UsageError)
    assert sentence in str(told.exception)


def test_nccl_wants_a_gpu_and_several_ranks_may_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any it says so; with too few the table says so, since its times are others."""
    monkeypatch.setattr("megascale_ops.chaos.trial.hold", lambda *_: trial().outcome)
    options = ["score", "--only", "sigkill", "--backend", "nccl"]

    monkeypatch.setattr("megascale_ops.cli.chaos.trials._gpus", lambda: 0)
    told = CliRunner().invoke(chaos, options)
    assert isinstance(told.exception, UsageError)
    assert str(told.exception) == "--backend nccl wants a GPU, and torch finds none: give --backend gloo"

    for gpus, said in (
        (1, "4 ranks over nccl on 1 GPU, rank 1"),
        (2, "over nccl on 2 GPUs,"),
        (4, "over nccl, rank 1"),
    ):
        monkeypatch.setattr("megascale_ops.cli.chaos.trials._gpus", lambda gpus=gpus: gpus)
        assert said in CliRunner().invoke(chaos, options, standalone_mode=False).output


def test_trials_of_ranks_that_share_a_gpu_are_not_gone_on_with_where_each_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are slower, and of other rows: they are not added up."""
    path = tmp_path / "trials.jsonl"
    monkeypatch.setattr("megascale_ops.chaos.trial.hold", lambda *_: trial().outcome)
    options = ["score", "--only", "sigkill", "--backend", "nccl", "--resume", str(path)]
    monkeypatch.setattr("megascale_ops.cli.chaos.trials._gpus", lambda: 1)
    assert CliRunner().invoke(chaos, options, standalone_mode=False).return_value == 0
    assert CliRunner().invoke(chaos, options, standalone_mode=False).return_value == 0

    monkeypatch.setattr("megascale_ops.cli.chaos.trials._gpus", lambda: 4)
    told = CliRunner().invoke(chaos, options)

    assert isinstance(told.exception, UsageError)
    assert "--backend nccl (ranks that share GPUs: 1), and these are of" in str(told.exception)


def test_ctrl_c_costs_only_the_trial_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of what was held until then is shown, and it is in the file for the next call."""
    path = tmp_path / "trials.jsonl"
    outcomes = iter([trial().outcome])

    def hold(*_: object) -> Outcome:
        if (outcome := next(outcomes, None)) is None:
            raise KeyboardInterrupt
        return outcome

    monkeypatch.setattr("megascale_ops.chaos.trial.hold", hold)
    options = ["score", "--only", "sigkill", "--runs", "3", "--resume", str(path)]
    told = CliRunner().invoke(chaos, options, standalone_mode=False)

    assert told.return_value == 130
    assert "2 not held before Ctrl-C" in told.output
    assert "1 of 1 trials right" in told.output
    assert [one.outcome for one in kept.read(path)] == [trial().outcome]
