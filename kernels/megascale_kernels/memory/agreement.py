# SPDX-License-Identifier: Apache-2.0
"""Make sure that all ranks are about to do the same, before a collective that would hang if they were not.

The kernels compare what they run through their flags. The serial path has no flags: a collective whose shapes differ
between ranks hangs, or worse, moves the wrong bytes. So ranks first write what they are going to run into the group's
key-value store (the one the process group was made with; no GPU, no collective) and read what the others wrote.

Leaving is agreed on as well: the first to decide, by one atomic `compare_set`, decides for all. Otherwise a rank that
comes at the very moment when another gives up would go on alone into the collective.
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megascale_kernels.errors import KernelError, RankMismatch, TileTimeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# How often the store is asked: soon at first, since peers usually come within a millisecond, then 50 times a second.
FIRST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.02
GO = "go"

# Workspaces are made by all ranks of a group together, so their number within the group is a name they agree on.
_MADE: Counter[str] = Counter()


def _group_store(group: dist.ProcessGroup) -> "Store | None":
    """The store of a group; None for groups that were not made by torch's own front door."""
    try:
        store: Store = c10d._get_process_group_store(group)  # noqa: SLF001 - the only way to a subgroup's store
    except (AttributeError, KeyError, TypeError):
        return None
    return store


def members_of(group: dist.ProcessGroup) -> list[int]:
    """The job's rank of each rank of a group; empty for groups that were not made by torch's own front door."""
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return []


def among(group: dist.ProcessGroup) -> str:
    """What a message that numbers the ranks of a group adds when these are not the job's own numbers; else nothing."""
    members = members_of(group)
    if members == list(range(len(members))):
        return ""
    return f"; ranks are counted within the group of the job's ranks {', '.join(map(str, members))}"


class Agreement:
    """Compares, before a collective, what each rank of one group is about to run.

    Args:
        store: through which the ranks exchange texts; None compares nothing.
        name: of the sequence of comparisons, the same on all ranks.
        rank: this rank.
        world_size: ranks in the group.
        note: what messages end with (`among`).
    """

    def __init__(self, store: "Store | None", name: str, rank: int, world_size: int, note: str = "") -> None:
        self.store, self.name, self.note = store, name, note
        self.number = zlib.crc32(name.encode()) or 1  # by which boards of one conversation are known for such
        self.rank, self.world_size = rank, world_size
        self.resets = 0
        self.rounds = 0
        self.known: set[object] = set()

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> "Agreement":
        """A conversation of the ranks of a group; all of them must begin it together."""
        number = _MADE[group.group_name]
        _MADE[group.group_name] += 1
        name = f"megascale/{group.group_name}/{number}"
        return cls(_group_store(group), name, dist.get_rank(group), dist.get_world_size(group), among(group))

    def compare(self, said: str, deadline_s: float, waiting: Callable[[int], None]) -> None:
        """Return when every rank has announced the same.

        Args:
            said: what this rank is going to run, in words.
            deadline_s: how long to wait for the others, seconds.
            waiting: called with the rank that is being waited for.

        Raises:
            RankMismatch: a peer announced something else; all ranks raise it.
            TileTimeout: a peer announced nothing; all ranks that came raise it, and so will the late one.
            KernelError: the store is gone with the process that kept it.
        """
        if self.store is None or self.world_size == 1:
            return
        try:
            self._compare(self.store, said, deadline_s, waiting)
        except dist.DistNetworkError as error:
            raise KernelError(
                f"rank {self.rank}, {said}: the group's store is gone, so the process that kept it has ended (that of "
                f"the job's rank 0, unless a launcher keeps it): {str(error).partition(chr(10))[0]}{self.note}"
            ) from error

    def _compare(self, store: "Store", said: str, deadline_s: float, waiting: Callable[[int], None]) -> None:
        round_name = f"{self.name}/{self.resets}/{self.rounds}"
        store.set(f"{round_name}/{self.rank}", said)
        missing = self._wait(store, round_name, time.monotonic() + deadline_s, waiting)
        # An empty expectation stands for "not written yet": the first writer's word is what all ranks read.
        word = GO if not missing else f"rank {self.rank} waited {deadline_s:.3f} s for rank {missing[0]}"
        decided = store.compare_set(f"{round_name}/decided", "", word).decode()
        if decided != GO:
            peer = missing[0] if missing else int(decided.split()[1])
            raise TileTimeout(
                f"rank {self.rank}, {said}: {decided}, which has not called it{self.note}", rank=self.rank, peer=peer,
                operator=said.partition("(")[0], epoch=self.rounds,
            )  # fmt: skip
        sayings = {rank: store.get(f"{round_name}/{rank}").decode() for rank in range(self.world_size)}
        self._forget(store, self.rounds - 2)
        self.rounds += 1
        other = next((rank for rank, saying in sayings.items() if saying != said), None)
        if other is not None:
            raise RankMismatch(
                f"rank {self.rank} runs {said}; rank {other} runs {sayings[other]}: "
                f"all ranks must call the same operators with the same sizes in the same order{self.note}"
            )

    def compare_once(self, said: object, deadline_s: float, waiting: Callable[[int], None]) -> None:
        """Compare what was not compared before: where asking the store each time would cost more than the work."""
        if said not in self.known:
            self.compare(str(said), deadline_s, waiting)
            self.known.add(said)

    def reset(self) -> None:
        """Begin anew after an error; all ranks must do it."""
        self.resets += 1
        self.rounds = 0
        self.known.clear()

    def _wait(self, store: "Store", round_name: str, end: float, waiting: Callable[[int], None]) -> list[int]:
        missing = [rank for rank in range(self.world_size) if rank != self.rank]
        pause_s = FIRST_PAUSE_S
        while True:
            missing = [rank for rank in missing if not store.check([f"{round_name}/{rank}"])]
            if not missing or time.monotonic() > end:
                return missing
            waiting(missing[0])
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _forget(self, store: "Store", round_number: int) -> None:
        """Delete this rank's part of a round that all ranks have read: a rank in round n has read round n - 1."""
        if round_number >= 0:
            names = [str(self.rank), *(["decided"] if self.rank == 0 else [])]
            for name in names:
                store.delete_key(f"{self.name}/{self.resets}/{round_number}/{name}")
