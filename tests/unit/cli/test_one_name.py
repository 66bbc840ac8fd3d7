# SPDX-License-Identifier: Apache-2.0
"""One thing has one name on the command line; a name that it had before goes on working, with a line that says so."""

from collections.abc import Iterator

import click
import pytest

from megascale_ops.cli.main import main, program
from tests.fakes.typed_commands import parse

# What `--job` means beside the job that a verb is about, so that there is no [JOB]: a run that is started, a token's
# right, a job to be broken, the job of an incident, the run whose controller answers.
NODES = {f"nodes {word}" for word in ("list", "history", "quarantine", "release", "undo", "spares")}
OTHERWISE = {"run", "token issue", "chaos run", "why", "bad-hardware list", "bad-hardware forget", *NODES}


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command that can be typed, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


COMMANDS = dict(commands(program))


def options(command: click.Command) -> set[str]:
    """Return the options that a help page shows."""
    return {name for one in command.params if isinstance(one, click.Option) and not one.hidden for name in one.opts}


def test_a_verb_about_one_job_takes_it_with_and_without_the_option() -> None:
    """``VERB JOB`` and ``VERB --job JOB`` are the same wherever either is."""
    by_option = {name for name, command in COMMANDS.items() if "--job" in options(command)}
    by_place = {
        name
        for name, command in COMMANDS.items()
        if any(isinstance(one, click.Argument) and "JOB" in (one.metavar or "").strip("[].") for one in command.params)
    }

    assert len(by_place) > 12
    assert by_option - OTHERWISE == by_place


def test_files_nodes_and_what_is_forgotten_have_one_name() -> None:
    """``--out`` is the file to write, ``--node`` a node, ``forget`` what ends a memory."""
    shown = {name: options(command) for name, command in COMMANDS.items()}

    assert not [name for name, found in shown.items() if found & {"--output", "--node-name", "--outfile"}]
    assert {name for name, found in shown.items() if "--out" in found} >= {"report", "trace", "token issue", "targets"}
    assert {name for name, found in shown.items() if "--node" in found} == {"run", "agent", "token issue", "diagnose"}
    assert "bad-hardware forget" in COMMANDS
    assert "bad-hardware clear" not in COMMANDS


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("megascale-ops report --output x.html", "note: --output is called --out now; both work\n"),
        ("megascale-ops report gpt --output=x.html", "note: --output is called --out now; both work\n"),
        ("megascale-ops trace --output x", "note: --output is called --out now; both work\n"),
        ("megascale-ops report -o x.html", ""),
        ("megascale-ops report --out x.html", ""),
        ("megascale-ops report -- --output", ""),  # a job of an odd name
    ],
)
def test_an_old_option_works_and_says_its_new_name(line: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its value stands behind it or after a sign; behind ``--`` nothing is an option."""
    parse(line)

    assert capsys.readouterr().err == note


def test_an_old_word_works_and_says_its_new_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program listens there, which is said after the note; a word that never was is refused with the nearest."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)

    assert main(["bad-hardware", "clear", "GPU-1", "--controller=http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert main(["bad-hardware", "forgets"]) == 2

    assert told[0] == "note: bad-hardware clear is called bad-hardware forget now; both work"
    assert "no controller answers" in told[1]
    assert "did you mean 'forget'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["status", "top", "page", "incidents", "skew", "report", "trace", "logs", "policy show"]
)
def test_two_jobs_are_one_too_many(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names both; the same one twice is no mistake."""
    assert main([*verb.split(), "gpt", "--job", "llama"]) == 2

    assert capsys.readouterr().err == "megascale-ops: two jobs are named: 'gpt' and --job 'llama'\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpt", "--job=llama", "frozen=warn"], "two jobs are named: 'gpt' and --job 'llama'"),
        (["gpt"], "missing argument 'NAME=VALUE...'"),
        (["frozen=warn"], "'frozen=warn' is a setting, not a job: megascale-ops policy set JOB NAME=VALUE"),
        (["--job=gpt", "frozen=wran"], "did you mean 'warn'?"),
        (["gpt", "frozen=wran"], "did you mean 'warn'?"),
    ],
)
def test_a_policy_is_set_for_a_job_of_either_form(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the job in its place or by its option; what is missing or too much is one sentence."""
    assert main(["policy", "set", *words]) == 2

    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
