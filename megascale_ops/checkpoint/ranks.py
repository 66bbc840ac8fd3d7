# SPDX-License-Identifier: Apache-2.0
"""Let all ranks of a process group succeed together or fail together.

A rank that raises alone leaves the others waiting in the next collective until its time-out, half an hour later. So
every risky piece of work is an ``agree``: each rank does its part, all hear how all fared, and if one failed, all raise
the same sentence. Waiting is bounded by the process group's own time-out; a peer that dies ends it at once.

Without an initialised process group this is a world of one and nothing is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from megascale_ops.checkpoint import storage
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_SENTENCE_LENGTH = 300  # a cause is one readable line; the trace stays on the rank that failed


def cause_of(error: BaseException) -> str:
    """The reason of a failure in one line; the system's own words when an OSError lies beneath it.

    A full disk surfaces from torch as ``[enforce fail at inline_container.cc]``; what a person needs is the OSError
    that it was raised from.
    """
    if isinstance(error, CheckpointError):  # already a sentence of ours
        return str(error)
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return storage.describe(link)
        link = link.__cause__ or link.__context__
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{type(error).__name__}: {first_line}"


class EchoError(CheckpointError):
    """This rank is well, but another one failed inside the same piece of work; report that one's cause."""


def require_one_step(doing: str, steps: list[int]) -> None:
    """Prove that all ranks mean the same step.

    Raises:
        CheckpointError: they do not.
    """
    if len(set(steps)) > 1:
        raise CheckpointError(f"{doing} failed: the ranks are at different steps, {sorted(set(steps))}")


@dataclass
class Outcome(Generic[T]):
    """How one rank fared; travels to all the others."""

    rank: int
    value: T | None = None
    failure: str | None = None
    echo: bool = False


class Ranks:
    """The ranks that save and restore together.

    Args:
        process_group: torch's process group, or None for the default one; ignored while torch.distributed is not
            initialised.
    """

    def __init__(self, process_group: "ProcessGroup | None" = None) -> None:
        from torch import distributed

        self.process_group = process_group
        self.distributed = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank(process_group) if self.distributed else 0
        self.world_size = distributed.get_world_size(process_group) if self.distributed else 1
        if self.rank < 0:
            raise CheckpointError("this rank is not in the process group that the checkpoint was asked for")

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and seals."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if not self.distributed:
            return [value]
        from torch import distributed

        values: list[T] = [value] * self.world_size
        distributed.all_gather_object(values, value, group=self.process_group)
        return values

    def agree(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Do work on every rank and hear how all fared.

        Args:
            doing: what is being done, for the sentence: ``saving step 120 to /data/run``.
            work: this rank's part; its result must be picklable.

        Returns:
            Every rank's result, in the order of ranks.

        Raises:
            CheckpointError: on every rank, when any rank failed; it names the first such rank and its cause.
        """
        mine, error = self._tried(work)
        outcomes = self.gather(mine)
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        if failed:
            causes = [outcome for outcome in failed if not outcome.echo] or failed
            where = f" on rank {causes[0].rank}" if self.world_size > 1 else ""
            others = f" (and on {len(causes) - 1} more)" if len(causes) > 1 else ""
            raise CheckpointError(f"{doing} failed{where}{others}: {causes[0].failure}") from error
        return [cast("T", outcome.value) for outcome in outcomes]  # None only where T allows None

    def lead(self, doing: str, work: Callable[[], T], *, rank: int = 0) -> T:
        """Do work on one rank alone and hear its result on every rank: what one can read, all need not.

        Args:
            doing: what is being done, for the sentence.
            work: the part of that rank; its result must be picklable.
            rank: which one; the same on every rank.

        Raises:
            CheckpointError: on every rank, when it failed.
        """
        mine, error = self._tried(work) if self.rank == rank else (Outcome[T](rank), None)
        if self.distributed:
            from torch import distributed

            box = [mine]
            distributed.broadcast_object_list(box, group=self.process_group, group_src=rank)
            mine = box[0]
        if mine.failure is not None:
            where = f" on rank {rank}" if self.world_size > 1 else ""
            raise CheckpointError(f"{doing} failed{where}: {mine.failure}") from error
        return cast("T", mine.value)

    def _tried(self, work: Callable[[], T]) -> tuple[Outcome[T], Exception | None]:
        mine: Outcome[T] = Outcome(self.rank)
        try:
            mine.value = work()
        except Exception as exc:  # noqa: BLE001  whatever it is, the other ranks must hear of it; raised by the caller
            mine.failure = cause_of(exc)[:_SENTENCE_LENGTH]
            mine.echo = isinstance(exc, EchoError)
            return mine, exc
        return mine, None
