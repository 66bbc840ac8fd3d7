# SPDX-License-Identifier: Apache-2.0
"""Which controller or journal is read when none is named."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.cli.sources.locate import Place, Wanted, find_place, narrowed, read_token
from megascale_ops.errors import ControllerUnreachableError, UsageError
from megascale_ops.link.token_files import write_token_file
from megascale_ops.link.whereabouts import Whereabouts, write_whereabouts
from megascale_ops.schema.tokens import new_token


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty state root, with nothing said in the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MEGASCALE_CONTROLLER", "MEGASCALE_TOKEN", "MEGASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "megascale-ops"
    root.mkdir()
    return root


@pytest.fixture
def listening() -> Iterator[str]:
    """Return the address of something that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def deaf() -> Iterator[str]:
    """Return an address where nothing listens: bound, so that no other program gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def run_folder(root: Path, job: str, at_s: float, url: str | None = None, *, journal: bool = True) -> Path:
    """Leave behind what a run leaves: a journal, and where its controller was."""
    folder = root / job
    folder.mkdir()
    if journal:
        (folder / "journal.db").write_bytes(b"")
    if url is not None:
        (folder / "controller.json").write_text(json.dumps({"url": url, "pid": 1, "runner_pid": 2}))
    for path in folder.iterdir():
        os.utime(path, (at_s, at_s))
    return folder


def test_the_address_given_is_asked_first(state: Path, listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--controller beats MEGASCALE_CONTROLLER, which beats whatever runs here."""
    run_folder(state, "a", 1.0, listening)
    monkeypatch.setenv("MEGASCALE_CONTROLLER", "http://env:1")

    assert find_place(Wanted(controller="http://given:1"), journal_too=True) == Place(url="http://given:1")
    assert find_place(Wanted(), journal_too=True) == Place(url="http://env:1")


def test_the_newest_running_controller_is_found(state: Path, listening: str, deaf: str) -> None:
    """A dead controller's file is passed over, even if it is newer."""
    run_folder(state, "old", 1.0, "http://127.0.0.1:1")
    alive = run_folder(state, "alive", 2.0, listening)
    run_folder(state, "killed", 3.0, deaf)

    assert find_place(Wanted(), journal_too=True) == Place(url=listening, folder=alive)


def test_without_a_controller_the_newest_journal_is_read(state: Path, deaf: str) -> None:
    """What happened can be asked after the run has ended."""
    run_folder(state, "older", 1.0)
    newest = run_folder(state, "newest", 5.0, deaf)
    run_folder(state, "empty", 9.0, journal=False)

    assert find_place(Wanted(), journal_too=True) == Place(journal=newest / "journal.db", folder=newest)


def test_a_named_job_or_folder_is_the_only_one_asked(state: Path, tmp_path: Path, listening: str) -> None:
    """--job and --run-dir exclude every other run."""
    wanted = run_folder(state, "wanted", 1.0)
    run_folder(state, "other", 9.0, listening)
    elsewhere = run_folder(tmp_path, "elsewhere", 1.0)

    assert find_place(Wanted(job="wanted"), journal_too=True).journal == wanted / "journal.db"
    assert find_place(Wanted(run_dir=str(elsewhere)), journal_too=True).journal == elsewhere / "journal.db"


@pytest.mark.parametrize("rubbish", [b"", b"{}", b"\xff\xfe", b'{"url": 3}', b'{"url": "no address"}'])
def test_a_broken_file_is_passed_over(state: Path, rubbish: bytes) -> None:
    """Half-written or foreign files never break the search."""
    folder = run_folder(state, "a", 1.0)
    (folder / "controller.json").write_bytes(rubbish)

    assert find_place(Wanted(), journal_too=True).journal == folder / "journal.db"


def test_nothing_found_says_where_was_looked(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence names the folder and what to do instead."""
    with pytest.raises(ControllerUnreachableError, match=f"found under {state}: start a run, or give --controller URL"):
        find_place(Wanted(), journal_too=True)
    monkeypatch.setenv("XDG_STATE_HOME", "/does/not/exist")
    with pytest.raises(ControllerUnreachableError, match="found under /does/not/exist"):
        find_place(Wanted(), journal_too=False)


def test_a_job_or_folder_that_is_not_there_is_told_as_that(state: Path, tmp_path: Path) -> None:
    """Not as a controller that does not run: a name was mistyped, and the nearest one is named."""
    run_folder(state, "gpt-large", 1.0)

    with pytest.raises(ControllerUnreachableError) as mistyped:
        find_place(Wanted(job="gpt-lrage"), journal_too=True)
    with pytest.raises(ControllerUnreachableError, match=f"there is no folder {tmp_path}/gone: --run-dir takes the"):
        find_place(Wanted(run_dir=f"{tmp_path}/gone"), journal_too=True)

    assert str(mistyped.value).startswith("unknown job 'gpt-lrage': did you mean 'gpt-large'? (`megascale-ops jobs`")
    assert "--controller URL" in str(mistyped.value)


def test_what_needs_a_controller_points_to_what_a_finished_run_left(state: Path) -> None:
    """``top`` needs a controller; when only a journal is left, the sentence says what still works."""
    run_folder(state, "done", 1.0)

    with pytest.raises(ControllerUnreachableError, match="`incidents`, `why` and `report` still read what"):
        find_place(Wanted(), journal_too=False)


def test_an_incidents_name_leads_to_its_run(state: Path) -> None:
    """``why old-3`` asks the run ``old``, not the newest one; a name without a run changes nothing."""
    run_folder(state, "old", 1.0)

    assert narrowed(Wanted(), "old-3") == Wanted(job="old")
    assert narrowed(Wanted(job="x"), "old-3") == Wanted(job="x")
    assert narrowed(Wanted(), "gone-3") == Wanted()
    assert narrowed(Wanted(), "old") == Wanted()


@pytest.mark.usefixtures("state")
def test_the_token_comes_from_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File given, the run's own, file named by the environment, token in it: in this order; none is no token."""
    files = {name: tmp_path / name for name in ("given", "own", "named")}
    for file in files.values():
        write_token_file(file, new_token())
    ours = Place(url="http://127.0.0.1:1", token_file=str(files["own"]))
    assert read_token(None, Place()) is None
    monkeypatch.setenv("MEGASCALE_TOKEN", "three")
    assert read_token(None, Place()) == "three"
    monkeypatch.setenv("MEGASCALE_TOKEN_FILE", str(files["named"]))

    assert read_token(None, Place()) == files["named"].read_text().strip()
    assert read_token(None, ours) == files["own"].read_text().strip()
    assert read_token(str(files["given"]), ours) == files["given"].read_text().strip()


def test_the_address_of_a_run_of_ours_is_enough(state: Path, tmp_path: Path, listening: str) -> None:
    """``--controller`` with what a run printed finds that run's token; another's address gets none of ours."""
    folder = run_folder(state, "a", 1.0)
    write_token_file(folder / "controller.token", new_token())
    write_whereabouts(folder, Whereabouts(listening, token_file=str(folder / "controller.token")))
    shared = tmp_path / "shared"
    write_token_file(shared, new_token())
    write_whereabouts(run_folder(state, "b", 2.0), Whereabouts("http://127.0.0.1:1", 1, 2**22 + 1, str(shared)))
    write_whereabouts(run_folder(state, "c", 3.0), Whereabouts("http://127.0.0.1:2", 1, os.getpid(), str(shared)))

    found = find_place(Wanted(job="a"), journal_too=False)

    own = (folder / "controller.token").read_text().strip()
    assert read_token(None, found) == own
    assert read_token(None, Place(url=f"{listening}/")) == own
    assert read_token(None, Place(url="http://127.0.0.1:3")) is None
    # A token for several controllers is not sent to another program at the address of a run that has ended.
    assert read_token(None, Place(url="http://127.0.0.1:1")) is None
    assert read_token(None, Place(url="http://127.0.0.1:2")) == shared.read_text().strip()


@pytest.mark.usefixtures("state")
def test_a_token_file_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    """Missing, empty, open and short ones are refused by name, never sent; the sentence says how to make a good one."""
    broken = tmp_path / "token"
    broken.write_text("\n")
    broken.chmod(0o600)
    with pytest.raises(UsageError, match="is empty"):
        read_token(str(broken), Place())
    broken.write_text("hunter2\n")
    with pytest.raises(UsageError, match=r"could be guessed, since .*megascale-ops token new FILE") as refused:
        read_token(str(broken), Place())
    assert "hunter2" not in str(refused.value)
    broken.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_token(str(broken), Place())
    with pytest.raises(UsageError, match="can't be read"):
        read_token(str(tmp_path / "missing"), Place())
