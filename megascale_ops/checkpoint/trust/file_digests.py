# SPDX-License-Identifier: Apache-2.0
"""Digests of files, by algorithms that a manifest names: ``xxh3_128:`` and 32 hexadecimal digits, ``sha256:`` and 64.

XXH3 with 128 bits (the package xxhash) finds whatever happens to a file by chance: of 2**128 damages one is missed.
It runs at the speed of memory, ten times that of SHA-256. What it gives up: a file can be made to a digest on purpose.
A user who keeps a manifest to prove a checkpoint by later, or lets others write shards but no manifest, wants SHA-256.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Literal, Protocol

from megascale_ops.errors import CheckpointError

Algorithm = Literal["xxh3_128", "sha256"]

DEFAULT: Algorithm = "xxh3_128"

_SPELLED = {"xxh3_128": re.compile(r"xxh3_128:[0-9a-f]{32}"), "sha256": re.compile(r"sha256:[0-9a-f]{64}")}


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> object:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


class FileDigest:
    """The digest of one file, taken piece by piece; both algorithms leave Python's lock while they work.

    Args:
        like: a digest, whose algorithm is taken, or the name of one.

    Raises:
        CheckpointError: the package that has the algorithm is not installed.
    """

    def __init__(self, like: str) -> None:
        self._algorithm = algorithm_of(like)
        self._hash = _MAKERS[self._algorithm]()

    def update(self, data: bytes | memoryview) -> None:
        """Take more of the file."""
        self._hash.update(memoryview(data))

    def text(self) -> str:
        """As a manifest has it."""
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def algorithm_of(digest: str) -> Algorithm:
    """By what a digest was taken.

    Raises:
        ValueError: by none that is known here.
    """
    name = digest.partition(":")[0]
    found = next((known for known in _MAKERS if known == name), None)
    if found is None:
        raise ValueError(f"{name!r} is no digest: it is one of {', '.join(_MAKERS)}")
    return found


def is_known(digest: str) -> bool:
    """Whether its algorithm is one of these."""
    return digest.partition(":")[0] in _SPELLED


def is_spelled(digest: str) -> bool:
    """Whether it reads as ``FileDigest.text`` writes it."""
    pattern = _SPELLED.get(digest.partition(":")[0])
    return pattern is not None and pattern.fullmatch(digest) is not None


def digest_of(raw: bytes, like: str) -> str:
    """The digest of some bytes by the algorithm that another digest, or a name, says."""
    digest = FileDigest(like)
    digest.update(raw)
    return digest.text()


def _xxh3() -> _Hash:
    try:
        import xxhash
    except ImportError as exc:
        raise CheckpointError(
            "files of this checkpoint have XXH3 digests, for which the package xxhash has to be installed"
        ) from exc
    return xxhash.xxh3_128()


_MAKERS: dict[Algorithm, Callable[[], _Hash]] = {"xxh3_128": _xxh3, "sha256": hashlib.sha256}
