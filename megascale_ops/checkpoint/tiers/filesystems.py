# SPDX-License-Identifier: Apache-2.0
"""Object stores and other file systems behind a URL, through fsspec: each call has a deadline and fails as an OSError.

What fsspec's file systems raise is as various as their libraries. Here everything that is no OSError becomes one, with
its first line, so that what calls them need not know S3's errors from those of Google's or of HTTP.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from megascale_ops.checkpoint.loading.sources import Opened, Source
from megascale_ops.checkpoint.storage import describe
from megascale_ops.errors import UsageError

T = TypeVar("T")

# 16 MB: the parts in which a file goes to a store; S3 takes from 5 MB on, and 10,000 of them at most.
_PART_BYTES, _MOST_PARTS = 16 << 20, 9_000
# Where the file systems of fsspec say when a file was written.
_WHEN = ("LastModified", "last_modified", "mtime", "updated", "created")

# 60 s: what a store may take for an answer, its library's own retries included.
_ANSWER_S = 60.0
# 5 MB/s, below which a store is as good as gone.
_LEAST_BYTES_S = 5e6


def is_url(path: object) -> bool:
    """Whether a place is one of fsspec's, and not a folder that this process sees."""
    return isinstance(path, str) and "://" in path


def bounded(doing: str, call: Callable[[], T], size_bytes: int = 0) -> T:
    """Call into a file system, with a deadline by what is moved.

    Raises:
        FileNotFoundError, FileExistsError: as the file system says.
        OSError: anything else, in one line; a call that takes too long goes on in a thread that holds nothing up.
    """
    found: list[T] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            found.append(call())
        except BaseException as exc:  # noqa: BLE001  whatever the library raises; given to the caller
            failed.append(exc)
        finally:
            over.set()

    # A daemon: an executor's threads would be waited for at the end of the process.
    threading.Thread(target=work, name="checkpoint-store", daemon=True).start()
    most_s = _ANSWER_S + size_bytes / _LEAST_BYTES_S
    if not over.wait(most_s):
        raise TimeoutError(f"{doing}: no answer in {most_s:.0f} s")
    if failed:
        error = failed[0]
        if isinstance(error, OSError):
            raise error
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OSError(f"{doing}: {type(error).__name__}: {first_line}") from error
    return found[0]


class Listed(NamedTuple):
    """One file of a listing. ``when``: it was written, in whatever form the store says so; empty: it does not say."""

    size_bytes: int
    when: str


class Store:
    """The files below one URL.

    Args:
        url: of the folder of checkpoints; anything that fsspec knows.

    Raises:
        UsageError: fsspec is missing, does not know the kind of URL or lacks a package for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UsageError(
                f"checkpoints at {url} need the package fsspec: pip install 'megascale-ops[storage]'"
            ) from None
        kind = url.partition("://")[0]
        try:
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
        except ImportError as exc:  # fsspec says which package to install
            raise UsageError(f"checkpoints at {url} need a package that is not installed: {exc}") from None
        except ValueError as exc:
            from fsspec.registry import known_implementations

            if kind not in known_implementations:
                raise UsageError(f"checkpoints at {url}: fsspec knows no {kind}://, but for example s3://") from None
            raise UsageError(f"checkpoints at {url}: {exc}") from None

    @property
    def is_of_one_process(self) -> bool:
        """Whether no other process sees what is written there: fsspec's file system in memory."""
        kinds = self._fs.protocol
        return "memory" in ((kinds,) if isinstance(kinds, str) else kinds)

    def prepare(self) -> None:
        """Prove that it can be written to.

        Raises:
            UsageError: it can't; one sentence with the reason.
        """
        import uuid

        probe = f".probe-{uuid.uuid4().hex}"
        try:
            self.put(probe, b"")
            self.delete(probe)
        except (OSError, NotImplementedError) as exc:
            said = describe(exc) if isinstance(exc, OSError) else "it can only be read"
            raise UsageError(f"cannot write checkpoints to {self.url}: {said}") from exc

    def path_of(self, name: str) -> str:
        """The file system's own path of a file."""
        return f"{self._root}/{name}"

    def names(self, below: str = "") -> list[str]:
        """Names of what stands right below a folder; none where there is no such folder."""

        def listed() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(each) for each in self._fs.ls(self.path_of(below).rstrip("/"), detail=False)]
            except FileNotFoundError:
                return []

        found = bounded(f"listing {self.url}/{below}", listed)
        return sorted({name for each in found if (name := each.rstrip("/").rpartition("/")[2])})

    def require_there(self) -> None:
        """Prove that what holds the files is there: the bucket of an object store.

        Raises:
            FileNotFoundError: it is not.
            OSError: it can't be looked at.
        """
        container = self._root.split("/")[0]
        if container:  # a file system that has a root has it always
            bounded(f"looking at {self.url}", lambda: self._fs.ls(container, detail=False))

    def listing(self, below: str) -> dict[str, Listed]:
        """Every file right below a folder, by one question; none where there is no such folder."""

        def listed() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.ls(self.path_of(below).rstrip("/"), detail=True))
            except FileNotFoundError:
                return []

        found = bounded(f"listing {self.url}/{below}", listed)
        files = {str(each["name"]).rpartition("/")[2]: each for each in found if each.get("type") != "directory"}
        # A store that has no folders may list the folder itself, as an empty file.
        return {
            name: Listed(int(each.get("size") or 0), next((str(each[key]) for key in _WHEN if key in each), ""))
            for name, each in files.items()
            if name
        }

    def read(self, name: str, most_bytes: int) -> bytes:
        """All of a small file.

        Raises:
            OSError: it is not there, or larger.
        """
        raw = self.read_range(name, 0, most_bytes + 1)
        if len(raw) > most_bytes:
            raise OSError(f"it has more than the {most_bytes} bytes that it may have")
        return raw

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of a file, fewer where it ends."""

        def ranged() -> bytes:
            try:
                return bytes(self._fs.cat_file(self.path_of(name), start=start, end=stop))
            except FileNotFoundError:
                raise
            except Exception:  # a store refuses a range behind the end of an empty file
                if self._fs.size(self.path_of(name)) == 0:
                    return b""
                raise

        return bounded(f"reading {self.url}/{name}", ranged, stop - start)

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            OSError: it is not there, or the store does not say.
        """
        return int(bounded(f"looking at {self.url}/{name}", lambda: self._fs.info(self.path_of(name)))["size"])

    def modified_ns(self, name: str) -> int:
        """When a file was written last, by the store's clock; 0 where it does not say."""
        try:
            return int(
                bounded(f"looking at {self.url}/{name}", lambda: self._fs.modified(self.path_of(name))).timestamp()
                * 1e9
            )
        except (NotImplementedError, FileNotFoundError):
            return 0

    def put(self, name: str, raw: bytes, *, anew: bool = False) -> None:
        """Write a small file, whole or not at all.

        Args:
            name: of the file.
            raw: what is in it.
            anew: only where there is none: of two that try one succeeds, as far as the store can (S3, Google, Azure).

        Raises:
            FileExistsError: with ``anew``, there is one.
            OSError: it can't be written.
        """
        mode = "create" if anew else "overwrite"

        def write() -> None:
            self._in_folder(name, lambda: self._fs.pipe_file(self.path_of(name), raw, mode=mode))

        try:
            bounded(f"writing {self.url}/{name}", write, len(raw))
        except OSError as exc:
            if anew and _says_exists(exc):
                raise FileExistsError(f"{name} is there already") from exc
            raise

    def upload(self, local: str, name: str, size_bytes: int) -> None:
        """Write a file from this machine.

        Raises:
            OSError: it can't be written, or has another size there.
        """

        def write() -> None:
            self._in_folder(name, lambda: self._fs.put_file(local, self.path_of(name)))

        bounded(f"writing {self.url}/{name}", write, size_bytes)
        if (size := self.size(name)) != size_bytes:
            raise OSError(f"writing {self.url}/{name}: it has {size} bytes there instead of {size_bytes}")

    def opened_to_write(self, name: str, size_bytes: int) -> Any:  # noqa: ANN401  fsspec gives it no type
        """Begin a file that is written from front to back, and is there when it is closed; with no deadline of its own.

        Args:
            name: of the file.
            size_bytes: what it will have, for stores that count the parts of a file.
        """
        block = max(_PART_BYTES, size_bytes // _MOST_PARTS + 1)
        return self._in_folder(name, lambda: self._fs.open(self.path_of(name), "wb", block_size=block))

    def _in_folder(self, name: str, write: Callable[[], T]) -> T:
        """Write a file; where the file system has folders, which object stores have not, the file's is made."""
        try:
            return write()
        except FileNotFoundError:
            parts = self.path_of(name).split("/")
            # One by one and without parents: with them a bucket that was misspelt would be made.
            for count in range(2, len(parts)):
                with suppress(Exception):  # what could not be made is seen by the write that follows
                    self._fs.mkdir("/".join(parts[:count]), create_parents=False)
            return write()

    def delete(self, name: str) -> None:
        """Delete a file, or all below a folder; one that is not there is fine."""

        def remove() -> None:
            try:
                self._fs.rm(self.path_of(name), recursive=True)
            except FileNotFoundError:
                return

        bounded(f"deleting {self.url}/{name}", remove)

    def delete_if_empty(self, below: str) -> None:
        """Delete a folder that nothing is in, where the file system has folders; object stores have none."""

        def remove() -> None:
            with suppress(Exception):  # there are others in it, or there are no folders
                self._fs.rmdir(self.path_of(below))

        bounded(f"deleting {self.url}/{below}", remove)


def _says_exists(error: OSError) -> bool:
    """Whether a conditional write was refused; S3 answers 412, or 409 where two came at once."""
    told = f"{error} {error.__cause__}"
    return isinstance(error, FileExistsError) or any(
        each in told for each in ("PreconditionFailed", "ConditionalRequestConflict", "At least one of the pre-cond")
    )


class _OpenObject:
    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._at = store, name, 0
        self.size_bytes = store.size(name)

    def read_into(self, view: memoryview) -> int:
        raw = self._store.read_range(self._name, self._at, min(self._at + len(view), self.size_bytes))
        view[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)


class StoreSource(Source):
    """The files of one checkpoint in a store, as ``loading`` opens them."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder

    @property
    def said(self) -> str:
        """Its URL."""
        return f"{self._store.url}/{self._folder}"

    def read(self, name: str, most_bytes: int) -> bytes:
        """All of a small file."""
        return self._store.read(f"{self._folder}/{name}", most_bytes)

    @contextmanager
    def opened(self, name: str) -> Iterator[Opened]:
        """A file, read by ranges."""
        yield _OpenObject(self._store, f"{self._folder}/{name}")

    def size_of(self, name: str) -> int:
        """Bytes of a file; -1 where there is none. A store that does not answer is an error, and no missing file."""
        try:
            return self._store.size(f"{self._folder}/{name}")
        except FileNotFoundError:
            return -1
