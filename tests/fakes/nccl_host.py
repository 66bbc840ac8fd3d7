# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NCCL: a C program that calls the profiler plugin, and the black box of the rank that it plays."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.nccl_profiler import build
from tests.fixtures.made_once import shared_folder

SOURCES = Path(__file__).parents[1] / "fixtures" / "nccl_host"
_HOST = ("host.c", "calls.c", "drawn.c")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
RANK = 3
STEP = 41


class Binaries(NamedTuple):
    """Plugin, host and a second plugin, built alike."""

    plugin: Path
    host: Path
    chained: Path


def compiled(factory: pytest.TempPathFactory, sanitizer: str) -> Binaries:
    """Return plugin and host, plain or under a sanitizer; built once in a session, 1 to 2 s of CPU each."""
    folder = shared_folder(factory) / f"nccl-{sanitizer.replace(',', '-') or 'plain'}"
    if not folder.exists():
        beside = folder.with_name(f"{folder.name}.{os.getpid()}")
        beside.mkdir()
        _compile_all(_in(beside), sanitizer)
        with suppress(OSError):  # another worker's are there: they are the same
            beside.rename(folder)
    return _in(folder)


def _in(folder: Path) -> Binaries:
    return Binaries(folder / "plugin.so", folder / "host", folder / "chained.so")


def _compile_all(made: Binaries, sanitizer: str) -> None:
    """Build everything with the plugin's own flags and, where named, a sanitizer."""
    extra = [*WARNINGS, *([f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1"] if sanitizer else [])]
    # A sanitizer's own functions come with the host.
    flags = [flag for flag in build.FLAGS if not (sanitizer and flag == "-Wl,-z,defs")]
    plain = ["-std=gnu11", "-O1", "-g"]
    for command in (
        [*flags, *extra, "-o", str(made.plugin), *map(str, build.SOURCES), *build.LIBRARIES],
        [*plain, *extra, "-o", str(made.host), *(str(SOURCES / name) for name in _HOST), *build.LIBRARIES],
        [*plain, *extra, "-fPIC", "-shared", "-o", str(made.chained), str(SOURCES / "chained.c")],
    ):
        subprocess.run(["cc", *command], check=True, timeout=120)


class Played:
    """One run of the host."""

    def __init__(
        self, binaries: Binaries, folder: Path, abi: int, scenario: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.box: BoxReader
        self._proc = subprocess.Popen(
            [str(binaries.host), str(binaries.plugin), str(abi), scenario],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PATH": os.environ["PATH"],
                "MEGASCALE_BOX_DIR": str(folder),
                "RANK": str(RANK),
                "TSAN_OPTIONS": "halt_on_error=1",
                **(variables or {}),
            },
        )
        self.pid = self._proc.pid

    def make_box(self, pid: int = 0) -> BoxWriter:
        """Make the rank's box, by default with the host's pid."""
        identity = BoxIdentity(
            job="j", node="n", rank=RANK, local_rank=0, world_size=8, pid=pid or self.pid, start_ticks=1, round=1
        )
        writer = BoxWriter.create(self.folder, identity)
        writer.set_now(STEP, "forward")
        self.box = BoxReader(self.folder / f"{RANK}.box")
        return writer

    def say(self, line: str = "") -> None:
        """Let the host go on, with a line for it to read."""
        assert self._proc.stdin is not None
        self._proc.stdin.write(f"{line}\n")
        self._proc.stdin.flush()

    def wait_for(self, word: str) -> None:
        """Read the host's output up to a line."""
        assert self._proc.stdout is not None
        while (line := self._proc.stdout.readline().strip()) != word:
            assert line, f"the host ended before it said {word}"

    def finish(self) -> dict[str, list[float]]:
        """Wait for the end, which must be a good one; return what the host printed, by word."""
        out, err = self._proc.communicate(timeout=120)
        assert self._proc.returncode == 0, (self._proc.returncode, err)
        said: dict[str, list[float]] = {}
        for line in out.splitlines():
            word, *numbers = line.split()
            said.setdefault(word, []).extend(map(float, numbers))
        self.complaints = err
        return said


def play(
    binaries: Binaries, folder: Path, abi: int, scenario: str, variables: Mapping[str, str] | None = None
) -> Played:
    """Run a scenario to its end, with a box from the start; ``box`` reads what it left."""
    played = Played(binaries, folder, abi, scenario, variables)
    played.make_box()
    played.say()
    return played
