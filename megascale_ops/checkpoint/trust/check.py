# SPDX-License-Identifier: Apache-2.0
"""Look at what is saved, on all ranks: replicas compared, weights held against those of the save before.

Usually no rank sends more than it sends anyway: 40 bytes for each entry of the state and place in a mesh travel with
what a save gathers. Only where they differ do the ranks in doubt send the digests of their tensors, then the sums of
the blocks of those that differ, then one block: so a single flipped bit is told as that.

    check = Check("check", watches_freshness=True)                       on each rank, as all that follows
    described = check.describe(parts, state, world_size=ranks.world_size)   in the foreground: copies nothing
    look = check.look(described, copies)                                 whenever, also in another thread
    summaries = ranks.gather(look.summary)
    found = check.conclude(step, summaries, look, ranks)
    check.sealed(step, look)                                             once the checkpoint counts
"""

import hashlib
import logging
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.state.layout import Layout
from megascale_ops.checkpoint.trust import digests, freshness, verdicts
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.parts import MUST_AGREE, Part, is_optimizer, parameters_of, place_of
from megascale_ops.checkpoint.trust.verdicts import Alarm, Bucket, Odd, Replicas

_DOING = "comparing replicas"

_log = logging.getLogger("megascale_ops.checkpoint")


class Summary(NamedTuple):
    """What every rank tells of a save."""

    strict: tuple[Bucket, ...]  # of what must agree
    others: tuple[Bucket, ...]
    movements: tuple[freshness.Movement, ...]
    unchanged: tuple[str, ...]
    compared: int


class Described(NamedTuple):
    """What one rank is about to save: as it was when the save began."""

    parts: Sequence[Part]
    wanted: Sequence[Part]  # what is digested
    optimizers: Mapping[str, tuple[freshness.Parameter, ...]]
    compares: bool


class Look(NamedTuple):
    """What one rank has seen of one save."""

    parts: Sequence[Part]
    digests: Mapping[str, bytes]  # by layout
    fresh: freshness.Look
    summary: Summary


class _Saved(NamedTuple):
    """The save before."""

    step: int
    fresh: freshness.Look | None


class _Answer(NamedTuple):
    """What a rank tells where ranks differ: its digests of what must agree, and of the rest; what has changed."""

    doubtful: dict[tuple[str, str], bytes]
    varied: dict[tuple[str, str], bytes]
    changed: tuple[str, ...]


class Check:
    """What is known from one save to the next; one of each manager.

    Args:
        replicas: "off" compares none.
        watches_freshness: alarm where the weights do not move though the optimizer does.
    """

    def __init__(self, replicas: Replicas, *, watches_freshness: bool) -> None:
        self._replicas = replicas
        self._watches = watches_freshness
        self._before = _Saved(-1, None)
        self._told_others = False
        self._steps = _Steps()

    def describe(self, parts: Sequence[Part], state: Mapping[str, Any], *, world_size: int) -> Described:
        """Choose what is digested, and ask optimizers for their learning rates; cheap.

        Args:
            parts: what this rank holds.
            state: as given to ``save``.
            world_size: how many ranks save together.
        """
        compares = self._replicas != "off" and world_size > 1
        moves = self._watches and any(is_optimizer(value) for value in state.values())
        wanted = [
            part
            for part in parts
            if (part.kind in MUST_AGREE and (compares or moves)) or (compares and not self._told_others)
        ]
        optimizers = {
            entry: _parameters(entry, value, parts, self._steps)
            for entry, value in state.items()
            if self._watches and is_optimizer(value)
        }
        return Described(parts, wanted, optimizers, compares)

    def begin(self, described: Described) -> digests.Begun:
        """Let GPUs begin to digest what this rank holds; nothing waits."""
        return digests.Begun(part.tensor for part in described.wanted)

    def look(
        self,
        described: Described,
        copies: Mapping[str, torch.Tensor] | None = None,
        begun: digests.Begun | None = None,
    ) -> Look:
        """Digest what this rank holds.

        Args:
            described: what that is.
            copies: by key, what was copied of it meanwhile, on any device; None: the tensors themselves.
            begun: digests of these, where that was begun.
        """
        wanted = described.wanted
        if begun is None:
            begun = digests.Begun(part.tensor if copies is None else copies[part.key] for part in wanted)
        found = dict(zip((part.layout for part in wanted), begun.digests(), strict=True))
        kept = {part.layout: found[part.layout] for part in wanted if part.kind in ("weight", "moment")}
        fresh = freshness.Look(kept, {part.layout: part.key for part in wanted if part.trains}, described.optimizers)
        compared = [part for part in wanted if part.kind in MUST_AGREE] if described.compares else []
        before = self._before.fresh if self._watches else None
        summary = Summary(
            _buckets(compared, found),
            _buckets([part for part in wanted if part.kind not in MUST_AGREE], found),
            tuple(freshness.movements(before, fresh)),
            tuple(freshness.unchanged(before, fresh)),
            len(compared),
        )
        held = described.parts if copies is None else [part._replace(tensor=copies[part.key]) for part in wanted]
        return Look(held, found, fresh, summary)

    def conclude(
        self, step: int, summaries: Sequence[Summary], look: Look, ranks: Ranks, layouts: Sequence[Layout] = ()
    ) -> Findings:
        """Hear of all ranks' summaries, ask on where they differ, and judge: the same on every rank.

        Args:
            step: of the save.
            summaries: of all ranks, in their order.
            look: this rank's.
            ranks: who takes part; every one of them must call.
            layouts: the meshes in which they stand, for sentences.
        """
        doubtful = verdicts.differing([summary.strict for summary in summaries])
        varied = verdicts.differing([summary.others for summary in summaries])
        still = {key for summary in summaries for key in summary.unchanged}
        wrong: list[Odd] = []
        details: dict[str, str] = {}
        if doubtful or varied or still:
            answers = ranks.agree(_DOING, lambda: self._answer(look, doubtful, varied, still))
            wrong = verdicts.odd_ones([answer.doubtful for answer in answers])
            others = verdicts.told_others(verdicts.odd_ones([answer.varied for answer in answers]))
            still -= {key for answer in answers for key in answer.changed}
            if others and ranks.leads:
                _log.info("%s", others)
            self._told_others = self._told_others or bool(others)
        if wrong:
            details = _details(wrong[: verdicts.MOST_NAMED], look, ranks)
        compared = max(summary.compared for summary in summaries)
        alarms = verdicts.judge(wrong, details, compared, _names(ranks), layouts)
        alarms += self._stale(step, [summary.movements for summary in summaries])
        unchanged = tuple(sorted(still))[: freshness.MOST_NAMES]
        return Findings(step, ranks.world_size, compared, tuple(alarms), self._before.step, unchanged)

    def forget(self) -> None:
        """Another state was loaded: what was saved before says nothing of it."""
        self._before = _Saved(-1, None)

    def sealed(self, step: int, look: Look) -> None:
        """The checkpoint counts: the next one is held against it."""
        self._before = _Saved(step, look.fresh)

    def _stale(self, step: int, movements: Sequence[Sequence[freshness.Movement]]) -> list[Alarm]:
        names = freshness.stale(movements)
        if not names or step <= self._before.step:  # a step that is saved again
            return []
        text = (
            f"no parameter of {', '.join(map(repr, names))} has changed by a bit between steps {self._before.step} and "
            f"{step}, though it has made steps with a learning rate above zero"
        )
        return [Alarm("stale_weights", (), text)]

    def _answer(self, look: Look, doubtful: frozenset[bytes], varied: frozenset[bytes], still: set[str]) -> _Answer:
        """What this rank holds of what differs, and which of its parts have changed where others' have not."""
        changed = freshness.changed_among(still, self._before.fresh, look.fresh)
        return _Answer(_held(look, doubtful), _held(look, varied), tuple(sorted(changed)))


class _Steps:
    """Counts the steps of optimizers that keep no state: the state of any other one tells that it has stepped."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = WeakKeyDictionary()

    def of(self, optimizer: torch.optim.Optimizer) -> Mapping[int, int]:
        """Steps by number of the group since the optimizer was first seen: with gradients, and a rate above zero."""
        states = [each for each in optimizer.state.values() if isinstance(each, Mapping)]
        if any(isinstance(value, torch.Tensor) for each in states for value in each.values()):
            return {}
        counts = self._counts.get(optimizer)
        if counts is None:
            counts = self._counts[optimizer] = defaultdict(int)
            optimizer.register_step_post_hook(partial(_count, counts))
        return counts


def _count(counts: dict[int, int], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A step was made."""
    for number, group in enumerate(optimizer.param_groups):
        if _is_taught(group) and any(parameter.grad is not None for parameter in group["params"]):
            counts[number] += 1


def _is_taught(group: Mapping[str, Any]) -> bool:
    """Whether a group's learning rate is above zero; one of an optimizer's own kind tells nothing."""
    try:
        return float(group["lr"]) > 0.0
    except (KeyError, TypeError, ValueError):
        return False


def _parameters(
    entry: str,
    value: Any,  # noqa: ANN401  an optimizer or its state dict
    parts: Sequence[Part],
    steps: _Steps,
) -> tuple[freshness.Parameter, ...]:
    """An optimizer's parameters, in the order of their numbers."""
    moments: defaultdict[str, list[str]] = defaultdict(list)
    if isinstance(value, torch.optim.Optimizer):
        names = {str(number) for number, _ in enumerate(parameters_of(value))}
    else:
        names = {str(name) for group in value["param_groups"] for name in group.get("params", ())}
    for part in parts:
        if part.entry == entry and part.key.startswith(f"{entry}.state."):
            moments[_owner(part.key.removeprefix(f"{entry}.state."), names)].append(part.layout)
    if isinstance(value, torch.optim.Optimizer):
        at: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for part in parts:
            if part.kind == "weight" and part.tensor.numel():
                at[place_of(part.tensor)].append(part.layout)
        counts = steps.of(value)
        return tuple(
            freshness.Parameter(
                _is_taught(value.param_groups[group]) and parameter.requires_grad,
                tuple(at[place_of(parameter)]),
                tuple(moments[str(number)]),
                counts.get(group, 0),
            )
            for number, (group, parameter) in enumerate(parameters_of(value))
        )
    # A state dict does not tell which parameters it is of: all that train.
    weights = tuple(part.layout for part in parts if part.kind == "weight" and part.trains)
    return tuple(
        freshness.Parameter(_is_taught(group), weights, tuple(moments[str(name)]))
        for group in value["param_groups"]
        for name in group.get("params", ())
    )


def _owner(place: str, names: Collection[str]) -> str:
    """The parameter that a place in an optimizer's state belongs to: ``0.exp_avg``, ``layers.1.weight.exp_avg``."""
    while place and place not in names:
        place = place.rpartition(".")[0]
    return place


def _by_bucket(parts: Iterable[Part]) -> dict[tuple[str, str, bool], list[Part]]:
    found: defaultdict[tuple[str, str, bool], list[Part]] = defaultdict(list)
    for part in parts:
        found[part.entry, part.place, part.kind in MUST_AGREE].append(part)
    return found


def _layout_of(bucket: tuple[str, str, bool], parts: Iterable[Part]) -> bytes:
    layouts = "\n".join(sorted(part.layout for part in parts))
    return hashlib.blake2b(f"{bucket}\n{layouts}".encode(), digest_size=8).digest()


def _buckets(parts: Iterable[Part], found: Mapping[str, bytes]) -> tuple[Bucket, ...]:
    buckets = []
    for bucket, held in _by_bucket(parts).items():
        content = b"".join(found[part.layout] for part in sorted(held, key=lambda part: part.layout))
        hashed = hashlib.blake2b(content, digest_size=16).digest()
        buckets.append(Bucket(_layout_of(bucket, held), hashed, len(held)))
    return tuple(buckets)


def _held(look: Look, layouts: frozenset[bytes]) -> dict[tuple[str, str], bytes]:
    """The digests of all parts that are in a bucket with one of these layouts, by layout and key."""
    if not layouts:
        return {}
    return {
        (part.layout, part.key): look.digests[part.layout]
        for bucket, parts in _by_bucket(part for part in look.parts if part.layout in look.digests).items()
        if _layout_of(bucket, parts) in layouts
        for part in parts
    }


def _names(ranks: Ranks) -> list[int]:
    """The number in the whole job of each rank that takes part."""
    if not ranks.distributed:
        return [0]
    from torch import distributed

    return distributed.get_process_group_ranks(ranks.process_group or distributed.group.WORLD)


def _details(odd: Sequence[Odd], look: Look, ranks: Ranks) -> dict[str, str]:
    """What is different in each of a few tensors; every rank must call."""
    held = {part.key: part.tensor for part in look.parts}
    pairs = {one.key: (one.ranks[0], one.against) for one in odd}
    mine = {key: held[key] for key, pair in pairs.items() if ranks.rank in pair}
    sums = ranks.agree(
        _DOING, lambda: {key: digests.block_sums(tensor).cpu().numpy().tobytes() for key, tensor in mine.items()}
    )
    blocks = {key: _unlike(sums[left][key], sums[right][key]) for key, (left, right) in pairs.items()}

    def first_block() -> dict[str, tuple[bytes, int, int]]:
        return {
            key: (digests.elements_at(tensor, blocks[key][0]).numpy().tobytes(), tensor.element_size(), tensor.numel())
            for key, tensor in mine.items()
            if blocks[key]
        }

    firsts = ranks.agree(_DOING, first_block)
    told = {}
    for key, (left, right) in pairs.items():
        if blocks[key]:
            raw, itemsize, count = firsts[left][key]
            told[key] = _difference(raw, firsts[right][key][0], itemsize, count, blocks[key])
    return told


def _unlike(left: bytes, right: bytes) -> list[int]:
    """The numbers of blocks whose sums differ; the sums are two rows of 8 bytes, one behind the other."""
    count = len(left) // 16
    lefts, rights = (struct.unpack(f"<{2 * count}q", raw) for raw in (left, right))
    return [at for at in range(count) if (lefts[at], lefts[count + at]) != (rights[at], rights[count + at])]


def _difference(left: bytes, right: bytes, itemsize: int, count: int, blocks: Sequence[int]) -> str:
    """What differs in the first block that does, and in how many it does."""
    at = [
        start
        for start in range(0, len(left), itemsize)
        if left[start : start + itemsize] != right[start : start + itemsize]
    ]
    bits = sum((one ^ other).bit_count() for one, other in zip(left, right, strict=True))
    first = (blocks[0] * digests.BLOCK_BYTES + at[0]) // itemsize
    more = f", and more in {len(blocks) - 1} other blocks of 128 KiB" if len(blocks) > 1 else ""
    verb = "differs" if len(at) == 1 else "differ"
    bits_differ = "1 bit" if bits == 1 else f"{bits} bits"
    return f"{len(at)} of {count} elements {verb}{more}, the first is number {first}; {bits_differ}"
