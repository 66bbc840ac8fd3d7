# SPDX-License-Identifier: Apache-2.0
"""Training jobs of drawn parallel layouts: who is in which process group, and what each rank's script does in a step.

Tensor, context, data, expert and pipeline parallel groups of odd sizes too, which overlap (data parallel ranks with and
without context parallel ones, the first and the last stage's embeddings, all ranks, all ranks over Gloo). Pipelines are
GPipe, 1F1B and interleaved; sends and receives are calls of their own or batches. Gradients are reduced in the
background in buckets, in coalesced batches, or as shards. A script may read its loss, so that its host waits.
"""

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

KINDS = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "all_to_all")
_AXES = ("tensor", "context", "data", "stage")
_MOST_RANKS = 24
ALL, GLOO = "all", "gloo"


class Call(NamedTuple):
    """What is given to a process group at once: a collective, several that are coalesced, or sends and receives."""

    group: str  # the name of its kind, until a layout has told it
    function: str = ""
    size: int = 8
    dtype: str = "BFloat16"
    waits: bool = True  # the next kernel waits for it; else a ``Wait`` does
    source: int = -1  # places in the group, of a send or a receive
    target: int = -1
    pieces: tuple["Call", ...] = ()  # of what is coalesced

    @property
    def is_pair(self) -> bool:
        """Whether it is one or more sends and receives."""
        return self.source >= 0 or any(piece.source >= 0 for piece in self.pieces)


class Wait(NamedTuple):
    """The kernels behind it wait for all that was called before."""


class ReadLoss(NamedTuple):
    """The host waits until all that its kernels wait for has ended."""


class Away(NamedTuple):
    """The host is elsewhere, and comes no more."""

    place: str


class StuckKernel(NamedTuple):
    """A kernel is launched that does not end."""


class Ended(NamedTuple):
    """The script is over."""


Act = Call | Wait | ReadLoss | Away | StuckKernel | Ended
Program = list[Act]


_KINDS = {
    "tp": ("tensor",), "cp": ("context",), "dp": ("data",), "dp_cp": ("data", "context"), "pp": ("stage",),
    "ep": ("data",),
}  # fmt: skip


class Layout(NamedTuple):
    """A job without a fault: ``groups`` by name, and of each rank the group of each kind, its place and its step."""

    world: int
    groups: dict[str, tuple[int, ...]]
    own: list[dict[str, str]]
    places: list[dict[str, int]]
    steps: list[Program]
    sizes: dict[str, int]


def draw(rng: random.Random) -> Layout:
    """Draw a layout and what its ranks do in a step."""
    while True:
        sizes = {axis: rng.choice((1, 1, 2, 2, 3, 4, 5, 6)) for axis in _AXES}
        world = sizes["tensor"] * sizes["context"] * sizes["data"] * sizes["stage"]
        if 1 < world <= _MOST_RANKS:
            break
    order = rng.sample(_AXES, 4) if rng.random() < 0.4 else list(_AXES)
    places = [
        dict(zip(order, reversed(at), strict=True)) for at in product(*(range(sizes[one]) for one in reversed(order)))
    ]
    split = rng.choice([part for part in (1, 2, 3) if sizes["data"] % part == 0])
    for place in places:
        place["expert"] = place["data"] // (sizes["data"] // split)
        place["contexts"] = sizes["context"]
    groups: dict[str, tuple[int, ...]] = {"0": tuple(range(world))}
    own: list[dict[str, str]] = [{ALL: "0"} for _ in range(world)]
    is_hashed = rng.random() < 0.3
    for kind, members in [*_groups_of(places, sizes), (GLOO, tuple(range(world)))]:
        name = f"{rng.getrandbits(64):016x}" if is_hashed else str(len(groups))
        groups[name] = members
        for rank in members:
            own[rank][kind] = name
    habits = _Habits(rng, sizes)
    steps = [habits.step(place, own[rank]) for rank, place in enumerate(places)]
    return Layout(world, groups, own, places, steps, sizes)


def _groups_of(places: list[dict[str, int]], sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield kind and members of each group that has more than one: who differs in some places alone."""
    for kind, inside in _KINDS.items():
        apart: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            key = tuple(place[axis] for axis in _AXES if axis not in inside)
            apart.setdefault((*key, place["expert"]) if kind == "ep" else key, []).append(rank)
        yield from ((kind, tuple(members)) for members in apart.values() if len(members) > 1)
    if sizes["stage"] > 2:
        ends: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            if place["stage"] in (0, sizes["stage"] - 1):
                ends.setdefault(tuple(place[axis] for axis in _AXES[:3]), []).append(rank)
        yield from (("embedding", tuple(members)) for members in ends.values())


class _Habits:
    """What all ranks of a job do alike, by their place."""

    def __init__(self, rng: random.Random, sizes: dict[str, int]) -> None:
        self.stages = sizes["stage"]
        self.layers = rng.randint(1, 3)
        self.micro = rng.randint(1, 4)
        self.schedule = rng.choice(("gpipe", "1f1b", "interleaved"))
        self.is_batched = self.schedule == "interleaved" or rng.random() < 0.5
        self.tensor = rng.choice(
            (("all_reduce",), ("_all_gather_base", "_reduce_scatter_base"), ("all_reduce", "all_reduce"))
        )
        self.context = rng.choice(("_all_gather_base", "ring", ""))
        self.has_experts = rng.random() < 0.5
        self.grads = rng.choice(("buckets", "shards", "coalesced", "plain"))
        self.grad_group = rng.choice(("dp", "dp_cp"))
        self.buckets = rng.randint(1, 3)
        self.hidden = rng.choice((64, 128, 512))
        self.has_norm = rng.random() < 0.7
        self.reads_loss = rng.random() < 0.6
        self.meets_over_gloo = rng.random() < 0.2
        self.tells_loss = rng.random() < 0.3

    def step(self, place: dict[str, int], own: dict[str, str]) -> Program:
        """Return a rank's step."""
        stage = place["stage"]
        acts = self._interleaved(stage) if self.schedule == "interleaved" else self._in_turn(stage)
        if stage in (0, self.stages - 1):
            acts.append(Call("embedding", "all_reduce", 4 * self.hidden))
        acts += self._gradients()
        acts += [Call(ALL, "all_reduce", 1, "Float")] if self.has_norm else []
        acts += [Call("pp", "broadcast", 1, "Float")] if self.tells_loss else []
        acts += [Call(GLOO, "barrier", 1)] if self.meets_over_gloo else []
        acts += [ReadLoss()] if self.reads_loss else []
        return [_told(act, own, place) for act in acts if not isinstance(act, Call) or act.group in own]

    def _in_turn(self, stage: int) -> Program:
        """Return GPipe's or 1F1B's passes; what a stage sends while it receives is one batch, or nobody would begin."""
        ahead = self.micro if self.schedule == "gpipe" else min(self.micro, self.stages - stage - 1)
        rest = self.micro - ahead
        acts: Program = []
        for _ in range(ahead):
            acts += [*self._pair("recv", stage, -1), *self._work(), *self._pair("send", stage, 1)]
        acts += self._pair("recv", stage, -1) if rest else []
        for at in range(rest):
            acts += [*self._work(), *self._exchange(stage, 1), *self._work()]
            acts += self._exchange(stage, -1) if at < rest - 1 else self._pair("send", stage, -1)
        for _ in range(ahead):
            acts += [*self._pair("recv", stage, 1), *self._work(), *self._pair("send", stage, -1)]
        return acts

    def _pair(self, function: str, stage: int, step: int) -> Program:
        """Return a send to, or a receive from, the stage that is so many steps on."""
        other = stage + step
        if not 0 <= other < self.stages:
            return []
        ends = (stage, other) if function == "send" else (other, stage)
        call = Call("pp", function, self.hidden, source=ends[0], target=ends[1])
        return [Call("pp", pieces=(call,)) if self.is_batched else call]

    def _exchange(self, stage: int, step: int) -> Program:
        other = stage + step
        if not 0 <= other < self.stages:
            return []
        sent = Call("pp", "send", self.hidden, source=stage, target=other)
        return [Call("pp", pieces=(sent, Call("pp", "recv", self.hidden, source=other, target=stage)))]

    def _interleaved(self, stage: int) -> Program:
        """Return passes of two chunks a stage: all stages send on in a ring, the last one to the first one."""
        acts: Program = []
        size, rounds = self.stages, 2 * self.micro
        for step, at in product((1, -1), range(rounds)):
            end = size - 1 if step > 0 else 0
            acts += self._work()
            is_last = at == rounds - 1
            pieces = [Call("pp", "send", self.hidden, source=stage, target=(stage + step) % size)]
            pieces = [] if is_last and stage == end else pieces
            if not (is_last and stage == (end + step) % size):
                pieces.append(Call("pp", "recv", self.hidden, source=(stage - step) % size, target=stage))
            acts += [Call("pp", pieces=tuple(pieces))] if pieces else []
        return acts

    def _work(self) -> Program:
        """Return what a pass calls in the groups of its stage."""
        acts: Program = []
        for layer in range(self.layers):
            acts += [Call("tp", one, self.hidden * (1 + at)) for at, one in enumerate(self.tensor)]
            acts += [Call("cp", self.context, self.hidden)] if self.context else []
            acts += [Call("ep", "all_to_all", self.hidden)] * 2 if self.has_experts and layer % 2 == 0 else []
        return acts

    def _gradients(self) -> Program:
        group, size = self.grad_group, 4096
        if self.grads == "buckets":
            return [*(Call(group, "all_reduce", size + at, "Float", waits=False) for at in range(self.buckets)), Wait()]
        if self.grads == "shards":
            return [Call(group, "_reduce_scatter_base", size, "Float"), Call(group, "_all_gather_base", size)]
        if self.grads == "coalesced":
            return [
                Call(
                    group, pieces=tuple(Call(group, "all_reduce", size + at, "Float") for at in range(1 + self.buckets))
                )
            ]
        return [Call(group, "all_reduce", size, "Float")]


def _told(act: Act, own: dict[str, str], place: dict[str, int]) -> Act:
    """Return an act with the name of the rank's group instead of its kind, and a ring as its sends and receives."""
    if not isinstance(act, Call):
        return act
    if act.function == "ring":
        at, size = place["context"], place["contexts"]
        sent = act._replace(function="send", source=at, target=(at + 1) % size)
        act = Call(act.group, pieces=(sent, act._replace(function="recv", source=(at - 1) % size, target=at)))
    pieces = tuple(piece._replace(group=own[piece.group]) for piece in act.pieces)
    return act._replace(group=own[act.group], pieces=pieces)
