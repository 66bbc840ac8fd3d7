# SPDX-License-Identifier: Apache-2.0
"""The mesh of a job: how its ranks are laid out, and by what names (dp, tp, pp) people know its dimensions.

Everything here is judgement: no torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec

# 16 dimensions, of names of 40 characters: a mesh in a file that others wrote may have no more.
_MOST_DIMENSIONS, _NAME_LENGTH = 16, 40


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mesh of ranks; the last dimension varies fastest.

    ``ranks``: the numbers in the whole job of those that it holds, in its order; (): 0, 1, 2 and so on.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many ranks it holds."""
        return prod(self.sizes)

    def is_sound(self) -> bool:
        """Whether it can be one; it may come from a file that others wrote."""
        fits = len(self.names) == len(self.sizes) <= _MOST_DIMENSIONS and all(size > 0 for size in self.sizes)
        return fits and all(len(name) <= _NAME_LENGTH for name in self.names) and len(self.ranks) in {0, self.count}

    def spelled(self) -> str:
        """Its dimensions: ``pp=2 dp=4 tp=8``."""
        return " ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def place_of(self, rank: int) -> str:
        """Where a rank of the job stands: ``pp=0 dp=3 tp=1``; empty: not in this mesh."""
        if self.ranks:
            at = self.ranks.index(rank) if rank in self.ranks else -1
        else:
            at = rank if 0 <= rank < self.count else -1
        if at < 0:
            return ""
        return " ".join(f"{name}={where}" for name, where in zip(self.names, _coordinates(at, self.sizes), strict=True))


def laid_out(names: Sequence[str | None], sizes: Sequence[int], ranks: Sequence[int]) -> Layout:
    """A mesh as its device mesh tells; a dimension without a name is called after its number."""
    called = tuple(f"dim{at}" if name is None else name[:_NAME_LENGTH] for at, name in enumerate(names))
    in_order = all(rank == at for at, rank in enumerate(ranks))
    return Layout(called, tuple(sizes), () if in_order else tuple(ranks))


def of_job(told: Iterable[Layout | None]) -> tuple[Layout, ...]:
    """All meshes that ranks have told, each once: that with the most ranks first, then by the ranks that told."""
    found = dict.fromkeys(layout for layout in told if layout is not None)
    return tuple(sorted(found, key=lambda layout: -layout.count))


def named(rank: int, layouts: Iterable[Layout]) -> str:
    """A rank with its place: ``5 (pp=1 dp=0 tp=1)``; its number alone where no mesh has it."""
    places: Iterator[str] = filter(None, (layout.place_of(rank) for layout in layouts))
    place = next(places, "")
    return f"{rank} ({place})" if place else f"{rank}"


def _coordinates(at: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        at, coordinate = divmod(at, size)
        found.append(coordinate)
    return tuple(reversed(found))
