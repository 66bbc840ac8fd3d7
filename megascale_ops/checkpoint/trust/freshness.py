# SPDX-License-Identifier: Apache-2.0
"""Whether the weights have moved since the save before, where the optimizer has.

A job that saves a stale copy of its weights (an exchange that was lost, a copy that nothing updates) looks well until
its checkpoint is evaluated. The sign: an optimizer's own state has moved, its learning rate was above zero at both
saves, and none of its parameters has changed by a bit.

No sign: parameters without gradients, a learning rate of zero at either save (the first or the last step in between may
have been made with it), an optimizer that has made no step, a step that is saved again, the first save of a process.

Everything here is judgement: digests and learning rates in, names out.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

# 1,000 names a rank: of more that do not change the first are told.
MOST_NAMES = 1000


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One parameter of an optimizer: whether its group's learning rate is above zero, and its parts on this rank."""

    is_taught: bool
    weights: tuple[str, ...]  # layouts of its own parts; () where the state does not have it
    moments: tuple[str, ...]  # layouts of its optimizer's state
    steps: int = 0  # that its group has made, with gradients and a rate above zero; of optimizers that keep no state


class Look(msgspec.Struct, frozen=True):
    """One save on one rank."""

    digests: Mapping[str, bytes]  # by layout
    trains: Mapping[str, str]  # of parameters that require gradients: key by layout
    optimizers: Mapping[str, tuple[Parameter, ...]]


class Movement(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has seen of one optimizer since the save before."""

    name: str
    should_change: bool  # it has made a step on a parameter that is in the state, with a learning rate above zero
    have_changed: bool  # any of its parameters has


def movements(before: Look | None, now: Look) -> list[Movement]:
    """What has moved on this rank; nothing after the first save."""
    if before is None:
        return []
    return [
        _movement(name, before.optimizers[name], parameters, before, now)
        for name, parameters in now.optimizers.items()
        if len(before.optimizers.get(name, ())) == len(parameters)
    ]


def _movement(name: str, olds: Sequence[Parameter], news: Sequence[Parameter], before: Look, now: Look) -> Movement:
    should_change = any(
        new.weights
        and old.is_taught
        and new.is_taught
        and (
            new.steps > old.steps
            or _have_changed(new.moments, before, now)
            or not before.digests.keys() >= set(new.moments)
        )
        for old, new in zip(olds, news, strict=True)
    )
    return Movement(name, should_change, any(_have_changed(new.weights, before, now) for new in news))


def _have_changed(layouts: Iterable[str], before: Look, now: Look) -> bool:
    return any(layout in before.digests and before.digests[layout] != now.digests[layout] for layout in layouts)


def stale(by_rank: Sequence[Sequence[Movement]]) -> list[str]:
    """The optimizers that have stepped and whose parameters have not changed, on any rank."""
    seen = [one for rank in by_rank for one in rank]
    changed = {one.name for one in seen if one.have_changed}
    return list(dict.fromkeys(one.name for one in seen if one.should_change and one.name not in changed))


def unchanged(before: Look | None, now: Look) -> list[str]:
    """The keys of parameters that require gradients and have not changed on this rank, where anything has."""
    if before is None or not any(one.should_change for one in movements(before, now)):
        return []
    return [
        key
        for layout, key in now.trains.items()
        if layout in before.digests and before.digests[layout] == now.digests[layout]
    ][:MOST_NAMES]


def changed_among(keys: Iterable[str], before: Look | None, now: Look) -> set[str]:
    """Those of some keys of which this rank holds a part that has changed."""
    wanted = set(keys)
    if before is None:
        return set()
    return {
        key
        for layout, key in now.trains.items()
        if key in wanted and layout in before.digests and before.digests[layout] != now.digests[layout]
    }
