# SPDX-License-Identifier: Apache-2.0
"""Files that hold a token: written for their owner only, and refused when others may read them or could guess it."""

import contextlib
import math
import os
import string
from pathlib import Path

from megascale_ops.errors import UsageError

# 128 bits: beyond what anybody guesses over a network or from a derived token that was seen, with all of today's
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
_NEW = "`megascale-ops token new FILE` makes a good one"


def read_token_file(path: str | Path) -> str:
    """Return the token that a file holds: a controller's own, or one derived from it.

    Raises:
        UsageError: it can't be read, others may read it, it holds no token, or one that could be guessed; one sentence
            with what to do, and never the token.
    """
    try:
        mode = Path(path).stat().st_mode & 0o777
        token = Path(path).read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"token file {path} holds no token: letters and digits are expected; {_NEW}") from error
    except OSError as error:
        raise UsageError(f"token file {path} can't be read ({error.strerror})") from error
    if mode & 0o077:
        raise UsageError(f"token file {path} has mode {mode:04o}, so others may read it: run `chmod 600 {path}`")
    if not token:
        raise UsageError(f"token file {path} is empty: {_NEW}")
    if not token.isprintable() or " " in token:
        raise UsageError(f"token file {path} holds no token: one word of printable characters is expected; {_NEW}")
    weak = why_weak(token)
    if weak:
        raise UsageError(f"the token in {path} could be guessed, since {weak}: {_NEW}")
    return token


def why_weak(token: str) -> str:
    """Return why a token could be guessed, "" where nothing speaks for that.

    A token's randomness can't be seen; what its length and letters allow at most can.
    """
    if len(set(token)) < _LEAST_DIFFERENT:
        return f"it has only {len(set(token))} different characters"
    letters = set(token)
    size = next((size for alphabet, size in _ALPHABETS if letters <= set(alphabet)), _PRINTABLE)
    bits = int(len(token) * math.log2(size))
    return f"its {len(token)} characters hold {bits} bits at most, {LEAST_BITS} are asked for" * (bits < LEAST_BITS)


def write_token_file(path: Path, token: str, *, anew: bool = False) -> None:
    """Write a token beside and rename, mode 0600 from its first byte on. ``anew``: a file that is there is kept.

    Raises:
        UsageError: it can't be written, or is there already.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()  # of a process that had our id and was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600), "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        if anew:
            os.link(beside, path)
            beside.unlink()
        else:
            beside.replace(path)
    except FileExistsError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{path} is there already, and may be in use: name another file, or remove it") from error
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise UsageError(f"token file {path} can't be written ({error.strerror}): name another one") from error
