# SPDX-License-Identifier: Apache-2.0
"""A page says what is so: a start is no training, a blink is no verdict, an end by hand is no success."""

import io
import signal
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from megascale_ops.cli.terminal.tables import status_view
from megascale_ops.cli.top.verdict import Look
from megascale_ops.cli.top.view import screen
from megascale_ops.controller import status as controller_status
from megascale_ops.controller.history.files import HistoryFiles
from megascale_ops.controller.job.job import UNSEEN_S
from megascale_ops.controller.live.feed import Feed, Sources
from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.events import Status
from megascale_ops.schema.live import JUDGED
from megascale_ops.schema.messages import Leave
from tests.fakes.controlled_job import World
from tests.fakes.gathered_frames import gather, judged
from tests.fakes.training_job import Training


def _printed(status: Status) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as printed:
        console.print(status_view(status))
    return printed.get()


def _status(world: World) -> Status:
    found = world.loop.status("job")
    assert found is not None
    return found


async def test_nothing_is_said_of_a_rank_before_its_grace_is_over() -> None:
    """A process that is stopped for a blink (a debugger, a snapshot) is no news: in no frame, in no status."""
    world = World(nproc=2)
    await world.up("a", step=50)
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    feed = Feed("job")
    frames, statuses = [], []
    for _look in range(6):
        await world.wait(0.2)
        frames.append(gather(feed, world))
        statuses.append(_status(world))

    assert world.state == "suspect"
    assert {frame.headline and frame.headline.sentence for frame in frames} == {"All 2 ranks make progress."}
    assert {tuple(judged(frame)) for frame in frames} == {("ok", "ok")}
    assert {frame.jobs and (frame.jobs[0].level, frame.jobs[0].state) for frame in frames} == {("calm", "running")}
    assert {frame.pace and frame.pace.state for frame in frames} == {"running"}
    assert all("job job · running · " in _printed(status) for status in statuses)


async def test_a_title_says_what_the_headline_says_is_being_done() -> None:
    """Of every state in which a job does not train as it should: in `status`, in `top`, and on the page."""
    world = World(nproc=2)
    await world.up("a", step=50)
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    feed, seen = Feed("job"), set()
    for _look in range(40):
        await world.wait(0.2)
        frame = gather(feed, world)
        assert frame.pace is not None
        assert frame.headline is not None
        title = screen(frame, Look(200))[0].plain
        assert title.split(" · ")[1] == _printed(_status(world)).split(" · ")[1]
        if frame.headline.level == "act" and frame.pace.stepped < 0:
            assert f"; {title.split(' · ')[1]}." in frame.headline.sentence
            seen.add(frame.pace.state)

    assert "stopping" in seen


async def test_a_rank_that_is_stopped_and_continued_in_turn_is_one_headline() -> None:
    """The headline does not follow each turn: it comes once, and stays until nothing has happened for a while."""
    world = World(nproc=2)
    await world.up("a", step=50)
    feed, said = Feed("job"), []
    for turn in range(10):
        world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
        for _look in range(2):
            await world.wait(0.9)
            said.append(gather(feed, world))
        world.rank(1).state, world.rank(1).moved_s = "R", world.now_s
        world.train(51 + turn)
        for _look in range(2):
            await world.wait(0.5)
            said.append(gather(feed, world))
    for second in range(16):
        world.train(70 + second)
        await world.wait(1.0)

    later = gather(feed, world)

    sentences = [frame.headline.sentence for frame in said if frame.headline is not None]
    flips = sum(one != other for one, other in pairwise(sentences))
    assert len(sentences) == 40
    assert flips <= 3
    assert sentences[-1] == "Rank 1 froze again and again; it moves in between."
    assert later.headline is not None
    assert later.headline.sentence == "All 2 ranks make progress."


async def test_headline_map_and_list_are_of_one_moment() -> None:
    """Gathering takes a while: what is judged meanwhile is in all parts of the frame, or in none."""
    world = World(nproc=2)
    await world.up("a", step=50)
    loop, feed = world.loop, Feed("job")
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job)
    gathering = feed.gather(sources, now_s=loop.clock(), wall_s=loop.wall(), lag_s=0.0)
    while next(gathering) is None:
        pass
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(1.8)

    for _pause in gathering:
        pass

    frame = feed.frame
    assert frame is not None
    assert frame.headline is not None
    assert frame.headline.culprits == (1,)
    assert judged(frame) == ["ok", "lost"]
    assert frame.pace is not None
    assert frame.pace.counts[JUDGED.index("lost")] == 1
    assert frame.incidents is not None
    assert frame.incidents[0].culprits == (1,)
    assert frame.jobs is not None
    assert frame.jobs[0].level == "act"


async def test_ranks_that_have_not_stepped_yet_are_starting_and_not_well() -> None:
    """Until the first step of a round the map, the headline and the level say that ranks start, also where all live."""
    world = World(nproc=2)
    world.ask(world.new_join())
    await world.settle()
    feed = Feed("job")
    formed = gather(feed, world)
    world.spawn("a")
    world.beat_all()
    await world.wait(5.0)
    up = gather(feed, world)
    world.rank(0).state = "S"
    world.train(0)
    await world.wait(0.2)

    half = gather(feed, world)

    assert world.loop.jobs["job"].state is State.CATCHING_UP
    assert [judged(frame) for frame in (formed, up, half)] == [["starting"] * 2, ["starting"] * 2, ["starting", "ok"]]
    assert [frame.headline and (frame.headline.level, frame.headline.sentence) for frame in (formed, up, half)] == [
        ("waiting", "Ranks are starting: 0 of 2 have made a step."),
        ("waiting", "Ranks are starting: 0 of 2 have made a step."),
        ("waiting", "Ranks are starting: 1 of 2 has made a step."),
    ]
    assert half.jobs is not None
    assert half.jobs[0].level == "waiting"
    assert half.pace is not None
    assert half.pace.stepped == 1


async def test_a_start_is_said_to_take_as_long_as_the_last_one() -> None:
    """What the last start took is told with the next one, by the page and by status, until it takes much longer."""
    world = World(nproc=1)
    world.ask(world.new_join())
    await world.settle()
    await world.wait(12.0, beating=False)
    await world.run_round(0)
    exits = (world.exit(0, -signal.SIGKILL, step=0),)
    world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    await world.settle()
    feed = Feed("job")
    soon = gather(feed, world)
    status = controller_status.job_status(
        world.loop.jobs["job"], world.loop.registry, now_s=world.loop.clock(), wall_s=world.loop.wall()
    )
    await world.wait(19.0, beating=False)

    late = gather(feed, world)

    assert soon.headline is not None
    assert soon.headline.sentence.endswith("starting again: 0 of 1 has made a step, about 12 s in all.")
    assert "starting 0/1, about 12 s in all" in _printed(Status(1, 0.0, 0.0, (status,)))
    assert late.headline is not None
    assert late.headline.sentence.endswith("0 of 1 has made a step, longer than the 12 s of the last one.")


async def test_a_script_without_steps_is_not_starting_for_ever() -> None:
    """Ranks without a black box start until a script that trains would have one, and are well from then on."""
    world = World(nproc=1)
    world.ask(world.new_join())
    await world.settle()
    world.spawn("a")
    world.rank(0).has_box = False
    world.beat_all()
    feed = Feed("job")
    first = gather(feed, world)
    await world.wait(UNSEEN_S + 5.0)

    later = gather(feed, world)

    assert world.loop.jobs["job"].state is State.RUNNING
    assert [judged(frame) for frame in (first, later)] == [["starting"], ["ok"]]


async def test_a_script_whose_black_box_comes_late_is_starting_until_its_first_step() -> None:
    """Where torch takes long to be imported nothing is known of a rank: it is not said to make progress."""
    world = World(nproc=2)
    world.ask(world.new_join())
    await world.settle()
    world.spawn("a")
    for rank in world.ranks["a"]:
        rank.has_box = False
    await world.wait(5.0)
    feed = Feed("job")
    without = gather(feed, world)
    for rank in world.ranks["a"]:
        rank.has_box = True
    await world.wait(1.0)
    with_box = gather(feed, world)
    world.rank(1).state = "S"
    world.train(0)
    await world.wait(1.0)

    half = gather(feed, world)

    assert world.loop.jobs["job"].state is State.RUNNING
    assert [judged(frame) for frame in (without, with_box, half)] == [
        ["starting"] * 2,
        ["starting"] * 2,
        ["ok", "starting"],
    ]
    assert [frame.headline and (frame.headline.level, frame.headline.sentence) for frame in (with_box, half)] == [
        ("waiting", "Ranks are starting: 0 of 2 have made a step."),
        ("waiting", "1 of 2 ranks make progress; 1 made no step yet."),
    ]
    assert with_box.jobs is not None
    assert with_box.jobs[0].level == "waiting"


async def test_a_job_stopped_by_hand_is_not_told_as_one_that_finished() -> None:
    """Ctrl-C in mid-run has a sentence of its own, with the step; none of its ranks makes progress any more."""
    world = World(nproc=2)
    await world.up("a", step=2374)
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))

    frame = gather(Feed("job"), world)

    assert frame.headline is not None
    assert (frame.headline.level, frame.headline.sentence) == (
        "over",
        "The job was stopped by hand at step 2,374.",
    )
    assert frame.pace is not None
    assert (frame.pace.state, frame.pace.step) == ("stopped", 2374)
    assert judged(frame) == ["gone", "gone"]


async def test_a_job_that_was_over_before_this_controller_has_no_rank_that_is_not_heard(tmp_path: Path) -> None:
    """Who opens the journal of a run that has ended sees ranks that ended, its last step, and its goodput then."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _second in range(60):
        world.second()
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))
    world.loop.tick()
    files = HistoryFiles(world.loop, tmp_path)
    before = gather(Feed("job"), world, world.loop.goodput("job"))
    await files.close()
    world.restart_controller()
    HistoryFiles(world.loop, tmp_path).restore()

    after = gather(Feed("job"), world, world.loop.goodput("job"))

    assert before.pace is not None
    assert before.pace.goodput > 0.5
    assert after.pace is not None
    for told in ("state", "step", "goodput", "goodput_hour", "alive_s", "counts"):
        assert getattr(after.pace, told) == getattr(before.pace, told)
    assert judged(after) == ["gone", "gone"]
