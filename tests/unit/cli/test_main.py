# SPDX-License-Identifier: Apache-2.0
"""What a user sees of the command line itself: help, mistakes, exit codes."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import megascale_ops
from megascale_ops.cli import main as cli_main
from megascale_ops.cli.config.configuration import struct_of
from megascale_ops.cli.config.settings import settings_of
from megascale_ops.cli.main import VERBS, main, program
from megascale_ops.controller.journal.store import open_store
from megascale_ops.errors import ControllerUnreachableError, UsageError


@pytest.fixture(autouse=True)
def _leave_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)


def raising(error: BaseException) -> click.Command:
    """Return a verb that fails as told."""

    @click.command
    def verb() -> None:
        raise error

    return verb


@pytest.fixture
def failing_verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Let the verb ``status`` fail in the way given."""

    def install(error: BaseException) -> None:
        monkeypatch.setattr(program, "get_command", lambda _ctx, _name: raising(error))

    return install


def test_help_lists_every_verb_without_loading_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--help`` prints the table and imports no verb."""
    monkeypatch.setattr(program, "get_command", lambda *_: pytest.fail("a verb was loaded"))

    code = main(["--help"])

    text = capsys.readouterr().out
    assert code == 0
    for name, verb in VERBS.items():
        assert name in text
        assert verb.help in text


@pytest.mark.parametrize("line", [["--help"], ["--version"], ["status", "--help"], ["why", "--help"], []])
def test_help_imports_nothing_heavy(line: list[str]) -> None:
    """Help answers at once because none of rich, textual, aiohttp, sqlalchemy and torch is loaded for it."""
    probe = (
        "import sys; from megascale_ops.cli.main import main; main(sys.argv[1:]); "
        "heavy = {'rich', 'textual', 'aiohttp', 'torch', 'numpy', 'sqlalchemy'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", probe, *line], capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("name", list(VERBS))
def test_every_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``VERB --help`` works for every row of the table, and begins with a usage line."""
    code = main([name, "--help"])

    assert code == 0
    assert capsys.readouterr().out.startswith(f"Usage: megascale-ops {name}")


@pytest.mark.parametrize("section", ["controller", "agent"])
def test_every_setting_is_an_option_of_its_verb(section: str) -> None:
    """What can be set in the file or the environment can be set on the command line, but for tables of tables."""
    verb = program.get_command(click.Context(program), section)
    assert verb is not None

    options = {param.name for param in verb.params}

    assert {setting.name for setting in settings_of(struct_of(section)) if len(setting.path) == 1} <= options


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints the version of the package."""
    assert main(["--version"]) == 0
    assert megascale_ops.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["staus"], "unknown verb 'staus': did you mean 'status'?"),
        (["zzzz"], "unknown verb 'zzzz'"),
        (["status", "--wach"], "unknown option '--wach': did you mean '--watch'?"),
        (["--log-levle", "debug"], "unknown option '--log-levle': did you mean '--log-level'?"),
        (["config", "shwo"], "unknown command 'shwo': did you mean 'show'?"),
        (["config", "show", "agnt"], "unknown section 'agnt': did you mean 'agent'?"),
        (["status", "--job"], "option '--job' requires an argument"),
        (["jobs", "now"], "got unexpected extra argument (now)"),
        (["clean", "--older-than=x"], "invalid value for '--older-than': 'x' is not a number"),
        (["clean", "--keep=x"], "invalid value for '--keep': 'x' is not a whole number"),
        (["completion"], "missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"),
        (
            ["chaos", "run", "sigkil"],
            "unknown fault 'sigkil': did you mean 'sigkill'? (`megascale-ops chaos list` shows all)",
        ),
    ],
)
def test_a_mistyped_command_line_is_one_sentence(
    line: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake costs one line that names the nearest right name; the exit code is 2."""
    code = main(line)

    out, err = capsys.readouterr()
    assert (code, out, err) == (2, "", f"megascale-ops: {sentence}\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ControllerUnreachableError("nobody answers at X"), 1, "megascale-ops: nobody answers at X\n"),
        (UsageError("no such file: x"), 2, "megascale-ops: no such file: x\n"),
        (ModuleNotFoundError("x", name="torch.cuda"), 1, "needs torch, which is not installed"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_sentence_and_an_exit_code(
    error: BaseException,
    code: int,
    said: str,
    failing_verb: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Our errors print their sentence and carry their exit code; Ctrl-C is 130; no traceback in any of them."""
    failing_verb(error)

    outcome = main(["status"])

    err = capsys.readouterr().err
    assert outcome == code
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [EOFError("a truncated file"), asyncio.IncompleteReadError(b"", 4)])
def test_what_ended_too_early_is_no_interrupt(
    error: EOFError, failing_verb: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file or a connection that ends is a fault of ours, with a traceback; Ctrl-D at a question is 130."""
    failing_verb(error)
    with pytest.raises(type(error)):
        main(["status"])

    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: (_ for _ in ()).throw(EOFError))
    monkeypatch.setattr(program, "get_command", lambda _ctx, _name: click.Command("ask", callback=ask))
    assert main(["status"]) == 130


def ask() -> None:
    """Ask what nobody answers."""
    click.confirm("really?")


@pytest.mark.parametrize(
    ("line", "missing", "extra"),
    [
        (["run", "--", "train.py"], "torch", "train"),
        (["run", "--controller=http://127.0.0.1:9", "--", "train.py"], "torch", "train"),
        (["run", "--wrap", "--", "deepspeed", "train.py"], "numpy", "controller"),
        (["demo"], "torch", "train"),
        (["chaos", "run", "sigkill"], "torch", "train"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_started(
    line: list[str],
    missing: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the base installation alone: the extra is named that brings all of it, and no run leaves a folder behind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("megascale_ops.cli.terminal.needs.find_spec", lambda _: None)

    assert main(line) == 1

    needs = f"`megascale-ops` needs {missing}, which is not installed: pip install 'megascale-ops[{extra}]'"
    assert capsys.readouterr().err == f"megascale-ops: {needs}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_bug_of_ours_is_not_hidden(failing_verb: Callable[[BaseException], None]) -> None:
    """An error that is no user's mistake keeps its traceback."""
    failing_verb(ZeroDivisionError("oops"))

    with pytest.raises(ZeroDivisionError):
        main(["status"])


def test_a_missing_module_breaks_only_its_own_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verb that is not installed says so; the others and the help go on working."""
    row = VERBS["status"]._replace(module="megascale_ops.cli.no_such_verb")
    monkeypatch.setitem(cli_main.VERBS, "status", row)

    assert main(["status"]) == 1
    assert "not part of this installation" in capsys.readouterr().err
    assert main(["why", "--help"]) == 0


def test_a_verbs_return_value_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that wraps a program passes on that program's code."""
    monkeypatch.setattr(program, "get_command", lambda *_: click.Command("x", callback=lambda: 77))

    assert main(["status"]) == 77


def test_python_dash_m_is_the_same_program() -> None:
    """``python -m megascale_ops.cli`` is the command line, for parents that have no console script on PATH."""
    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", "staus"], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (2, "megascale-ops: unknown verb 'staus': did you mean 'status'?\n")


@pytest.mark.parametrize(
    ("where", "said", "code"),
    [
        ("> /dev/full", "megascale-ops: what was to be printed can't be written: No space left on device\n", 1),
        (">&-", "", 0),
    ],
)
def test_a_full_disk_is_one_sentence_and_a_closed_output_none(where: str, said: str, code: int) -> None:
    """``megascale-ops ... > FILE`` on a full disk says so; with a closed stdout nothing is printed."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m megascale_ops.cli --help {where}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.stderr, done.returncode) == (said, code)


@pytest.mark.parametrize(("program", "code"), [("megascale_ops.cli", 130), ("megascale_ops.cli.main", -signal.SIGINT)])
def test_ctrl_c_while_the_program_still_imports_is_no_traceback(program: str, code: int, tmp_path: Path) -> None:
    """The console script takes it before it imports click; negative control: the module behind it does not."""
    slow = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "click.py").write_text(slow)

    # Who is started behind a shell's `&`, or by nohup, has the signal ignored, and so would all that it starts.
    done = subprocess.run(
        ["env", "--default-signal=INT", sys.executable, "-m", program, "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code != 130)


@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        (["status", "--job", "x" * 5000], "File name too long (`--log-level debug` shows what it was needed for)", 1),
        (["jobs", "--limit", "9" * 5001], "(5003 characters) is not a whole number", 2),
        (["checkpoint", "ls", ""], "invalid value for 'PATH': it is empty: is a variable of the shell not set?", 2),
        (["clean", "gpt", ""], "invalid value for '[JOB]...': it is empty: is a variable of the shell not set?", 2),
        (["checkpoint", "ls", "caf\udce9"], "there is no caf\\udce9", 2),
        (["incidents", "--before", "\udcff"], "'\\udcff' can't be: it is not in UTF-8", 2),
        (["page", "--controller", "127.0.0.1"], "controller address '127.0.0.1' can't be used", 2),
    ],
)
def test_what_no_system_takes_gets_its_sentence(
    line: list[str],
    said: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names that no file can have, words that are nothing or not in UTF-8, addresses that are none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "megascale-ops" / "gpt"
    folder.mkdir(parents=True)
    open_store(f"sqlite:///{folder / 'journal.db'}").close()

    assert main(line) == code

    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert len(err) < 500


def test_a_folder_that_has_been_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is relative leads nowhere then; where all is well, the same error is a bug of ours."""
    monkeypatch.setattr(program, "get_command", lambda *_: raising(FileNotFoundError(errno.ENOENT, "No such file")))
    with pytest.raises(FileNotFoundError):
        main(["status"])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert main(["status"]) == 1

    assert capsys.readouterr().err == (
        "megascale-ops: the current folder has been removed: change to another one (`cd ~`)\n"
    )


def test_a_terminal_without_utf_8_is_written_to() -> None:
    """What its encoding lacks is written as an escape; it ends no command."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "MEGASCALE_AGENT_NODE": "\u2603"}

    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", "config", "show", "agent"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2603" in done.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    """``megascale-ops ... | head`` leaves no traceback behind."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m megascale_ops.cli --help | true; sleep 0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stderr == ""
