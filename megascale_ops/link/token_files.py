# SPDX-License-Identifier: Apache-2.0
"""Files that hold a token: written for their owner only, and refused when others may read them or could guess it."""

import math
import os
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megascale_ops import foreign
from megascale_ops.errors import UsageError
from megascale_ops.schema import environment
from megascale_ops.whole_file import PRIVATE, write_whole

# 128 bits: beyond what can be guessed over a network or from a derived token that was seen, with all of today's
# computers together.
LEAST_BITS = 128
# 8: 32 random hexadecimal digits have fewer different ones once in 25 million; "aaaa..." and "abcabc..." always.
_LEAST_DIFFERENT = 8
_ALPHABETS = (
    (string.digits, 10),
    (string.hexdigits.lower(), 16),
    (string.hexdigits.upper(), 16),
    (string.ascii_lowercase, 26),
    (string.ascii_uppercase, 26),
    (string.ascii_letters + string.digits + "+/-_=", 64),
)
_PRINTABLE = 94
# 16 KiB: more than any header that a server takes; what is larger is another file.
_MOST_BYTES = 16_384
_EXPECTED = {
    "token": "one word of printable characters is expected",
    "password": "one line is expected",
    "address": "one line is expected",
}
_NEW = "`megascale-ops token new FILE` makes a good one"


# Beside a controller's token file, as long as a change is under way: the token that was valid before.
FORMER = ".former"


class FileToken(str):
    """A token that knows its file: a client that is refused reads it again, since it may have been changed."""

    __slots__ = ("path",)

    def __new__(cls, token: str, path: str | Path) -> Self:
        """Return the token of a file."""
        made = super().__new__(cls, token)
        made.path = Path(path)
        return made

    path: Path


def former_of(path: str | Path) -> Path:
    """Return where the token lies that was valid before the one in ``path``."""
    return Path(f"{path}{FORMER}")


def rotate(path: Path, token: str) -> None:
    """Put ``token`` into ``path``; what was there stays valid until ``end_rotation``.

    Raises:
        UsageError: there is no token yet, one of the files can't be written, or a change is under way already.
    """
    former = former_of(path)
    if former.exists():
        raise UsageError(
            f"a change of the token in {path} is under way already: end it by `megascale-ops token rotate --end {path}`"
        )
    write_token_file(former, read_token_file(path))
    write_token_file(path, token)


def end_rotation(path: Path) -> None:
    """Take back what was valid before the token in ``path``.

    Raises:
        UsageError: no change is under way, or the file can't be removed.
    """
    former = former_of(path)
    try:
        former.unlink()
    except FileNotFoundError as error:
        raise UsageError(f"no change of the token in {path} is under way: there is no {former}") from error
    except OSError as error:
        raise UsageError(f"{former} can't be removed ({error.strerror}), so the token in it stays valid") from error


def read_token_file(path: str | Path) -> FileToken:
    """Return the token that a file holds: a controller's own, or one derived from it.

    Raises:
        UsageError: it can't be read, others may read it, it holds no token, or one that could be guessed; one sentence
            with what to do, and never the token.
    """
    token = read_secret_file(path, "token", f"; {_NEW}")
    weak = why_weak(token)
    if weak:
        raise UsageError(f"the token in {path} could be guessed, since {weak}: {_NEW}")
    return FileToken(token, path)


def read_secret_file(path: str | Path, what: str, advice: str = "") -> str:
    """Return the one line that a file holds: a token, ours or another program's, or a password.

    Nothing else in this house opens such a file; how good another program's secret is, that program knows.

    Args:
        path: a regular file, or a link to one, which only its owner may read.
        what: "token", "password" or "address" (of a webhook: who has it may write there). A password may have spaces
            and any letters.
        advice: what to do where the file holds none.

    Raises:
        UsageError: it can't be read, others may read it, or it holds nothing of the kind.
    """
    try:
        with foreign.opened(Path(path), follow=True) as handle:
            mode = os.fstat(handle).st_mode & 0o777
            raw = os.read(handle, _MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{what} file {path} can't be read ({error.strerror or error})") from error
    if mode & 0o077:
        raise UsageError(f"{what} file {path} has mode {mode:04o}, so others may read it: run `chmod 600 {path}`")
    try:
        text = raw.decode("ascii" if what == "token" else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} file {path} holds no {what}: {_EXPECTED[what]}{advice}") from error
    if not text:
        raise UsageError(f"{what} file {path} is empty{advice}")
    if len(raw) > _MOST_BYTES or not text.isprintable() or (what == "token" and " " in text):
        raise UsageError(f"{what} file {path} holds no {what}: {_EXPECTED[what]}{advice}")
    return text


def find_token(path: str | Path, environ: Mapping[str, str]) -> str | None:
    """Return the token of the file ``path``, else of the file that the environment names, else its own, or None.

    Raises:
        UsageError: as ``read_token_file``.
    """
    path = path or environ.get(environment.TOKEN_FILE, "")
    return read_token_file(path) if path else environ.get(environment.TOKEN) or None


def why_weak(token: str) -> str:
    """Return why a token could be guessed, "" where it could not.

    A token's randomness can't be seen; what its length and letters allow at most can.
    """
    if len(set(token)) < _LEAST_DIFFERENT:
        return f"it has only {len(set(token))} different characters"
    letters = set(token)
    size = next((size for alphabet, size in _ALPHABETS if letters <= set(alphabet)), _PRINTABLE)
    bits = int(len(token) * math.log2(size))
    return f"its {len(token)} characters hold {bits} bits at most, {LEAST_BITS} are asked for" * (bits < LEAST_BITS)


def write_token_file(path: Path, token: str, *, anew: bool = False) -> None:
    """Write a token, mode 0600 from its first byte on. ``anew``: a file that is there is kept.

    Raises:
        UsageError: it can't be written, or is there already.
    """
    try:
        write_whole(path, f"{token}\n".encode("ascii"), mode=PRIVATE, anew=anew)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already, and may be in use: name another file, or remove it") from error
    except OSError as error:
        raise UsageError(f"token file {path} can't be written ({error.strerror}): name another one") from error
