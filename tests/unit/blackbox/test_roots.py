# SPDX-License-Identifier: Apache-2.0
"""Every user has a folder for black boxes, whichever user was faster with its name, and it is found by its owner."""

import os
from pathlib import Path

import pytest

from megascale_ops.blackbox import roots
from megascale_ops.blackbox.roots import find_job, roots_of, take_root, watched_roots
from megascale_ops.errors import UsageError

ME = os.geteuid()
ANOTHER = ME + 4711


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /dev/shm: all users may make names, none may move another's."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_user_has_a_folder_of_the_users_own(shared: Path) -> None:
    """Made once, with mode 0700, and taken again; nothing is to be said of it."""
    first, second = take_root(shared=shared), take_root(shared=shared)

    assert first == second == (shared / f"megascale-ops-{ME}", "")
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert roots_of(ME, shared) == [first.path]


@pytest.mark.parametrize("squatting", ["link to ours", "file", "open folder"])
def test_a_name_that_is_taken_costs_no_run(shared: Path, tmp_path: Path, squatting: str) -> None:
    """The boxes go to a folder with a name that can't be guessed; later starts and agents find it again."""
    plain = shared / f"megascale-ops-{ME}"
    precious = tmp_path / "precious"
    precious.mkdir()
    if squatting == "link to ours":
        plain.symlink_to(precious)
    elif squatting == "file":
        plain.touch()
    else:
        plain.mkdir()
        plain.chmod(0o777)

    first, second = take_root(shared=shared), take_root(shared=shared)

    assert first.path == second.path
    assert first.path.name.startswith(f"megascale-ops-{ME}-")
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert str(plain) in first.said
    assert f"so black boxes are in {first.path}" in first.said
    assert first.path in watched_roots(ME, shared)
    assert list(precious.iterdir()) == []


def test_a_folder_of_another_user_is_not_taken(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither under the plain name nor under one of those that stand in for it."""
    for name in (f"megascale-ops-{ANOTHER}", f"megascale-ops-{ANOTHER}-0123abcd"):
        (shared / name).mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    monkeypatch.setattr(Path, "mkdir", taken)  # every new name, too

    with pytest.raises(UsageError, match="so is every other name"):
        take_root(shared=shared)

    assert roots_of(ANOTHER, shared) == []


def taken(_path: Path, mode: int = 0) -> None:
    """Stand in for `Path.mkdir` where every name exists."""
    del mode
    raise FileExistsError


def test_root_watches_all_users_and_others_themselves(shared: Path) -> None:
    """A folder counts where its owner is the user in its name; others' names, links and files do not count."""
    mine = shared / f"megascale-ops-{ME}"
    mine.mkdir()
    stand_in = shared / f"megascale-ops-{ME}-0123abcd"
    stand_in.mkdir()
    of_all = shared / "megascale-ops"  # what versions before had
    of_all.mkdir()
    (shared / f"megascale-ops-{ANOTHER}").mkdir()  # not that user's: the name alone proves nothing
    (shared / f"megascale-ops-{ME}-xyz").mkdir()
    (shared / f"megascale-ops-{ME}-11111111").symlink_to(mine)
    (shared / f"megascale-ops-{ME}-22222222").touch()

    assert watched_roots(ME, shared) == [of_all, mine, stand_in]
    assert watched_roots(0, shared) == [of_all, mine, stand_in]
    assert watched_roots(ANOTHER, shared) == []
    assert watched_roots(ME, shared / "nowhere") == []


def test_a_job_is_found_where_it_is(shared: Path) -> None:
    """In any of our folders, or in the one that is named; a link is no job."""
    stand_in = shared / f"megascale-ops-{ME}-0123abcd"
    (stand_in / "llama").mkdir(parents=True)
    (stand_in / "linked").symlink_to("llama")

    assert find_job("llama", shared=shared) == stand_in / "llama"
    assert find_job("linked", shared=shared) == shared / f"megascale-ops-{ME}" / "linked"
    assert find_job("llama", "/named", shared) == Path("/named/llama")


def test_a_named_place_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made when missing, closed to others, reached by a link of ours; what is not ours is one sentence."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here").chmod(0o775)
    (tmp_path / "link").symlink_to("here")

    by_name, by_link = take_root(str(tmp_path / "here")), take_root(str(tmp_path / "link"))
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    warned = take_root(str(loose / "boxes"))

    assert by_name == by_link == (tmp_path / "here", "")
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700
    assert "everybody may move it" in warned.said
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"box root .*boxes can't be used \(.*\): give another one by --box-root"):
        take_root(str(tmp_path / "file" / "boxes"))
    with pytest.raises(UsageError, match="missing, so black boxes can't be kept there"):
        take_root(shared=tmp_path / "nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    with pytest.raises(UsageError, match=r"here can't be used \(.* belongs to user \d+, not to us"):
        take_root(str(tmp_path / "here"))


def test_the_real_place_is_memory() -> None:
    """A tmpfs on every Linux."""
    assert str(roots.SHARED) == "/dev/shm"
