# SPDX-License-Identifier: Apache-2.0
"""Jobs of drawn layouts that hang by a drawn fault, or do not hang, and what somebody took of them afterwards.

The faulty ranks are known by construction. What was taken: flight recorder dumps as torch 2.3 to 2.13 write them (JSON
or pickled, short rings, timing on or off, clocks apart, own groups only), of most ranks; stacks of all, some or none.
"""

import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.fakes import drawn_layouts, drawn_stacks
from tests.fakes.drawn_layouts import ALL, GLOO, Act, Away, Call, Layout, Program, StuckKernel
from tests.fakes.drawn_runs import Entry, Run, Stood, stood

FAULTS = (
    "away", "away", "several away", "crash", "skip", "extra", "swap", "cross", "size", "dtype", "function",
    "no partner", "uneven steps", "conditional", "stuck kernel", "cut", "running",
)  # fmt: skip
_ORDER = frozenset({"collective_order", "collective_mismatch", "not_joined"})
_STOOD = frozenset({"not_joined", "sleeping", "stuck", "data_stall", "storage_stall", "silent"})
_CLASSES = {
    "crash": frozenset({"not_joined"}), "size": frozenset({"collective_mismatch"}),
    "dtype": frozenset({"collective_mismatch"}),
    "function": _ORDER, "skip": _ORDER | _STOOD, "extra": _ORDER | _STOOD, "swap": _ORDER, "cross": _ORDER | _STOOD,
    "no partner": _ORDER | _STOOD, "uneven steps": _ORDER | _STOOD, "conditional": _ORDER | _STOOD,
    "stuck kernel": frozenset({"gpu_stuck", "stuck", "not_joined", "silent"}),
    "cut": frozenset({"silent", "slow", "unknown"}), "running": frozenset({"silent", "slow", "unknown", "idle"}),
}  # fmt: skip
_PLACES = {
    "loader": "data_stall", "saves": "storage_stall", "sleeps": "sleeping", "spins": "stuck",
    "waits_for_queue": "sleeping", "waits_for_child": "sleeping", "waits_for_server": "sleeping", "compiles": "stuck",
}  # fmt: skip
_MORE = 5  # steps that a job would go on for
_GPU = "    synchronize (torch/cuda/__init__.py:1040)\n    train_step (train.py:88)\n"
_ITEM = "    train_step (train.py:91)\n"
_LAUNCH = "    forward (torch/nn/modules/linear.py:125)\n    train_step (train.py:80)\n"
_DTYPES = {"BFloat16": "BFloat16", "Float": "Float"}


class Job(NamedTuple):
    """What was taken of a job, and what is right: ``culprits`` empty where nobody is to blame."""

    fault: str
    world: int
    dumps: dict[int, bytes]
    stands: dict[int, Stood]  # of those whose stacks were taken
    stacks: dict[int, str]
    culprits: tuple[int, ...]
    also: tuple[int, ...]  # of a pair that disagrees: the other one
    classes: frozenset[str]


class _Fault(NamedTuple):
    culprits: tuple[int, ...]
    also: tuple[int, ...] = ()
    classes: frozenset[str] = frozenset()


def draw(seed: int) -> Job | None:
    """Draw a job and run it; None where the fault does no harm, or not to all that the job has."""
    rng = random.Random(seed)  # noqa: S311  # seeds of a test
    layout, kind = drawn_layouts.draw(rng), rng.choice(FAULTS)
    steps = rng.randint(2, 4)
    programs: list[Program] = [list(step) * (steps + _MORE) for step in layout.steps]
    run = Run(programs, layout.groups, rng.choice((0, 0, 2, 8, 30)))
    run.gloo = {layout.own[0][GLOO]}
    fault = _break(rng, layout, run, kind, steps - 1)
    if fault is None:
        return None
    record = _Recorder(rng, layout, run)
    if kind == "running":
        run.go(rng.randint(1, sum(len(step) for step in layout.steps) * steps))
        for rank in rng.sample(range(layout.world), layout.world):
            record.take(rank)
            run.go(rng.choice((0, 0, 1, 5, 20)))
    else:
        run.go()
        if any(run.at[rank] >= len(program) and rank not in fault.culprits for rank, program in enumerate(programs)):
            return None
        for rank in range(layout.world):
            record.take(rank)
    record.lose(kind, fault)
    return Job(
        kind, layout.world, record.dumps, record.stands, record.stacks, fault.culprits, fault.also,
        fault.classes or _CLASSES[kind],
    )  # fmt: skip


def _break(rng: random.Random, layout: Layout, run: Run, kind: str, step: int) -> _Fault | None:  # noqa: PLR0911  # a row each
    """Put a fault into the programs."""
    rank = rng.randrange(layout.world)
    length = len(layout.steps[rank])
    begin = length * step
    program = run.programs[rank]
    at = begin + rng.randrange(max(1, length))
    if kind == "running":
        return _Fault(())
    if kind in ("away", "several away"):
        place = rng.choice(sorted(_PLACES))
        who = (rank,) if kind == "away" else tuple(_of_stage(layout, rank))
        if 2 * len(who) > layout.world:
            return None
        for one in who:
            run.programs[one].insert(len(layout.steps[one]) * step + (at - begin if len(who) == 1 else 0), Away(place))
        return _Fault(who, (), frozenset({_PLACES[place], "not_joined", "silent", "unknown"}))
    if kind in ("crash", "stuck kernel"):
        program.insert(at, Away("gone") if kind == "crash" else StuckKernel())
        return _Fault((rank,))
    if kind == "cut":
        group = rng.choice(sorted(layout.groups))
        calls = sum(
            isinstance(act, Call) and act.group == group and not act.is_pair
            for act in layout.steps[layout.groups[group][0]]
        )
        run.cut[group] = calls * step + 1
        return _Fault(()) if calls else None
    if kind == "uneven steps":
        return _uneven(rng, layout, run, step)
    if kind == "conditional":
        return _conditional(rng, layout, run, step)
    return _changed(rng, layout, program, rank, kind, begin)


def _of_stage(layout: Layout, rank: int) -> list[int]:
    """Return the ranks of one stage, or of one replica where there are no stages."""
    axis = "stage" if layout.sizes["stage"] > 1 else "data"
    return [one for one, place in enumerate(layout.places) if place[axis] == layout.places[rank][axis]]


def _uneven(rng: random.Random, layout: Layout, run: Run, step: int) -> _Fault | None:
    """Let a replica have one batch less, and go on to what comes after training."""
    if layout.sizes["data"] < 3:
        return None
    replica = rng.randrange(layout.sizes["data"])
    who = tuple(rank for rank, place in enumerate(layout.places) if place["data"] == replica)
    after: Act = rng.choice(
        (Call("0", "barrier", 1), Call("0", "all_reduce", 2, "Float"), Away("saves"), Away("sleeps"))
    )
    for rank in who:
        run.programs[rank][len(layout.steps[rank]) * step :] = [after]
    return _Fault(who)


def _conditional(rng: random.Random, layout: Layout, run: Run, step: int) -> _Fault | None:
    """Let some ranks of a group call what the others do not, as behind ``if is_main:``."""
    kind = rng.choice((ALL, "dp", "tp", "pp", "dp_cp"))
    rank = rng.randrange(layout.world)
    name = layout.own[rank].get(kind)
    if name is None:
        return None
    members = layout.groups[name]
    who = tuple(sorted(rng.sample(members, rng.randint(1, max(1, (len(members) - 1) // 2)))))
    if 2 * len(who) >= len(members):
        return None
    at = rng.choice((0, len(layout.steps[rank])))
    for one in who:
        place = len(layout.steps[one]) * step + (at and len(layout.steps[one]))
        run.programs[one].insert(
            place, Call(name, rng.choice(("all_reduce", "barrier")) if one == who[0] else "all_reduce", 1, "Float")
        )
    return _Fault(who)


def _changed(rng: random.Random, layout: Layout, program: Program, rank: int, kind: str, begin: int) -> _Fault | None:
    """Change a call of one rank."""
    calls = [at for at in range(begin, begin + len(layout.steps[rank])) if isinstance(program[at], Call)]
    calls = [at for at in calls if _call(program, at).is_pair is (kind == "no partner")]
    if not calls:
        return None
    at = rng.choice(calls)
    call = _call(program, at)
    both = layout.groups[call.group] if len(layout.groups[call.group]) == 2 else (rank,)
    if kind in ("skip", "no partner"):
        pieces = call.pieces if kind == "no partner" else ()
        del program[at]
        if len(pieces) > 1:
            program.insert(at, call._replace(pieces=pieces[1:]))
        ends = (pieces or (call,))[0]
        both = tuple(layout.groups[call.group][place] for place in (ends.source, ends.target)) if call.is_pair else both
    elif kind == "extra":
        program.insert(at, Call(call.group, "all_reduce", 3, "Float"))
    elif kind in ("swap", "cross"):
        then = next(
            (one for one in calls if one > at and (_call(program, one).group == call.group) is (kind == "swap")), 0
        )
        if not then or program[then] == call:
            return None
        both = (
            layout.groups[_call(program, then).group]
            if kind == "cross" and len(both) < 2 and len(layout.groups[_call(program, then).group]) == 2
            else both
        )
        program[at], program[then] = program[then], call
    elif call.function in ("", "barrier", "all_to_all"):
        return None
    else:
        kinds = [one for one in drawn_layouts.KINDS if one != call.function]
        program[at] = {
            "size": call._replace(size=call.size + 8),
            "dtype": call._replace(dtype="Half"),
            "function": call._replace(function=rng.choice(kinds)),
        }[kind]
    return _Fault((rank,), tuple(one for one in both if one != rank))


def _call(program: Program, at: int) -> Call:
    act = program[at]
    assert isinstance(act, Call)
    return act


class _Recorder:
    """What is taken of a run: dumps and stacks, rank by rank."""

    def __init__(self, rng: random.Random, layout: Layout, run: Run) -> None:
        self.rng, self.layout, self.run = rng, layout, run
        self.torch = rng.choice(("2.3", "2.4", "2.5", "2.6", "2.7", "2.9", "2.10", "2.11", "2.13"))
        self.minor = int(self.torch.partition(".")[2])
        self.is_json = self.minor >= 5 and rng.random() < 0.5
        self.is_timed = rng.random() < 0.4
        self.ring = rng.choice((16, 40, 100, 2000, 2000))
        self.own_only = rng.random() < 0.7
        self.looks = rng.choice((1.0, 1.0, 0.6, 0.0, 0.0))
        self.is_item = rng.random() < 0.5
        self.dumps: dict[int, bytes] = {}
        self.stands: dict[int, Stood] = {}
        self.stacks: dict[int, str] = {}

    def take(self, rank: int) -> None:
        """Take what a rank has now."""
        at = stood(self.run, rank)
        if self.rng.random() < self.looks:
            self.stands[rank], self.stacks[rank] = at, self._stack(at)
        if at.place != "gone":
            self.dumps[rank] = self._dump(rank)

    def lose(self, kind: str, fault: _Fault) -> None:
        """Lose the dumps of a few."""
        for rank in self.rng.sample(range(self.layout.world), self.rng.choice((0, 0, 0, 1, 2))):
            if len(self.dumps) > 2 and (rank not in fault.culprits or kind in ("away", "several away")):
                self.dumps.pop(rank, None)

    def _stack(self, at: Stood) -> str:
        known = drawn_stacks.stacks_of("py_spy")
        if at.place in known:
            return known[at.place]
        if at.place == "gone":
            return "Error: Failed to open process - check if it is running.: No such process (os error 3)\n"
        if at.place == "collective":
            name = {"barrier": "dist_barrier", "send": "dist_recv", "recv": "dist_recv"}.get(at.call, "dist_all_reduce")
            return known[name]
        frames = (_ITEM if self.is_item else _GPU) if at.place in ("gpu", "ended") else _LAUNCH
        head = "Process 4242: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        head += 'Thread 4242 (active): "MainThread"\n'
        return f"{head}{frames}    <module> (train.py:140)\n"

    def _dump(self, rank: int) -> bytes:
        own = [name for name in self.layout.own[rank].values() if name not in self.run.gloo]
        names = own if self.own_only else [name for name in self.layout.groups if name not in self.run.gloo]
        skew = self.rng.randint(-(10**9), 10**9)
        entries = list(self._entries(rank))[-self.ring :]
        for number, entry in enumerate(entries):
            entry.update(record_id=number, time_created_ns=1_795_610_829_759_203_967 + skew + 1_000_000 * number)
        dump: dict[str, Any] = {
            "version": "1.5" if self.minor == 3 else "2.10",
            "pg_config": {
                name: {"name": name, "desc": _desc(name), "ranks": str(list(self.layout.groups[name]))}
                for name in names
            },
            "pg_status": {"0": {"last_enqueued_collective": len(entries), "last_completed_collective": 1}},
            "entries": [self._of_then(entry) for entry in entries],
        }
        return json.dumps(dump).encode() if self.is_json else pickle.dumps(dump, protocol=2)

    def _of_then(self, entry: dict[str, Any]) -> dict[str, Any]:
        if self.minor > 3:
            return entry
        lacks = ("p2p_seq_id", "op_id", "input_dtypes", "output_dtypes", "is_p2p", "timeout_ms", "collective_seq_id")
        return {key: value for key, value in entry.items() if key not in lacks}

    def _entries(self, rank: int) -> Iterator[dict[str, Any]]:
        """Yield a rank's calls as torch records them; nothing of Gloo's is in NCCL's recorder."""
        numbers: Counter[tuple[str, bool]] = Counter()
        for entry in self.run.entries[rank]:
            call = entry.call
            if call.group in self.run.gloo:
                continue
            numbers[call.group, call.is_pair] += 1
            both = {"collective_seq_id": numbers[call.group, False], "p2p_seq_id": numbers[call.group, True]}
            both["seq_id"] = sum(both.values())
            for piece in call.pieces if call.is_pair or self.minor >= 7 else ():
                yield {**self._told(piece, entry, is_piece=True), **both}
            whole = call._replace(function="coalesced", pieces=()) if call.pieces else call
            yield {**self._told(whole, entry), **both, "is_p2p": call.is_pair}

    def _told(self, call: Call, entry: Entry, *, is_piece: bool = False) -> dict[str, Any]:
        size = len(self.layout.groups[call.group])
        mine, made = [[call.size]], [[call.size]]
        if call.function == "_all_gather_base":
            made = [[call.size * size]]
        elif call.function == "_reduce_scatter_base":
            mine = [[call.size * size]]
        elif call.function == "all_to_all":
            mine = made = [[call.size * size]]
        elif call.function == "coalesced":
            mine = made = []
        name = "all_reduce_barrier" if call.function == "barrier" and self.minor >= 7 else call.function
        arrow = {"send": f" {call.source}->{call.target}", "recv": f" {call.target}<-{call.source}"}.get(
            call.function, ""
        )
        is_over = entry.over and not is_piece
        state = "completed" if is_over else "started" if self.is_timed and entry.begun and not is_piece else "scheduled"
        none = 0 if self.is_json else None
        return {
            "frames": [],
            "pg_id": 0,
            "process_group": [call.group, _desc(call.group)],
            "profiling_name": f"nccl:{name}{arrow}",
            "op_id": 1,
            "input_sizes": mine,
            "input_dtypes": [call.dtype] * len(mine),
            "output_sizes": made,
            "output_dtypes": [call.dtype] * len(made),
            "state": state,
            "time_discovered_started_ns": 1_795_610_829_000 if self.is_timed and state != "scheduled" else none,
            "time_discovered_completed_ns": 1_795_610_830_000 if is_over else none,
            "retired": is_over,
            "timeout_ms": 600_000,
            "is_p2p": call.is_pair,
        }


def _desc(name: str) -> str:
    return "default_pg" if name == "0" else "undefined"
