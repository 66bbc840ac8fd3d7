# SPDX-License-Identifier: Apache-2.0
"""Read short files of /proc: ``open`` would ask for size, kind and place before it reads."""

import os


def beginning(path: str, most_bytes: int) -> bytes:
    """Return the first bytes of a file, in one read.

    Raises:
        OSError: it is not there any more, or can't be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, most_bytes)
    finally:
        os.close(handle)
