# SPDX-License-Identifier: Apache-2.0
"""``token new``, ``token issue`` and ``page``: what they print, and what a controller makes of it."""

import stat
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from megascale_ops.cli.main import main, program
from megascale_ops.cli.page import address
from megascale_ops.errors import UsageError
from megascale_ops.link.token_files import read_token_file
from megascale_ops.schema.tokens import Grant, issue, new_token, read_grant


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("MEGASCALE_CONTROLLER", "MEGASCALE_TOKEN", "MEGASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def _verb(*arguments: str) -> None:
    program.main(list(arguments), standalone_mode=False)


def _own(tmp_path: Path) -> tuple[Path, str]:
    file = tmp_path / "own"
    _verb("token", "new", str(file))
    return file, read_token_file(file)


def test_a_new_token_is_good_and_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 bits, mode 0600, never on the terminal; a file that is there is not replaced."""
    file, token = _own(tmp_path)
    said = capsys.readouterr()

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(bytes.fromhex(token)) == 32
    assert token not in said.out + said.err
    with pytest.raises(UsageError, match="is there already"):
        _verb("token", "new", str(file))


@pytest.mark.parametrize(
    ("options", "grant"),
    [
        (("--job=gpt", "--right=operate"), Grant("operate", "gpt")),
        (("--job=gpt",), Grant("read", "gpt")),
        (("--node=n1",), Grant("operate", "", "n1")),
        (("--job=gpt", "--node=n1", "--right=operate"), Grant("operate", "gpt", "n1")),
        (("--right=read",), Grant("read")),
    ],
)
def test_an_issued_token_allows_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], grant: Grant
) -> None:
    """Alone on stdout, for a shell; what it is for and until when on stderr."""
    file, own = _own(tmp_path)
    capsys.readouterr()

    _verb("token", "issue", f"--token-file={file}", "--days=2", *options)

    said = capsys.readouterr()
    found = read_grant(own, said.out.strip())
    assert found is not None
    assert (found.right, found.job, found.node) == (grant.right, grant.job, grant.node)
    assert abs(found.until_wall_s - time.time() - 2 * 86_400) < 60
    assert said.err.startswith(f"valid for {found.scope} until 20")


def test_an_issued_token_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--out`` writes it 0600 and prints it nowhere, and replaces the one before, as a prolog needs it."""
    file, own = _own(tmp_path)
    for job in ("a", "b"):
        _verb("token", "issue", f"--token-file={file}", f"--job={job}", f"--out={tmp_path / 'out'}")

    token = read_token_file(tmp_path / "out")

    said = capsys.readouterr()
    assert token not in said.out + said.err
    assert read_grant(own, token) is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--right=operate",), "name it by --job or --node"),
        (("--node=n1", "--right=read"), "leave --node out to read"),
        (("--job=a/b",), "job name 'a/b' can't be used"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    """Nothing is printed that looks like a token."""
    file, _own_token = _own(tmp_path)

    with pytest.raises(UsageError, match=sentence):
        _verb("token", "issue", f"--token-file={file}", *options)


def test_without_the_own_token_nothing_is_issued() -> None:
    """The sentence says where it may come from."""
    with pytest.raises(UsageError, match="give --token-file FILE, the controller's own, or --run-dir DIR"):
        _verb("token", "issue", "--job=a")


def test_the_pages_address_carries_a_token_that_only_reads() -> None:
    """Behind the #, for the job that was named, for a day. A lent token is handed on as it is; none needs none."""
    own, now_s = new_token(), 1_800_000_000.0
    lent = issue(own, Grant("read", "gpt"))

    parts = urlsplit(address("http://127.0.0.1:7070", own, "gpt", now_s))
    said = parse_qs(parts.fragment)

    assert parts.query == ""
    assert said["job"] == ["gpt"]
    assert read_grant(own, said["token"][0]) == Grant("read", "gpt", until_wall_s=now_s + 86_400)
    assert address("http://h:1/", lent, "", now_s) == f"http://h:1/#token={lent}"
    assert address("http://h:1", None, "", now_s) == "http://h:1/"


def test_an_unknown_word_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """As behind every other verb."""
    assert main(["token", "neww"]) == 2
    assert capsys.readouterr().err == "megascale-ops: unknown command 'neww': did you mean 'new'?\n"
