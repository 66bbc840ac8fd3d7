# SPDX-License-Identifier: Apache-2.0
"""The file that remembers what was measured.

One JSON file in `~/.cache/megascale-ops/kernels` (or `MEGASCALE_KERNEL_CACHE`). A measured choice holds for the GPU,
the library versions, the number of ranks, the element type and the code of the kernels it was measured with; these
together name an *environment*, and an entry of one is never read in another.

Mixtures of experts have a file of their own, `moe_choices.json`, of the same form (`moe_choosing.py`).

    {"format": 1, "environments": {"NVIDIA H200 | 132 | torch 2.11.0 | ...": {"ag_gemm m8192 n7168 k8192": {
        "config": {"block_m": 128, ...} or null, "time_s": 0.0013, "serial_s": 0.0016}}}}

It is written beside and renamed, under a lock, after merging with what others have written meanwhile. A damaged file
costs the memory, never the run: it is reported once and replaced at the next writing.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from megascale_kernels.planning.config import Config, read_config
from megascale_kernels.progress.atomic_file import put

FORMAT = 1
MEASURES_NOTHING = {"autotune", "bench", "emulate"}  # rooms whose code no launch runs: a change makes no time untrue
LOCK_S = 10.0  # a writer holds the lock for milliseconds; a dead one releases it by dying
log = logging.getLogger("megascale_kernels.autotune")
_told: set[str] = set()


class Kept(Protocol):
    """A configuration as the file keeps it."""

    def _asdict(self) -> dict[str, Any]: ...


Way = TypeVar("Way", bound=Kept)


class Entry(NamedTuple, Generic[Way]):
    """What a tuning found.

    Attributes:
        config: the fastest configuration; None when NCCL + cuBLAS in series was faster than all.
        time_s: its time, seconds, the median of the slowest rank's.
        serial_s: the serial path's time, measured in turn with it.
    """

    config: Way | None
    time_s: float
    serial_s: float


def cache_file(name: str = "choices.json") -> Path | None:
    """Where a memory lies; None where there is no home, as in a container that runs under a number without a name."""
    folder = os.environ.get("MEGASCALE_KERNEL_CACHE")
    if not folder:
        try:
            folder = str(Path.home() / ".cache" / "megascale-ops" / "kernels")
        except RuntimeError:
            return None
    return Path(folder) / name


def bucket(m: int) -> int:
    """The largest M that shares its choice with `m`: a power of two, or three quarters of one."""
    top = 1 << max(0, m - 1).bit_length()
    return top * 3 // 4 if top >= 4 and m <= top * 3 // 4 else top


def entry_key(operator: str, m: int, n: int, k: int) -> str:
    """The name of one operator and shape."""
    return f"{operator} m{bucket(m)} n{n} k{k}"


@cache
def versions() -> str:
    """The libraries and the code that a measurement belongs to."""
    import torch

    nccl = "none"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch has no type here
    return (
        f"torch {torch.__version__} | triton {installed('triton')} | nccl {nccl} | "
        f"megascale {installed('megascale-ops')} {digest_of(Path(__file__).parents[1])}"
    )


def digest_of(package: Path) -> str:
    """The code of the kernels in eight digits: any change of it starts a new environment."""
    found = ((path.relative_to(package), path) for path in package.rglob("*.py"))
    sources = sorted((inside, path) for inside, path in found if inside.parts[0] not in MEASURES_NOTHING)
    return hashlib.sha256(b"".join(path.read_bytes() for _, path in sources)).hexdigest()[:8]


def installed(package: str) -> str:
    """The version of an installed package; "source" when it runs from a checkout that was never installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def environment_key(gpu: str, processors: int, world_size: int, dtype: str) -> str:
    """The name of an environment."""
    return f"{gpu} | {processors} | {versions()} | world {world_size} | {dtype}"


def read(path: Path | None, environment: str) -> dict[str, Entry[Config]]:
    """The entries of one environment; none when there is no file or it cannot be used (which is said once)."""
    return read_as(path, environment, read_config)


def read_as(path: Path | None, environment: str, reader: Callable[[dict[str, Any]], Way]) -> dict[str, Entry[Way]]:
    """`read` for configurations of any kind; `reader` makes one of what `_asdict` gave, or raises ValueError."""
    found: dict[str, Entry[Way]] = {}
    if path is None:
        return found
    for key, raw in _environments(path).get(environment, {}).items():
        try:
            found[key] = _entry(raw, reader)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            _tell(f"{path}: entry {key!r} is ignored, it cannot be read: {error}")
    return found


def write(path: Path | None, environment: str, key: str, entry: Entry[Any]) -> bool:
    """Add an entry, keeping what others wrote; False when the folder cannot be written (which is said once)."""
    if path is None:
        _tell(
            "what was tuned is remembered by this process only: there is no home folder, and MEGASCALE_KERNEL_CACHE "
            "names no other"
        )
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            environments = _environments(path)
            config = None if entry.config is None else entry.config._asdict()
            environments.setdefault(environment, {})[key] = {**entry._asdict(), "config": config}
            text = json.dumps({"format": FORMAT, "environments": environments}, indent=1)
            put(path, text.encode(), durably=True)
    except OSError as error:
        _tell(f"{path}: what was tuned is remembered by this process only: {error}")
        return False
    return True


def _environments(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _tell(f"{path}: the memory of tuned kernels cannot be read and is ignored: {type(error).__name__}: {error}")
        return {}


def _parse(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']}, this version reads {FORMAT}")
    environments: dict[str, dict[str, Any]] = raw["environments"]
    if not all(isinstance(entries, dict) for entries in environments.values()):
        raise ValueError("an environment is not a table")
    return environments


def _entry(raw: dict[str, Any], reader: Callable[[dict[str, Any]], Way]) -> Entry[Way]:
    return Entry(None if raw["config"] is None else reader(raw["config"]), float(raw["time_s"]), float(raw["serial_s"]))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} was locked by another process for {LOCK_S:.0f} s") from None
                time.sleep(0.02)
        yield


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        log.warning(message)
