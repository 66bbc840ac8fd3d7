# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops policy`` and ``run --policy``: what a person types, and one sentence for what can't be."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megascale_ops.cli.main import main, program
from megascale_ops.errors import MegascaleError, RefusedError, UsageError
from megascale_ops.link import Link
from megascale_ops.schema import policy_settings
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.messages import Join, RankExit
from megascale_ops.schema.policy import SETTINGS, JobPolicy
from tests.fakes.served_controller import Served, serve_controller

WORD = "a long random word"


@pytest.fixture(autouse=True)
def _leave_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A controller with one job, ``job``, whose journal is where a run would leave it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with serve_controller(tmp_path, token=WORD) as one:
        monkeypatch.setenv("MEGASCALE_TOKEN", WORD)
        async with Link(one.url, WORD) as link:
            await link.join(_join(1))
        yield one


def _verb(arguments: list[str]) -> int:
    """Run a verb beside the served controller: signals can only be taken in the main thread, so not by ``main``."""
    try:
        program.main(arguments, standalone_mode=False)
    except MegascaleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _join(number: int, **more: object) -> Join:
    now_s = time.monotonic()
    return Join("job", "a", "r1", f"j{number}", 1, 1, 1, "127.0.0.1", 29500, now_s, **more)  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("sielence_floor_s=3", "unknown policy 'sielence_floor_s': did you mean 'silence_floor_s'?"),
        ("frozn=warn", "did you mean 'frozen'?"),
        ("actions.frozn=warn", "unknown class of fault 'frozn': did you mean 'frozen'?"),
        ("frozen=wran", "unknown action 'wran': did you mean 'warn'? frozen takes ignore, warn, restart, evict, stop"),
        ("dry_run=maybe", "give true or false"),
        ("silence_floor_s=-1", "it must be 0 or more"),
        ("silence_floor_s=nan", "it must be 0 or more"),
        ("silence_floor_s=soon", "a number is needed"),
        ("restarts_per_hour=1.5", "a whole number is needed"),
        ("silence_floor_s", "give NAME=VALUE"),
        ("=3", "give NAME=VALUE"),
        ("frozen=", "give NAME=VALUE"),
    ],
)
def test_what_can_not_be_is_one_sentence(item: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``run`` and ``policy set`` refuse it alike, before anything is started or asked."""
    codes = (main(["run", "--policy", item, "x.py"]), main(["policy", "set", "job", item]))

    lines = capsys.readouterr().err.strip().splitlines()
    assert codes == (2, 2)
    assert len(lines) == 2
    assert all(sentence in line for line in lines)


def test_the_file_s_actions_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown action in the configuration file is refused like one on the command line."""
    config = tmp_path / "ops.toml"
    config.write_text('[run.policy.actions]\nfrozen = "wran"\n')

    code = main(["run", "--config", str(config), "x.py"])

    assert code == 2
    assert "did you mean 'warn'" in capsys.readouterr().err


def test_settings_are_read_as_what_they_are() -> None:
    """Numbers, whole numbers, booleans and actions; the last of two wins."""
    items = [
        "silence_floor_s=1",
        "max_restarts=-1",
        "dry_run=Yes",
        "frozen=warn",
        "actions.killed=stop",
        "frozen=evict",
    ]

    found = policy_settings.values_of(policy_settings.read_settings(items))

    assert found == {
        "silence_floor_s": 1.0,
        "max_restarts": -1,
        "dry_run": True,
        "actions": {"frozen": "evict", "killed": "stop"},
    }


def test_no_class_of_fault_has_the_name_of_a_setting() -> None:
    """``frozen=warn`` can only mean one thing."""
    assert not set(FAULTS) & set(SETTINGS)


def test_every_setting_can_be_shown_and_read_back() -> None:
    """What ``policy show`` prints, ``policy set`` takes."""
    policy = JobPolicy(dry_run=True, silence_floor_s=7.25, actions={"frozen": "warn"})

    assert (
        policy_settings.apply_settings(
            JobPolicy(), policy_settings.check_settings(policy_settings.show_settings(policy))
        )
        == policy
    )


def test_every_setting_of_a_policy_has_its_line_of_help() -> None:
    """A field without a line fails, and so does a line without a field."""
    assert set(JobPolicy.HELP) == set(JobPolicy.__struct_fields__)


def test_every_class_is_shown_with_its_action_and_the_reason() -> None:
    """The table's own; where the job's policy says otherwise that, and what would hold without it."""
    rows = {row.fault: row for row in policy_settings.class_actions(JobPolicy(actions={"killed": "stop"}))}

    assert set(rows) == set(FAULTS)
    assert (rows["segfault"].action, rows["segfault"].why) == ("restart", FAULTS["segfault"].why)
    assert (rows["killed"].action, rows["killed"].is_own) == ("stop", True)
    assert rows["killed"].why.endswith(f"without it: restart, {FAULTS['killed'].why}")


async def test_set_changes_the_job_and_show_shows_it(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The new value with the default beside it, for people and for programs."""
    command = ["policy", "set", "job", "silence_floor_s=9", "frozen=warn", "--controller", served.url]

    codes = [await asyncio.to_thread(_verb, command)]
    codes.append(await asyncio.to_thread(_verb, ["policy", "show", "job", "--controller", served.url]))
    text = capsys.readouterr().out
    codes.append(await asyncio.to_thread(_verb, ["policy", "show", "--json", "--controller", served.url]))
    view = json.loads(capsys.readouterr().out)

    assert codes == [0, 0, 0]
    assert text.count("9  (default 5, changed while it lives)") == 2
    assert all(help_[:30] in text for name, help_ in JobPolicy.HELP.items() if name != "actions")
    assert len(view["classes"]) == len(FAULTS)
    frozen = next(row for row in view["classes"] if row["fault"] == "frozen")
    assert frozen["action"] == "warn"
    assert frozen["why"].startswith("this job's policy says so; without it: restart, ")
    assert "actions.frozen" in text
    assert served.loop.jobs["job"].record.policy.silence_floor_s == 9.0
    assert view["policy"]["silence_floor_s"] == 9.0
    assert view["changed"] == {"silence_floor_s": "9", "actions.frozen": "warn"}


async def test_a_job_that_is_not_there(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest job is named."""
    code = await asyncio.to_thread(_verb, ["policy", "set", "jbo", "dry_run=true", "--controller", served.url])

    assert code == 2
    assert "unknown job 'jbo': did you mean 'job'?" in capsys.readouterr().err


async def test_the_controller_checks_for_itself(served: Served) -> None:
    """Whatever client asks: a token is needed, names and values are checked, and a body of another form is refused."""
    async with Link(served.url) as stranger:
        with pytest.raises(RefusedError, match="wants a token"):
            await stranger.set_policy("job", {"dry_run": "true"})
    async with Link(served.url, WORD) as link:
        for settings in ({"nonsense_at_all": "1"}, {"dry_run": "perhaps"}, {"frozen": "explode"}):
            with pytest.raises(RefusedError):
                await link.set_policy("job", settings)
        with pytest.raises(RefusedError, match="there is no job 'nobody'"):
            await link.policy("nobody")
        with pytest.raises(RefusedError, match="there is no job 'nobody'"):
            await link.set_policy("nobody", {})

        assert (await link.policy("job")).policy == JobPolicy()


async def test_a_replay_reads_the_journal(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each decision with its reason; under a stricter policy those that would have come out otherwise."""
    async with Link(served.url, WORD) as link:
        exits = (RankExit(0, 0, 7, -9, time.monotonic(), step=3),)
        await link.join(_join(2, previous_round=1, cause="failure", exits=exits))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "journal.db").symlink_to(tmp_path / "ops.db")
    replay = ["policy", "replay", "--run-dir", str(run_dir)]

    codes = [await asyncio.to_thread(_verb, replay)]
    same = capsys.readouterr().out
    codes.append(await asyncio.to_thread(_verb, [*replay, "--policy", "max_restarts=0"]))
    strict = capsys.readouterr().out
    codes.append(await asyncio.to_thread(_verb, [*replay, "--json"]))
    data = json.loads(capsys.readouterr().out)

    assert codes == [0, 0, 0]
    assert "job-1  killed: restart: whoever killed the rank may not do it again" in same
    assert "1 decisions, 0 of them otherwise" in same
    assert "otherwise now: stop: the budget of 0 restarts is used up" in strict
    assert "1 decisions, 1 of them otherwise under max_restarts=0" in strict
    assert data["decisions"][0]["recorded"]["action"] == "restart"
    assert data["decisions"][0]["question"]["verdict"]["culprits"] == [0]


def test_a_replay_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No journal is one sentence, with where it was looked for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    code = main(["policy", "replay", "nobody"])

    assert code == 2
    assert "there is no journal in" in capsys.readouterr().err


def test_a_wrong_order_of_words_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """``policy set NAME=VALUE NAME=VALUE`` without a job."""
    code = main(["policy", "set", "dry_run=true", "frozen=warn"])

    assert code == 2
    assert "is a setting, not a job" in capsys.readouterr().err


def test_check_takes_back_only_what_is_known() -> None:
    """The word "default" is taken for every setting and for no other name."""
    assert policy_settings.check_settings({"frozen": "default"}) == {"actions.frozen": "default"}
    with pytest.raises(UsageError):
        policy_settings.check_settings({"nothing_of_ours": "default"})
