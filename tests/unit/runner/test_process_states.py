# SPDX-License-Identifier: Apache-2.0
"""What /proc tells of a process, whatever its name."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.runner.processes import is_dying, start_ticks

NAMES = {"plain": b"rank", "of several words": b") S 1 (", "no UTF-8": b"r\xff\xfe"}


@pytest.fixture(params=NAMES.values(), ids=NAMES.keys())
def name(request: pytest.FixtureRequest) -> Iterator[bytes]:
    """This process has this name meanwhile."""
    place = Path(f"/proc/{os.getpid()}/comm")
    before = place.read_bytes()
    place.write_bytes(request.param)
    yield request.param
    place.write_bytes(before.rstrip(b"\n"))


def test_a_process_that_lives_is_seen_whatever_its_name(name: bytes) -> None:
    """It has begun at some time, and does not end; the control: one that is gone has not, and does."""
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)

    assert b"(" + name + b")" in Path(f"/proc/{os.getpid()}/stat").read_bytes()
    assert start_ticks(os.getpid()) > 0
    assert not is_dying(os.getpid())
    assert start_ticks(gone) == 0
    assert is_dying(gone)
