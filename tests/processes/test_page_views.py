# SPDX-License-Identifier: Apache-2.0
"""The page's list of many jobs, its curve of the loss, and its view of what a rank printed, in a real browser."""

import asyncio
import re
import time
from pathlib import Path

import pytest

from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork
from tests.fakes.reading_agent import reading_agent
from tests.fakes.served_controller import Served, serve_controller
from tests.processes.browsing import EVIL, LISTEN, MS, Open, browser, opened, poison
from tests.processes.launch import PATIENCE_S

__all__ = ["browser", "opened"]  # pytest finds fixtures by their names
# A picture gets narrower, and a key comes before a frame tells of it: in one task, as on a busy machine.
NARROWED = """() => {
    document.getElementById("times-frame").style.width = "700px";
    document.getElementById("times-over").dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
}"""
pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


async def _many_jobs(served: Served, number: int) -> None:
    """Let jobs wait for their ranks, and one of them have failed."""
    policy = JobPolicy(node_lost_s=3600.0)
    for at in range(number):
        name = f"job-{at:02d}"
        join = Join(name, "a", "r", f"j{at}", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
        await served.loop.joining.join(join, 5.0)
    verdict = Verdict("killed", "rank 1: SIGKILL", 1.0, (1,), ("a",))
    served.loop.jobs["job-30"].change(state="failed", since_wall_s=time.time(), ended_verdict=verdict)


async def _job_with(served: Served, name: str, losses: list[StepWork]) -> None:
    """Let a job have made these steps, one in ten seconds."""
    policy = JobPolicy(node_lost_s=3600.0)
    join = Join(name, "a", "r", f"j-{name}", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
    await served.loop.joining.join(join, 5.0)
    history = served.loop.histories.of(served.loop.jobs[name])
    history.origin_s = float(int(time.time() - 10.0 * len(losses)))
    for rank in range(2):
        for at, work in enumerate(losses):
            history.ingest_steps(rank, "a", Mesh(), (work,), history.origin_s + 10.0 * at + 5.0)


async def test_long_names_that_differ_at_their_ends_are_told_apart(tmp_path: Path, opened: Open) -> None:
    """On a phone the map shows the ends of nodes' names; no sentence changes one, nothing is wider than the page."""
    node = "gpu-pool.of.a.cluster.with-a-long-name." * 2
    names = [f"{node}{at}" for at in range(2)]
    async with serve_controller(tmp_path) as served:
        policy = JobPolicy(node_lost_s=3600.0)
        joins = [
            Join("g" * 100, name, name, name, 1, 2, 2, "127.0.0.1", 29500, time.monotonic(), policy=policy)
            for name in names
        ]
        await asyncio.gather(*(served.loop.joining.join(join, PATIENCE_S) for join in joins))
        path = "/a/long/path" * 20
        verdict = Verdict("node_lost", f"{names[0]}: no answer", 0.9, (0,), (names[0],))
        incident = Incident("g-1", "g" * 100, 1, "open", Marks(began=time.time(), detected=time.time()), verdict, path)
        job = served.loop.jobs["g" * 100]
        job.change(state="stopping", incident="g-1")
        served.loop.transitions.put_incident(job, incident)
        served.loop.transitions.save(job)

        async with opened(served.url, width=320, dark=True) as seen:
            await seen.says(".reason", "no answer")
            await seen.page.evaluate(LISTEN)
            await seen.page.set_viewport_size({"width": 330, "height": 844})  # all is drawn anew
            await seen.page.wait_for_function("() => [...(window.written ?? [])].some((text) => text.endsWith('.1'))")
            written = await seen.page.evaluate("[...window.written]")
            beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            wider = [await seen.page.evaluate(beyond)]
            said = await seen.text(".reason >> nth=0")
            assert seen.wrong == []  # below, the journal may not have the incident at the first try
            await seen.page.evaluate("location.hash = '#incident=g-1'")
            await seen.says("#incident", path)
            wider.append(await seen.page.evaluate(beyond))

    labels = [text for text in written if text.startswith("map: ") and "\u2026" in text]
    assert {label[-2:] for label in labels} == {".0", ".1"}
    assert max(wider) <= 0
    assert said == verdict.reason


async def test_the_loss_is_drawn_where_ranks_tell_one(tmp_path: Path, opened: Open) -> None:
    """A curve on the scale of time of the steps, with its figure by keyboard; none told: no curve."""
    losses = [StepWork(at, 0.5, loss=8.0 / (1 + at)) for at in range(19)] + [StepWork(19, 0.5, loss_is_finite=False)]
    async with serve_controller(tmp_path) as served:
        await _job_with(served, "learns", losses)
        await _job_with(served, "mute", [StepWork(at, 0.5) for at in range(20)])
        said, written, high = {}, {}, {}
        for job in ("learns", "mute"):
            async with opened(f"{served.url}/#job={job}") as seen:
                await seen.says("#times-legend", "median rank")
                await seen.page.locator("#times-over").focus()
                await seen.page.keyboard.press("Home")
                await seen.says("#times-facts", re.compile(r"up to step 0(?!\d)"))  # the oldest columns come last
                await seen.page.evaluate(LISTEN)
                await seen.page.evaluate(NARROWED)  # all is drawn anew
                told = [await seen.text("#times-facts")]
                for key in ("End", "ArrowLeft"):
                    await seen.page.keyboard.press(key)
                    told.append(await seen.text("#times-facts"))
                said[job] = told
                high[job] = await seen.page.evaluate("document.getElementById('times').offsetHeight")
                end_s = time.monotonic() + PATIENCE_S
                while not any(text.startswith("times: ") for text in written.get(job, ())):
                    assert time.monotonic() < end_s, "the steps were not drawn anew"
                    written[job] = await seen.page.evaluate("[...window.written]")
                assert seen.wrong == []

        first, last, before = said["learns"]
        assert "loss is no number" in last
        assert "loss 0.4211" in before
        assert "loss 8" in first
        assert {"times: loss: mean of the ranks", "times: 5"} <= set(written["learns"])
        assert not any("loss" in text for text in (*said["mute"], *written["mute"]))
        assert high["learns"] > high["mute"]


async def test_a_node_that_is_not_healthy_is_shown_with_what_may_be_typed(tmp_path: Path, opened: Open) -> None:
    """Taken out while the page is open it appears, as text and no markup; released it is gone again."""
    async with serve_controller(tmp_path) as served:
        await _job_with(served, "mine", [StepWork(at, 0.5) for at in range(5)])
        async with opened(f"{served.url}/#job=mine", width=390) as seen:
            await seen.says("#times-legend", "median rank")
            before = await seen.page.locator("#nodes-part").is_visible()
            served.loop.nodes.quarantine("a", "ada", f"a fan is loud {EVIL}", 0.0)
            await seen.says("#nodes", "a is draining")
            said = await seen.text("#nodes")
            served.loop.nodes.release("a", "ada", "")
            await seen.page.locator("#nodes-part").wait_for(state="hidden", timeout=PATIENCE_S * MS)

            assert not before
            assert "by ada" in said
            assert EVIL in said
            assert f"megascale-ops nodes release a --controller {served.url}" in said
            assert await seen.page.evaluate("document.documentElement.scrollWidth") <= 390
            assert seen.wrong == []


async def test_fifty_jobs_on_a_phone_leave_the_worst_verdict_on_the_first_screen(tmp_path: Path, opened: Open) -> None:
    """The head of the page has one line for all jobs; their list has the worst first, one line each."""
    async with serve_controller(tmp_path) as served:
        await _many_jobs(served, 50)
        async with opened(f"{served.url}/#job=job-30", width=390, touch=True) as seen:
            await seen.says("#verdict h1", "job failed")
            verdict = await seen.page.locator("#verdict h1").bounding_box()
            await seen.page.locator("#jobs a.all").tap()
            await seen.says("#overview-jobs", "job-49")
            lines = await seen.page.locator("#overview-jobs li").all_inner_texts()
            heights = await seen.page.evaluate(
                "[...document.querySelectorAll('#overview-jobs li')].map((one) => one.offsetHeight)"
            )

            assert verdict is not None
            assert verdict["y"] + verdict["height"] < 500
            assert len(lines) == 50
            assert lines[0].startswith("job-30")
            assert "Rank 1 was killed" in lines[0]
            assert max(heights) < 50  # one line of text
            assert await seen.page.evaluate("document.documentElement.scrollWidth") <= 390
            assert seen.wrong == []


async def test_jobs_are_searched_filtered_and_opened_by_keyboard(tmp_path: Path, opened: Open) -> None:
    """A slash searches, arrows walk, Enter opens; a filter keeps what needs a person; Escape goes back to the job."""
    async with serve_controller(tmp_path) as served:
        await _many_jobs(served, 40)
        async with opened(served.url) as seen:
            await seen.says("#jobs", "all 40 jobs")
            await seen.page.keyboard.press("/")
            await seen.page.keyboard.type("job-1")
            await seen.says("#overview-left", "30 jobs not shown")
            for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
                await seen.page.keyboard.press(key)
            chosen = await seen.page.evaluate("document.activeElement.querySelector('.name').textContent")
            await asyncio.sleep(2.5)  # two frames: the line that has the focus keeps it
            still = await seen.page.evaluate("document.activeElement.querySelector('.name')?.textContent")
            await seen.page.keyboard.press("Enter")
            await seen.says("#jobs a[aria-current]", chosen)
            opened_page = await seen.page.locator("#page").is_visible()
            await seen.page.keyboard.press("/")
            await seen.page.keyboard.press("Escape")
            await seen.page.locator("[data-filter=act]").click()
            acted = await seen.page.locator("#overview-jobs li").all_inner_texts()
            await seen.page.keyboard.press("Escape")
            await seen.page.locator("#page").wait_for(timeout=PATIENCE_S * MS)

            assert chosen == still
            assert chosen.startswith("job-1")
            assert opened_page
            assert [line.split()[0] for line in acted] == ["job-30"]
            assert seen.wrong == []


async def test_what_a_rank_printed_is_followed_searched_and_marked(tmp_path: Path, opened: Open) -> None:
    """From an incident to the culprit's log: new lines come by themselves, markup stays text, what counts is marked."""
    folder = tmp_path / "logs/round-1/rank-1"
    folder.mkdir(parents=True)
    path = folder / "stderr.log"
    path.write_text("".join(f"step {at}\n" for at in range(300)) + f"RuntimeError: {EVIL}\n")
    async with serve_controller(tmp_path, logs_of=tmp_path) as served:
        await poison(served)
        async with opened(f"{served.url}/#incident=evil-1") as seen:
            await seen.page.get_by_text("What rank 1 printed").click()
            await seen.says("#log-lines .marked", EVIL)
            await seen.says("#log-state", "1 line marked that the incident rests on")
            with path.open("a") as file:
                file.write("came later\n")
            await seen.says("#log-lines li", "came later")
            await seen.page.fill("#log-search", "STEP 77")
            await seen.says("#log-state", "1 line holds this text")
            found = await seen.page.locator("#log-lines li").all_inner_texts()
            await seen.page.fill("#log-rank", "7")
            await seen.page.keyboard.press("Enter")
            await seen.says("#log-state", "rank 7 has left no stderr")
            await seen.page.locator("#log-back").click()
            await seen.says("#incident h1", "Rank 1 died of an exception")

            assert found == ["step 77"]
            assert await seen.page.evaluate("window.hacked") is None
            assert await seen.page.locator("main img, main script, main iframe").count() == 0


async def test_a_log_that_is_followed_goes_on_with_the_next_round(tmp_path: Path, opened: Open) -> None:
    """What a restarted rank prints is shown from its first line, and no more of the round before."""
    for number in (1, 2):
        (tmp_path / f"logs/round-{number}/rank-1").mkdir(parents=True)
    (tmp_path / "logs/round-1/rank-1/stderr.log").write_text("before\n")
    async with serve_controller(tmp_path, logs_of=tmp_path) as served:
        await poison(served)
        async with opened(f"{served.url}/#log=1&job=evil") as seen:
            await seen.says("#log-lines li", "before")
            (tmp_path / "logs/round-2/rank-1/stderr.log").write_text("the first line\nthe second line\n")
            await seen.says("#log-lines li", "the second line")

            assert await seen.page.locator("#log-lines li").all_inner_texts() == ["the first line", "the second line"]
            assert seen.wrong == []


async def test_a_shared_controller_shows_what_an_agent_reads(tmp_path: Path, opened: Open) -> None:
    """An agent that was not heard at first is asked again; what an incident rests on is marked, also far up."""
    folder = tmp_path / "node/round-1/rank-1"
    folder.mkdir(parents=True)
    path = folder / "stderr.log"
    path.write_text(f"RuntimeError: {EVIL}\n" + "".join(f"step {at}\n" for at in range(500)))
    async with serve_controller(tmp_path) as served:
        await poison(served)
        async with opened(f"{served.url}/#log=1&job=evil&incident=evil-1&round=1") as seen:
            await seen.says("#log-state", "the agent of node a, where rank 1 ran, is not heard")
            async with reading_agent(served.url, "a", tmp_path / "node"):
                await seen.says("#log-lines .marked", EVIL)
                with path.open("a") as file:
                    file.write("came later\n")
                await seen.says("#log-lines li", "came later")
                await seen.page.fill("#log-search", "STEP 499")
                await seen.says("#log-state", "1 line holds this text on node a")

                assert await seen.page.locator("#log-lines li").all_inner_texts() == ["step 499"]
                assert await seen.page.evaluate("window.hacked") is None


async def test_a_page_that_is_open_to_all_shows_no_log_without_a_token(tmp_path: Path, opened: Open) -> None:
    """What ranks print may hold anything: who has no token is told that, while the page itself stays open."""
    path = tmp_path / "logs/round-1/rank-1/stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text("secret\n")
    async with serve_controller(tmp_path, "token", open_page=True, logs_of=tmp_path) as served:
        await poison(served)
        async with opened(f"{served.url}/#log=1&job=evil") as seen:
            await seen.says("#log-state", "wants a token")

            assert "secret" not in await seen.text("#log")
