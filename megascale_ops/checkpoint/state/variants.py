# SPDX-License-Identifier: Apache-2.0
"""One entry of a state of which ranks hold other parts: the layers of a pipeline stage, the experts of a rank.

A name means the same on every rank that has it, so of tensors nothing has to be agreed on. But what says where in the
entry they stand is one structure for each entry, and that of stage 0 has no place for the layers of stage 1. So ranks
tell each other a digest of what they hold (which keys, which tensors of which shape), and their mesh. Where digests
differ each *variant* is stored, and a restore puts them together: a rank gets those keys that it has, by whichever
ranks they were saved. In a job of as many ranks as before it gets its own variant, unless it has become a rank of
another stage.

    told = variants.take_apart(state, allowed, flat)          on each rank
    as_guessed = variants.settle(doing, all that was told, flat, ranks)

What would be lost is refused: a name that is one tensor here and another one there, and an optimizer that numbers its
parameters where number 0 is another parameter on another rank.
"""

import copy
import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megascale_ops.checkpoint import contents
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.state.layout import Layout, of_job
from megascale_ops.checkpoint.state.meshes import layout_of, mesh_in
from megascale_ops.checkpoint.value_kinds import Slot
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Told(NamedTuple):
    """What a rank tells the others: by entry, a digest of what it holds, and which variant it takes that for."""

    digests: dict[str, bytes]
    guessed: dict[str, int]
    layout: Layout | None  # the mesh that it is in


class World(NamedTuple):
    """What a manifest tells of the ranks that saved: their mesh, and, of entries with several, whose is which."""

    layout: Layout | None = None
    variants: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def told(self) -> dict[str, Any]:
        """The fields of a manifest; none where there is nothing to tell."""
        found = {"mesh": self.layout, "variants": dict(self.variants)}
        return {name: value for name, value in found.items() if value}


class Variants:
    """What is known of a job's ranks from one save to the next; one for each manager, the same on every rank.

    Args:
        mesh: as the user has given it; None: that of the sharded tensors in a state.
    """

    def __init__(self, mesh: "DeviceMesh | None" = None) -> None:
        self.layouts: tuple[Layout, ...] = ()
        """The meshes of all ranks, the largest first: of one that is not whole there may be several."""
        self._given = None if mesh is None else layout_of(mesh)
        self.world = World()
        """What is known of the ranks since the last ``settle``."""
        self._numbers: dict[str, int] = {}
        self._held: _Held | None = None
        self._digests: dict[str, bytes] = {}
        self._described: dict[str, dict[str, str]] = {}
        self._checked: object = None  # what was told, and found to be without contradiction

    def take_apart(self, state: Mapping[str, Any], allowed: Allowed, flat: dict[str, torch.Tensor]) -> Told:
        """Take a state apart into ``flat``; what the others have to hear of it.

        Raises:
            CheckpointError: something in it can't be stored.
        """
        tensors, structures = contents.separate(state, allowed)
        return self.encode(state, allowed, tensors, structures, flat)

    def encode(
        self,
        state: Mapping[str, Any],
        allowed: Allowed,
        tensors: Mapping[str, torch.Tensor],
        structures: Mapping[str, Any],
        flat: dict[str, torch.Tensor],
    ) -> Told:
        """The second half: put all that is stored into ``flat``, the structures as the variants that they were.

        Raises:
            CheckpointError: something in a structure can't be stored.
        """
        guessed = {name: self._numbers.get(name, 0) for name in structures}
        flat.update(tensors)
        flat.update(contents.encode(structures, allowed, guessed))
        held = _held(state, tensors, structures)
        if held != self._held:
            self._held, self._described = held, _described(held, list(structures))
            self._digests = {name: _digest(held.keys[name], self._described[name]) for name in structures}
        return Told(self._digests, guessed, self._given or mesh_in(tensors.values()))

    def settle(self, doing: str, told: Sequence[Told], flat: dict[str, torch.Tensor], ranks: Ranks) -> bool:
        """Name this rank's structures as the variants that they are; collective.

        Args:
            doing: what is being done, for the sentence.
            told: by all ranks, in their order.
            flat: the state, taken apart.
            ranks: who takes part.

        Returns:
            Whether all ranks had guessed right: else the keys of ``flat`` may have changed, on any rank.

        Raises:
            CheckpointError: on every rank, where one name is two tensors.
        """
        self.layouts = of_job(each.layout for each in told)
        numbers = _numbered([each.digests for each in told])
        mine = numbers[ranks.rank]
        apart = sorted({name for each in numbers for name, number in each.items() if number})
        table = {name: tuple(each.get(name, -1) for each in numbers) for name in apart}
        self.world = World(self.layouts[0] if self.layouts else None, table)
        if apart:
            self._check(doing, apart, [each.digests for each in told], ranks)
        for name, number in mine.items():
            before = contents.structure_key(name, told[ranks.rank].guessed[name])
            flat[contents.structure_key(name, number)] = flat.pop(before)
        self._numbers = mine
        return all(each.guessed == number for each, number in zip(told, numbers, strict=True))

    def _check(self, doing: str, apart: Sequence[str], told: Sequence[Mapping[str, bytes]], ranks: Ranks) -> None:
        """Refuse names that are two tensors; once for each way in which ranks differ."""
        if self._checked == told:
            return
        firsts: dict[tuple[str, bytes], int] = {}
        for rank, digests in enumerate(told):
            for name in apart:
                if name in digests:
                    firsts.setdefault((name, digests[name]), rank)
        mine = {name for (name, _), rank in firsts.items() if rank == ranks.rank}
        parts = ranks.gather({name: self._described.get(name, {}) for name in mine})
        for name in apart:
            if conflict := _conflict(name, [part.get(name, {}) for part in parts]):
                raise CheckpointError(f"{doing} failed: {conflict}")
        self._checked = list(told)


def of_rank(
    variants: Sequence[Any],
    value: object,
    captured: Any,  # noqa: ANN401  whatever a user puts there
    own: int | None,
    allowed: Allowed,
) -> Any:  # noqa: ANN401  same
    """The structure of an entry for this rank.

    Args:
        variants: all that are stored, in the order of their numbers.
        value: the entry as the user gave it.
        captured: what ``capture`` made of it.
        own: the number of the variant that this rank had saved; None: not known, or of another job.
        allowed: into which dataclasses to look.
    """
    if own is not None and own < len(variants) and _covers(variants[own], captured):
        return variants[own]
    return put_together(variants, keys_here(value, captured), allowed)


def put_together(variants: Sequence[Any], have: Any, allowed: Allowed) -> Any:  # noqa: ANN401  whatever a user puts there
    """One structure of several.

    Args:
        variants: the structures of one entry, in the order of their numbers.
        have: what the entry holds here before it is loaded; of a dict of which ranks held other keys only those are
            taken that it has. Where it has nothing (an empty dict, None), all are.
        allowed: into which dataclasses to look.
    """
    return variants[0] if len(variants) == 1 else _together(variants, have, allowed, None)


def _covers(saved: Any, have: Any) -> bool:  # noqa: ANN401  same
    """Whether a structure is that of an entry as it is here, which may still lack what comes with training.

    All keys that are here stand in it. It has no tensors more in a dict of tensors: those are layers of another stage.
    """
    if isinstance(have, Mapping) and isinstance(saved, Mapping):
        more = [item for key, item in saved.items() if key not in have]
        if any(_holds(item, Slot) for item in more) and _holds(have, torch.Tensor):
            return False
        return all(key in saved and _covers(saved[key], item) for key, item in have.items())
    if isinstance(have, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(have) <= len(saved) and all(map(_covers, saved, have))
    return True


def keys_here(value: object, captured: Any) -> Any:  # noqa: ANN401  same
    """What of an entry says which keys of it are here: an optimizer has the moments of its parameters before a step."""
    if not isinstance(value, torch.optim.Optimizer) or not isinstance(captured, Mapping):
        return captured
    count = sum(len(group["params"]) for group in value.param_groups)
    return {**captured, "state": {number: {} for number in range(count)}}


def _holds(value: object, kind: type) -> bool:
    """Whether one of a kind stands in a nest."""
    if isinstance(value, Mapping):
        return any(_holds(item, kind) for item in value.values())
    if isinstance(value, (list, tuple, deque)):
        return any(_holds(item, kind) for item in value)
    return isinstance(value, kind)


# -- what a rank holds ----------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """What a rank holds; equal where its digests are, and compared in a tenth of the time that these take."""

    tensors: list[tuple[str, torch.dtype, torch.Size]]
    keys: dict[str, object]  # by entry: the keys of its dicts, nested as they are
    parameters: dict[str, list[str]]  # by entry that is an optimizer: the name of each number


def _held(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], structures: Mapping[str, Any]) -> _Held:
    optimizers = {entry: value for entry, value in state.items() if isinstance(value, torch.optim.Optimizer)}
    modules = {entry: value for entry, value in state.items() if isinstance(value, torch.nn.Module) and optimizers}
    names = {
        id(parameter): f"{entry}.{name}"
        for entry, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    return _Held(
        [(key, each.dtype, each.size()) for key, each in tensors.items() if not key.endswith(contents.PICKLED)],
        {name: _keys(structure) for name, structure in structures.items()},
        {
            entry: [names.get(id(each)) or _words(each.dtype, each.size()) for each in _taught(optimizer)]
            for entry, optimizer in optimizers.items()
        },
    )


def _taught(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


class _Keys(NamedTuple):
    """The keys of a dict, and those below each of them."""

    names: tuple[object, ...]
    below: tuple[object, ...]


def _keys(value: object) -> object:
    """The keys of all dicts in a nest, nested as they are; None where there are none. Values don't count."""
    if isinstance(value, Mapping):
        below = tuple([_keys(item) if isinstance(item, _HOLDS) else None for item in value.values()])
        return _Keys(tuple(value), below)
    if isinstance(value, (list, tuple, deque)):
        items = tuple([_keys(item) if isinstance(item, _HOLDS) else None for item in value])
        return items if any(each is not None for each in items) else None
    return None


_HOLDS = (Mapping, list, tuple, deque)


def _described(held: _Held, entries: Sequence[str]) -> dict[str, dict[str, str]]:
    """By entry: what each of its tensors is, and which parameter each of an optimizer's numbers means, in words."""
    found: dict[str, dict[str, str]] = {name: {} for name in entries}
    longest_first = sorted(entries, key=len, reverse=True)
    for key, dtype, size in held.tensors:
        entry = next((name for name in longest_first if key.startswith(name) and key[len(name) :][:1] in _NEXT), None)
        if entry is not None:
            found[entry][key] = _words(dtype, size)
    for entry, names in held.parameters.items():
        found[entry] |= {str(number): name for number, name in enumerate(names)}
    return found


# What follows an entry's name in that of a tensor: nothing, a place below it, what keeps two apart that spell alike.
_NEXT = ("", ".", "~")


def _words(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"


def _digest(keys: object, described: Mapping[str, str]) -> bytes:
    lines = [*_spelled(keys), *(f"{key} {what}" for key, what in sorted(described.items()))]
    return hashlib.blake2b("\n".join(lines).encode("utf-8", "backslashreplace"), digest_size=8).digest()


def _spelled(keys: object) -> Iterator[str]:
    """Nested keys line by line, the same for any order of a dict."""
    if isinstance(keys, _Keys):
        named = sorted(zip(map(repr, keys.names), keys.below, strict=True), key=lambda pair: pair[0])
        yield repr([name for name, _ in named])
        for name, below in named:
            if below is not None:
                yield name
                yield from _spelled(below)
    elif isinstance(keys, tuple):
        for below in keys:
            yield from _spelled(below)


def _numbered(told: Sequence[Mapping[str, bytes]]) -> list[dict[str, int]]:
    """By rank and entry, the number of its variant; the first rank's is 0."""
    seen: dict[str, dict[bytes, int]] = {}
    return [
        {name: seen.setdefault(name, {}).setdefault(digest, len(seen[name])) for name, digest in digests.items()}
        for digests in told
    ]


def _conflict(name: str, parts: Sequence[Mapping[str, str]]) -> str:
    """What of an entry is one thing on one rank and another on another, in words; empty: nothing."""
    known: dict[str, tuple[int, str]] = {}
    for rank, described in enumerate(parts):
        for key, what in described.items():
            first, before = known.setdefault(key, (rank, what))
            if before == what:
                continue
            on_ranks = f"{before} on rank {first} and {what} on rank {rank}"
            if key.isdigit():
                return (
                    f"{name!r} numbers its parameters, and number {key} is {on_ranks}: save what torch's "
                    "get_optimizer_state_dict(model, optimizer) gives, which names them, or give each rank's optimizer "
                    "an entry of its own"
                )
            return f"{key} is {on_ranks}: what differs between ranks needs a name for each of them"
    return ""


# -- variants put together ------------------------------------------------------------------------------------------


def _together(variants: Sequence[Any], have: Any, allowed: Allowed, key: object) -> Any:  # noqa: ANN401  same
    first = variants[0]
    alike = [each for each in variants if type(each) is type(first)]
    if isinstance(first, dict):
        return _dict_together(alike, have, allowed)
    if isinstance(first, (list, tuple)):
        return _list_together(alike, have, allowed, key)
    if dataclasses.is_dataclass(first) and allowed.has(type(first)):
        made = copy.copy(first)
        for each in dataclasses.fields(first):
            fields = [getattr(one, each.name) for one in alike]
            object.__setattr__(made, each.name, _together(fields, getattr(have, each.name, None), allowed, each.name))
        return made
    return first


def _dict_together(variants: Sequence[dict[Any, Any]], have: Any, allowed: Allowed) -> dict[Any, Any]:  # noqa: ANN401  same
    here = have if isinstance(have, Mapping) else {}
    keys = dict.fromkeys(chain.from_iterable(variants))
    if here and any(each.keys() != keys.keys() for each in variants):
        keys = {key: None for key in keys if key in here}
        keys = next((dict.fromkeys(each) for each in variants if each.keys() == keys.keys()), keys)  # in its order
    made = copy.copy(variants[0])  # keeps its type
    made.clear()
    for key in keys:
        made[key] = _together([each[key] for each in variants if key in each], here.get(key), allowed, key)
    if hasattr(made, "_metadata"):  # the versions of a module's parts, which its ``load_state_dict`` goes by
        versions = [vars(each).get("_metadata") or {} for each in variants]
        vars(made)["_metadata"] = _together(versions, None, allowed, None)
    return made


def _list_together(variants: Sequence[Any], have: Any, allowed: Allowed, key: object) -> Any:  # noqa: ANN401  same
    if key == "params" and all(isinstance(item, str) for each in variants for item in each):
        return type(variants[0])(dict.fromkeys(chain.from_iterable(variants)))  # of a group of parameters, by name
    here = list(have) if isinstance(have, (list, tuple)) else []
    count = max(map(len, variants))
    if here and any(len(each) != count for each in variants):
        count = min(count, len(here))
    items = [
        _together([each[at] for each in variants if at < len(each)], here[at] if at < len(here) else None, allowed, at)
        for at in range(count)
    ]
    kind = type(variants[0])
    return kind._make(items) if hasattr(kind, "_make") else kind(items)
