# SPDX-License-Identifier: Apache-2.0
"""Files with tokens: for their owner only, and none that could be guessed."""

import base64
import random
import secrets
import stat
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.link.token_files import read_token_file, why_weak, write_token_file
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
