# SPDX-License-Identifier: Apache-2.0
"""Files with tokens: for their owner only, and none that could be guessed."""

import base64
import os
import random
import secrets
import stat
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.link.token_files import (
    find_token,
    read_secret_file,
    read_token_file,
    why_weak,
    write_token_file,
)
from megascale_ops.schema.tokens import Grant, issue, new_token


@pytest.mark.parametrize(
    "token",
    [
        "hunter2",
        "0123456789abcdef0123456789abcde",  # 31 hexadecimal digits: 124 bits
        "12345678901234567890123456789012345678",  # 38 digits
        "abcdefghijklmnopqrstuvwxyz",  # 26 letters of one kind
        "a" * 64,
        "abcabcabc" * 20,
        "",
    ],
)
def test_what_could_be_guessed_is_weak(token: str) -> None:
    """Too short for 128 bits with the letters it has, or ever the same letters."""
    assert why_weak(token)


def test_what_good_tools_make_is_not() -> None:
    """What `openssl rand -hex 16` and `-base64 16` print, and what we derive; a thousand times each."""
    order = random.Random(1)  # noqa: S311  no secret
    for _ in range(1000):
        raw = order.randbytes(16)
        made = (raw.hex(), raw.hex().upper(), base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode())
        assert [why_weak(token) for token in made] == [""] * len(made), made
    assert not why_weak(secrets.token_urlsafe(16))
    assert not why_weak(issue(new_token(), Grant("read")))


def test_a_written_token_is_read_back_and_private(tmp_path: Path) -> None:
    """Mode 0600 whatever was there before; beside it nothing is left."""
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    token = new_token()

    write_token_file(path, token)

    assert read_token_file(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_token_replaces_none(tmp_path: Path) -> None:
    """What controllers and agents may be using is not overwritten by mistake."""
    path = tmp_path / "token"
    write_token_file(path, new_token(), anew=True)
    before = path.read_text()

    with pytest.raises(UsageError, match="is there already"):
        write_token_file(path, new_token(), anew=True)

    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """The user named it; no traceback."""
    with pytest.raises(UsageError, match="can't be written"):
        write_token_file(tmp_path / "no" / "token", new_token())


def test_no_link_is_followed_when_a_token_is_written(tmp_path: Path) -> None:
    """In a folder where others may write, a link laid beside would send the token elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "token").symlink_to(elsewhere)

    write_token_file(tmp_path / "token", new_token())

    assert not elsewhere.exists()
    assert not (tmp_path / "token").is_symlink()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o601, 0o777])
@pytest.mark.parametrize("what", ["token", "password"])
def test_a_secret_that_others_may_open_is_refused_whoever_it_is_for(tmp_path: Path, mode: int, what: str) -> None:
    """A controller's, Grafana's or Prometheus's: the sentence says what to run, and never what stands in the file."""
    path = tmp_path / what
    path.write_text("glsa_an0therProgramsOwn")
    path.chmod(mode)

    with pytest.raises(UsageError, match=f"{what} file .* mode {mode:04o}.*chmod 600") as caught:
        read_secret_file(path, what)

    assert "glsa" not in str(caught.value)


def test_a_link_to_a_secret_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts a secret as a link to a link to a file; what counts is the file's own mode."""
    (tmp_path / "..data").mkdir()
    write_token_file(tmp_path / "..data" / "token", token := new_token())
    (tmp_path / "token").symlink_to("..data/token")

    assert read_token_file(tmp_path / "token") == token


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A FIFO without a writer would block the program for ever, and a device never ends."""
    path = {"a FIFO": tmp_path / "fifo", "a folder": tmp_path, "a device": Path("/dev/zero")}[kind]
    if kind == "a FIFO":
        os.mkfifo(path, 0o600)

    with pytest.raises(UsageError, match=f"can't be read .it is {kind}"):
        read_secret_file(path, "token")


@pytest.mark.parametrize(
    ("what", "raw", "words"),
    [
        ("token", b"two words", "one word"),
        ("token", "schl\u00fcssel".encode(), "one word"),
        ("token", b"\xff\xfe", "one word"),
        ("token", b"x" * 20_000, "one word"),
        ("token", b"one\ntwo", "one word"),
        ("token", b"\n", "is empty"),
        ("password", b"", "is empty"),
        ("password", b"one\ntwo", "one line"),
        ("password", b"\xff\xfe", "one line"),
    ],
)
def test_another_file_than_was_meant_is_refused(tmp_path: Path, what: str, raw: bytes, words: str) -> None:
    """What can be no secret of its kind is told as what it is."""
    path = tmp_path / what
    path.touch(0o600)
    path.write_bytes(raw)

    with pytest.raises(UsageError, match=words):
        read_secret_file(path, what)


def test_a_password_may_have_spaces_and_any_letters(tmp_path: Path) -> None:
    """Other programs say how good their secrets are: a short one is theirs to refuse."""
    path = tmp_path / "password"
    path.touch(0o600)
    path.write_text("correct h\u00f6rse\n", encoding="utf-8")

    assert read_secret_file(path, "password") == "correct h\u00f6rse"


def test_a_token_is_looked_for_in_one_order(tmp_path: Path) -> None:
    """The file that is given, the one that the environment names, the environment's own; a bad file ends the search."""
    given, named = tmp_path / "given", tmp_path / "named"
    write_token_file(given, first := new_token())
    write_token_file(named, second := new_token())
    environ = {"MEGASCALE_TOKEN_FILE": str(named), "MEGASCALE_TOKEN": "own"}

    assert find_token(given, environ) == first
    assert find_token("", environ) == second
    assert find_token("", {"MEGASCALE_TOKEN": "own"}) == "own"
    assert find_token("", {}) is None
    named.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        find_token("", environ)
