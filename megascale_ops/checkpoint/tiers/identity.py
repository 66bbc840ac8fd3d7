# SPDX-License-Identifier: Apache-2.0
"""Which shared storage a near tier belongs to: a name that is drawn at its first use and kept in it.

A person who deletes the shared folder to begin anew means the sets on the nodes too; by this name they are those of
another job.
"""

import re
import uuid
from contextlib import suppress
from pathlib import Path

from megascale_ops import foreign
from megascale_ops.errors import CheckpointError
from megascale_ops.whole_file import write_whole

FILE_NAME = ".identity"
MOST_BYTES = 100
_IDENTITY = re.compile(rb"[0-9a-f]{32}\n")


def drawn() -> bytes:
    """A new one, as it stands in its file."""
    return f"{uuid.uuid4().hex}\n".encode()


def read(raw: bytes) -> str:
    """The identity in a file.

    Raises:
        CheckpointError: there is none in it.
    """
    if not _IDENTITY.fullmatch(raw):
        raise CheckpointError(f"{FILE_NAME} does not hold an identity as this program writes it: move it away")
    return raw.decode().strip()


def of_folder(root: Path) -> str:
    """The identity of a folder; drawn if it has none yet.

    Raises:
        CheckpointError: what stands there is none.
        OSError: it can't be read or written.
    """
    with suppress(FileExistsError):
        if not (root / FILE_NAME).exists():
            write_whole(root / FILE_NAME, drawn(), durably=True, anew=True)
    return read(foreign.read(root / FILE_NAME, MOST_BYTES))
