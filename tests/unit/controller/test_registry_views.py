# SPDX-License-Identifier: Apache-2.0
"""Folding heartbeats: late, doubled, lost, reordered, from restarted agents."""

import msgspec

from megascale_ops.controller.cluster.registry import Folded, Registry
from megascale_ops.controller.cluster.steady import Sign, Told
from megascale_ops.controller.job.diagnose import BLIND_S, is_blind
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.job_record import JobRecord, Member
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import ProcessReading, Progress, RankReport


def _report(rank: int, *, round_: int = 1, moved_s: float = 0.0, state: str = "R") -> RankReport:
    progress = Progress(moved_mono_s=moved_s)
    process = ProcessReading(state=state, stopped_since_mono_s=moved_s)
    return RankReport(rank=rank, local_rank=rank, pid=rank, round=round_, progress=progress, process=process)


def _send(registry: Registry, seq: int, *ranks: RankReport, now_s: float = 0.0, **more: object) -> Folded:
    fields: dict[str, object] = {"agent_id": "a1", "mono_s": 50.0 + seq, "full": False, "round_": 1, **more}
    round_ = fields.pop("round_")
    jobs = (JobReport("job", round_, ranks=ranks),)
    return registry.fold(Heartbeat(node="n", seq=seq, wall_s=0.0, jobs=jobs, **fields), now_s)


def _known(registry: Registry, round_: int = 1) -> set[int]:
    return {rank.report.rank for rank in registry.ranks("job", round_, ["n"], 0.0)}


def test_the_first_partial_heartbeat_asks_for_everything() -> None:
    """A new controller or agent: send_full until a full heartbeat came."""
    registry = Registry()

    assert _send(registry, 5, _report(0)).send_full
    assert _send(registry, 6, _report(0)).send_full
    assert not _send(registry, 7, _report(0), full=True).send_full
    assert not _send(registry, 8, _report(0)).send_full


def test_a_gap_asks_for_everything_and_is_taken_in() -> None:
    """A lost heartbeat may have carried a change."""
    registry = Registry()
    _send(registry, 1, _report(0), full=True)

    folded = _send(registry, 3, _report(1))

    assert folded.accepted
    assert folded.send_full
    assert _known(registry) == {0, 1}


def test_late_and_doubled_heartbeats_change_nothing() -> None:
    """The sequence number only rises."""
    registry = Registry()
    _send(registry, 1, _report(0), full=True)
    _send(registry, 2, _report(0, state="T"))

    assert not _send(registry, 2, _report(0)).accepted
    assert not _send(registry, 1, _report(0), full=True).accepted
    (rank,) = registry.ranks("job", 1, ["n"], 0.0)
    assert rank.report.process.state == "T"


def test_a_partial_heartbeat_keeps_what_it_does_not_name() -> None:
    """Only what changed is in it."""
    registry = Registry()
    _send(registry, 1, _report(0), _report(1), full=True)

    _send(registry, 2, _report(1, state="T"))

    assert _known(registry) == {0, 1}


def test_a_full_heartbeat_replaces_everything() -> None:
    """Ranks and jobs that it does not name are gone."""
    registry = Registry()
    _send(registry, 1, _report(0), _report(1), full=True)

    _send(registry, 2, _report(1), full=True)

    assert _known(registry) == {1}


def test_rounds_do_not_mix() -> None:
    """A report of another round is not seen by who asks for this one, and replaces the older round's ranks."""
    registry = Registry()
    _send(registry, 1, _report(0), _report(1), full=True)

    _send(registry, 2, _report(0, round_=2), round_=2)

    assert _known(registry, 1) == set()
    assert _known(registry, 2) == {0}


def test_a_restarted_agent_takes_over() -> None:
    """Its numbers begin anew; what its predecessor still has under way is dropped."""
    registry = Registry()
    _send(registry, 7, _report(0), full=True)

    folded = _send(registry, 1, _report(0), agent_id="a2", now_s=1.0)
    late = _send(registry, 8, _report(0), agent_id="a1", now_s=2.0)

    assert folded.accepted
    assert folded.send_full
    assert not late.accepted


def test_an_agent_may_come_back_when_its_successor_is_gone() -> None:
    """Two machines of one name: the one that is left is believed after a while."""
    registry = Registry()
    _send(registry, 7, _report(0), full=True)
    _send(registry, 1, _report(0), agent_id="a2", now_s=1.0)

    assert _send(registry, 9, _report(0), agent_id="a1", now_s=30.0).accepted


def test_silence_is_measured_in_the_senders_clock() -> None:
    """How late a heartbeat comes does not make its ranks more silent."""
    registry = Registry()
    _send(registry, 1, _report(0, moved_s=48.0), full=True, now_s=9_000.0)
    _send(registry, 2, _report(0, moved_s=48.0), now_s=9_500.0)

    (rank,) = registry.ranks("job", 1, ["n"], 9_500.0)

    assert rank.silent_s == 1.0  # the agent's first heartbeat is where patience begins


def test_a_stalled_agent_accuses_nobody() -> None:
    """An agent that was itself away for more than five seconds begins its ranks' patience anew."""
    registry = Registry()
    _send(registry, 1, _report(0, moved_s=51.0), full=True, mono_s=51.0)

    _send(registry, 2, _report(0, moved_s=51.0), mono_s=151.0)

    (rank,) = registry.ranks("job", 1, ["n"], 0.0)
    assert rank.silent_s == 0.0


def test_clocks_begin_anew_when_the_controller_was_away() -> None:
    """No rank is to blame for what the controller did not receive."""
    registry = Registry()
    _send(registry, 1, _report(0, moved_s=50.0), full=True)
    _send(registry, 2, _report(0, moved_s=50.0))

    registry.restart_clocks(77.0)

    (rank,) = registry.ranks("job", 1, ["n"], 77.0)
    assert rank.silent_s == 0.0
    assert rank.heard_age_s == 0.0


def test_nodes_of_long_ago_are_forgotten() -> None:
    """The registry does not grow for ever."""
    registry = Registry()
    _send(registry, 1, _report(0), full=True, now_s=10.0)

    registry.forget(11.0)

    assert len(registry) == 0


def test_a_node_that_goes_on_is_awaited_only_when_nothing_is_missing() -> None:
    """The next heartbeat of the same agent, on the same ranks of the same round: all else must come as it is."""
    registry = Registry()
    _send(registry, 1, _report(0), _report(1), full=True)
    sign = Sign("n", "a1", 2, 52.0, 0.0, 2)

    assert registry.awaits(sign, "job", 1, tells=True) is registry.node("n")
    for other in (
        sign._replace(node="m"),
        sign._replace(agent_id="a2"),
        sign._replace(seq=1),
        sign._replace(seq=3),
        sign._replace(mono_s=57.0),
        sign._replace(size=1),
    ):
        assert registry.awaits(other, "job", 1, tells=True) is None
    assert registry.awaits(sign, "job", 2, tells=True) is None
    assert registry.awaits(sign, "other", 1, tells=True) is None
    _send(registry, 3, _report(0))
    assert registry.awaits(sign._replace(seq=4, mono_s=53.5), "job", 1, tells=True) is None  # one was lost


def test_ranks_that_went_on_are_as_if_they_had_been_told() -> None:
    """What is known of each is written when it is read: by the sender's clock, and nothing of it but how far it is."""
    registry, usual = Registry(), Registry()
    for one in (registry, usual):
        _send(one, 1, _report(0), _report(1), full=True)
    told = Told(Progress(state="running", step=7, steps_seen=8, moved_mono_s=-0.5), None)
    sign = Sign("n", "a1", 2, 52.0, 0.0, 2)

    view = registry.awaits(sign, "job", 1, tells=True)
    assert view is not None
    registry.go_on(view, sign, 9.0, moves=True)
    view.shares["job"].go_on(told, sign.mono_s)
    progress = Progress(
        state="running", step=7, steps_seen=8, phase_since_mono_s=52.0, moved_mono_s=51.5, beat_mono_s=52.0
    )
    _send(usual, 2, *(msgspec.structs.replace(_report(rank), progress=progress) for rank in (0, 1)), now_s=9.0)

    assert list(registry.ranks("job", 1, ["n"], 10.0)) == list(usual.ranks("job", 1, ["n"], 10.0))


def _silent_s(every_s: float, gap_s: float) -> float:
    """Let an agent send ten heartbeats of a rank that stands still; return for how long that is seen."""
    registry = Registry()
    for seq in range(1, 11):
        at_s = 100.0 + seq * gap_s
        _send(registry, seq, _report(0, moved_s=100.0), mono_s=at_s, now_s=at_s, every_s=every_s, full=seq == 1)
    (rank,) = registry.ranks("job", 1, ["n"], 100.0 + 10 * gap_s)
    return rank.silent_s


def test_a_rank_of_an_agent_that_speaks_seldom_is_seen_to_stand_still() -> None:
    """One heartbeat in 8 s, as in a large cluster, is no stall; the same gap of one that speaks each second is."""
    assert _silent_s(8.0, 8.0) >= 72.0
    assert _silent_s(1.0, 1.0) >= 9.0
    assert _silent_s(1.0, 8.0) == 0.0


def test_an_agent_that_speaks_seldom_is_there_between_two_heartbeats() -> None:
    """For two heartbeats and a half, and at least 5 s."""
    registry = Registry()
    _send(registry, 1, full=True, now_s=100.0, every_s=8.0)

    assert registry.agent_is_fresh("job", "n", 119.0)
    assert not registry.agent_is_fresh("job", "n", 121.0)
    _send(registry, 2, now_s=122.0)
    assert registry.agent_is_fresh("job", "n", 126.0)
    assert not registry.agent_is_fresh("job", "n", 128.0)


def test_ranks_that_stand_still_are_as_if_they_had_been_told() -> None:
    """Nothing of them is another but when their recorders' threads beat last, and that is no news."""
    registry, usual = Registry(), Registry()
    for one in (registry, usual):
        _send(one, 1, _report(0, moved_s=9.0), _report(1, moved_s=9.0), full=True)
    sign = Sign("n", "a1", 2, 52.0, 0.0, 2)
    before = registry.stirred("job", 1, ["n"], 0.0)

    view = registry.awaits(sign, "job", 1, tells=True)
    assert view is not None
    registry.go_on(view, sign, 9.0, moves=False)
    view.shares["job"].stand(51.9)
    progress = Progress(moved_mono_s=9.0, beat_mono_s=51.9)
    told = [msgspec.structs.replace(_report(rank, moved_s=9.0), progress=progress) for rank in (0, 1)]
    _send(usual, 2, *told, now_s=9.0)

    assert list(registry.ranks("job", 1, ["n"], 10.0)) == list(usual.ranks("job", 1, ["n"], 10.0))
    assert registry.stirred("job", 1, ["n"], 0.0) == before


def test_news_is_a_heartbeat_that_tells_of_more_than_time_passing() -> None:
    """A rank that is where it was is none, told in part or in full; one that moves, that comes or that goes is."""
    registry = Registry()

    def news(seq: int, *ranks: RankReport, **more: object) -> bool:
        before = registry.stirred("job", 1, ["n"], 0.0)
        _send(registry, seq, *ranks, **more)
        return registry.stirred("job", 1, ["n"], 0.0) != before

    _send(registry, 1, _report(0), _report(1), full=True)
    assert not news(2)
    assert not news(3, _report(0))
    assert not news(4, _report(0), _report(1), full=True)
    assert news(5, _report(0, moved_s=54.0))
    assert news(6, _report(0, moved_s=54.0), full=True)  # the other one is gone
    assert news(7, _report(0, moved_s=54.0), _report(1))
    assert news(8, agent_id="a2", full=True)


def test_nodes_of_which_not_all_is_known_never_stand() -> None:
    """One that was not heard, one that reports no rank of the round, and one with two agents."""
    registry = Registry()
    _send(registry, 1, _report(0), full=True, now_s=100.0)

    assert registry.stirred("job", 1, ["n"], 99.0) is not None
    assert registry.stirred("job", 1, ["n"], 101.0) is None
    assert registry.stirred("job", 1, ["n", "m"], 99.0) is None
    assert registry.stirred("job", 2, ["n"], 99.0) is None
    _send(registry, 1, full=True, now_s=100.0, agent_id="b1", serves="user")
    assert registry.stirred("job", 1, ["n"], 99.0) is None


def test_a_young_controller_is_blind_until_and_unless_all_nodes_report_the_round() -> None:
    """Asked at every turn of a look at thousands of nodes: what was seen stands until a node reports something else."""
    registry = Registry()
    job = Job(JobRecord("job", round=1, members=(Member("n", "r", "j", 1, "n", 1),)), 0.0)

    before = is_blind(registry, job, 1.0)
    _send(registry, 1, _report(0), full=True)
    told = [is_blind(registry, job, 1.0), is_blind(registry, job, 2.0)]
    _send(registry, 2, _report(0, round_=2), round_=2)
    elsewhere = is_blind(registry, job, 3.0)

    assert (before, told, elsewhere) == (True, [False, False], True)
    assert not is_blind(registry, job, BLIND_S)


def test_of_a_node_with_two_agents_nothing_is_kept_in_mind() -> None:
    """Another of them may be believed by and by, without anything having come."""
    registry = Registry()
    _send(registry, 1, _report(0), full=True)
    alone = registry.shares_seen

    _send(registry, 1, full=True, agent_id="b1", serves="1000:/box")

    assert alone is not None
    assert registry.shares_seen is None
