# SPDX-License-Identifier: Apache-2.0
"""What many tests share is made once in a session, by whichever of its workers asks first."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fixtures.made_once import Shelf, shared_folder


class Thing(NamedTuple):
    """Something that takes long to make."""

    text: str
    number: int


class Maker:
    """Counts what it makes."""

    def __init__(self) -> None:
        self.times = 0

    def of(self, text: str) -> Callable[[], Thing]:
        """Return what makes a thing of a text."""

        def make() -> Thing:
            self.times += 1
            return Thing(text, self.times)

        return make


def shelf(folder: Path | None) -> Shelf[Thing]:
    """A shelf as each worker has one."""
    made = Shelf(Thing)
    made.folder = folder
    return made


def test_a_thing_is_made_once_for_all_workers(tmp_path: Path) -> None:
    """The second worker reads what the first has made, as it was; another name is another thing."""
    maker = Maker()
    first, second = shelf(tmp_path), shelf(tmp_path)

    made = [first.get("a", maker.of("a")), first.get("a", maker.of("a")), second.get("a", maker.of("a"))]
    other = second.get("b", maker.of("b"))

    assert made == [Thing("a", 1)] * 3
    assert other == Thing("b", 2)
    assert len([path for path in tmp_path.iterdir() if not path.suffix]) == 2


def test_of_two_that_ask_at_once_one_waits(tmp_path: Path) -> None:
    """The second asks while the first makes it, and gets what the first has made."""
    maker, is_making, may_end = Maker(), threading.Event(), threading.Event()
    first, second = shelf(tmp_path), shelf(tmp_path)

    def slowly() -> Thing:
        is_making.set()
        assert may_end.wait(90.0)
        return maker.of("a")()

    with ThreadPoolExecutor() as pool:
        one = pool.submit(first.get, "a", slowly)
        assert is_making.wait(90.0)
        other = pool.submit(second.get, "a", maker.of("a"))
        assert not other.done()
        may_end.set()
        made = [one.result(90.0), other.result(90.0)]

    assert made == [Thing("a", 1)] * 2
    assert maker.times == 1


def test_who_can_not_make_it_leaves_it_to_the_next(tmp_path: Path) -> None:
    """An error is the asker's own, and nothing stands in the way of another one."""

    def broken() -> Thing:
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        shelf(tmp_path).get("a", broken)

    assert shelf(tmp_path).get("a", Maker().of("a")) == Thing("a", 1)


def test_without_a_folder_each_process_makes_its_own() -> None:
    """Once, too."""
    maker = Maker()
    alone, other = shelf(None), shelf(None)

    assert alone.get("a", maker.of("a")) is alone.get("a", maker.of("a"))
    assert other.get("a", maker.of("a")) == Thing("a", 2)


def test_workers_of_a_session_share_a_folder_and_sessions_do_not(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's folder lies in its session's."""
    own = tmp_path / "popen-gw1"
    own.mkdir()
    monkeypatch.setattr(tmp_path_factory, "getbasetemp", lambda: own)

    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    of_worker = shared_folder(tmp_path_factory)
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    alone = shared_folder(tmp_path_factory)

    assert (of_worker.parent, alone.parent) == (tmp_path, own)
