# SPDX-License-Identifier: Apache-2.0
"""Find a process's rank from its call to ``init_process_group`` or from its launcher's variables. Pure.

torchrun, accelerate and deepspeed put RANK into the environment before Python starts. Others do not: Lightning's own
launcher sets LOCAL_RANK and WORLD_SIZE and computes the rank, ``torch.multiprocessing.spawn`` passes it as an
argument, MPI has variables of its own. All of them pass it to ``init_process_group``, in one of torch's ways:
as arguments, in the query of a ``tcp://`` or ``file://`` address, or in the environment that ``env://`` reads.
Source: torch.distributed.init_process_group, torch/distributed/rendezvous.py.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megascale_ops.recorder.recording.config import FoundRank

# Rank, world size and local rank, by the MPI that sets them: Open MPI; MPICH, Intel MPI and their kin; MVAPICH2.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
_LOCAL_RANKS = ("LOCAL_RANK", *(local for _, _, local in _MPI))


def by_process_group(given: Mapping[str, Any], environ: Mapping[str, str]) -> FoundRank | None:
    """Return the rank that calls ``init_process_group`` with the arguments ``given``; None if only its return shows it.

    With the backend ``mpi`` the library assigns the ranks; a call that fails for want of a rank also gives None.
    """
    method = str(given.get("init_method") or ("" if given.get("store") is not None else "env://"))
    address = urlsplit(method)
    asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
    rank, size = _number(given.get("rank")), _number(given.get("world_size"))
    rank = _number(asked.get("rank")) if rank < 0 else rank
    size = _number(asked.get("world_size")) if size < 1 else size
    world = f"{address.scheme}://{address.netloc}{address.path}" if method else "store"
    if address.scheme == "env":
        rank = _number(environ.get("RANK")) if rank < 0 else rank
        size = _number(environ.get("WORLD_SIZE")) if size < 1 else size
        world = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    return FoundRank(rank, _local_rank(environ), size, world) if 0 <= rank < size else None


def by_environment(environ: Mapping[str, str]) -> FoundRank:
    """Return the rank of a process that trains without a process group: its launcher's variables, else rank 0 of 1."""
    for rank_name, size_name, _ in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), *_MPI):
        rank, size = _number(environ.get(rank_name)), _number(environ.get(size_name))
        if 0 <= rank < size:
            return FoundRank(rank, _local_rank(environ), size, rank_name)
    return FoundRank(0, max(0, _local_rank(environ)), 1, "alone")


def _local_rank(environ: Mapping[str, str]) -> int:
    return next((found for name in _LOCAL_RANKS if (found := _number(environ.get(name))) >= 0), -1)


def _number(said: object) -> int:
    """Return ``said`` as a number, -1 if it is none."""
    try:
        return int(said)  # type: ignore[call-overload,no-any-return]  # whatever a script passes
    except (TypeError, ValueError):
        return -1
