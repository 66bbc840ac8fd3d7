# SPDX-License-Identifier: Apache-2.0
"""The controller's page in a real browser, with a real run behind it in which a rank is slow and one is killed."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.schema.health import CheckedFigure, CheckedFinding, SelfCheck, SelfCheckView
from megascale_ops.schema.messages import Join, Leave
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.held_frame import hold_frames
from tests.fakes.served_controller import serve_controller
from tests.processes.browsing import LISTEN, MS, Open, Seen, browser, opened, poison
from tests.processes.launch import PATIENCE_S, Launch, until

PACED = Path(__file__).parents[1] / "fixtures" / "scripts" / "paced.py"
# 30 columns of ten seconds: longer than the run lives.
MOST_COLUMNS = 30
__all__ = ["browser", "opened"]  # pytest finds fixtures by their names
pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Four ranks, the third of which works twice as long as the others: half as long again drowns on a busy machine."""
    launched = Launch(tmp_path_factory.mktemp("page"))
    launched.spawn(
        "run", "--nproc-per-node=4", "--job=toy", "--", str(PACED), "--slow=forward", "--share=1.0", "--at=20",
        "--steps=1000000",
    )  # fmt: skip
    launched.until_step(10, deadline_s=120.0)
    yield launched
    launched.close()


def _url(run: Launch) -> str:
    """Return what a person gets told to open: the address with a token for a day."""
    done = run.command("page", "--job=toy")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_the_slow_rank_is_the_first_thing_to_read(run: Launch, opened: Open) -> None:
    """The headline names rank 2, its node and what it costs; the map marks it; nothing is asked of anybody else."""
    url = _url(run)

    async with opened(url) as seen:
        await seen.says("#verdict h1", "Rank 2 is slow and makes all others wait")
        # The ranks' places come behind the verdict, by the live feed.
        await seen.says("#verdict .where", "→ local rank 2")
        where = await seen.text("#verdict .where")
        await seen.says("#legend", "1 slow")
        # A verdict takes ten steps or so, an account needs a second of them and three for late ranks.
        await seen.says("#pace", re.compile(r"Goodput, last 5 min\s*\d+(\.\d)? %\s*Goodput, last hour\s*\d"))
        figures = await seen.text("#pace")
        title = await seen.page.title()
        await seen.page.locator(".copy").first.click()
        copied = await seen.page.evaluate("navigator.clipboard.readText()")

        assert where.startswith("rank 2 → ")
        assert where.endswith("→ local rank 2")
        assert "toy: Rank 2 is slow" in title
        assert "Step" in figures
        assert "not known" not in figures.split("Since the last step")[0]
        assert copied.startswith("megascale-ops why toy-")
        asked = {address.split("/static/")[0].split("?")[0] for address in seen.asked}
        here = url.partition("#")[0]
        assert asked <= {url, here, here.rstrip("/"), f"{here}v1/live"}
        assert "token=" in url
        # A browser never sends what follows the #; the page removes it from copied addresses.
        assert "token=" not in seen.page.url
        assert seen.wrong == []


# How many colours there are in the strip of step times, and in the heat map below it; the labels are left out.
COLOURS = """() => {
    const canvas = document.getElementById("times");
    const left = 52 * devicePixelRatio;
    const brush = canvas.getContext("2d");
    const colours = (top, until) => {
        const high = (until - top) * devicePixelRatio;
        const image = brush.getImageData(left, top * devicePixelRatio, canvas.width - left, high);
        return new Set(new Uint32Array(image.data.buffer)).size;
    };
    const high = canvas.height / devicePixelRatio; // the heat map is the last of the pictures
    return [colours(0, 128), colours(high - 60, high)];
}"""


async def test_the_steps_show_whose_work_they_waited_for(run: Launch, opened: Open) -> None:
    """The strip and the heat map are drawn; by keyboard they say how long a step took and that rank 2 worked longer."""
    async with opened(_url(run)) as seen:
        await seen.says("#legend", "1 slow")

        strip, heat = await seen.page.evaluate(COLOURS)
        await seen.page.locator("#times-over").focus()
        await seen.page.keyboard.press("End")
        told = []
        for _column in range(MOST_COLUMNS):  # the newest may have begun a moment ago, the oldest before it was slow
            facts = await seen.text("#times-facts")
            await seen.page.keyboard.press("ArrowDown")
            await seen.page.keyboard.press("ArrowDown")
            slow = await seen.text("#times-facts")
            told.append((facts, slow, _own(facts), _own(slow)))
            if _own(facts) and _own(slow) >= 125:
                break
            for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
                await seen.page.keyboard.press(key)
        facts, slow, own, slow_own = told[-1]

        assert strip >= 3  # the ground, the median rank's line, the longest steps
        assert heat >= 2  # ranks at work, and the one that works longer
        assert facts.startswith("rank 0")
        assert re.search(r"median rank [\d.]+ m?s a step", facts), told
        assert slow.startswith("rank 2")
        assert slow_own >= 125 > own > 0, told


async def test_a_slow_rank_keeps_its_number_and_time_has_a_ledger(run: Launch, opened: Open) -> None:
    """The map has the numbers of all ranks, also of the one that is not well; host, date and ledger, too."""
    async with opened(_url(run)) as seen:
        await seen.says("#legend", "1 slow")
        await seen.page.evaluate(LISTEN)
        await seen.page.set_viewport_size({"width": 1200, "height": 844})  # all is drawn anew

        numbers = {"map: 0", "map: 1", "map: 2", "map: 3"}
        end_s = time.monotonic() + PATIENCE_S
        while not numbers <= (written := set(await seen.page.evaluate("[...window.written]"))):
            assert time.monotonic() < end_s, written
            await asyncio.sleep(0.2)
        await seen.page.locator("#map-over").focus()
        await seen.page.keyboard.press("n")
        facts = await seen.text("#rank-facts")
        await seen.says("#ledger", re.compile(r"training.*waiting for the slowest", re.DOTALL))
        ledger = await seen.text("#ledger")
        figures = await seen.text("#pace")

        assert "host " in facts
        assert re.search(r"whole job, \d", ledger)
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d", figures)
        assert seen.wrong == []


# Of steps of one second, the newest fifth of which take so much longer: how much of the height that is.
SLOWDOWN = """async (longer) => {
    const { TimesView } = await import("/static/times.js");
    const step = (at) => (at < 80 ? 1 : 1 + longer) * (at % 2 ? 1.01 : 0.99);
    const slots = [...Array(100).keys()].map((at) => (
        { median_s: step(at), longest_s: at === 50 ? 600 : 1.05 * step(at) }
    ));
    const { usual_s, low_s, top_s } = TimesView.prototype.scale.call({ slots });
    return { share: (Math.min(top_s, usual_s * (1 + longer)) - usual_s) / (top_s - low_s), top_s };
}"""


async def test_a_fifth_longer_is_seen_at_a_glance_and_a_ripple_is_not(tmp_path: Path, opened: Open) -> None:
    """A slowdown of 20 % takes a quarter of the height at least, one of 2 % next to nothing; none is cut off."""
    async with serve_controller(tmp_path) as served, opened(served.url) as seen:
        ripple, fifth, twice = [await seen.page.evaluate(SLOWDOWN, longer) for longer in (0.02, 0.2, 1.0)]

        assert ripple["share"] < 0.06
        assert fifth["share"] > 0.25
        assert twice["top_s"] > 2.0  # and not ten minutes, as its longest step
        assert twice["share"] > 0.5


def _own(facts: str) -> int:
    """Return the per cent of the median rank's work that the page tells, 0 for none."""
    found = re.search(r"own work (\d+)", facts)
    return int(found[1]) if found else 0


async def test_a_killed_rank_is_told_without_a_reload_and_leaves_a_page(run: Launch, opened: Open) -> None:
    """From the kill to the recovery the open page follows; the incident's page shows evidence and how to undo."""
    async with opened(_url(run)) as seen:
        await seen.says("#verdict h1", "Rank 2 is slow")

        os.kill(run.pid(1), signal.SIGKILL)
        await seen.says("body[data-level=act] #verdict h1", "Rank 1 was killed")
        # This incident, not another one that a busy machine may have had.
        await seen.says("#incidents li", re.compile(r"Rank 1 was killed.*training again after.*recovered"))
        row = seen.page.locator("#incidents a").filter(has_text="Rank 1 was killed").first
        await row.focus()
        await seen.page.keyboard.press("Enter")
        await seen.says("#incident h1", "Rank 1 was killed")
        await seen.says("#incident", "What was done")
        page = await seen.text("#incident")
        assert "megascale-ops policy set toy killed=warn" in page
        assert "SIGKILL" in page
        assert "first new step" in page
        assert not await seen.page.locator("#page").is_visible()
        await seen.page.locator(".back a").click()
        await seen.page.locator("#page").wait_for(timeout=PATIENCE_S * MS)
        assert seen.wrong == []


async def test_a_controller_that_falls_silent_is_said_and_comes_back_by_itself(run: Launch, opened: Open) -> None:
    """The page says for how long the controller was not heard; when it speaks again, the page lives again."""
    controller = run.controller()
    assert controller is not None
    pid = int(controller["pid"])

    async with opened(_url(run)) as seen:
        await seen.says("#heard", "live")
        os.kill(pid, signal.SIGSTOP)
        try:
            await seen.says("#heard", re.compile(r"controller not heard for \d+ s"))
            silent = await seen.text("#trouble")
        finally:
            os.kill(pid, signal.SIGCONT)
        await seen.says("#heard", "live")

        assert "training goes on without it" in silent
        assert not await seen.page.locator("#trouble").is_visible()


async def test_the_map_is_walked_by_keyboard(run: Launch, opened: Open) -> None:
    """Tab reaches the map; arrows move from rank to rank, n finds the one that is not well, Escape lets go."""
    async with opened(_url(run)) as seen:
        await seen.says("#legend", "1 slow")

        for _ in range(12):
            await seen.page.keyboard.press("Tab")
            if await seen.page.evaluate("document.activeElement.id") == "map-over":
                break
        first = await seen.text("#rank-facts strong")
        await seen.page.keyboard.press("ArrowRight")
        second = await seen.text("#rank-facts strong")
        await seen.page.keyboard.press("Home")
        await seen.page.keyboard.press("n")
        unwell = await seen.text("#rank-facts")
        await seen.page.keyboard.press("Escape")
        after = await seen.text("#rank-facts")

        assert (first, second) == ("rank 0", "rank 1")
        assert unwell.startswith("rank 2")
        assert "slow" in unwell
        assert "arrow keys" in after


@pytest.mark.parametrize("dark", [False, True])
async def test_a_phone_has_room_for_all_of_it(run: Launch, opened: Open, *, dark: bool) -> None:
    """At 390 pixels nothing is wider than the screen, a tap shows a rank, and the night is dark."""
    async with opened(_url(run), width=390, dark=dark, touch=True) as seen:
        await seen.says("#legend", "make progress")
        facts = ""
        for x in range(60, 340, 20):  # the node's name stands before its ranks, as long as it is
            await seen.page.locator("#map-over").tap(position={"x": x, "y": 12})
            facts = await seen.text("#rank-facts")
            if facts.startswith("rank "):
                break
        wide = await seen.page.evaluate("document.documentElement.scrollWidth")
        ground = await seen.page.evaluate("getComputedStyle(document.body).backgroundColor")

        assert wide <= 390
        assert facts.startswith("rank ")
        brightness = sum(int(part) for part in ground.strip("rgb()").split(",")) / 3
        assert brightness < 60 if dark else brightness > 200


async def test_the_verdict_is_there_before_the_ranks_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Open
) -> None:
    """While the first frame is still being made the headline is read; what is not known yet is not there at all."""
    may_go_on = hold_frames(monkeypatch)
    async with serve_controller(tmp_path) as served:
        # No agent sends heartbeats for this node: however long the browser takes to start, it is not lost.
        policy = JobPolicy(node_lost_s=3600.0)
        join = Join("one", "a", "r", "j", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
        await served.loop.joining.join(join, 5.0)
        async with opened(served.url) as seen:
            await seen.says("#verdict h1", "Ranks are starting: 0 of 2 have made a step.")
            early = [await seen.page.locator(part).is_visible() for part in PARTS]
            pace, jobs = await seen.text("#pace"), await seen.text("#jobs")
            may_go_on.set()
            await seen.says("#incidents", "Nothing has happened to this job.")
            later = [await seen.page.locator(part).is_visible() for part in PARTS]

            assert early == [False, False, False]
            assert "Step" in pace
            assert "one" in jobs
            assert later == [True, False, True]  # no step has ended yet
            assert seen.wrong == []


PARTS = ("#map-part", "#times-part", "#incidents-part")


async def test_the_newest_self_check_of_a_node_is_shown(tmp_path: Path, opened: Open) -> None:
    """Nothing without one; then the node, its worst finding, as text whatever it holds, and its figures on a press."""
    async with serve_controller(tmp_path) as served:
        policy = JobPolicy(node_lost_s=3600.0)
        join = Join("one", "a", "r", "j", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
        await served.loop.joining.join(join, 5.0)
        async with opened(served.url) as seen:
            await seen.says("#incidents", "Nothing has happened to this job.")
            before = await seen.page.locator("#checks-part").is_visible()
            slow = CheckedFinding("bad", "GPU 1", "GPU 1: <b>products</b> 52.0% less", check="gemm")
            rate = CheckedFigure("gemm_bf16", "2 of them", 5e14, 3e14, 6e14, "bf16 matrix products, 2 of them: 500")
            check = SelfCheck("a", "quick", "bad", findings=(slow,), figures=(rate,))
            view = SelfCheckView("a", "done", asked_wall_s=time.time(), check=check)

            served.loop.nodes.keep_check(view)
            await seen.says("#checks", "GPU 1: <b>products</b> 52.0% less")
            row = await seen.text("#checks summary")
            await seen.page.locator("#checks summary").click()
            figures = await seen.page.locator("#checks details ul").is_visible()

            assert not before
            assert re.sub(r"\s+", "", row).endswith("aGPU1:<b>products</b>52.0%lessbad")
            assert figures
            assert "2 of them: 500" in await seen.text("#checks")
            assert seen.wrong == []


async def _unfolded(seen: Seen, times: int) -> str:
    """Return what the incident's page says with everything unfolded, once it has the markup so many times.

    Not by clicks: the page may draw itself anew between two of them, when the first frame comes after the incident.
    """
    unfold = "document.querySelectorAll('#incident details').forEach((one) => { one.open = true; })"
    end_s = time.monotonic() + PATIENCE_S
    shown = ""
    while shown.count("<script>window.hacked=1</script>") < times and time.monotonic() < end_s:
        await seen.page.evaluate(unfold)
        shown = await seen.text("#incident")
    return shown


async def test_what_a_job_says_is_text_and_never_markup(tmp_path: Path, opened: Open) -> None:
    """Markup in every text that a job has is shown as it is written, on the job's page and on the incident's."""
    async with serve_controller(tmp_path) as served:
        await poison(served)
        async with opened(served.url) as seen:
            await seen.says("#verdict", "<script>window.hacked=1</script>")
            await seen.page.goto(f"{served.url}/#incident=evil-1")
            await seen.says("#incident", "Evidence")
            shown = await _unfolded(seen, 6)

            assert shown.count("<script>window.hacked=1</script>") >= 6
            assert await seen.page.evaluate("window.hacked") is None
            assert await seen.page.locator("main img, main script, main iframe").count() == 0
            assert seen.wrong == []


async def test_a_token_is_asked_for_once_and_kept_for_the_tab(tmp_path: Path, opened: Open) -> None:
    """The shell is served to all, data are not; a wrong token is said, the right one opens, a reload keeps it."""
    async with serve_controller(tmp_path, "secret") as served:
        await poison(served)
        async with opened(served.url) as seen:
            await seen.says("#door", "This controller wants a token")
            await seen.page.fill("#door-token", "guess")
            await seen.page.keyboard.press("Enter")
            await seen.says("#door-wrong", "not this controller's token")
            await seen.page.fill("#door-token", "secret")
            await seen.page.keyboard.press("Enter")
            await seen.says("#verdict", "Rank 1 died of an exception")
            commands = await seen.text("#verdict .command")
            await seen.page.reload()
            await seen.says("#verdict", "Rank 1 died of an exception")

            assert "--token-file FILE" in commands
            assert "secret" not in seen.page.url
            other = await seen.page.context.browser.new_page()  # type: ignore[union-attr]  # it has one
            await other.goto(served.url)
            await other.locator("#door").wait_for(timeout=PATIENCE_S * MS)
            await other.close()


async def test_an_incident_is_a_link_that_can_be_sent(run: Launch, opened: Open) -> None:
    """An address with an incident opens on it, and one that does not exist is said in a sentence."""
    until(lambda: (run.status() or None) and run.incidents(), "a first incident")

    async with opened(f"{_url(run)}&incident=toy-1") as seen:
        await seen.says("#incident", "What was done")
        await seen.page.evaluate("location.hash = '#incident=toy-999'")
        await seen.says("#incident", "there is no incident 'toy-999'")
        await asyncio.sleep(0)


async def test_a_page_whose_controller_ended_with_its_job_raises_no_alarm(tmp_path: Path, opened: Open) -> None:
    """The last thing that it shows is how the job ended, and no banner says that training goes on."""
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serve_controller(tmp_path))
        policy = JobPolicy(node_lost_s=3600.0)
        join = Join("one", "a", "r", "j", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
        await served.loop.joining.join(join, 5.0)
        async with opened(served.url) as seen:
            await seen.says("#incidents", "Nothing has happened to this job.")
            served.loop.leave(Leave("one", "a", "r", "cancelled", round=1))
            await served.api.say_goodbye()
            await stack.aclose()

            await seen.says("#verdict h1", "The job was stopped by hand.")
            await seen.says("#heard", "the job is over, and so is its controller")
            assert not await seen.page.locator("#trouble").is_visible()
            assert "Ran for" in await seen.text("#pace")


async def test_a_runs_own_controller_reads_its_ranks_logs(run: Launch, opened: Open) -> None:
    """From the map to the log of a rank by the address that a run prints, and no 409 of a shared controller."""
    async with opened(_url(run)) as seen:
        await seen.says("#legend", "make progress")
        await seen.page.locator("#map-over").focus()
        end_s = time.monotonic() + PATIENCE_S
        while not await seen.page.locator("#log-stream").is_visible() and time.monotonic() < end_s:
            await seen.page.get_by_text("what it printed").click()  # lost where the page draws itself anew beneath it
            await asyncio.sleep(0.2)
        await seen.page.select_option("#log-stream", "stdout")

        await seen.says("#log-state", re.compile(r"^\d+ lines?\b"))
