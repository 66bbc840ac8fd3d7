# SPDX-License-Identifier: Apache-2.0
"""Put the progress board where other processes see it: a file in memory that outlives the process.

There are two ways. `map_board` makes a file whose pages are mapped into the GPU: kernels store into it over PCIe, and
it is current to the microsecond; the file has to lie in memory (/dev/shm), since Linux lets no device write into pages
that are backed by a disk. `BoardCopier` leaves the board in device memory, where a store costs nothing, and
copies its 32 KB through pinned memory into a file anywhere ten times a second, on a stream of its own, so it works
while a kernel spins. Either way the file stays when the process is killed, until the next board of that name replaces
it. Where a supervisor names a folder, a workspace makes its file by itself (`publish.py`).

Make both before a launch that may spin: mapping new host memory into the GPU waits for running kernels.
"""

import ctypes
import errno
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from megascale_kernels.errors import Unsupported
from megascale_kernels.progress.atomic_file import is_plain
from megascale_kernels.progress.board_format import (
    GROUP_WORD,
    HOST_FIELDS,
    HOST_WORD,
    LINE,
    MAX_RANKS,
    MEMBERS_WORD,
    PROGRESS_MAGIC,
    PROGRESS_WORDS,
)
from megascale_kernels.progress.view import BOARD_BYTES, process_started

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108 - memory that outlives a process; the file is ours alone (mode 0600)
REGISTER_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
COPY_DEADLINE_S = 1.0  # 32 KB take some 10 us; a copy that takes a second means that the device is in trouble
POLL_S = 0.001


class Numbered(Protocol):
    """What ranks of one workspace agree on."""

    @property
    def number(self) -> int:
        """The same on all of them."""
        ...


class BoardOwner(Protocol):
    """A rank with a board: what is shown of a workspace."""

    @property
    def board(self) -> "Tensor":
        """Its words."""
        ...

    @property
    def rank(self) -> int:
        """Whose it is, within its group."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def members(self) -> Sequence[int]:
        """The job's rank of each of them."""
        ...

    @property
    def agreement(self) -> Numbered:
        """By whose number boards of one workspace are known for such."""
        ...


class MappedBoard:
    """A board in a file, writable for kernels on a machine with CUDA; close it after the last launch has ended.

    Attributes:
        path: the file.
        words: the board, int32: hand it to `Workspace(progress=...)`.
    """

    def __init__(self, path: Path, rank: int, world_size: int, *, for_gpu: bool = True) -> None:
        import torch

        cuda: Any = torch.cuda
        self.path = path
        self._map = _new_file(path, rank, world_size)
        self.words: Tensor = torch.frombuffer(self._map, dtype=torch.int32, count=PROGRESS_WORDS)
        self._registered = for_gpu and cuda.is_available()
        if self._registered:
            error = int(cuda.cudart().cudaHostRegister(self.words.data_ptr(), len(self._map), REGISTER_PORTABLE_MAPPED))
            if error:
                self._registered = False
                _forget_last_error()
                raise Unsupported(
                    f"map_board({path}): the GPU refuses to map this memory (cudaHostRegister: error {error}); "
                    "Linux lets devices write only into files that lie in memory: name one in /dev/shm"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the pages from the GPU; the file stays. A tensor over them that is still referenced stays readable."""
        if self._registered:
            import torch

            cuda: Any = torch.cuda
            cuda.cudart().cudaHostUnregister(self.words.data_ptr())
            self._registered = False

    def introduce(self, group: int, members: Sequence[int]) -> None:
        """Write the workspace's group into the header.

        Args:
            group: a number that its ranks agree on.
            members: the job's rank of each of its ranks.
        """
        told = [rank + 1 for rank in members[:MAX_RANKS]]
        struct.pack_into(f"<{len(told)}I", self._map, MEMBERS_WORD * 4, *told)
        struct.pack_into("<I", self._map, GROUP_WORD * 4, group & 0xFFFFFFFF)

    def note_copy(self, now_s: float) -> None:
        """Write when the words were last copied from device memory (Unix time, s)."""
        struct.pack_into("<I", self._map, (HOST_WORD + HOST_FIELDS.index("copied_s")) * 4, int(now_s) & 0xFFFFFFFF)


def map_board(path: str | os.PathLike[str], *, rank: int = 0, world_size: int = 1) -> MappedBoard:
    """Make a board in a file, the old file of that name replaced in one step.

    Args:
        path: the file; a bare name stands for one in /dev/shm.
        rank: whose board it is, until the first launch writes it.
        world_size: ranks in the group, likewise.

    Raises:
        OSError: the file cannot be made, there is no room for it, or the name belongs to something that is no plain
            file, whose place a board must not take.
        Unsupported: the GPU cannot map it.
    """
    return MappedBoard(_located(path), rank, world_size)


def _new_file(path: Path, rank: int, world_size: int) -> mmap.mmap:
    if not is_plain(path):
        raise OSError(errno.EINVAL, "it is there and is no plain file, whose place a board must not take", str(path))
    pages = -(-BOARD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without this a full /dev/shm would kill us at the first store instead of raising here.
        os.posix_fallocate(handle, 0, pages)
        mapped = mmap.mmap(handle, pages)
        struct.pack_into("<3I", mapped, 0, PROGRESS_MAGIC, rank, world_size)
        pid = os.getpid()
        struct.pack_into("<2I", mapped, HOST_WORD * 4, pid, process_started(pid) or 0)
        beside.rename(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return mapped


class BoardCopier:
    """Copy a workspace's board from device memory into a file, again and again, until closed.

    Args:
        workspace: whose board.
        path: the file (see `map_board`).
        every_s: pause between two copies, seconds.

    Attributes:
        error: why copying ended early, None while all is well.
    """

    def __init__(self, workspace: BoardOwner, path: str | os.PathLike[str], every_s: float = 0.1) -> None:
        if every_s <= 0:
            raise ValueError(f"BoardCopier(every_s={every_s}): the pause between two copies must be positive")
        self.error: str | None = None
        self._source = workspace.board
        self._target = MappedBoard(_located(path), workspace.rank, workspace.world_size, for_gpu=False)
        self._target.introduce(workspace.agreement.number, workspace.members)
        self._every_s = every_s
        self._closing = threading.Event()
        self._under_way = False
        if self._source.is_cuda:
            import torch

            cuda: Any = torch.cuda
            self._pinned = torch.empty(PROGRESS_WORDS, dtype=torch.int32, pin_memory=True)
            self._stream: Any = cuda.Stream(self._source.device, priority=-1)
            self._copied: Any = cuda.Event()
        self._thread = threading.Thread(target=self._run, name="board-copier", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Copy once more and end; a copy that is stuck is left to itself, with its memory."""
        self._closing.set()
        self._thread.join(COPY_DEADLINE_S + self._every_s + 1.0)
        if not self._thread.is_alive() and not self._under_way:
            self._target.close()

    def _run(self) -> None:
        try:
            if self._source.is_cuda:
                _allow_calls_during_capture()
            while not self._closing.wait(self._every_s):
                self._copy()
            self._copy()
        except RuntimeError as error:
            # Any CUDA call reports the fault of any kernel: the board must not take the job's own report away.
            self.error = str(error).splitlines()[0]
            logger.warning("the progress board %s is no longer updated: %s", self._target.path, self.error)

    def _copy(self) -> None:
        if not self._under_way:
            self._begin()
        deadline = time.monotonic() + COPY_DEADLINE_S
        while self._under_way and time.monotonic() < deadline:
            if not self._source.is_cuda or self._copied.query():
                self._under_way = False
                self._write(self._pinned if self._source.is_cuda else self._source)
                self._target.note_copy(time.time())
            else:
                time.sleep(POLL_S)

    def _begin(self) -> None:
        """Ask the GPU for its words; a board on the CPU has them at hand."""
        self._under_way = True
        if not self._source.is_cuda:
            return
        import torch

        with torch.cuda.stream(self._stream):
            self._pinned.copy_(self._source[:PROGRESS_WORDS], non_blocking=True)
            self._copied.record()

    def _write(self, words: "Tensor") -> None:
        """All words but the magic number and those of the host, which the device's board does not have."""
        for part in (slice(1, HOST_WORD), slice(LINE, PROGRESS_WORDS)):
            self._target.words[part].copy_(words[part])


def _located(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    return FOLDER / file if file.name == os.fspath(path) else file


def _cuda_runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = [line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libcudart.so" in line]
    return ctypes.CDLL(found[0]) if found else None


def _forget_last_error() -> None:
    """Take back the error that a refused call left behind: torch would raise it at the job's next launch."""
    runtime = _cuda_runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


def _allow_calls_during_capture() -> None:
    """Let this thread ask for events while another captures a graph; by default that would spoil the capture."""
    runtime = _cuda_runtime()
    if runtime is not None:
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(CAPTURE_RELAXED)))
