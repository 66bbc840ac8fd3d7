# SPDX-License-Identifier: Apache-2.0
"""What a page is told of a job, frame by frame, through the real loop with a clock that the test winds."""

import signal

import msgspec

from megascale_ops.controller.live.feed import Feed, Sources
from megascale_ops.controller.live.ranks import NODES_A_TIME
from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.health import CheckedFigure, CheckedFinding, SelfCheck, SelfCheckView
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.live import UNKNOWN, Frame, merge, numbers
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, StepWork
from tests.fakes.controlled_job import World
from tests.fakes.gathered_frames import gather, judged


async def test_a_controller_without_a_job_says_so() -> None:
    """A frame without a job is whole and has a headline; nothing is made up."""
    frame = gather(Feed(""), World())

    assert frame.headline is not None
    assert (frame.headline.level, frame.headline.sentence) == ("waiting", "No job has joined this controller yet.")
    assert frame.columns is None


async def test_a_healthy_job_is_calm() -> None:
    """All ranks are told with place, step and phase, and the headline says that all is well."""
    world = World(nproc=2, min_nodes=2, max_nodes=2)
    await world.up("a", "b", step=50)

    frame = gather(Feed("job"), world)

    assert frame.headline is not None
    assert (frame.headline.level, frame.headline.sentence) == ("calm", "All 4 ranks make progress.")
    assert frame.pace is not None
    assert (frame.pace.step, frame.pace.world_size, frame.pace.counts) == (50, 4, (4, 0, 0, 0, 0, 0, 0))
    assert frame.layout is not None
    assert frame.layout.nodes == ("a", "b")
    assert list(numbers("node", frame.layout.node)) == [0, 0, 1, 1]
    assert list(numbers("local", frame.layout.local)) == [0, 1, 0, 1]
    assert list(numbers("pid", frame.layout.pid)) == [1000, 1001, 1002, 1003]
    assert frame.columns is not None
    assert frame.columns.phases is not None
    assert {frame.columns.phases[place] for place in numbers("phase", frame.columns.phase)} == {"forward"}
    assert list(numbers("behind", frame.columns.behind)) == [0, 0, 0, 0]


async def test_the_headline_is_told_before_the_rest_is_gathered() -> None:
    """Of each frame its headline and its pace come first, alone, and are those of the frame."""
    world = World(nproc=2)
    await world.up("a", step=50)
    loop, feed = world.loop, Feed("job")
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job)

    gathering = feed.gather(sources, now_s=loop.clock(), wall_s=loop.wall(), lag_s=0.0)
    first = next(told for told in gathering if told is not None)
    frame_by_then = feed.frame
    again = [told for told in gathering if told is not None]

    assert frame_by_then is None
    assert again == []
    assert feed.frame is not None
    assert (first.headline, first.pace, first.jobs) == (feed.frame.headline, feed.frame.pace, feed.frame.jobs)
    assert (first.job, first.whole, first.layout, first.columns, first.times) == ("job", False, None, None, None)


async def test_a_second_frame_tells_only_what_changed() -> None:
    """Of a job in which nothing happens a frame is a few hundred bytes, however many ranks it has."""
    world = World(nproc=64)
    await world.up("a", step=50)
    feed = Feed("job")
    gather(feed, world)
    await world.wait(0.2)

    frame = gather(feed, world)

    assert feed.change is not None
    assert not feed.change.whole
    assert feed.change.layout is None
    assert feed.change.columns is None
    assert feed.change.headline is None
    assert len(msgspec.json.encode(feed.change)) < 600
    assert frame.whole


async def test_changes_add_up_to_the_whole() -> None:
    """Each change applied to the frame before gives the whole frame, whatever happens to the job."""
    world = World(nproc=2)
    await world.up("a", step=50)
    feed = Feed("job")
    known: Frame | None = None

    for step in range(51, 60):
        world.train(step)
        world.rank(1).step = 50
        world.rank(1).phase = "a phase of its own" if step > 55 else "data"
        work = StepWork(step, 0.05, waiting_s=0.01)
        history = world.loop.histories.of(world.loop.jobs["job"])
        history.ingest_steps(0, "a", Mesh(), (work,), world.loop.wall())
        await world.wait(0.4)
        gather(feed, world)
        assert feed.change is not None
        known = merge(known, feed.change)

    assert known == feed.frame


async def test_another_life_of_the_job_is_told_whole() -> None:
    """When the history begins anew, nothing of the one before is left on a page that has been open since."""
    world = World(nproc=1)
    await world.up("a", step=50)
    feed = Feed("job")
    job, histories = world.loop.jobs["job"], world.loop.histories
    histories.of(job).ingest_steps(0, "a", Mesh(), (StepWork(50, 0.05),), world.loop.wall())
    known = gather(feed, world)
    await world.wait(3.0)

    job.change(life=2, started_wall_s=world.loop.wall())
    histories.of(job).ingest_steps(0, "a", Mesh(), (StepWork(0, 0.05),), world.loop.wall() + 1.0)
    now = gather(feed, world)

    assert feed.change is not None
    assert merge(known, feed.change).times == now.times


async def test_a_frozen_rank_is_marked_and_named_with_its_place() -> None:
    """The headline says which rank on which node, and what is being done; its place in the column is not ok."""
    world = World(nproc=2, min_nodes=2, max_nodes=2)
    await world.up("a", "b", step=50)
    world.rank(3).state, world.rank(3).stopped_since_s = "T", world.now_s
    await world.wait(1.8)

    frame = gather(Feed("job"), world)

    assert frame.headline is not None
    assert frame.headline.level == "act"
    assert frame.headline.sentence == "Rank 3 froze; evidence is being gathered."
    assert [(place.rank, place.node, place.local_rank) for place in frame.headline.places] == [(3, "b", 1)]
    assert (frame.headline.confidence > 0.5, frame.headline.sure_of) == (True, "")
    assert judged(frame) == ["ok", "ok", "ok", "lost"]


async def test_while_it_is_mended_the_headline_says_by_what() -> None:
    """From the verdict until training is back the sentence names the fault and what is being done."""
    world = World(nproc=2)
    await world.up("a", step=50)
    exits = (world.exit(1, -signal.SIGKILL, step=50), world.exit(0, -15, by_us=True))
    world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    await world.settle()

    frame = gather(Feed("job"), world)

    assert world.loop.jobs["job"].state is State.RESTARTING
    assert frame.headline is not None
    assert frame.headline.level == "act"
    assert frame.headline.sentence == ("Rank 1 was killed; ranks are starting again: 0 of 2 have made a step.")
    assert frame.headline.command == "megascale-ops why job-1"
    assert frame.incidents is not None
    assert [(line.id, line.what, line.state) for line in frame.incidents] == [("job-1", "Rank 1 was killed", "open")]
    assert frame.incidents[0].undo_command == "megascale-ops policy set job killed=warn"


async def test_after_it_is_mended_the_last_incident_is_still_told() -> None:
    """An hour later it still shows what happened and how long it took."""
    world = World(nproc=2)
    await world.up("a", step=50)
    exits = (world.exit(1, -signal.SIGKILL, step=50), world.exit(0, -15, by_us=True))
    world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    await world.settle()
    await world.run_round(60)
    await world.wait(0.5)

    frame = gather(Feed("job"), world)

    assert frame.headline is not None
    assert frame.headline.sentence == "All 2 ranks make progress."
    assert frame.headline.reason.startswith("Before: rank 1 was killed; training was back after ")
    assert frame.headline.incident == "job-1"


async def test_quiet_is_counted_and_a_node_that_is_not_heard_counts_as_quiet() -> None:
    """Ranks of a node whose agent is silent are not shown as if they moved."""
    world = World(nproc=1, min_nodes=2, max_nodes=2, policy=JobPolicy(node_lost_s=3600.0, silence_floor_s=600.0))
    await world.up("a", "b", step=50)
    for _second in range(7):
        world.now_s += 1.0
        world.train(world.rank(0).step + 1)
        world.beat("a")
        world.loop.tick()

    frame = gather(Feed("job"), world)

    assert frame.columns is not None
    quiet = list(numbers("quiet", frame.columns.quiet))
    assert quiet[0] == 0
    assert 6 <= quiet[1] <= 8


async def test_ranks_that_nobody_told_of_are_unheard() -> None:
    """A rank without a report is neither well nor ill, and the headline does not say that all is well."""
    world = World(nproc=1, min_nodes=2, max_nodes=2)
    await world.up("a", "b", step=50)
    del world.loop.registry.node("b").shares["job"]  # type: ignore[union-attr]  # it is known

    frame = gather(Feed("job"), world)

    assert judged(frame) == ["ok", "unheard"]
    assert frame.headline is not None
    assert frame.headline.sentence == "1 of 2 ranks are heard; 1 is not."
    assert frame.columns is not None
    assert numbers("behind", frame.columns.behind)[1] == UNKNOWN


async def test_a_pause_without_steps_is_not_called_progress() -> None:
    """When no step ends for long, the headline says so, before a rank is suspected."""
    world = World(nproc=1, policy=JobPolicy(silence_floor_s=600.0))
    await world.up("a", step=50)
    await world.wait(11.0)

    frame = gather(Feed("job"), world)

    assert frame.headline is not None
    assert (frame.headline.level, frame.headline.sentence) == ("watch", "The only rank lives, but no step ends.")


async def test_ranks_beyond_the_world_and_absurd_numbers_do_no_harm() -> None:
    """A report that can't be takes no place that is not there."""
    world = World(nproc=1)
    await world.up("a", step=50)
    world.ranks["a"][0].rank = 7
    world.beat_all()

    frame = gather(Feed("job"), world)

    assert judged(frame) in (["ok"], ["unheard"])


async def test_gathering_pauses_between_nodes() -> None:
    """Of a large job no more than 96 nodes are gone through before others may run."""
    nodes = [f"n{number}" for number in range(2 * NODES_A_TIME)]
    world = World(nproc=1, min_nodes=len(nodes), max_nodes=len(nodes))
    await world.up(*nodes)
    loop = world.loop
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job)

    pauses = sum(1 for _ in Feed("job").gather(sources, now_s=loop.clock(), wall_s=loop.wall(), lag_s=0.0))

    assert pauses >= 4


async def test_a_rank_that_waits_in_a_collective_is_told_as_it_is() -> None:
    """Ranks behind the furthest are told with how many steps they are behind."""
    world = World(nproc=2)
    await world.up("a", step=50)
    world.rank(0).step = 55
    world.rank(0).collective = CollectivePosition(enqueued=9, completed=8)
    world.beat_all()

    frame = gather(Feed("job"), world)

    assert frame.columns is not None
    assert list(numbers("behind", frame.columns.behind)) == [0, 5]


async def test_the_newest_self_checks_of_the_jobs_nodes_are_told_the_worst_first() -> None:
    """Age, worst finding, figures; nodes without one are left out, and another job's node is not this job's."""
    world = World(nproc=1, min_nodes=3, max_nodes=3)
    await world.up("a", "b", "c")
    rate = CheckedFigure("gemm_bf16", "8 of them", 6e14, 3e14, 6.6e14, "bf16 matrix products, 8 of them: 600 TFLOP/s")
    slow = CheckedFinding("bad", "GPU 1", "GPU 1 is slow", check="gemm")
    keep = world.loop.nodes.keep_check
    keep(SelfCheckView("a", "done", asked_wall_s=5.0, check=SelfCheck("a", "quick", "good", figures=(rate,))))
    keep(SelfCheckView("b", "done", asked_wall_s=6.0, check=SelfCheck("b", "quick", "bad", findings=(slow,))))
    keep(SelfCheckView("x", "done", asked_wall_s=7.0, check=SelfCheck("x", "quick", "bad")))
    loop, feed = world.loop, Feed("job")
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job, check_of=loop.self_checks.view)

    for _ in feed.gather(sources, now_s=world.now_s, wall_s=loop.wall(), lag_s=0.0):
        pass

    assert feed.frame is not None
    assert feed.frame.checks is not None
    assert [(one.node, one.status, one.worst) for one in feed.frame.checks] == [
        ("b", "bad", "GPU 1 is slow"),
        ("a", "good", ""),
    ]
    assert feed.frame.checks[1].figures == ("bf16 matrix products, 8 of them: 600 TFLOP/s",)
