# SPDX-License-Identifier: Apache-2.0
"""Training jobs of drawn shapes with one drawn fault, run until they hang, as the recorders of their ranks have it.

A job has data, pipeline and tensor parallel groups and a group of all; its ranks call what their place in it says. One
rank is elsewhere, leaves a call out, swaps two, or brings another size or type; who it is, is known by construction.
Hosts may run ahead of their GPUs, recorders be short, first stages do more than others, and a dump be missing.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_MARKS = {"in_data_loader": "data_stall", "in_storage": "storage_stall", "in_syscall": "sleeping"}
_SHAPES = ((2, 2, 2), (4, 1, 2), (2, 1, 4), (1, 2, 4), (2, 4, 1), (3, 2, 2), (4, 2, 1), (8, 1, 1), (1, 1, 8), (2, 3, 1))
_FAULTS = ("absent", "absent", "skip", "size", "dtype", "order")
_CLASSES = {
    "skip": {"collective_order", "collective_mismatch", "not_joined"},
    "size": {"collective_mismatch"},
    "dtype": {"collective_mismatch"},
    "order": {"collective_order", "collective_mismatch"},
}
_DONE_AFTER = 6  # steps: no fault lets a job go on for longer


class Call(NamedTuple):
    """One call of a program: a collective, or a send or a receive between two members of a group."""

    function: str
    size: int
    group: str
    source: int = -1
    target: int = -1
    dtype: str = "Float"

    @property
    def is_pair(self) -> bool:
        """Whether it is a send or a receive."""
        return self.source >= 0


class Hang(NamedTuple):
    """A job that hangs: its dumps as ``tests/real`` tells them, and what is right."""

    given: dict[str, Any]
    world: int
    culprit: int
    classes: frozenset[str]
    without_dump: int  # -1: none


class _Job:
    """What the ranks of one job call."""

    def __init__(self, rng: random.Random) -> None:
        """Draw its shape and its calls."""
        self.rng = rng
        self.shape = data, stages, tensor = rng.choice(_SHAPES)
        self.world = data * stages * tensor
        self.groups: dict[str, list[int]] = {"0": list(range(self.world))}
        self.tensor = [(rng.choice(_KINDS), rng.choice((64, 128, 512))) for _ in range(rng.randint(2, 4))]
        self.data = rng.choice(
            ([("all_reduce", 4096)], [("reduce_scatter", 4096), ("all_gather", 512)], [("all_reduce", 2048)])
        )
        self.all = rng.choice(([], [("all_reduce", 1)], [("all_reduce", 1), ("barrier", 1)]))
        self.has_embedding = rng.random() < 0.5
        self.steps = rng.randint(2, 4)
        self.calls = {rank: self.steps_of(rank) for rank in range(self.world)}

    def group(self, ranks: list[int]) -> str:
        """Return the name of the group of these ranks."""
        known = next((name for name, members in self.groups.items() if members == ranks and name != "0"), "")
        name = known or str(len(self.groups))
        self.groups[name] = ranks
        return name

    def steps_of(self, rank: int) -> list[list[Call]]:
        """Return all steps of a rank."""
        _, stages, tensor = self.shape
        replica, stage, part = rank // tensor // stages, rank // tensor % stages, rank % tensor
        at = [[(one * stages + two) * tensor for two in range(stages)] for one in range(self.shape[0])]
        peers = self.group([first + part for first in at[replica]]) if stages > 1 else ""
        shard = self.group([at[replica][stage] + other for other in range(tensor)]) if tensor > 1 else ""
        copies = self.group([one[stage] + part for one in at]) if len(at) > 1 else ""
        step: list[Call] = []
        for back in (0, 1):
            before, after = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
            step += [Call("recv", 64, peers, before, stage)] if 0 <= before < stages else []
            step += [Call("all_reduce", 96, shard)] if shard and self.has_embedding and stage == 0 and not back else []
            step += [Call(*one, shard) for one in self.tensor if shard]
            step += [Call("send", 64, peers, stage, after)] if 0 <= after < stages else []
        step += [Call(*one, copies) for one in self.data if copies]
        step += [Call(*one, "0") for one in self.all]
        return [step] * (self.steps + _DONE_AFTER)


def draw(seed: int) -> Hang | None:
    """Draw a job and run it; None where the fault does no harm or can't be seen."""
    rng = random.Random(seed)  # noqa: S311  # seeds of a test
    job = _Job(rng)
    culprit, fault = rng.randrange(job.world), rng.choice(_FAULTS)
    programs = {rank: [call for step in steps for call in step] for rank, steps in job.calls.items()}
    step = len(job.calls[culprit][0])
    begin = step * (job.steps - 1)
    mark = rng.choice(sorted(_MARKS))
    halted = {culprit: begin + rng.randrange(step)} if step and fault == "absent" else {}
    changed = _changed(rng, programs[culprit], begin, step, fault) if not halted else (programs[culprit], "")
    if changed is None:
        return None
    programs[culprit], group = changed
    reached = _run(programs, job.groups, halted)
    if any(reached[rank] >= len(program) for rank, program in programs.items()):
        return None
    ahead, ring = rng.randint(0, 3), rng.choice((8, 12, 20, 40, 200))
    ranks = {
        rank: _entries(program[: min(halted.get(rank, 1 << 30), reached[rank] + 1 + ahead)], reached[rank], job.groups)
        for rank, program in programs.items()
    }
    spare = [rank for rank in ranks if rank != culprit and (not group or rank not in job.groups[group])]
    missing = rng.choice(spare) if spare and rng.random() < 0.2 else -1
    given = {
        "groups": job.groups,
        "ranks": {str(rank): entries[-ring:] for rank, entries in ranks.items() if rank != missing},
        "elsewhere": {str(culprit): [mark]} if halted else {},
        "form": rng.choice(("json", "pickle")),
        "version": rng.choice(("2.4", "2.10", "2.11")),
        "own_groups": rng.random() < 0.4,
    }
    classes = {_MARKS[mark]} if halted else _CLASSES[fault]
    return Hang(given, job.world, culprit, frozenset(classes), missing)


def _changed(
    rng: random.Random, program: list[Call], begin: int, step: int, fault: str
) -> tuple[list[Call], str] | None:
    """Return a program with a fault and the group in which it is; None where it can't have that."""
    where = [at for at in range(begin, begin + step) if not program[at].is_pair]
    if not where or fault == "absent":
        return None
    at = rng.choice(where)
    call, rest = program[at], program[at + 1 :]
    if fault == "skip":
        return [*program[:at], *rest], call.group
    if fault == "order":
        other = next((then for then in range(at + 1, len(program)) if not program[then].is_pair), 0)
        if not other or program[other] == call:
            return None
        return [*program[:at], program[other], *program[at + 1 : other], call, *program[other + 1 :]], call.group
    if call.function in ("barrier", "all_to_all"):  # an all_to_all may bring what it likes
        return None
    odd = call._replace(size=call.size + 8) if fault == "size" else call._replace(dtype="BFloat16")
    return [*program[:at], odd, *rest], call.group


def _run(programs: dict[int, list[Call]], groups: dict[str, list[int]], halted: dict[int, int]) -> dict[int, int]:
    """Let every rank go on as long as all that its call needs have come; return how far each is."""
    reached = dict.fromkeys(programs, 0)

    def now(rank: int) -> Call | None:
        over = reached[rank] >= min(halted.get(rank, 1 << 30), len(programs[rank]))
        return None if over else programs[rank][reached[rank]]

    moved = True
    while moved:
        moved = False
        for rank in programs:
            call = now(rank)
            if call is None:
                continue
            members = groups[call.group]
            if call.is_pair:
                members = [members[call.source], members[call.target]]
            there = [now(member) for member in members]
            wanted = (
                [call._replace(function=name) for name in ("send", "recv")] if call.is_pair else [call] * len(there)
            )
            if there == wanted:
                moved = True
                for member in members:
                    reached[member] += 1
    return reached


def _entries(calls: list[Call], over: int, groups: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Return a recorder's entries, of which the first ``over`` have ended."""
    numbers: Counter[tuple[str, bool]] = Counter()
    entries = []
    for place, call in enumerate(calls):
        numbers[call.group, call.is_pair] += 1
        number = numbers[call.group, call.is_pair]
        size = len(groups[call.group])
        mine, made = [[call.size]], [[call.size]]
        if call.function == "all_gather":
            made = [[call.size * size]]
        elif call.function == "reduce_scatter":
            mine = [[call.size * size]]
        arrow = f" {call.source}->{call.target}" if call.function == "send" else f" {call.target}<-{call.source}"
        entry: dict[str, Any] = {
            "name": f"nccl:{call.function}{arrow if call.is_pair else ''}",
            "p2p" if call.is_pair else "seq": number,
            "group": call.group,
            "in": mine,
            "out": made,
            "dtype": call.dtype,
        }
        entries.append(entry if place < over else {**entry, "state": "scheduled"})
    return entries
