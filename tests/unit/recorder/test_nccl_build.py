# SPDX-License-Identifier: Apache-2.0
"""The NCCL profiler plugin is built once, and where that cannot be done one sentence says why."""

import ctypes
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from megascale_ops.recorder.nccl_profiler import build

SYMBOLS = [f"ncclProfiler_v{version}" for version in range(1, 8)]


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return an environment with a cache of its own."""
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path), **more}


def compiler(tmp_path: Path, script: str) -> str:
    """Return a program that is called as a compiler."""
    path = tmp_path / "mycc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that copies what the real one has made, in a tenth of its time."""
    folder = tmp_path_factory.mktemp("made")
    content, seal, _ = build.build(environ(folder)).read_bytes().rpartition(build.SEAL)
    assert seal
    made = folder / "made.so"
    made.write_bytes(content)
    return compiler(folder, f'while [ "$1" != -o ]; do shift; done; exec cp {made} "$2"')


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, copier: str) -> Path:
    """A cache with a plugin that is whole, to be damaged in copies."""
    folder = tmp_path_factory.mktemp("whole")
    build.build(environ(folder, CC=copier))
    return folder


def built(tmp_path: Path, whole: Path) -> Path:
    """Return the path of a plugin in an environment's own cache, built some time ago."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "megascale-ops" / "nccl_profiler").iterdir()
    return path


def test_the_plugin_has_every_version_and_nothing_else(tmp_path: Path) -> None:
    """NCCL finds its newest; the name is the cache's, private to the user."""
    path = build.build(environ(tmp_path))

    library = ctypes.CDLL(str(path))
    assert all(ctypes.c_char_p.in_dll(library, symbol) for symbol in SYMBOLS)
    assert not hasattr(library, "slot_claim")
    assert path.parent == tmp_path / "megascale-ops" / "nccl_profiler"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_it_is_built_once(tmp_path: Path) -> None:
    """A compiler that has done its work is not asked again; another compiler is."""
    counted = compiler(tmp_path, f'echo x >> {tmp_path}/calls; exec {shutil.which("cc")} "$@"')

    first = build.build(environ(tmp_path, CC=counted))
    second = build.build(environ(tmp_path, CC=counted))
    third = build.build(environ(tmp_path))

    assert first == second != third
    assert (tmp_path / "calls").read_text() == "x\n"


def test_builders_at_the_same_time_do_not_harm_each_other(tmp_path: Path, copier: str) -> None:
    """Each writes beside and renames: the second replaces a whole file by an equal one."""
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.build(environ(tmp_path, CC=copier)))) for _ in range(3)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(found) == 3
    assert len(set(found)) == 1
    assert ctypes.CDLL(str(found[0])).ncclProfiler_v5


def test_a_plugin_that_is_whole_is_kept(tmp_path: Path, whole: Path, copier: str) -> None:
    """The control of those below: the copy is taken as it is."""
    path = built(tmp_path, whole)
    before = path.stat()

    again = build.build(environ(tmp_path, CC=copier))

    assert again == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_plugin_that_others_may_write_is_built_again(tmp_path: Path, whole: Path, copier: str) -> None:
    """It would be loaded into every training process."""
    path = built(tmp_path, whole)
    path.write_bytes(b"not mine")
    path.chmod(0o777)

    again = build.build(environ(tmp_path, CC=copier))

    assert again == path
    assert path.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("harm", ["empty", "cut", "zeroed", "flipped", "theirs"])
def test_a_plugin_that_was_damaged_is_built_again(tmp_path: Path, whole: Path, copier: str, harm: str) -> None:
    """A disk that was full, a machine that lost its power: NCCL would silently skip it in every run."""
    path = built(tmp_path, whole)
    good = path.read_bytes()
    flipped = bytes([*good[:5000], good[5000] ^ 4, *good[5001:]])
    zeroed = good[:4096] + bytes(4096) + good[8192:]
    damaged = {"empty": b"", "cut": good[:9000], "zeroed": zeroed, "flipped": flipped, "theirs": b"#!/bin/sh"}[harm]
    path.write_bytes(damaged)
    path.chmod(0o700)

    again = build.build(environ(tmp_path, CC=copier))

    assert again == path
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 0", r"mycc ended well and wrote nothing$"),
        (
            'while [ "$1" != -o ]; do shift; done; echo junk > "$2"',
            r"mycc built can't be loaded: .*: (file too short|inv)",
        ),
        (
            'exec cc -shared -o "$(echo "$@" | grep -o "/[^ ]*[.]so")" -x c /dev/null',
            "undefined symbol: ncclProfiler_v7$",
        ),
    ],
)
def test_what_nccl_could_not_load_is_not_kept(tmp_path: Path, script: str, words: str) -> None:
    """A compiler for another machine, or none at all: said now, since NCCL would not say it."""
    wrong = compiler(tmp_path, script)

    with pytest.raises(build.BuildError, match=words):
        build.build(environ(tmp_path, CC=wrong))

    assert list((tmp_path / "megascale-ops" / "nccl_profiler").iterdir()) == []


def test_its_path_is_one_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: str) -> None:
    """Ranks whose script has changed its folder find it all the same."""
    monkeypatch.chdir(tmp_path)

    path = build.build({**environ(tmp_path, CC=copier), "XDG_CACHE_HOME": "cache"})

    assert path.is_absolute()
    assert path.parent == tmp_path / "cache" / "megascale-ops" / "nccl_profiler"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"PATH": "/nowhere"}, "there is no C compiler"),
        ({"CC": "nonsense"}, "CC names nonsense, which is not there"),
        ({"CC": "false"}, "false failed: status 1"),
        ({"XDG_CACHE_HOME": "/proc"}, "can't be kept in /proc/megascale-ops"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(tmp_path: Path, more: dict[str, str], words: str) -> None:
    """No compiler, a broken one, no place."""
    with pytest.raises(build.BuildError, match=words):
        build.build({**environ(tmp_path), **more})


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path) -> None:
    """It has a deadline, and leaves nothing behind."""
    slow = compiler(tmp_path, "exec sleep 60")

    with pytest.raises(build.BuildError, match=r"was not done after 0 s"):
        build.build(environ(tmp_path, CC=slow), deadline_s=0.2)

    assert list((tmp_path / "megascale-ops" / "nccl_profiler").iterdir()) == []


def test_the_first_error_of_the_compiler_is_told(tmp_path: Path) -> None:
    """Not its warnings, not its last line."""
    broken = compiler(
        tmp_path, "echo 'x: warning: a' >&2; echo 'x.c:1: fatal error: stdio.h: no' >&2; echo end >&2; exit 1"
    )

    with pytest.raises(build.BuildError, match=r"fatal error: stdio\.h: no$"):
        build.build(environ(tmp_path, CC=broken))
