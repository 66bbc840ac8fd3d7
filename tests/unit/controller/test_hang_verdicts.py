# SPDX-License-Identifier: Apache-2.0
"""From a silence and its evidence to a class and a name: one job for each class, and what must name no rank.

All jobs train in steps of 50 ms; patience for a step is 5 s, and silence has lasted 3 s unless a test says otherwise.
"""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from tests.fakes.hung_job import (
    ABSENT,
    POLICY,
    WAITING,
    everybody,
    judge_job,
    made_calls,
    one_absent,
    rank_view,
    said_of,
    stack_of,
)

HALF, NEARLY, FULL, DOUBLE, BUSY, PHASE = 2.5, 4.5, 5.0, 10.0, 60.0, 1800.0
COMPILING = ("wait (subprocess.py:1264)", "compile_fx (torch/_inductor/compile_fx.py:10)")
SLEEPS = ("in_syscall",)
LOOP = ("spin (train.py:40)", "main (train.py:90)")
LAYER = ("forward (torch/nn/modules/linear.py:125)", "evaluate (train.py:60)")


@pytest.mark.parametrize(("odd", "patience_s"), [("all_gather", HALF), ("all_reduce", POLICY.phase_patience_s)])
def test_a_declared_phase_excuses_no_contradiction(odd: str, patience_s: float) -> None:
    """A rank that saves while all others are in an all_reduce waits for ever; if all called the same, they may wait."""
    views = [rank_view(rank, phase="checkpoint" if rank == 3 else "other") for rank in range(4)]
    calls = {3: made_calls("all_reduce", "all_gather", odd)}
    evidence = [item for rank in range(4) for item in said_of(rank, calls.get(rank, WAITING))]

    judged = judge_job(views, evidence)

    assert judged.patience_s == patience_s
    if odd == "all_gather":
        assert (judged.verdict.fault, judged.verdict.culprits) == ("collective_order", (3,))


@pytest.mark.parametrize(
    ("fault", "patience_s", "view", "items"),
    [
        ("sleeping", NEARLY, {}, (ABSENT, stack_of(*SLEEPS, frames=("sleep (train.py:3)",)))),
        ("data_stall", NEARLY, {"phase": "data"}, (ABSENT, stack_of("in_data_loader", "in_syscall"))),
        ("data_stall", NEARLY, {}, (ABSENT, stack_of("in_data_loader"), stack_of("worker_stopped", kind="process"))),
        ("storage_stall", NEARLY, {}, (ABSENT, stack_of("in_storage", "in_syscall"))),
        ("storage_stall", NEARLY, {"state": "D"}, (ABSENT,)),
        ("storage_stall", NEARLY, {}, (ABSENT, stack_of("uninterruptible", kind="process"))),
        ("gil_held", NEARLY, {}, (ABSENT, stack_of("gil_held"))),
        ("gil_held", DOUBLE, {"busy": 1.0}, (ABSENT, stack_of("gil_held"))),
        ("frozen", HALF, {}, (ABSENT, stack_of("stopped", kind="process"))),
        ("stuck", DOUBLE, {"busy": 1.0}, (ABSENT, *3 * (stack_of("in_python", frames=LOOP),))),
        ("not_joined", NEARLY, {}, ()),
    ],
)
def test_a_rank_that_others_wait_for_is_named_by_what_it_does(
    fault: str, patience_s: float, view: dict[str, object], items: tuple[EvidenceItem, ...]
) -> None:
    """Its marks give the class, and with it how long silence must last; also when it gave no evidence at all."""
    found = one_absent(*items, **view)  # type: ignore[arg-type]  # fields of rank_view

    assert (found.verdict.fault, found.verdict.culprits) == (fault, (1,))
    assert found.verdict.nodes == ("node0",)
    assert found.verdict.confidence >= 0.9
    assert found.patience_s == patience_s
    assert "all_reduce #41" in found.verdict.reason
    assert "3 ranks wait" in found.verdict.reason
    assert found.verdict.otherwise


def test_a_held_lock_is_seen_without_any_answer() -> None:
    """The recorder's own thread is silent, and no stack was to be had."""
    found = one_absent(EvidenceItem("stacks", ok=False, marks=("no_answer",)), beat_age_s=3.0)

    assert (found.verdict.fault, found.verdict.culprits) == ("gil_held", (1,))


def test_a_recorder_that_ended_is_no_held_lock() -> None:
    """Python answered, so the lock is free, however old the last beat is."""
    assert one_absent(ABSENT, stack_of(*SLEEPS, frames=LOOP), beat_age_s=3.0).verdict.fault == "sleeping"


def test_the_missing_dump_of_the_culprit_hides_nothing() -> None:
    """Its heartbeat alone says that it has not come; that it gave no evidence is itself told."""
    found = one_absent(EvidenceItem("stacks", ok=False, marks=("no_answer",)))

    assert (found.verdict.fault, found.verdict.culprits) == ("not_joined", (1,))
    assert "no_answer" in [finding.name for finding in found.verdict.evidence]


def test_a_rank_of_which_nothing_at_all_is_known_is_missing() -> None:
    """No heartbeat tells its position, no evidence came: those who wait tell who is not there."""
    assert one_absent(known=False).verdict.culprits == (1,)


def test_several_culprits_are_all_named() -> None:
    """Two ranks of eight are missing, each for its own reason."""
    views = [rank_view(rank, waits=rank not in (2, 5)) for rank in range(8)]
    evidence = [item for rank in range(8) if rank not in (2, 5) for item in said_of(rank, WAITING)]
    evidence += said_of(2, ABSENT, stack_of("in_data_loader")) + said_of(5, ABSENT, stack_of("in_storage"))

    found = judge_job(views, evidence)

    assert found.verdict.culprits == (2, 5)
    assert found.verdict.nodes == ("node0", "node1")
    assert "rank 2: it waits for its data loader" in found.verdict.reason
    assert "rank 5: it waits for storage" in found.verdict.reason


def test_a_chain_of_groups_is_followed_to_its_root() -> None:
    """0 waits for 1 in a data parallel group, 1 for 3 in a tensor parallel one, 3 sleeps: 1 is a victim."""
    views = [rank_view(0), rank_view(1), rank_view(2), rank_view(3, waits=False)]
    past, inside = made_calls("all_reduce", last=7, done=True, group="dp"), made_calls("all_gather", last=5, group="tp")
    evidence = [
        *said_of(0, made_calls("all_reduce", last=8, group="dp")),
        *said_of(1, EvidenceItem("flight_recorder", ok=True, collectives=(*past.collectives, *inside.collectives))),
        *said_of(2, inside),
        *said_of(3, made_calls("all_gather", last=4, done=True, group="tp"), stack_of(*SLEEPS)),
    ]

    found = judge_job(views, evidence)

    assert (found.verdict.fault, found.verdict.culprits) == ("sleeping", (3,))


def test_a_skipped_collective_shifts_all_that_follow() -> None:
    """The culprit waits in what comes after the one that it left out, and the others where it should be."""
    steps = ("all_reduce", "all_gather", "broadcast") * 3
    right = made_calls(*steps, "all_reduce")
    odd = made_calls(*steps, "all_gather", "broadcast", last=42)

    found = everybody(odd=odd, right=right)

    assert (found.verdict.fault, found.verdict.culprits) == ("not_joined", (1,))
    assert "skipped all_reduce #41 of group 0" in found.verdict.reason
    assert found.patience_s == HALF


def test_a_rank_that_is_a_step_ahead_has_skipped_one() -> None:
    """It waits in its first wrong call: only the step tells leaving out from changing places."""
    right = made_calls("all_reduce", "all_gather", "all_reduce", "all_gather", "all_reduce")
    odd = made_calls("all_reduce", "all_gather", "all_reduce", "all_gather", "all_gather")

    assert everybody(odd=odd, right=right, ahead=1).verdict.fault == "not_joined"
    assert everybody(odd=odd, right=right, ahead=0).verdict.fault == "collective_order"


def test_two_swapped_collectives_are_an_order_fault() -> None:
    """Both are there, in the other order."""
    steps = ("all_reduce", "all_gather", "broadcast") * 3
    right = made_calls(*steps, "all_reduce")
    odd = made_calls(*steps, "all_gather", "all_reduce", last=42)

    found = everybody(odd=odd, right=right)

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (1,))
    assert "changed places" in found.verdict.reason
    assert found.patience_s == HALF


def test_another_function_without_any_history_is_an_order_fault() -> None:
    """All that is known is where each waits."""
    found = everybody(odd=made_calls("all_gather"), right=made_calls("all_reduce"))

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (1,))


@pytest.mark.parametrize(
    ("odd", "word"),
    [("all_reduce:[[16]]", "sizes [[16]]"), ("all_reduce::double", "dtype double")],
)
def test_other_sizes_or_types_are_a_mismatch(odd: str, word: str) -> None:
    """Same function, same number, other data: both are said."""
    found = everybody(odd=made_calls("all_reduce", "all_gather", odd))

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_mismatch", (1,))
    assert word in found.verdict.reason
    assert found.verdict.confidence >= 0.9
    assert found.patience_s == HALF


def test_other_bytes_are_a_mismatch_where_only_the_black_box_speaks() -> None:
    """It knows no sizes, but the bytes of the first tensor."""
    small = EvidenceItem("collectives", ok=True, collectives=(CollectiveFact("0", 41, "all_reduce", bytes_moved=32),))
    large = EvidenceItem("collectives", ok=True, collectives=(CollectiveFact("0", 41, "all_reduce", bytes_moved=64),))

    found = everybody(odd=large, right=small)

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_mismatch", (1,))


def test_sizes_that_may_differ_are_no_mismatch() -> None:
    """Each rank of an all_to_all brings as much as it has; uneven batches that were finished were all right too."""
    views = [rank_view(rank) for rank in range(4)]
    uneven = [item for rank in range(4) for item in said_of(rank, made_calls("all_reduce", f"all_to_all:[[{rank}]]"))]
    finished = [item for rank in range(4) for item in said_of(rank, made_calls(f"all_gather:[[{rank}]]", "all_reduce"))]

    for evidence in (uneven, finished):
        assert judge_job(views, evidence).verdict.culprits == ()


def test_of_two_ranks_their_history_tells_who_is_right() -> None:
    """There is no majority; a rank that made the same calls as before counts as one."""
    right = made_calls("all_reduce", "all_gather", "all_reduce", "all_gather", "all_reduce")
    odd = made_calls("all_reduce", "all_gather", "all_reduce", "all_gather", "all_reduce:[[16]]")

    for culprit in (0, 1):
        found = everybody(odd=odd, right=right, size=2, culprit=culprit)

        assert (found.verdict.fault, found.verdict.culprits) == ("collective_mismatch", (culprit,))
        assert found.verdict.confidence >= 0.9


def test_of_two_ranks_a_history_with_gaps_tells_who_is_right() -> None:
    """The first step after a checkpoint is like the one after the checkpoint before; one rank remembers that."""
    saved = ("all_gather:[[1]]:long", "all_gather:[[9]]:byte")
    before = made_calls(*saved, "all_reduce", last=10, done=True).collectives
    right = msgspec.structs.replace(now := made_calls(*saved, "all_reduce"), collectives=(*before, *now.collectives))
    odd = made_calls(*saved, "all_gather")

    for culprit in (0, 1):
        found = everybody(odd=odd, right=right, size=2, culprit=culprit)

        assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (culprit,))


def test_a_call_that_forms_a_communicator_is_in_the_black_box_only() -> None:
    """Three wait in a barrier of a new group, of which torch's recorder knows nothing yet; one never came to it."""
    views = [rank_view(rank, waits=rank != 1) for rank in range(4)]
    inside = made_calls("barrier", last=1, group="5", source="collectives")
    evidence = [item for rank in (0, 2, 3) for item in said_of(rank, inside, ABSENT, stack_of("in_collective"))]

    found = judge_job(views, [*evidence, *said_of(1, ABSENT, stack_of("in_syscall", frames=("_sleep (train.py:9)",)))])

    assert found.verdict.culprits == (1,)
    assert "0,2-3: barrier #1" in next(one.text for one in found.verdict.evidence if one.name == "places")


def test_of_two_ranks_without_history_both_are_named() -> None:
    """Low confidence, and the usual patience."""
    found = everybody(odd=made_calls("all_gather"), right=made_calls("all_reduce"), size=2)

    assert found.verdict.culprits == (0, 1)
    assert found.verdict.confidence <= 0.5
    assert found.patience_s == FULL


def test_a_group_that_one_rank_never_creates() -> None:
    """Most wait for the group to form, one has gone on to the next collective."""
    views = [rank_view(rank, waits=rank == 1) for rank in range(4)]
    evidence = [item for rank in (0, 2, 3) for item in said_of(rank, ABSENT, stack_of("in_rendezvous", "in_syscall"))]

    found = judge_job(views, [*evidence, *said_of(1, WAITING)])

    assert (found.verdict.fault, found.verdict.culprits) == ("group_never_formed", (1,))
    assert found.patience_s == HALF


def test_a_group_that_only_one_rank_creates() -> None:
    """The majority decides who is right."""
    views = [rank_view(rank, waits=rank != 1) for rank in range(4)]
    evidence = [item for rank in (0, 2, 3) for item in said_of(rank, WAITING)]

    found = judge_job(views, [*evidence, *said_of(1, ABSENT, stack_of("in_rendezvous"))])

    assert (found.verdict.fault, found.verdict.culprits) == ("group_never_formed", (1,))


def test_a_rendezvous_that_one_rank_never_joins() -> None:
    """Before the first step, at the end of the patience for starting up."""
    views = [rank_view(rank, known=False, seen=0, silent_s=2000.0, phase="startup") for rank in range(4)]
    evidence = [item for rank in (0, 2, 3) for item in said_of(rank, stack_of("in_rendezvous"))]

    found = judge_job(views, [*evidence, *said_of(1, stack_of(*SLEEPS))])

    assert (found.verdict.fault, found.verdict.culprits) == ("group_never_formed", (1,))


def test_ranks_that_nobody_reports_are_missing_in_the_rendezvous() -> None:
    """Seven of eight wait; of the eighth nothing was ever heard."""
    views = [rank_view(rank, known=False, seen=0, silent_s=2000.0) for rank in range(7)]
    evidence = [item for rank in range(7) for item in said_of(rank, stack_of("in_rendezvous"))]

    assert judge_job(views, evidence, world_size=8).verdict.culprits == (7,)


def test_all_in_the_same_collective_names_nobody() -> None:
    """The network or a library: low confidence, and twice the patience."""
    found = everybody(odd=WAITING)

    assert (found.verdict.fault, found.verdict.culprits) == ("silent", ())
    assert found.verdict.confidence < 0.5
    assert found.patience_s == DOUBLE


def test_a_circle_of_groups_is_closed_by_the_few() -> None:
    """Three wait in group a for rank 3, which waits in group b for them."""
    views = [rank_view(rank) for rank in range(4)]

    def facts(a: int, b: int, inside: str) -> EvidenceItem:
        pair = (
            CollectiveFact("a", a, "all_reduce", done=inside != "a"),
            CollectiveFact("b", b, "all_reduce", done=inside != "b"),
        )
        return EvidenceItem("flight_recorder", ok=True, collectives=pair)

    evidence = [item for rank in range(3) for item in said_of(rank, facts(5, 4, "a"))] + said_of(3, facts(4, 5, "b"))

    found = judge_job(views, evidence)

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (3,))


def test_one_rank_that_does_not_come_out_of_a_finished_collective() -> None:
    """The others are further; it is named, but not for sure."""
    views = [rank_view(rank) for rank in range(4)]
    evidence = [item for rank in (0, 1, 2) for item in said_of(rank, WAITING)] + said_of(
        3, made_calls("all_reduce", "all_gather", last=40)
    )

    found = judge_job(views, evidence)

    assert (found.verdict.fault, found.verdict.culprits) == ("silent", (3,))
    assert found.verdict.confidence < 0.9


def test_ranks_that_all_sleep_are_idle() -> None:
    """No rank waits, none works: none is named."""
    views = [rank_view(rank, waits=False, silent_s=61.0) for rank in range(4)]

    found = judge_job(views, [item for rank in range(4) for item in said_of(rank, ABSENT, stack_of(*SLEEPS))])

    assert (found.verdict.fault, found.verdict.culprits) == ("idle", ())


def test_a_single_rank_is_judged_by_what_it_does() -> None:
    """No rank waits for it, and it still makes no step."""
    found = judge_job([rank_view(0, waits=False, silent_s=61.0)], said_of(0, stack_of("in_data_loader")))

    assert (found.verdict.fault, found.verdict.culprits) == ("data_stall", (0,))
    assert found.patience_s == BUSY


def test_collectives_that_go_on_are_slow_not_stuck() -> None:
    """Between two looks one more has ended, whatever the heartbeats say."""
    found = one_absent(ABSENT, made_calls("all_gather", "all_reduce", last=41))

    assert found.verdict.fault == "slow"


def test_a_rank_claimed_twice() -> None:
    """Two nodes speak of rank 1."""
    views = [rank_view(0), rank_view(1, waits=False, node="a"), rank_view(1, waits=False, node="b")]

    found = judge_job(views, [])

    assert (found.verdict.fault, found.verdict.culprits) == ("duplicate_rank", (1,))
    assert found.verdict.nodes == ("a", "b")


def test_a_rank_that_ended_stays_the_culprit() -> None:
    """The watchdog's word: it left, and the others wait for it."""
    gone = rank_view(1, waits=False, silent_s=9.0, state="")
    assert gone.report.progress is not None
    progress = msgspec.structs.replace(gone.report.progress, state="exited")
    gone = gone._replace(report=msgspec.structs.replace(gone.report, progress=progress))

    found = judge_job([rank_view(0, silent_s=6.0), gone], said_of(0, WAITING))

    assert (found.verdict.fault, found.verdict.culprits) == ("exited_early", (1,))


def test_without_any_evidence_the_heartbeats_speak() -> None:
    """No rank answered; the absent one is found all the same."""
    found = judge_job([rank_view(rank, waits=rank != 1) for rank in range(4)], [])

    assert (found.verdict.fault, found.verdict.culprits) == ("not_joined", (1,))


def test_the_verdict_shows_where_everybody_is() -> None:
    """One line for all ranks, the crowd first."""
    found = one_absent(ABSENT, stack_of("in_data_loader"), size=8, culprit=3)

    assert "0-2,4-7: all_reduce #41; 3: DataLoader" in [finding.text for finding in found.verdict.evidence]


def test_a_group_that_nccl_forms_in_its_first_collective_is_told_by_what_is_not_recorded() -> None:
    """Three ranks are inside a call in two looks (one may fall before its record), the fourth is in the old group's."""
    inside = stack_of("in_collective", frames=("all_gather (torch/distributed/distributed_c10d.py:4287)",))
    views = [rank_view(rank, waits=rank == 1) for rank in range(4)]

    def judged(looks: int) -> Verdict:
        evidence = [item for rank in (0, 2, 3) for item in said_of(rank, ABSENT, *looks * (inside,))]
        return judge_job(views, [*evidence, *said_of(1, WAITING, stack_of("in_python"))], 4).verdict

    assert judged(1).fault != "group_never_formed"
    assert (judged(2).fault, judged(2).culprits) == ("group_never_formed", (1,))


# What must not end a job early.


def test_a_rank_that_is_somewhere_else_at_each_look_works() -> None:
    """An evaluation that was not declared: its stack changes, so it gets 60 s, idle or busy."""
    for busy in (0.0, 1.0):
        found = one_absent(ABSENT, stack_of(frames=LOOP), stack_of(frames=LAYER), busy=busy)

        assert found.patience_s == BUSY


def test_a_busy_rank_inside_torch_gets_its_time() -> None:
    """One layer evaluated for a minute stands in one line; that is no proof of being stuck."""
    found = one_absent(ABSENT, *5 * (stack_of(frames=LAYER),), busy=1.0)

    assert found.patience_s == BUSY


def test_two_equal_looks_at_a_busy_rank_are_not_enough() -> None:
    """By chance a loop is at the same place twice."""
    assert one_absent(ABSENT, *2 * (stack_of(frames=LOOP),), busy=1.0).patience_s == BUSY


@pytest.mark.parametrize(
    ("wandered", "ago_s", "busy", "patience_s"),
    [
        (3, 4.0, 1.0, PHASE),  # an evaluation on a GPU: nearly always in one line, now and then in others
        (40, 30.0, 1.0, PHASE),  # a pause of 30 s, after it has wandered for 70
        (40, 40.0, 1.0, DOUBLE),  # a longer one: it is stuck where it is
        (2, 4.0, 1.0, DOUBLE),  # a signal came by
        (40, 1.0, 0.0, NEARLY),  # it sleeps and looks now and then whether it may go on: a loop of retries
    ],
)
def test_a_busy_rank_that_wanders_works_however_long(
    wandered: int, ago_s: float, busy: float, patience_s: float
) -> None:
    """All looks of the agent saw the same line; what the recorder saw in between decides."""
    looks = 5 * (stack_of(*(() if busy else SLEEPS), frames=LOOP),)

    found = one_absent(ABSENT, *looks, busy=busy, silent_s=100.0, wandered=wandered, wandered_ago_s=ago_s)

    assert (found.patience_s, found.is_proven) == (patience_s, False)


def test_a_rank_that_compiles_works_even_while_it_sleeps() -> None:
    """Its compiler runs in another process, for minutes; the rank itself sleeps in a system call."""
    found = one_absent(ABSENT, *3 * (stack_of(*SLEEPS, frames=COMPILING),))

    assert (found.patience_s, found.is_proven) == (PHASE, False)


def test_a_job_that_compiles_everywhere_gets_the_same_time() -> None:
    """No rank waits for another: three wait for their compilers, one for the lock of a neighbour's."""
    locked = ("acquire (filelock/_api.py:1236)", "load (torch/_inductor/codecache.py:20)")
    evidence = [said_of(rank, stack_of(*SLEEPS, frames=locked if rank == 2 else COMPILING)) for rank in range(4)]

    views = [rank_view(rank, waits=False, silent_s=40.0) for rank in range(4)]

    found = judge_job(views, [item for told in evidence for item in told])

    assert (found.verdict.fault, found.verdict.culprits) == ("stuck", (0, 1, 2, 3))
    assert (found.patience_s, found.is_proven) == (PHASE, False)


@given(
    st.integers(3, 12), st.randoms(use_true_random=False), st.sampled_from(["absent", "mismatch", "rendezvous", "both"])
)
def test_the_order_of_ranks_never_changes_who_is_named(size: int, chance: random.Random, kind: str) -> None:
    """However ranks and their evidence are shuffled, the same are named, and none that waits where most wait."""
    culprits = set(chance.sample(range(size), max(1, (size - 1) // 3)))
    views, evidence = [], []
    for rank in range(size):
        bad = rank in culprits
        skips = bad and (kind == "absent" or (kind == "both" and rank % 2 == 0))
        views.append(rank_view(rank, waits=not skips and not (bad and kind == "rendezvous")))
        if skips:
            evidence += said_of(rank, ABSENT, stack_of(*SLEEPS)) if chance.random() < 0.7 else []
        elif bad and kind == "rendezvous":
            evidence += said_of(rank, ABSENT, stack_of("in_rendezvous"))
        elif bad:
            evidence += said_of(rank, made_calls("all_reduce", "all_gather", "all_reduce:[[9]]"))
        else:
            evidence += said_of(rank, WAITING)
    first = judge_job(views, evidence)
    chance.shuffle(views)
    chance.shuffle(evidence)

    second = judge_job(views, evidence)

    assert set(first.verdict.culprits) == culprits
    assert (first.verdict.fault, first.verdict.culprits) == (second.verdict.fault, second.verdict.culprits)
