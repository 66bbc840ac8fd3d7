# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN401, ANN201
# (kernels: their types are Triton's to infer; who stands for another takes its arguments)
"""Launches of a layer that follow each other, and tokens that leave while it routes: right, ordered, and undone."""

from copy import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import EPOCH, MET, layout  # noqa: E402
from megascale_kernels.device.signals import follow_launch  # noqa: E402
from megascale_kernels.emulate import RACE, Launch, World  # noqa: E402
from megascale_kernels.emulate.errors import EmulationError  # noqa: E402
from megascale_kernels.moe.kernels import dispatch_kernel, routing  # noqa: E402

from tests.fakes.driven_layers import driven  # noqa: E402
from tests.fakes.moe_cases import SMALL, Layer  # noqa: E402
from tests.fakes.moe_layers import Ran  # noqa: E402
from tests.matrix import wide  # noqa: E402

FOLLOWING = SMALL._replace(follows=True, early=True)
LARGE = 1 << 16
CASES = {
    "two ranks": Layer((19, 17), config=FOLLOWING),
    "no token leaves its rank": Layer((20, 15), 2, 2, routing="ours alone", config=FOLLOWING),
    "a rank without a token": Layer((0, 17), 1, 2, config=FOLLOWING),
    "four ranks": Layer((6, 17, 0, 9), 2, 2, 64, 16, "dropped", FOLLOWING._replace(splits=3)),
}


def kinds(done: Ran) -> set[str]:
    """The kinds of findings."""
    return {finding.kind for finding in done.ranks.world.findings}


# Each case once, and the smallest with either schedule.
KEPT = (
    ("two ranks", 0),
    ("two ranks", 1),
    ("no token leaves its rank", 2),
    ("a rank without a token", 1),
    ("four ranks", 0),
)


@pytest.mark.parametrize(("name", "seed"), wide([(name, seed) for name in CASES for seed in range(3)], keep=KEPT))
def test_tokens_that_leave_early_arrive_in_order(name: str, seed: int) -> None:
    """Three layers in a row whose tokens are overwritten behind each: right, nothing unordered, no event between."""
    done = driven(CASES[name], launches=3, seed=seed, data_bytes=LARGE, schedule=("random", "eager")[seed % 2])

    assert not any(done.ranks.faults())
    assert done.ranks.world.findings == ()
    assert done.worst <= 1
    for workspace in done.ranks.workspaces:
        route, dispatch, combine = (made for made, _, _ in workspace.made[:3])
        assert dispatch.copies
        assert not route.copies
        assert not combine.copies
        assert all(not join for _, join, _ in workspace.made)
        assert all(made.follows for made, _, _ in workspace.made)
        assert [made.gate != 0 for made, _, _ in workspace.made[:3]] == [False, True, False]


def test_a_straggler_is_waited_for_by_copies_too() -> None:
    """A rank a hundred times slower: its slots are written when it has begun to route, not before."""
    done = driven(CASES["two ranks"], launches=3, stragglers={1: 100.0}, data_bytes=LARGE, schedule="round_robin")

    assert done.ranks.world.findings == ()
    assert done.worst <= 1


def test_without_it_copies_begin_behind_the_routing_and_are_joined() -> None:
    """Control: by events, and no kernel that follows."""
    done = driven(CASES["two ranks"]._replace(config=SMALL), launches=2, data_bytes=LARGE)

    assert done.ranks.world.findings == ()
    assert done.worst <= 1
    for workspace in done.ranks.workspaces:
        assert [join for _, join, _ in workspace.made] == [False, True, False] * 2
        assert not any(made.follows or made.gate or made.told for made, _, _ in workspace.made)


def test_copies_wait_for_the_stream_where_the_launch_before_was_another() -> None:
    """A launch between routing and products has taken the slot's turn: what the gate tells is not what they need."""

    def in_between(plan: Any) -> None:
        parts = plan.parts

        def more(*given: Any) -> list[Any]:
            other = copy(plan.route)  # as good as any launch that tells nothing to copies
            other.opens = False
            route, *rest = parts(*given)
            return [route, lambda: plan.launch(other, given[1], given[2], given[5]), *rest]

        plan.parts = more

    done = driven(CASES["two ranks"], launches=2, data_bytes=LARGE, between=in_between)

    assert [behind for made, _, behind in done.ranks.workspaces[0].made if made.copies] == [True, True]
    assert done.ranks.world.findings == ()
    assert done.worst <= 1


def test_what_tells_copies_to_begin_is_the_routing_s_number() -> None:
    """One word, which each routing sets to its own number."""
    done = driven(CASES["two ranks"], launches=2, data_bytes=LARGE)

    for words in done.ranks.world.words:
        assert [int(words[EPOCH.value]), int(words[MET.value])] == [6, 4]


@triton.jit
def at_once(channel, epoch):
    """`routing.let_copies_begin` that asks no peer."""
    tl.atomic_xchg(channel.control + MET, epoch, sem="release", scope="sys")


@triton.jit
def never_mind(channel, counted):
    """`dispatch_kernel.await_own_copies` that does not."""


def test_copies_that_no_peer_allowed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: written into a slot that a peer still reads."""
    monkeypatch.setattr(routing, "let_copies_begin", at_once)

    assert any(RACE in kinds(driven(CASES["two ranks"], launches=3, seed=seed, data_bytes=LARGE)) for seed in range(3))


def test_copies_that_nobody_waits_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: of tokens that are overwritten meanwhile."""
    monkeypatch.setattr(dispatch_kernel, "await_own_copies", never_mind)

    assert RACE in kinds(driven(CASES["no token leaves its rank"], launches=2, data_bytes=LARGE))


def test_a_rank_that_does_not_come_holds_no_copy_for_ever() -> None:
    """A stream waits without a deadline, so a routing that gives up lets it go: all ends, and the rank is named."""
    drops = {"left": 99}

    def drop(notify) -> bool:
        lost = notify.source == 1 and notify.stamp >> 12 == 1 and drops["left"] > 0
        drops["left"] -= lost
        return bool(lost)

    done = driven(CASES["two ranks"], launches=1, drop=drop, data_bytes=LARGE)

    assert done.ranks.faults()[0]["peer"] == 1
    assert int(done.ranks.world.words[0][MET.value]) == 1


@triton.jit
def follows_first(word_ptr) -> None:
    """Waits for the launch before, then reads what that wrote."""
    follow_launch()
    tl.store(word_ptr + 1, tl.load(word_ptr))


@triton.jit
def reads_first(word_ptr) -> None:
    """Reads what the launch before may still write."""
    value = tl.load(word_ptr)
    follow_launch()
    tl.store(word_ptr + 1, value)


def test_a_kernel_that_touches_memory_before_it_follows_is_refused() -> None:
    """By the emulator, which runs launches one after the other and so would see nothing of it."""
    words = torch.tensor([7, 0], dtype=torch.int32)
    World(layout(1, 1, 64)).launch([Launch(0, follows_first, 1, (words,))])
    assert words.tolist() == [7, 7]

    with pytest.raises(EmulationError, match="1 accesses to memory come before the wait for the launch before"):
        World(layout(1, 1, 64)).launch([Launch(0, reads_first, 1, (words,))])
