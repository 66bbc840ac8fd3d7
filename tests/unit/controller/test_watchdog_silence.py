# SPDX-License-Identifier: Apache-2.0
"""Who is silent, who is frozen, who is only slow: patience without waiting."""

import msgspec
import pytest

from megascale_ops.diagnosis.hangs.lost_nodes import NodeSigns, judge_nodes
from megascale_ops.diagnosis.hangs.patience import patience_s
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.diagnosis.watchdog import judge, looks_odd
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankError, RankReport

# Nothing is granted to absentees; what they get otherwise has tests of its own.
POLICY = JobPolicy(absent_patience_s=0.0)
INSIDE = CollectivePosition(9, 8, "all_reduce")
OUTSIDE = CollectivePosition(8, 8, "all_reduce")
NO_AGE = float("inf")


def _rank(
    rank: int,
    silent_s: float,
    collective: CollectivePosition | None = OUTSIDE,
    *,
    phase: str = "forward",
    phase_s: float = 0.0,
    state: str = "S",
    stopped_s: float = 0.0,
    busy: float = 0.0,
    seen: int = 100,
    p50_s: float = 0.05,
    p99_s: float = 0.06,
    box: str = "running",
    has_box: bool = True,
    heard_age_s: float = 0.0,
    error: RankError | None = None,
) -> RankView:
    progress = Progress(
        state=box,
        step=seen - 1,
        steps_seen=seen,
        phase=phase,
        moved_mono_s=100.0 - silent_s,
        beat_mono_s=100.0,
        step_p50_s=p50_s,
        step_p99_s=p99_s,
    )
    report = RankReport(
        rank=rank,
        local_rank=rank,
        pid=50 + rank,
        round=1,
        progress=progress if has_box else None,
        collective=collective,
        process=ProcessReading(state=state, cpu_busy=busy),
        error=error,
    )
    return RankView("node", report, silent_s if has_box else 0.0, stopped_s, phase_s, heard_age_s)


def _judge(*ranks: RankView, policy: JobPolicy = POLICY) -> Suspicion | None:
    return judge(ranks, policy, 1e6)


def test_ranks_that_move_are_left_alone() -> None:
    """No rank silent, none suspected."""
    assert _judge(_rank(0, 0.1), _rank(1, 0.2)) is None


def test_the_rank_that_the_others_wait_for_is_to_blame() -> None:
    """Victims wait inside the collective, the culprit never arrived."""
    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 6.0, OUTSIDE), _rank(2, 6.0, INSIDE))

    assert found is not None
    assert found.lost
    assert (found.verdict.fault, found.verdict.culprits) == ("silent", (1,))
    assert found.verdict.since_wall_s == 1e6 - 6.0
    assert "6.0 s" in found.verdict.reason
    assert "2 of 3 ranks wait" in found.verdict.reason


def test_half_the_patience_makes_a_suspect() -> None:
    """Suspect first, lost second."""
    found = _judge(_rank(0, 3.0, INSIDE), _rank(1, 3.0, OUTSIDE))

    assert found is not None
    assert not found.lost
    waits = [one.text for one in found.verdict.evidence if one.name == "others_wait"]
    assert [text.startswith("1 rank waits in a collective") for text in waits] == [True]


def test_among_waiting_ranks_the_furthest_behind_is_to_blame() -> None:
    """A rank that waits in an earlier collective than the others skipped or swapped one."""
    behind = CollectivePosition(7, 6, INSIDE.name)

    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 6.0, behind), _rank(2, 6.0, INSIDE))

    assert found is not None
    assert found.verdict.culprits == (1,)


def test_when_all_wait_in_the_same_collective_nobody_stands_out() -> None:
    """The verdict names all of them with low confidence and says why."""
    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 6.0, INSIDE))

    assert found is not None
    assert found.verdict.confidence < 0.5
    assert "network" in found.verdict.reason


def test_numbers_of_different_groups_are_not_compared() -> None:
    """Collective 5 of a tensor parallel group is not behind number 9 of another: each group counts for itself."""
    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 6.0, CollectivePosition(5, 4, "pg tp")), _rank(2, 6.0, INSIDE))

    assert found is not None
    assert found.verdict.culprits == (0, 1, 2)
    assert found.verdict.confidence < 0.5
    assert "all 3 ranks wait in collectives of 2 groups" in found.verdict.reason


def test_patience_grows_with_the_step() -> None:
    """20 x p99 with a floor of 5 s."""
    assert patience_s(_rank(0, 0).report, POLICY) == 5.0
    assert patience_s(_rank(0, 0, p50_s=0.9, p99_s=1.0).report, POLICY) == 20.0


def test_one_slow_first_step_does_not_set_the_patience() -> None:
    """A first step of a minute among 50 ms steps costs two minutes of patience, not twenty."""
    assert patience_s(_rank(0, 0, p50_s=6.0, p99_s=6.5).report, POLICY) == 36.5  # not 20 times as long
    assert patience_s(_rank(0, 0, p50_s=6.0, p99_s=6.5).report, JobPolicy(silence_extra_s=1000.0)) == 130.0
    assert patience_s(_rank(0, 0, p50_s=0.05, p99_s=60.0).report, POLICY) == 120.0


def test_before_five_steps_the_start_up_patience_counts() -> None:
    """Compilers and caches may take their time; ranks that wait in collectives are looked at all the same."""
    found = _judge(_rank(0, 600.0, INSIDE, seen=1), _rank(1, 600.0, OUTSIDE, seen=1))
    late = _judge(*[_rank(i, 1900.0, INSIDE if i else OUTSIDE, seen=0) for i in range(2)])

    assert _judge(_rank(0, 600.0, seen=1), _rank(1, 600.0, seen=1)) is None
    assert _judge(_rank(0, 9.0, INSIDE, seen=1), _rank(1, 9.0, OUTSIDE, seen=1)) is None
    assert found is not None
    assert (found.lost, found.held, found.patience_s) == (False, True, 1800.0)
    assert late is not None
    assert late.lost


@pytest.mark.parametrize("phase", ["checkpoint", "eval", "export_to_onnx"])
def test_a_declared_phase_excuses_the_whole_job(phase: str) -> None:
    """While one rank saves, the others wait for it: no rank is suspected, up to phase_patience_s."""
    others = _rank(0, 60.0, INSIDE)

    assert _judge(others, _rank(1, 60.0, phase=phase, phase_s=60.0)) is None
    assert _judge(_rank(0, 1900.0, INSIDE), _rank(1, 1900.0, phase=phase, phase_s=1900.0)) is not None


@pytest.mark.parametrize("phase", ["checkpoint", "eval"])
def test_a_declared_phase_in_which_all_wait_is_looked_at(phase: str) -> None:
    """No rank is left to come out of it: worth a look, but not lost before the phase has used up its time."""
    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 6.0, INSIDE, phase=phase, phase_s=6.0))

    assert found is not None
    assert (found.lost, found.held, found.excused) == (False, True, True)
    assert (found.base_s, found.patience_s) == (5.0, POLICY.phase_patience_s)
    assert _judge(_rank(0, 2.0, INSIDE), _rank(1, 2.0, INSIDE, phase=phase, phase_s=2.0)) is None


def test_a_busy_rank_outside_collectives_gets_more() -> None:
    """Who burns CPU may be evaluating or compiling: suspected early, so that it is looked at, lost after 60 s."""
    early = _judge(_rank(0, 29.0, INSIDE), _rank(1, 29.0, busy=1.0))
    late = _judge(_rank(0, 61.0, INSIDE), _rank(1, 61.0, busy=1.0))

    assert early is not None
    assert late is not None
    assert early.held
    assert (early.lost, late.lost) == (False, True)
    assert (early.base_s, early.patience_s) == (5.0, 60.0)


def test_only_the_time_that_others_have_waited_counts() -> None:
    """All compiled for half a minute; the first to end has waited for 2 s, whether the others sleep or compute."""
    for busy in (0.0, 1.0):
        assert _judge(_rank(0, 2.0, INSIDE), _rank(1, 30.0, busy=busy), _rank(2, 30.0, busy=busy)) is None

    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 30.0), _rank(2, 30.0))
    assert found is not None
    assert found.age_s == 6.0


def test_a_rank_that_a_debugger_holds_is_excused() -> None:
    """Declared as a phase, state T is on purpose; any other phase excuses no stopped process."""
    for phase in ("debug", "debugger"):
        assert _judge(_rank(0, 8.0, INSIDE), _rank(1, 8.0, phase=phase, phase_s=9.0, state="T", stopped_s=8.0)) is None
    for phase in ("forward", "eval"):
        assert _judge(_rank(0, 8.0, INSIDE), _rank(1, 8.0, phase=phase, phase_s=9.0, state="T", stopped_s=8.0))


def test_a_rank_that_is_traced_is_not_frozen() -> None:
    """A debugger that is attached shows as t, not as T."""
    assert _judge(_rank(0, 0.1), _rank(1, 2.0, state="t")) is None


def test_a_rendezvous_before_the_first_step_ends_with_the_patience_for_starting() -> None:
    """Positions of -1 are no collectives: no rank is seen to be busy, so it is not stretched sixfold."""
    nowhere = CollectivePosition()
    policy = JobPolicy(startup_patience_s=8.0)

    found = _judge(*[_rank(rank, 9.0, nowhere, seen=0) for rank in range(2)], policy=policy)

    assert found is not None
    assert found.lost


def test_a_rank_that_spins_inside_a_collective_is_a_victim() -> None:
    """NCCL's waiting ranks burn a core; that buys them nothing and costs them nothing."""
    found = _judge(_rank(0, 6.0, INSIDE, busy=1.0), _rank(1, 6.0, OUTSIDE))

    assert found is not None
    assert found.lost
    assert found.verdict.culprits == (1,)


def test_a_slow_rank_that_moves_is_not_silent() -> None:
    """The others wait for one that shows progress: a straggler perhaps, not a hang."""
    assert _judge(_rank(0, 20.0, INSIDE), _rank(1, 0.5, OUTSIDE)) is None


def test_when_nobody_waits_a_slow_save_is_no_hang() -> None:
    """Where collectives are seen and no rank waits in one, none is held up: at least 60 s."""
    assert _judge(_rank(0, 20.0), _rank(1, 20.0)) is None
    assert _judge(_rank(0, 20.0, None)) is None

    found = _judge(_rank(0, 61.0), _rank(1, 61.0))
    assert found is not None
    assert found.verdict.confidence < 0.5


def test_a_frozen_process_needs_no_patience() -> None:
    """State T beyond the grace is lost, within it suspect."""
    within = _judge(_rank(0, 0.2, INSIDE), _rank(1, 1.0, state="T", stopped_s=1.0))
    beyond = _judge(_rank(0, 0.2, INSIDE), _rank(1, 1.6, state="T", stopped_s=1.6))

    assert within is not None
    assert not within.lost
    assert beyond is not None
    assert beyond.lost
    assert (beyond.verdict.fault, beyond.verdict.culprits) == ("frozen", (1,))


def test_a_silent_agent_does_not_age_a_frozen_rank() -> None:
    """Between heartbeats at most 1.2 s are assumed: a dead agent cannot convict."""
    found = _judge(_rank(0, 0.0, state="T", stopped_s=0.1, heard_age_s=500.0))

    assert found is not None
    assert not found.lost


def test_a_frozen_rank_without_black_box_is_found_too() -> None:
    """State T is evidence for any program."""
    found = _judge(_rank(0, 0.0, None, state="T", stopped_s=2.0, has_box=False))

    assert found is not None
    assert found.lost


def test_ranks_without_black_boxes_are_not_judged_by_silence() -> None:
    """Nothing is known of their progress."""
    assert _judge(_rank(0, 0.0, None, has_box=False), _rank(1, 0.0, None, has_box=False)) is None


def test_a_rank_that_left_while_the_others_wait_exited_early() -> None:
    """Exit 0 while the others wait in a collective for longer than patience."""
    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 9.0, state="", box="exited"))

    assert found is not None
    assert found.lost
    assert (found.verdict.fault, found.verdict.culprits) == ("exited_early", (1,))


@pytest.mark.parametrize(("waited_s", "lost"), [(2.4, False), (2.6, True)])
def test_half_the_patience_is_enough_for_who_waits_for_the_gone(waited_s: float, *, lost: bool) -> None:
    """A collective with a member that has ended does not come right by waiting."""
    found = _judge(_rank(0, waited_s, INSIDE), _rank(1, 9.0, state="", box="exited"))

    assert (found is not None and found.lost) is lost


@pytest.mark.parametrize(("left_s", "lost"), [(0.2, False), (2.4, False), (2.6, True)])
def test_what_was_waited_for_before_a_rank_left_is_no_fault_of_it(left_s: float, *, lost: bool) -> None:
    """A network is cut for 30 s and healed; of two ranks that then end, one is quicker by a moment."""
    found = _judge(_rank(0, 30.0, INSIDE), _rank(1, left_s, state="", box="exited"))

    assert (found is not None and found.lost) is lost


def test_ranks_that_end_seconds_apart_are_normal() -> None:
    """When no rank waits in a collective, those that remain may take their time to end."""
    assert _judge(_rank(0, 30.0), _rank(1, 40.0, state="", box="exited")) is None


def test_a_death_is_the_runners_to_report() -> None:
    """The exit status says more than the silence of those who wait for the dead."""
    assert _judge(_rank(0, 60.0, INSIDE), _rank(1, 60.0, state="Z")) is None


def test_the_cheap_look_never_misses() -> None:
    """Whatever the full judgement finds, the cheap look at one of its ranks has found before."""
    for silent_s in (0.0, 1.0, 2.4, 2.6, 6.0, 700.0):
        for seen in (0, 100):
            for state in ("S", "T"):
                ranks = [_rank(i, silent_s, INSIDE if i else OUTSIDE, seen=seen, state=state) for i in range(2)]
                if _judge(*ranks) is not None:
                    assert any(looks_odd(rank, POLICY) for rank in ranks)


def test_a_held_gil_is_said() -> None:
    """When the recorder's own thread is silent too, the verdict says that the GIL is held."""
    import msgspec

    culprit = _rank(1, 6.0)
    assert culprit.report.progress is not None
    progress = msgspec.structs.replace(culprit.report.progress, beat_mono_s=94.0)
    culprit = culprit._replace(report=msgspec.structs.replace(culprit.report, progress=progress))

    found = _judge(_rank(0, 6.0, INSIDE), culprit)

    assert found is not None
    assert "gil_held" in [finding.name for finding in found.verdict.evidence]


def _nodes(*signs: NodeSigns, lag_s: float = 0.0) -> tuple[str, ...]:
    verdict = judge_nodes(signs, POLICY, lag_s=lag_s, round_=1, wall_s=1e6)
    return verdict.nodes if verdict is not None else ()


def test_a_node_is_lost_when_neither_agent_nor_runner_answers() -> None:
    """Either of them alone keeps it."""
    assert _nodes(NodeSigns("n", 16.0, 16.0, ranks_gone=False, polling=False)) == ("n",)
    assert _nodes(NodeSigns("n", 1.0, 16.0, ranks_gone=False, polling=False)) == ()
    assert _nodes(NodeSigns("n", 16.0, 1.0, ranks_gone=False, polling=True)) == ()
    assert _nodes(NodeSigns("n", NO_AGE, 1.0, ranks_gone=True, polling=False)) == ()


def test_a_dead_runner_whose_ranks_are_gone_is_a_lost_node() -> None:
    """Its agent still reports, but nothing will ever join from there."""
    assert _nodes(NodeSigns("n", 1.0, 16.0, ranks_gone=True, polling=False)) == ("n",)


def test_an_agent_whose_silence_is_excused_is_not_said_to_be_silent() -> None:
    """For 18 s no node of the job reported; its agent has sent since as soon as the others, its runner has not."""
    signs = NodeSigns("n", 20.0, 40.0, ranks_gone=True, polling=False, excused_s=18.0)

    found = judge_nodes([signs], POLICY, lag_s=0.0, round_=1, wall_s=1e6)

    assert found is not None
    assert found.fault == "runner_lost"
    assert "neither agent" not in found.reason


def test_a_lagging_controller_is_slower_to_accuse() -> None:
    """Its own lag is added to the patience."""
    assert _nodes(NodeSigns("n", 16.0, 16.0, ranks_gone=False, polling=False), lag_s=5.0) == ()


def test_two_processes_that_claim_a_rank_are_told_at_once() -> None:
    """No rank is silent, and no patience is granted: both would write the same checkpoints."""
    single = _rank(1, 0.1)
    doubled = single._replace(report=msgspec.structs.replace(single.report, rivals=(77,)))

    suspicion = _judge(_rank(0, 0.1), doubled)

    assert looks_odd(doubled, POLICY)
    assert not looks_odd(single, POLICY)
    assert suspicion is not None
    assert suspicion.lost
    assert (suspicion.verdict.fault, suspicion.verdict.culprits) == ("duplicate_rank", (1,))
    assert "77" in suspicion.verdict.reason


def test_ranks_that_are_on_their_way_out_are_given_time() -> None:
    """Their scripts have ended and Python tidies up: no hang, wherever they were seen last; but not for ever."""
    slow = [_rank(0, 8.0, INSIDE, box="exited", busy=0.2), _rank(1, 8.0, OUTSIDE, box="exited", busy=0.2)]
    stuck = [_rank(0, 61.0, INSIDE, box="exited"), _rank(1, 61.0, OUTSIDE, box="exited")]

    found = _judge(*stuck)

    assert _judge(*slow) is None
    assert found is not None
    assert found.lost
    assert (found.verdict.fault, found.verdict.culprits) == ("silent", (0, 1))


def test_who_waits_for_a_rank_on_its_way_out_waits_in_vain() -> None:
    """It has left the others alone: gone or not yet makes no difference."""
    found = _judge(_rank(0, 6.0, INSIDE), _rank(1, 6.0, OUTSIDE, box="exited"), _rank(2, 6.0, INSIDE))

    assert found is not None
    assert (found.verdict.fault, found.verdict.culprits) == ("exited_early", (1,))
