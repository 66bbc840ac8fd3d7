# SPDX-License-Identifier: Apache-2.0
"""Doing something is not hanging, and silence without a contradiction is told early and acted upon late."""

import msgspec
import pytest

from megascale_ops.controller.policy.actions import decide
from megascale_ops.controller.policy.decision import Question, Restart
from megascale_ops.diagnosis.hangs.patience import raised
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.diagnosis.watchdog import judge as suspect
from megascale_ops.schema.health import HardwareFinding, Verdict
from megascale_ops.schema.messages import CollectiveFact, Evidence, EvidenceItem, Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from megascale_ops.schema.wording import PLACE
from megascale_ops.schema.work import ChildWork, ProcessWork
from tests.fakes.controlled_job import World
from tests.fakes.hung_job import WAITING, judge_job, one_absent, rank_view, said_of, stack_of

INSIDE, OUTSIDE = CollectivePosition(41, 40, "pg 0"), CollectivePosition(40, 40, "pg 0")
UPLOADS = ("wait (subprocess.py:1264)", "upload (/home/u/train.py:40)", "main (/home/u/train.py:90)")
ABSENT_S, PHASE_S = JobPolicy().absent_patience_s, JobPolicy().phase_patience_s
IDLE = ProcessWork(100.0, 4.0)
AWS = (ChildWork(4711, "aws s3 cp a b", "S", is_new=True),)


def _process(work: ProcessWork, *marks: str) -> EvidenceItem:
    return EvidenceItem("process", ok=True, work=work, marks=marks)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (ProcessWork(100.0, 4.0, child_cpu_s=3.9, children=AWS), "child 4711 (aws s3 cp a b) used 3.90 s of CPU"),
        (ProcessWork(100.0, 4.0, child_cpu_s=0.5), "children that have ended used"),
        (ProcessWork(100.0, 4.0, io_bytes=40_000_000), "38.1 MB read and written"),
        (ProcessWork(100.0, 4.0, socket_bytes=100_000), "97.7 KB sent and received over TCP"),
        (ProcessWork(100.0, 4.0, grown_bytes=5_000_000), "files that it holds open have grown"),
        (ProcessWork(100.0, 0.15, child_cpu_s=0.03), "used 0.03 s of CPU"),
    ],
)
def test_a_rank_that_gets_something_done_is_busy(work: ProcessWork, words: str) -> None:
    """Whatever its stack looks like: it is granted what a declared phase is, and the card says what it does."""
    judged = one_absent(_process(work, "in_syscall"), stack_of("in_syscall", frames=UPLOADS))

    assert (judged.verdict.fault, judged.verdict.culprits) == ("busy", (1,))
    assert words in judged.verdict.reason
    assert judged.patience_s == PHASE_S


@pytest.mark.parametrize(
    ("items", "fault", "sure_of"),
    [
        ((_process(IDLE, "in_syscall"), stack_of("in_syscall", frames=UPLOADS)), "sleeping", "place"),
        ((stack_of("in_data_loader", frames=UPLOADS),), "data_stall", "place"),
        ((_process(ProcessWork(100.0, 4.0, child_cpu_s=3.9)), stack_of(frames=UPLOADS)), "busy", "place"),
        ((stack_of("stopped", frames=UPLOADS),), "frozen", ""),
        ((_process(IDLE, "worker_stopped"), stack_of("in_data_loader", frames=UPLOADS)), "data_stall", ""),
    ],
)
def test_a_card_is_sure_of_a_hang_only_where_waiting_mends_nothing(
    items: tuple[EvidenceItem, ...], fault: str, sure_of: str
) -> None:
    """A rank that sleeps is there for sure, and may come all the same: its card does not promise a hang."""
    judged = one_absent(*items)

    assert (judged.verdict.fault, judged.verdict.sure_of) == (fault, sure_of)
    assert judged.verdict.confidence >= (0.5 if fault == "busy" else 0.9)


@pytest.mark.parametrize(
    "work",
    [
        IDLE,
        ProcessWork(100.0, 4.0, child_cpu_s=0.1),  # a data loader's worker that turns over in its sleep
        ProcessWork(100.0, 4.0, io_bytes=40_000),  # the stacks written on the agent's signal
        ProcessWork(100.0, 60.0, socket_bytes=12_000),  # a process group's watchdog that reads its store
    ],
)
def test_what_an_idle_rank_does_anyway_is_no_work(work: ProcessWork) -> None:
    """The negative control: it sleeps, and nothing is taken for work that every rank has."""
    judged = one_absent(_process(work, "in_syscall"), stack_of("in_syscall", frames=UPLOADS))

    assert judged.verdict.fault == "sleeping"
    assert judged.patience_s < 5.0  # nothing is granted to absentees here


def test_a_rank_in_state_r_never_sleeps() -> None:
    """On a machine that ten others use it gets little CPU, and wants it at every look."""
    judged = one_absent(_process(ProcessWork(100.0, 4.0, own_cpu_s=0.1, is_running=True)), stack_of(frames=UPLOADS))

    assert judged.verdict.fault == "stuck"


def test_the_program_that_a_rank_waits_for_is_told() -> None:
    """A child that only waits itself proves nothing, but its name is what a person looks for."""
    judged = one_absent(_process(msgspec.structs.replace(IDLE, children=AWS)), stack_of(frames=UPLOADS))

    assert judged.verdict.fault == "sleeping"
    assert "child 4711 (aws s3 cp a b) lives" in judged.verdict.reason


def test_a_worker_that_is_stopped_outweighs_what_others_do() -> None:
    """A process that the rank needs is in state T: waiting mends nothing, whatever its other children do."""
    work = ProcessWork(100.0, 4.0, child_cpu_s=3.0)

    judged = one_absent(_process(work, "worker_stopped"), stack_of("in_data_loader", frames=UPLOADS))

    assert judged.verdict.fault == "data_stall"
    assert judged.is_proven


async def _hang(policy: JobPolicy | None = None, *, steps: int = 20) -> World:
    """Three ranks; rank 1 does not come to collective 41."""
    world = World(nproc=3, policy=policy)
    await world.up("a", step=steps)
    for number in range(3):
        world.rank(number).collective = OUTSIDE if number == 1 else INSIDE
    return world


def _answer(world: World, *items: EvidenceItem) -> None:
    """Let the agent obey every order for evidence: ``items`` are about rank 1."""
    for order in [order for order in world.beat("a").orders if order.kind.startswith("dump_")]:
        mine = tuple(msgspec.structs.replace(item, rank=1) for item in items if order.kind == "dump_stacks")
        world.loop.evidence(Evidence("a", "job", order.incident, order.id, items=mine))


async def _until(world: World, limit_s: float, *items: EvidenceItem) -> float:
    """Let time pass and evidence be given until the job is stopped; return how long it took."""
    began_s = world.now_s
    while world.state != "stopping" and world.now_s - began_s < limit_s:
        await world.wait(1.0, tick_s=0.5)
        _answer(world, *items)
        await world.settle()
    return world.now_s - began_s


SLEEPS = (_process(IDLE, "in_syscall"), stack_of("in_syscall", frames=UPLOADS))


async def test_a_silent_rank_is_named_within_seconds_and_acted_upon_after_nine_minutes() -> None:
    """Told with the card and the moment of the restart; nothing is stopped before."""
    world = await _hang()
    await _until(world, 8.0, *SLEEPS)
    early = world.incident(1)

    took_s = await _until(world, 700.0, *SLEEPS)

    assert early.verdict is not None
    assert (early.verdict.fault, early.verdict.culprits, early.state) == ("sleeping", (1,), "open")
    assert early.verdict.sure_of == "place"
    assert "nothing yet: it is acted upon if it lasts until" in early.done
    assert "540 s in all" in early.done
    assert ABSENT_S - 15.0 < took_s + 8.0 < ABSENT_S + 5.0
    assert world.incident(1).marks.named - world.incident(1).marks.began < 15.0


async def test_a_rank_that_sleeps_inside_its_backward_pass_is_acted_upon_after_a_minute() -> None:
    """No script uploads, evaluates or waits there; between its passes it does, and gets nine."""
    took_s = {}
    for phase in ("backward", "forward"):
        world = await _hang()
        world.rank(1).phase = phase
        took_s[phase] = await _until(world, 700.0, *SLEEPS)

    assert 55.0 < took_s["backward"] < 66.0
    assert ABSENT_S - 5.0 < took_s["forward"] < ABSENT_S + 10.0


async def test_a_gpu_that_failed_as_its_rank_fell_silent_is_not_waited_for() -> None:
    """Xid 119 of the GPU of the rank that is missing, told 20 s after the silence began: acted upon at once."""
    world = await _hang()
    world.rank(1).gpu = "GPU-1"
    await _until(world, 20.0, *SLEEPS)
    said = "GPU 1: Xid 119: the GPU's system processor did not answer"
    before = world.state
    now_s = world.loop.wall()
    found = HardwareFinding("xid_119", said, "kernel_log", "fail", "GPU-1", now_s, now_s, is_bad=True)
    world.findings["a"] = (found,)

    took_s = await _until(world, 700.0, *SLEEPS)

    verdict = world.incident(1).verdict
    assert before == "confirming"
    assert took_s < 10.0
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == ("sleeping", (1,))
    assert said in verdict.reason


async def test_a_wait_of_five_minutes_that_ends_by_itself_is_harmless_and_becomes_a_habit() -> None:
    """One harmless incident; the next silence at the same place is given three times as long, if that is more."""
    world = await _hang()
    await _until(world, 300.0, *SLEEPS)
    world.train(21)
    await world.wait(0.4)

    record = world.loop.jobs["job"].record
    (place,) = record.habits

    assert (world.state, world.round) == ("running", 1)
    assert world.incident(1).state == "harmless"
    assert world.incident(1).done == "it moved again before anything was stopped"
    assert place == "upload (/home/u/train.py:40), others in group 0"
    assert 295.0 < record.habits[place] < 305.0
    assert await _until(world, 1200.0, *SLEEPS) > 3 * 290.0


async def test_a_rank_that_worked_is_granted_an_absentees_time_from_then_on() -> None:
    """It copies for 15 minutes and falls silent then: nine minutes from its last work, not at once."""
    world = await _hang()
    began_s = world.now_s
    copies = _process(ProcessWork(0.0, 4.0, io_bytes=10**9))
    while world.now_s - began_s < 900.0:
        await world.wait(1.0, tick_s=0.5)
        seen = msgspec.structs.replace(copies, work=msgspec.structs.replace(copies.work, mono_s=world.now_s))
        _answer(world, seen, SLEEPS[1])
        await world.settle()
    state = world.state

    took_s = await _until(world, 700.0, *SLEEPS)

    assert state == "confirming"
    assert ABSENT_S - 70.0 < took_s < ABSENT_S + 5.0


async def test_a_restart_that_did_not_cure_a_silence_is_not_repeated() -> None:
    """The second time at the same place is a warning with the card; the ranks are left as they are."""
    world = await _hang(JobPolicy(absent_patience_s=0.0))
    await _until(world, 60.0, *SLEEPS)
    first = world.state
    exits = tuple(world.exit(rank, -9, by_us=True) for rank in range(3))
    await world.ask(world.new_join("a", cause="order", exits=exits, previous_round=1))
    await world.run_round(40)
    for number in range(3):
        world.rank(number).collective = OUTSIDE if number == 1 else INSIDE

    await _until(world, 200.0, *SLEEPS)

    assert first == "stopping"
    assert (world.state, world.round) == ("running", 2)
    assert world.incident(2).state == "harmless"
    assert (
        "did not cure the same silence at the same place (upload (/home/u/train.py:40), others in group 0)"
        in world.incident(2).done
    )


@pytest.mark.parametrize(
    ("verdict", "policy", "action"),
    [
        (Verdict("sleeping", "", 0.9, (1,), place="there", sure_of=PLACE), JobPolicy(), "warn"),
        (Verdict("sleeping", "", 0.9, (1,), place="there"), JobPolicy(), "restart"),
        (Verdict("sleeping", "", 0.9, (1,), place="elsewhere", sure_of=PLACE), JobPolicy(), "restart"),
        (Verdict("sleeping", "", 0.9, (1,), place="", sure_of=PLACE), JobPolicy(), "restart"),
        (Verdict("collective_order", "", 0.9, (1,), place="there"), JobPolicy(), "restart"),
        (
            Verdict("sleeping", "", 0.9, (1,), place="there", sure_of=PLACE),
            JobPolicy(actions={"sleeping": "restart"}),
            "restart",
        ),
    ],
)
def test_only_the_same_silence_at_the_same_place_is_not_cured(verdict: Verdict, policy: JobPolicy, action: str) -> None:
    """Contradictions have budgets of their own, and a person's own word stands above the rule."""
    question = Question("hang", 1000.0, verdict, policy, restarts=(Restart(500.0, "sleeping", place="there"),))

    assert decide(question).action == action


def test_an_absentee_is_granted_no_less_than_a_restart_costs() -> None:
    """Ski rental: of a job that takes 20 minutes to come back no rank is killed after nine; 0 stays 0."""
    assert raised(JobPolicy(), 1200.0).absent_patience_s == 1200.0
    assert raised(JobPolicy(), 30.0).absent_patience_s == ABSENT_S
    assert raised(JobPolicy(absent_patience_s=10.0), 60.0).absent_patience_s == 60.0
    assert raised(JobPolicy(absent_patience_s=0.0), 1200.0).absent_patience_s == 0.0


def test_what_looks_stuck_is_granted_a_tenth_of_that() -> None:
    """A job that takes 23 minutes to come back does not stand for 23 minutes before it does; nor is it a minute."""
    assert raised(JobPolicy(), 1380.0).stuck_patience_s == pytest.approx(138.0)
    assert raised(JobPolicy(), 300.0).stuck_patience_s == JobPolicy().stuck_patience_s
    assert raised(JobPolicy(stuck_patience_s=200.0), 1380.0).stuck_patience_s == 200.0


async def test_a_contradiction_before_the_first_step_needs_no_patience_for_starting() -> None:
    """Rank 0 is in the first broadcast of its model, rank 1 in a barrier: named and acted upon within half a minute."""
    world = World(nproc=2)
    await world.ask(world.new_join("a"))
    world.spawn("a")
    for number in range(2):
        world.rank(number).collective = CollectivePosition(2, 1, "pg 0")
    world.beat_all()

    calls = ("broadcast", "barrier")
    began_s = world.now_s
    while world.state != "stopping" and world.now_s - began_s < 60.0:
        await world.wait(0.4)
        for order in [order for order in world.beat("a").orders if order.kind == "dump_flight_recorder"]:
            items = [
                EvidenceItem(
                    "flight_recorder", ok=True, rank=rank, collectives=(CollectiveFact("0", 2, name, "[[8]]", "float"),)
                )
                for rank, name in enumerate(calls)
            ]
            world.loop.evidence(Evidence("a", "job", order.incident, order.id, items=tuple(items)))
        await world.settle()

    verdict = world.incident(1).verdict
    assert world.state == "stopping"
    assert world.now_s - began_s < 30.0
    assert verdict is not None
    assert verdict.fault in ("collective_order", "collective_mismatch")
    assert set(verdict.culprits) == {0, 1}


async def test_a_download_before_the_first_step_takes_as_long_as_it_likes() -> None:
    """The negative control: rank 1 prepares data for 20 minutes, rank 0 waits in a barrier; nothing is stopped."""
    world = World(nproc=2)
    await world.ask(world.new_join("a"))
    world.spawn("a")
    world.rank(0).collective = CollectivePosition(2, 1, "pg 0")
    world.rank(1).collective = CollectivePosition(1, 1, "pg 0")
    world.beat_all()

    took_s = await _until(world, 1200.0, *SLEEPS)

    assert took_s >= 1200.0
    assert world.state == "confirming"


def test_ranks_that_leave_are_given_an_absentees_time() -> None:
    """Some tracker uploads at exit for minutes: told after one, not stopped before nine."""
    views = [rank_view(rank, silent_s=61.0) for rank in range(2)]
    leaving = [
        view._replace(
            report=msgspec.structs.replace(
                view.report, progress=msgspec.structs.replace(view.report.progress, state="exited")
            )
        )
        for view in views
    ]

    found = suspect(leaving, JobPolicy(), 1e6)

    assert found is not None
    assert (found.lost, found.name_s, found.patience_s) == (False, 60.0, ABSENT_S)


def test_where_all_wait_and_data_moves_it_is_slow() -> None:
    """One large reduction over a slow line: bytes are acknowledged, so nothing is stuck."""
    views = [rank_view(rank) for rank in range(4)]
    moving = _process(ProcessWork(100.0, 4.0, socket_bytes=50_000_000))

    judged = judge_job(views, [item for rank in range(4) for item in said_of(rank, WAITING, moving)])

    assert judged.verdict.fault == "slow"
    assert "data moves" in judged.verdict.reason


def test_where_all_wait_and_a_loaders_workers_fill_their_queues_nothing_moves() -> None:
    """The negative control: their CPU time says nothing of the collective in which all ranks are."""
    views = [rank_view(rank) for rank in range(4)]
    loading = _process(ProcessWork(100.0, 4.0, child_cpu_s=3.0, io_bytes=10**9))

    judged = judge_job(views, [item for rank in range(4) for item in said_of(rank, WAITING, loading)])

    assert (judged.verdict.fault, judged.verdict.culprits) == ("silent", ())


async def test_a_card_promises_no_restart_that_the_rules_forbid() -> None:
    """Of a silence that a restart did not cure, and in a dry run, it says that it is told only."""
    for policy, place in (
        (JobPolicy(dry_run=True), ""),
        (JobPolicy(), "upload (/home/u/train.py:40), others in group 0"),
    ):
        world = await _hang(policy)
        if place:
            world.loop.jobs["job"].change(restarts=(Restart(1e6, "sleeping", place=place),))

        await _until(world, 8.0, *SLEEPS)

        assert "nothing yet: it is told only" in world.incident(1).done


async def test_habits_end_with_a_jobs_life() -> None:
    """A name that is used again inherits no patience from another script's lines."""
    world = await _hang()
    world.loop.jobs["job"].change(habits={"upload (/home/u/train.py:40), others in group 0": 600.0})
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    await world.settle()

    world.ask(world.new_join("a", runner_id="another"))
    await world.settle()

    assert world.loop.jobs["job"].record.life == 2
    assert world.loop.jobs["job"].record.habits == {}


def _moved(view: RankView, seen_s: float, *, ago_s: float, heard_age_s: float = 0.0) -> tuple[RankView, EvidenceItem]:
    """A rank that moved ``ago_s`` before its last heartbeat at 100 s, and was looked at at ``seen_s``."""
    progress = msgspec.structs.replace(view.report.progress, moved_mono_s=100.0 - ago_s)
    report = msgspec.structs.replace(view.report, progress=progress)
    view = view._replace(report=report, silent_s=ago_s, heard_age_s=heard_age_s)
    return view, msgspec.structs.replace(WAITING, rank=view.report.rank, seen_mono_s=seen_s)


@pytest.mark.parametrize(
    ("seen_s", "ago_s", "heard_age_s", "outrun"),
    [
        (99.0, 3.0, 0.0, False),  # silent before the look, and after it
        (100.5, 3.0, 0.4, True),  # no heartbeat yet from after the look
        (96.0, 3.0, 0.0, True),  # it moved after it was looked at
        (100.5, 3.0, 5.0, False),  # the agent has died: what is known must do
    ],
)
def test_who_may_have_moved_since_it_was_looked_at_is_not_acted_upon(
    seen_s: float, ago_s: float, heard_age_s: float, outrun: bool
) -> None:
    """A wait that ends while evidence is gathered shows ranks in calls that do not fit."""
    pairs = [_moved(rank_view(rank), seen_s, ago_s=ago_s, heard_age_s=heard_age_s) for rank in range(2)]

    judged = judge_job([view for view, _ in pairs], [item for _, item in pairs])

    assert judged.is_outrun is outrun
