# SPDX-License-Identifier: Apache-2.0
"""Folders of stacks of a hung job, drawn, with who is elsewhere known by construction.

The stacks are real: processes of torch 2.13 on CPython 3.11 that hung in 20 ways (``tests/fixtures/stacks``), taken
with faulthandler, py-spy 0.4.3 (text, JSON, with native frames) and gdb 13. A draw takes a way for the crowd, one for
those that are elsewhere, a tool, and how the files are named.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

STACKS = Path(__file__).parent.parent / "fixtures" / "stacks"
TOOLS = ("faulthandler", "py_spy", "py_spy_json", "py_spy_native", "gdb")
CROWDS = ("dist_all_reduce", "dist_barrier", "dist_object", "dist_wait")
_STUCK = frozenset({"stuck", "sleeping"})
# Ways to be elsewhere, and the classes that are right for them.
ELSEWHERE = {
    "waits_in_lock": _STUCK, "waits_for_event": {"sleeping"}, "waits_for_thread": {"sleeping"},
    "waits_for_queue": {"sleeping"}, "sleeps": _STUCK, "spins": {"stuck"}, "waits_for_child": {"sleeping"},
    "waits_for_server": {"sleeping"}, "reads_fifo": {*_STUCK, "storage_stall"}, "loader": {"data_stall"},
    "loader0": {"data_stall"}, "saves": {"storage_stall"}, "compiles": {"stuck"},
}  # fmt: skip
# What Python frames alone show, and C frames alone do not.
_NATIVE_KNOWS_LESS = {"loader", "loader0", "saves", "compiles", "spins"}
_KINDS = ("one", "one", "one", "one", "two", "nobody", "all_alike", "missing", "other_call", "forming")


class Folder(NamedTuple):
    """Files by name, and what is right."""

    kind: str
    tool: str
    way: str
    files: dict[str, str]
    culprits: tuple[int, ...]
    classes: frozenset[str]


@cache
def stacks_of(tool: str) -> dict[str, str]:
    """Return the stacks that a tool took, by the way in which the process hung."""
    parts = (STACKS / f"{tool}.txt").read_text().split("=== ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def draw(seed: int) -> Folder:
    """Draw a job and what was taken of it."""
    rng = random.Random(seed)  # noqa: S311  # seeds of a test
    kind, tool = rng.choice(_KINDS), rng.choice(TOOLS)
    world = rng.choice((4, 8, 8, 16, 32))
    crowd, way = rng.choice(CROWDS), rng.choice(sorted(ELSEWHERE))
    ways = [crowd] * world
    culprits: tuple[int, ...] = ()
    classes = frozenset(ELSEWHERE[way]) | (_STUCK if tool == "gdb" and way in _NATIVE_KNOWS_LESS else frozenset())
    if kind in ("one", "two"):
        culprits = tuple(sorted(rng.sample(range(world), 1 if kind == "one" or world < 8 else 2)))
        for rank in culprits:
            ways[rank] = way
    elif kind == "nobody":
        classes = frozenset({"silent", "unknown"})
    elif kind == "all_alike":
        ways = [way] * world
        classes = frozenset({*ELSEWHERE[way], "unknown", "idle", "sleeping"})
    elif kind == "missing":
        culprits, crowd = (rng.randrange(world - 1),), "dist_all_reduce"
        ways = [crowd] * world
        classes = frozenset({"not_joined"})
    elif kind == "other_call":
        ways, culprits = ["dist_all_reduce"] * world, (rng.randrange(world),)
        ways[culprits[0]] = way = rng.choice(("dist_barrier", "dist_object"))
        classes = frozenset({"collective_order"})
        if "native" in tool or tool == "gdb":  # C++ waits for each of them in the same function
            culprits = culprits if tool != "gdb" else ()
            classes = frozenset({"collective_order"} if tool != "gdb" else {"silent"})
    elif kind == "forming":
        ways, culprits = ["dist_rendezvous"] * world, (rng.randrange(world),)
        ways[culprits[0]] = way
    texts = {rank: stacks_of(tool)[one] for rank, one in enumerate(ways)}
    if kind == "missing":
        del texts[culprits[0]]
    files = rng.choice(_NAMES if tool != "py_spy_json" else _NAMES[:5])(rng, texts, world)
    return Folder(kind, tool, way, files, culprits, classes)


def _by_name(form: str) -> Callable[[random.Random, dict[int, str], int], dict[str, str]]:
    return lambda _, texts, __: {form.format(rank=rank): text for rank, text in texts.items()}


def _by_node(_: random.Random, texts: dict[int, str], world: int) -> dict[str, str]:
    per_node = 4
    if len(texts) < world:
        return {f"rank{rank}.txt": text for rank, text in texts.items()}
    return {f"node{rank // per_node}/gpu{rank % per_node}.txt": text for rank, text in texts.items()}


def _in_one_log(_: random.Random, texts: dict[int, str], __: int) -> dict[str, str]:
    """A merged log, as torchrun or a job's output has it."""
    lines = [f"[rank{rank}]: {line}" for rank, text in texts.items() for line in text.splitlines()]
    return {"job.out": "\n".join(["[2026-11-20] launching", *lines])}


def _behind_noise(rng: random.Random, texts: dict[int, str], _: int) -> dict[str, str]:
    """Each rank's own log: training, then the stack."""

    def noisy(text: str) -> str:
        steps = "\n".join(f"step {at} loss {rng.random():.3f}" for at in range(20))
        return f"{steps}\nTimeout (0:10:00)!\n{text}"

    return {f"attempt_0/{rank}/stderr.log": noisy(text) for rank, text in texts.items()}


_NAMES = (
    _by_name("rank{rank}.txt"),
    _by_name("stacks_rank_{rank:04d}.log"),
    _by_name("{rank}.json"),
    _by_name("pyspy-r{rank}.dump"),
    _by_node,
    _in_one_log,
    _behind_noise,
)
