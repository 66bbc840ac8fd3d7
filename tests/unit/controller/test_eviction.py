# SPDX-License-Identifier: Apache-2.0
"""When a job goes on without a node, and when the node may come back."""

import pytest

from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import Decision, Eviction, Question, Restart
from megascale_ops.controller.policy.eviction import LONGEST_S, evict, is_evicted
from megascale_ops.controller.recovery.formation import form
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy import JobPolicy

NOW_S = 100_000.0
BEFORE = Restart(NOW_S - 600.0, "killed", node="b")


def _ask(fault: str = "killed", *, node: str = "b", **facts: object) -> Decision:
    verdict = Verdict(fault=fault, reason="", confidence=0.9, culprits=(3,), nodes=(node,) if node else ())
    known: dict[str, object] = {
        "kind": "end",
        "wall_s": NOW_S,
        "verdict": verdict,
        "policy": JobPolicy(),
        "restarts": (BEFORE,),
        "members": 4,
        "min_nodes": 4,
        "spares": 1,
    }
    return answer(Question(**{**known, **facts}))  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize("fault", sorted(name for name, row in FAULTS.items() if row.is_machines))
def test_twice_on_one_node_and_on_no_other_evicts(fault: str) -> None:
    """The second fault of a node within an hour, with a spare waiting: the job goes on without it."""
    decision = _ask(fault)

    assert (decision.action, decision.nodes, decision.rule) == ("evict", ("b",), "spare")
    assert "2 faults of b within an hour" in decision.reason


@pytest.mark.parametrize(
    "facts",
    [
        {"restarts": ()},
        {"restarts": (Restart(NOW_S - 4_000.0, "killed", node="b"),)},
        {"restarts": (BEFORE, Restart(NOW_S - 300.0, "segfault", node="c"))},
        {"restarts": (Restart(NOW_S - 600.0, "killed", node="c"),)},
        {"restarts": (Restart(NOW_S - 600.0, "exception", node="b"),)},
        {"fault": "exception"},
        {"node": ""},
        {"policy": JobPolicy(actions={"killed": "restart"})},
    ],
    ids=["first", "long ago", "another too", "only another", "the script's", "now the script's", "no node", "own rule"],
)
def test_bad_luck_evicts_nobody(facts: dict[str, object]) -> None:
    """Faults that are rare, spread, or the script's own point to no machine: all are restarted."""
    decision = _ask(**facts)  # type: ignore[arg-type]  # fields

    assert (decision.action, decision.nodes) == ("restart", ())


def test_an_elastic_job_shrinks() -> None:
    """Without a spare, a job that may run on fewer nodes does."""
    assert _ask(spares=0, min_nodes=3).rule == "shrink"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"spares": 0}, "no spare waits, and 3 nodes without b are fewer than the 4 needed"),
        ({"spares": 0, "members": 1, "min_nodes": 1}, "b is the only node"),
        (
            {"evictions": (Eviction("x", NOW_S - 60.0, NOW_S), Eviction("y", NOW_S - 50.0, NOW_S))},
            "2 evictions in the last hour use up the budget of 2",
        ),
    ],
    ids=["nobody to spare", "alone", "budget"],
)
def test_a_node_that_cannot_be_spared_is_restarted_with_the_others(facts: dict[str, object], why: str) -> None:
    """Rather with a bad node than not at all; the reason has the numbers."""
    decision = _ask(**facts)  # type: ignore[arg-type]  # fields

    assert (decision.action, decision.rule) == ("restart", "no_room")
    assert why in decision.reason


def test_the_budget_of_evictions_forgets() -> None:
    """Evictions older than an hour cost nothing."""
    old = (Eviction("x", NOW_S - 4_000.0, NOW_S), Eviction("y", NOW_S - 3_700.0, NOW_S))

    assert _ask(evictions=old).action == "evict"


def test_a_job_may_evict_at_the_first_fault() -> None:
    """An action of the job's own needs no second time."""
    assert _ask("frozen", restarts=(), policy=JobPolicy(actions={"frozen": "evict"})).action == "evict"


def test_each_time_out_is_twice_as_long() -> None:
    """10 minutes, 20, 40, up to a day; other nodes do not count."""
    evictions: tuple[Eviction, ...] = ()

    for _ in range(12):
        evictions = evict(evictions, ["b"], JobPolicy(), NOW_S, "why")
    evictions = evict(evictions, ["c"], JobPolicy(), NOW_S, "why")
    lengths = [one.until_wall_s - one.wall_s for one in evictions]

    assert lengths[:3] == [600.0, 1200.0, 2400.0]
    assert lengths[-2:] == [LONGEST_S, 600.0]


def test_an_eviction_ends() -> None:
    """Until its time is over a node is out, then it is a node like any other; so are all others all the time."""
    evictions = evict((), ["b"], JobPolicy(eviction_s=600.0), NOW_S, "why")

    assert is_evicted(evictions, "b", NOW_S + 599.0) is not None
    assert is_evicted(evictions, "b", NOW_S + 601.0) is None
    assert is_evicted(evictions, "a", NOW_S + 1.0) is None


def _form(joined: str, *, before: str = "abc", alive: str = "abc", **facts: int) -> tuple[str, ...]:
    return form(
        dict.fromkeys(joined, 100.0),
        min_nodes=facts.get("min_nodes", 2),
        max_nodes=facts.get("max_nodes", 3),
        before=tuple(before),
        alive=tuple(alive),
        now_s=float(facts.get("now_s", 101)),
        waiting_since_s=100.0,
        last_call_s=2.0,
        straggler_s=15.0,
        evicted=("c",),
    ).nodes


def test_a_round_is_formed_without_the_evicted_node() -> None:
    """The others suffice, with a spare in its place or without; the node that is out is not waited for."""
    assert _form("abcd") == ("a", "b", "d")
    assert _form("abc") == ("a", "b")
    assert _form("ab") == ("a", "b")


def test_an_evicted_node_is_taken_back_rather_than_no_round() -> None:
    """When the others are too few, and none of them is still on its way."""
    assert _form("ac", alive="ac") == ("a", "c")
    assert _form("c", before="c", alive="c", min_nodes=1, max_nodes=1) == ("c",)


def test_a_living_member_is_preferred_to_an_evicted_node() -> None:
    """Who was in the round and still lives is waited for before an evicted node is taken back."""
    assert _form("dc", max_nodes=2) == ()
    assert _form("dc", max_nodes=2, now_s=120) == ("c", "d")
    assert _form("adc", max_nodes=2) == ("a", "d")


def _cut(*nodes: str, before: tuple[str, ...], **facts: object) -> Decision:
    verdict = Verdict(fault="link_cut", reason="", confidence=0.9, nodes=nodes)
    return _ask(verdict=verdict, restarts=(), cut_before=before, first_node="a", **facts)


@pytest.mark.parametrize(
    ("now", "before", "goes"),
    [
        (("a", "b"), ("a", "b"), "b"),
        (("b", "c"), ("b", "c"), "c"),
        (("a", "b"), ("b",), "b"),
        (("a",), ("a", "b"), "a"),
    ],
    ids=["not rank 0's", "either", "named before", "named now"],
)
def test_of_nodes_that_stay_cut_off_one_goes(now: tuple[str, ...], before: tuple[str, ...], goes: str) -> None:
    """Two rounds in a row and no step between: the one that is named, else one that does not hold rank 0."""
    decision = _cut(*now, before=before)

    assert (decision.action, decision.nodes, decision.rule) == ("evict", (goes,), "spare")
    assert "a restart did not help" in decision.reason


@pytest.mark.parametrize(
    ("before", "facts", "rule"),
    [
        ((), {}, "table"),
        (("c", "d"), {}, "table"),
        (("a", "b"), {"policy": JobPolicy(actions={"link_cut": "restart"})}, "table"),
        (("a", "b"), {"policy": JobPolicy(evictions_per_hour=0)}, "no_room"),
        (("a", "b"), {"spares": 0}, "no_room"),
    ],
    ids=["first time, or steps between", "others", "own rule", "budget", "nobody to spare"],
)
def test_a_cut_that_may_have_healed_evicts_nobody(before: tuple[str, ...], facts: dict[str, object], rule: str) -> None:
    """One restart is tried first, and the limits of evictions hold as ever."""
    decision = _cut("a", "b", before=before, **facts)

    assert (decision.action, decision.nodes, decision.rule) == ("restart", (), rule)
