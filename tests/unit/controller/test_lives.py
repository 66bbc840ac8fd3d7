# SPDX-License-Identifier: Apache-2.0
"""A job that is started again inherits nothing but its names and its numbers, field by field."""

import msgspec

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Answer, Told
from megascale_ops.controller.job.suspected import Suspected
from megascale_ops.controller.policy.decision import Decision, Eviction, Failure, Restart, StateFailure, Tab
from megascale_ops.controller.record.job_record import COUNTS_ON, JobRecord, LeftAlone, Member, next_life, read_record
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Leave, Order
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

VERDICT = Verdict(fault="stuck", reason="rank 1 is stuck", confidence=0.9)
# A record of which no field is as in a new one. A field that is new and not in here fails the first test.
FULL = JobRecord(
    job="job",
    job_id="7" * 32,
    state="failed",
    round=8,
    life=3,
    min_nodes=2,
    max_nodes=4,
    policy=JobPolicy(max_restarts=7),
    run_dir="/run/before",
    members=(Member("b", "runner-b", "join-b", 2, "host-b", 4000),),
    runners=("runner-b",),
    started_wall_s=5.0,
    since_wall_s=6.0,
    reason="it was stopped",
    exit_code=3,
    before="running",
    restarts=(Restart(7.0, "stuck"),),
    restarted={"stuck": 4},
    failure=Failure("ValueError: no", 12),
    verdict=VERDICT,
    incident="job-9",
    aside="job-7",
    incidents=9,
    ended_verdict=VERDICT,
    ended_incident="job-8",
    orders=(Order("job:8:1.x", "job", "b", "stop", 8),),
    order_number=17,
    best_step=341,
    furthest=340,
    steps_are_absolute=True,
    had_boxes=True,
    start_s=12.0,
    step_s=0.3,
    useful_s=900.0,
    launch_policy=JobPolicy(max_restarts=6),
    tuned={"max_restarts": "7"},
    evictions=(Eviction("c", 8.0, 9.0),),
    prices_s=(44.0,),
    tabs={"straggler-1": Tab(1.0, 2.0)},
    decided=Decision("restart", "it pays", "stuck", "price"),
    left_alone=LeftAlone("job-7", 3.0, 4.0),
    state_failure=StateFailure("ValueError: no", 12, 10),
    restore_before=20,
    due_wall_s=3.0,
    habits={"upload (train.py:40)": 600.0},
)
# What differs between the first life of a name and a later one, and why that is right.
MAY_DIFFER = {
    "job_id": "ranks prove by it that an earlier round of theirs was replaced, in all lives",
    "round": "agents and folders know the numbers that were used",
    "life": "counts them",
    "incidents": "an incident's name is given once",
    "order_number": "an order's name is given once",
    "members": "they hold the join's own id, drawn for each",
    "policy": "is the join's; compared by itself",
}
# Of the object: what is no state of a life, or holds the record's numbers and its clock.
NOT_OF_A_LIFE = {
    "record": "compared field by field",
    "saved": "what the journal has, so that rows of the life before are deleted from it",
    "runners": "objects; compared by who they are",
    "waiting": "objects; a join each",
    "round": "compared field by field",
    "unsaved": "told with the next save",
    "checks": "an object; a new one, empty, in each life",
    "notices": "an object; a new one, empty, in each life",
    "homes": "by the numbers of this life's rounds",
    "heard_round": "the highest number that anybody tells of",
    "heard_incidents": "the highest number that anybody tells of",
}


def test_no_field_of_the_record_is_left_out_here() -> None:
    """Every field has a value here that a new record does not have, so that an inherited one is seen."""
    new = msgspec.structs.asdict(JobRecord(job="other"))

    same = [name for name, value in msgspec.structs.asdict(FULL).items() if value == new[name]]

    assert same == []


def test_a_job_that_an_older_program_called_finished_when_it_was_stopped_is_stopped() -> None:
    """Its journal has the exit code of an interrupt; one that finished has none."""
    by_hand = msgspec.json.encode(JobRecord(job="job", state="finished", exit_code=130))
    well = msgspec.json.encode(JobRecord(job="job", state="finished"))

    assert read_record("job", by_hand).state == "stopped"
    assert read_record("job", well).state == "finished"


def test_the_next_life_begins_with_a_new_record() -> None:
    """Only what counts on is taken over: all else is as in a record that was just made."""
    record = next_life(FULL)

    new = msgspec.structs.asdict(JobRecord(job="job"))
    differs = {name for name, value in msgspec.structs.asdict(record).items() if value != new[name]}
    assert differs == {*COUNTS_ON, "life"} - {"job"}
    assert record.life == 4


async def test_a_job_started_again_is_as_a_new_one_field_by_field() -> None:
    """Formed on the same node by the same join, a later life's record and object equal those of a first life."""
    again, new = World(), World()
    over = Job(FULL, again.now_s, saved=FULL)
    over.harmless_s, over.round.step, over.round.formed_wall_s, over.round.unheard_s = 8.0, 341, 9.0, 7.0
    over.round.told["straggler-1"] = Told(Answer("warn", "price", dry_run=True, policy=JobPolicy()))
    over.suspected = Suspected(["job:1:1"])
    over.superseded.add("runner-c")
    again.loop.jobs["job"] = over

    for world in (again, new):
        assert (await world.ask(world.new_join(runner_id="another"))).status == "go"

    job, first = again.loop.jobs["job"], new.loop.jobs["job"]
    mine, theirs = msgspec.structs.asdict(job.record), msgspec.structs.asdict(first.record)
    assert {name: mine[name] for name in mine if mine[name] != theirs[name] and name not in MAY_DIFFER} == {}
    assert (job.record.policy, len(job.record.members)) == (first.record.policy, len(first.record.members))
    assert (job.record.life, job.record.round, job.record.incidents) == (4, 9, 9)
    mine, theirs = vars(job), vars(first)
    assert {name: mine[name] for name in mine if mine[name] != theirs[name] and name not in NOT_OF_A_LIFE} == {}
    mine, theirs = vars(job.round), vars(first.round)
    assert {name: mine[name] for name in mine if mine[name] != theirs[name] and name != "silence"} == {}
    assert (job.suspicion, job.round.silence.odd) == (None, False)
    assert (job.runners.keys(), job.waiting.keys()) == (first.runners.keys(), first.waiting.keys())


async def _train_to_341(world: World) -> None:
    """A step a second; every 5 s the journal is told how far it came."""
    for step in range(323, 342):
        world.train(step)
        await world.wait(1.0)


async def test_a_short_life_after_a_long_one_catches_up() -> None:
    """The life before came to step 341; the next one trains to step 12, and is running."""
    world = World()
    await world.up("a", step=20)
    await _train_to_341(world)
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    await world.settle()
    assert world.loop.jobs["job"].record.furthest > 320

    await world.ask(world.new_join(runner_id="another"))
    await world.run_round(12)

    assert world.state == "running"
    assert world.loop.jobs["job"].record.best_step == -1


async def test_so_it_does_when_the_controller_was_started_again_between_them() -> None:
    """The journal's rows of the life before are gone, too: nothing of it is in what the next controller reads."""
    world = World()
    await world.up("a", step=20)
    await _train_to_341(world)
    world.loop.jobs["job"].change(habits={"upload": 600.0}, tabs={"straggler-1": Tab(1.0, 2.0)})
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    await world.settle()
    world.restart_controller()

    await world.ask(world.new_join(runner_id="another"))
    world.restart_controller()
    world.poll("a", runner_id="another")
    await world.run_round(12)

    record = world.loop.jobs["job"].record
    assert world.state == "running"
    assert (record.life, record.best_step, record.habits, record.tabs) == (2, -1, {}, {})


async def test_a_round_that_is_taken_over_after_a_life_that_is_over_inherits_nothing() -> None:
    """The journal ends with a finished life, and round 4 of a later one runs: best step and habits are not its."""
    world = World()
    world.loop.jobs["job"] = Job(msgspec.structs.replace(FULL, round=3, orders=()), world.now_s, saved=FULL)
    resume = msgspec.structs.replace(
        world.new_join(cause="resume", previous_round=4, runner_id="another"), node_rank=0, nodes=1
    )

    reply = await world.loop.joining.join(resume, 1.0)

    record = world.loop.jobs["job"].record
    assert (reply.status, record.round, record.life) == ("go", 4, 4)
    assert (record.best_step, record.furthest, record.habits, record.tabs, record.tuned) == (-1, -1, {}, {}, {})
