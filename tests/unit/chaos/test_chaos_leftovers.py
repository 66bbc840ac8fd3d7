# SPDX-License-Identifier: Apache-2.0
"""What is removed after a `chaos` that was killed is ours: any process may carry a mark, and a path is made of it."""

import os
import shutil
from pathlib import Path

import pytest

from megascale_ops.chaos import leftovers


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What would be removed; nothing is."""
    found: list[Path] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: found.append(Path(path)))
    monkeypatch.setattr(os, "kill", lambda *_: None)
    return found


def marks(*found: str) -> "list[tuple[int, str]]":
    """Return processes that carry these marks."""
    return [(2**22 + number, mark) for number, mark in enumerate(found)]


@pytest.mark.parametrize("mark", ["9-9-/../../home/x", "9-9-", "9-9-0123456789ab/..", "9-9-0123456789abc", "../9-9"])
def test_a_mark_that_we_did_not_make_removes_nothing(
    mark: str, removed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lead out of /dev/shm."""
    monkeypatch.setattr(leftovers, "_marks", lambda: marks(mark))

    assert leftovers.end_leftovers() == []
    assert removed == []


def test_a_mark_of_a_chaos_that_is_gone_is_followed(removed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are ended and its black boxes removed; those of one that lives are left alone."""
    gone, lives = "4194303-1-0123456789ab", leftovers.new_mark()
    monkeypatch.setattr(leftovers, "_marks", lambda: marks(gone, lives))

    assert leftovers.end_leftovers() == [2**22]
    assert removed == [Path(f"/dev/shm/megascale-chaos-{gone}")]
