# SPDX-License-Identifier: Apache-2.0
"""``doctor``: what is missing on a machine is found, priced and comes with what to do."""

import importlib.metadata
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megascale_ops.cli.doctor import checks
from megascale_ops.cli.doctor.checks import COSTS, GOOD, MUST, Finding
from megascale_ops.cli.main import main


def refused(*_: object, **__: object) -> None:
    """Answer as Linux does to a user without the right."""
    raise PermissionError(13, "Permission denied")


def no_torch(name: str) -> str:
    """Know no package, torch or another."""
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    return tmp_path


README_COMMANDS = ("megascale-ops doctor",)


def test_every_look_answers_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Each in a row of its own; whatever is not well says what to do."""
    main(["doctor", "--json"])

    found = [Finding(**row) for row in json.loads(capsys.readouterr().out)]
    assert [one.name for one in found] == list(checks.all_checks(Path()))
    assert all(one.found for one in found)
    assert all(one.remedy for one in found if one.kind != GOOD)


@pytest.mark.parametrize(
    ("patched", "look", "kind", "words"),
    [
        (("shutil.which", lambda *_: None), checks.compiler, COSTS, "no NCCL profiler plugin"),
        (("shutil.which", lambda *_: None), checks.stacks, COSTS, "no py-spy"),
        (("importlib.metadata.version", no_torch), checks.torch, MUST, "not installed"),
        (("importlib.metadata.version", no_torch), checks.numpy, MUST, "controller can't start"),
        (("importlib.metadata.version", lambda _: "2.9.1"), checks.torch, COSTS, "2.9.1"),
        (("importlib.metadata.version", lambda _: "2.12.0+cu130"), checks.torch, GOOD, "2.12.0+cu130"),
        (
            ("os.statvfs", lambda _: SimpleNamespace(f_bavail=16_000, f_frsize=4096)),
            checks.shared_memory,
            COSTS,
            "0.06",
        ),
        (("os.statvfs", refused), checks.shared_memory, MUST, "/dev/shm: Permission denied"),
        (("os.open", refused), checks.kernel_log, COSTS, "/dev/kmsg: Permission denied"),
        (("socket.create_server", refused), checks.loopback, MUST, "127.0.0.1: Permission denied"),
        (("socket.getaddrinfo", refused), checks.own_name, COSTS, "has no address"),
        (("resource.getrlimit", lambda _: (256, 1024)), checks.open_files, COSTS, "1,024"),
        (("resource.getrlimit", lambda _: (-1, -1)), checks.open_files, GOOD, "without limit"),
        (("sys.version_info", (3, 10, 1)), checks.python, COSTS, "at "),
    ],
)
def test_what_is_missing_is_found(
    monkeypatch: pytest.MonkeyPatch,
    patched: tuple[str, object],
    look: Callable[[], Finding],
    kind: str,
    words: str,
) -> None:
    """By what the machine answers; a tested version, or no limit, is none."""
    monkeypatch.setattr(*patched)

    found = look()

    assert (found.kind, words in found.found, bool(found.remedy)) == (kind, True, kind != GOOD), found


def test_a_tracer_that_may_not_look_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yama lets only root look into processes that are no children."""
    monkeypatch.setattr("shutil.which", lambda *_: "/usr/bin/py-spy")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(checks, "_read", lambda _: "1")

    assert checks.stacks().kind == COSTS


def test_run_folders_that_cannot_be_written_are_a_must(tmp_path: Path) -> None:
    """The place is named, and how to give another one."""
    (tmp_path / "file").write_text("")

    found = checks.run_folders(tmp_path / "file" / "megascale-ops")

    assert found.kind == MUST
    assert "--run-dir" in found.remedy


@pytest.mark.parametrize(("kind", "code"), [(GOOD, 0), (COSTS, 0), (MUST, 1)])
def test_the_exit_code_says_whether_training_can_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, code: int
) -> None:
    """What only costs an ability is told, and is no failure."""
    monkeypatch.setattr(checks, "all_checks", lambda _: {"thing": lambda: Finding("thing", kind, "gone", "bring it")})

    assert main(["doctor"]) == code
    assert "-> bring it" in capsys.readouterr().out


def test_a_look_that_hangs_is_told_and_holds_nobody() -> None:
    """A driver, a name server or a mount that does not answer: the others are looked at all the same."""
    never = threading.Event()

    found = checks.answered("GPUs", lambda: Finding("GPUs", GOOD, str(never.wait(60))), deadline_s=0.05)
    never.set()

    assert (found.name, found.kind, found.found) == ("GPUs", COSTS, "no answer within 0.05 s")
    assert found.remedy


def test_a_fault_of_a_look_is_no_silence() -> None:
    """It is ours, and must not pass for a sick machine."""

    def broken() -> Finding:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checks.answered("clock", broken)
