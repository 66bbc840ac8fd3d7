# SPDX-License-Identifier: Apache-2.0
"""Where black boxes live on a node: a folder for each user, found again by its owner.

    /dev/shm/megascale-ops-UID              mode 0700; made by the user's first process that needs it
    /dev/shm/megascale-ops-UID-1a2b3c4d     instead, where another user has taken that name first
    /dev/shm/megascale-ops-agents/NODE      of root: the lock of the root agent that reads the folders of all users

Any user may make names in /dev/shm, so a name proves nothing: a folder counts as a user's when it belongs to the
user in its name. Its sticky bit keeps others from moving it. XDG_RUNTIME_DIR would be a place of one's own, too, but
batch systems and containers often set none, and it goes when the user logs out, which a training job does not.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from megascale_ops.blackbox.private_folder import NotOursError, private_folder, who_may_move
from megascale_ops.errors import UsageError

SHARED = Path("/dev/shm")  # noqa: S108  shared by all users; that is what this file is about
# Where root's agent holds its lock, which is in a folder that no other user may enter.
AGENTS = "megascale-ops-agents"
# The one folder of earlier versions for all users; jobs of such a version are still seen.
_OLD = "megascale-ops"
_NAME = re.compile(r"megascale-ops-(\d{1,10})(-[0-9a-f]{8})?")
# 3: a name out of four billion that is taken already means that something else is wrong.
_TRIES = 3


class Root(NamedTuple):
    """A folder for black boxes of ours, and what the user should know of it ("": nothing)."""

    path: Path
    said: str = ""


def take_root(named: str = "", shared: Path = SHARED) -> Root:
    """Return the folder for this user's black boxes, made when missing, mode 0700.

    Args:
        named: Where the user wants it; "": the user's own below ``shared``.
        shared: Where any user may make folders.

    Raises:
        UsageError: there is no such place, or it is not ours; one sentence.
    """
    if named:
        return _take_named(Path(named))
    if not shared.is_dir():
        raise UsageError(f"{shared} is missing, so black boxes can't be kept there: give another place by --box-root")
    plain = shared / f"{_OLD}-{os.geteuid()}"
    try:
        with private_folder(plain, strict=True):
            moved = who_may_move(plain)
            return Root(plain, f"black boxes are in {plain}, but {moved}" if moved else "")
    except NotOursError as error:
        other = _another(shared, plain)
        return Root(other, f"{error}, so black boxes are in {other}: ask who administers this node whose the first is")
    except OSError as error:
        raise _unusable(plain, error.strerror) from error


def _take_named(path: Path) -> Root:
    """Take the folder that the user names; a link that is the user's own, or root's, is followed."""
    try:
        if path.is_symlink() and path.lstat().st_uid in (0, os.geteuid()):
            path = path.resolve()
        with private_folder(path):
            moved = who_may_move(path)
            return Root(path, f"black boxes are in {path}, but {moved}: give another --box-root" if moved else "")
    except NotOursError as error:
        raise _unusable(path, str(error)) from error
    except OSError as error:
        raise _unusable(path, error.strerror) from error


def _unusable(path: Path, why: str | None) -> UsageError:
    return UsageError(f"box root {path} can't be used ({why}): give another one by --box-root")


def _another(shared: Path, plain: Path) -> Path:
    """Return another folder of ours: one that an earlier start has made, or a new one with a random name."""
    for path in roots_of(os.geteuid(), shared):
        if path.name.startswith(f"{plain.name}-"):
            with contextlib.suppress(NotOursError, OSError), private_folder(path, strict=True):
                return path
    for _ in range(_TRIES):
        path = shared / f"{plain.name}-{os.urandom(4).hex()}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(path, error.strerror) from error
        return path
    raise _unusable(plain, "it is somebody else's, and so is every other name that was tried")


def roots_of(uid: int, shared: Path = SHARED) -> list[Path]:
    """Return where black boxes of a user are: in the folders that bear the user's number and belong to the user."""
    return [path for path, owner in _all(shared) if owner == uid]


def watched_roots(uid: int, shared: Path = SHARED) -> list[Path]:
    """Return the folders an agent of user ``uid`` reads: root's agent every user's, any other agent its user's own."""
    return [path for path, owner in _all(shared) if uid in (0, owner)]


def find_job(job: str, named: str = "", shared: Path = SHARED, *, others: bool = False) -> Path:
    """Return the folder of a job of ours on this node; where it would be when there is none.

    Args:
        job: Its name.
        named: The one place to look in.
        shared: Where any user may make folders.
        others: Root also means jobs of other users, after its own: to be read, for what is in there may be forged.
    """
    if named:
        return Path(named) / job
    uid = os.geteuid()
    roots = [*roots_of(uid, shared), *(watched_roots(uid, shared) if others else ())]
    there = (root / job for root in roots if (root / job).is_dir() and not (root / job).is_symlink())
    return next(there, shared / f"{_OLD}-{uid}" / job)


def _all(shared: Path) -> list[tuple[Path, int]]:
    """Return every folder of black boxes with its owner, users in order, a user's plain name first."""
    found = []
    try:
        # Thousands of files may lie there; a name takes 0.3 to 0.7 us.
        names = [name for name in os.listdir(shared) if name.startswith(_OLD)]  # noqa: PTH208  a Path costs more
    except OSError:
        return []
    for name in names:
        matched = _NAME.fullmatch(name)
        if matched is None and name != _OLD:
            continue
        with contextlib.suppress(OSError):
            status = (shared / name).lstat()
            if stat.S_ISDIR(status.st_mode) and (matched is None or int(matched[1]) == status.st_uid):
                found.append((shared / name, status.st_uid))
    return sorted(found, key=lambda one: (one[1], one[0].name))
