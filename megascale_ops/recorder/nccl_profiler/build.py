# SPDX-License-Identifier: Apache-2.0
"""Build the plugin with the system's compiler, once for each source and compiler.

    python -m megascale_ops.recorder.nccl_profiler.build

prints the path of the shared object, or one sentence with the reason why there is none. The runner starts it beside its
other
companions: NCCL wants the file only when the ranks have imported torch.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megascale_ops.errors import MegascaleError

HERE = Path(__file__).parent
HEADER = HERE.parent.parent / "blackbox" / "blackbox.h"
SOURCES = tuple(sorted(HERE.glob("*.c")))
# nodelete: NCCL unloads a plugin after the last communicator, and its threads may still call.
FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete", "-Wl,-z,defs")
LIBRARIES = ("-ldl", "-lpthread")
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ncclProfiler_v7"
# Stands behind the object, where no loader looks, and before the SHA-256 of all that comes before it.
SEAL = b"megascale-ops"
COMPILERS = ("cc", "gcc", "clang")
# 25 s in all for what takes one: a loaded machine, a cold file system; the runner waits a little longer.
DEADLINE_S = 25.0


class BuildError(MegascaleError):
    """The plugin could not be built; the message gives the reason in one sentence."""


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """Return the compiler that CC names, or the first of cc, gcc and clang on PATH, with its options.

    Raises:
        BuildError: there is none.
    """
    named = environ.get("CC", "").split()
    for candidate in [named] if named else [[name] for name in COMPILERS]:
        found = shutil.which(candidate[0], path=environ.get("PATH"))
        if found is not None:
            return [found, *candidate[1:]]
    raise BuildError(f"CC names {named[0]}, which is not there" if named else "there is no C compiler (cc, gcc, clang)")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where built plugins are kept.

    Raises:
        BuildError: the user has no home.
    """
    try:
        root = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError("there is no home folder to keep the plugin in: set XDG_CACHE_HOME") from error
    # Absolute: a rank looks for it from wherever its script has gone.
    return (Path(root) / "megascale-ops" / "nccl_profiler").absolute()


def fingerprint(compiler: Sequence[str]) -> str:
    """Return what changes when the source, the flags or the compiler do."""
    digest = hashlib.sha256()
    for path in (*SOURCES, *sorted(HERE.glob("*.h")), HEADER):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    found = Path(compiler[0]).stat()
    said = (*compiler, *FLAGS, *LIBRARIES, str(found.st_size), str(found.st_mtime_ns), os.uname().machine)
    digest.update("\0".join(said).encode())
    return digest.hexdigest()[:20]


def build(environ: Mapping[str, str], deadline_s: float = DEADLINE_S) -> Path:
    """Return the plugin's path, built now unless it lies in the cache already. Two builders at once are fine.

    Raises:
        BuildError: there is no compiler, it fails or takes too long, or there is nowhere to put the plugin.
    """
    end_s = time.monotonic() + deadline_s
    compiler = find_compiler(environ)
    folder = cache_folder(environ)
    try:
        target = folder / f"{fingerprint(compiler)}.so"
        if _is_ours(target) and _is_whole(target) and not _complaint(target, end_s):
            return target
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = folder / f".{target.stem}.{os.getpid()}.{threading.get_ident()}.so"
        try:
            _compile([*compiler, *FLAGS, "-o", str(beside), *map(str, SOURCES), *LIBRARIES], environ, end_s)
            _seal(beside, compiler[0], end_s)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(f"the plugin can't be kept in {folder} ({error.strerror})") from error
    return target


def _is_ours(path: Path) -> bool:
    """Return whether the plugin is a file of this user that no other user can write: training processes load it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return path.is_file() and not path.is_symlink() and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_whole(path: Path) -> bool:
    """Return whether a plugin's seal matches its bytes: NCCL skips a truncated or zeroed plugin without a message."""
    *content, seal = path.read_bytes().rpartition(SEAL)
    return seal == hashlib.sha256(content[0]).digest()


def _seal(path: Path, compiler: str, end_s: float) -> None:
    """Make a plugin that was just built one to be kept, with a checksum behind what a loader reads.

    Raises:
        BuildError: there is none, or none that this machine can load.
    """
    if not path.exists():
        raise BuildError(f"the compiler {compiler} ended well and wrote nothing")
    path.chmod(0o700)
    complaint = _complaint(path, end_s)
    if complaint:
        raise BuildError(f"what the compiler {compiler} built can't be loaded: {complaint}")
    with path.open("r+b") as file:
        content = file.read()
        file.write(SEAL + hashlib.sha256(content).digest())


def _complaint(path: Path, end_s: float) -> str:
    """Return why NCCL could not load a plugin (another machine's, a file system without execution), "" if it can.

    Asked in a process of its own: loading something strange may kill it.
    """
    left_s = max(0.0, end_s - time.monotonic())
    try:
        done = subprocess.run(
            [sys.executable, "-ISc", LOAD, str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=left_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"that was not done after {left_s:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def _compile(command: Sequence[str], environ: Mapping[str, str], end_s: float) -> None:
    """Run the compiler."""
    left_s = max(0.0, end_s - time.monotonic())
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=left_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler {command[0]} was not done after {left_s:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"the compiler {command[0]} failed: {lines[0] if lines else f'status {done.returncode}'}")


def main() -> int:
    """Print the plugin's path, or the reason why there is none on stderr."""
    try:
        # Bytes: a folder's name need be no text.
        sys.stdout.buffer.write(os.fsencode(build(os.environ)) + b"\n")
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
