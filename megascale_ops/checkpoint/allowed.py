# SPDX-License-Identifier: Apache-2.0
"""What a user has allowed beyond plain data: names that are pickled, types that are rebuilt, older folders."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_ops.errors import UsageError

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Allowed:
    """What may be stored and loaded that is not plain data. By default: nothing.

    Attributes:
        pickled: places in a state, as ``optimizer.x``, whose values are pickled at a save and unpickled at a restore.
        types: named tuples, dataclasses and enums by their names; they are stored as their fields.
        old_pickles: whether a folder of format 1, which is a pickle, may be loaded.
    """

    pickled: frozenset[str] = frozenset()
    types: Mapping[str, type] = field(default_factory=dict)
    old_pickles: bool = False

    @classmethod
    def of(cls, pickled: Iterable[str], types: Iterable[type], *, old_pickles: bool) -> "Allowed":
        """What a user wrote, checked.

        Raises:
            UsageError: ``pickled`` is one string, a type is of no kind that can be rebuilt, or two share a name.
        """
        if isinstance(pickled, str):
            raise UsageError(f"pickled is a list of names, not one string: pickled=({pickled!r},)")
        by_name: dict[str, type] = {}
        for each in types:
            if not is_rebuilt(each):
                raise UsageError(f"types takes named tuples, dataclasses and enums; {each!r} is none of them")
            if by_name.setdefault(each.__qualname__, each) is not each:
                raise UsageError(
                    f"types has two types called {each.__qualname__}; a checkpoint knows them by that name"
                )
        return cls(frozenset(pickled), by_name, old_pickles)

    def has(self, kind: type) -> bool:
        """Whether this very type was named."""
        return self.types.get(kind.__qualname__) is kind


def is_rebuilt(kind: object) -> bool:
    """Whether a type is one that can be stored as its fields, once a user has named it."""
    if not isinstance(kind, type):
        return False
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return named_tuple or dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)


def dotted(path: Path) -> str:
    """A place in a state as a user names it: ``optimizer.x``."""
    return ".".join(map(str, path))


def quoted(place: str) -> str:
    """A place as Python reads it, on one line: ``"optimizer.x"``."""
    return '"' + repr(f"'{place}")[2:-1] + '"' if '"' not in place else repr(place)


def spelled(path: Path) -> str:
    """A place in a state as Python spells it: ``state['optimizer']['x']``."""
    return "state" + "".join(f"[{key!r}]" for key in path)
