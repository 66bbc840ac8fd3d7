# SPDX-License-Identifier: Apache-2.0
"""``top`` as a person uses it: keys, screens, a controller that goes away, windows of any size; and without Textual."""

import asyncio
import io
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from rich.text import Text
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot
from textual.widgets import Footer

from megascale_ops.cards import Reader
from megascale_ops.cli.top import app, plain, verb
from megascale_ops.cli.top.app import TopApp
from megascale_ops.cli.top.feed import Feed
from megascale_ops.cli.top.lines import Lines, rendered
from megascale_ops.cli.top.screens import FeedScreen
from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError
from megascale_ops.schema.events import Incident
from megascale_ops.schema.live import Frame
from tests.fakes.live_frames import INCIDENTS, NOW_S, frame

# 20 s: a frame is shown within milliseconds.
DEADLINE_S = 20.0


class Controller:
    """Sends what it is given, to each job its own.

    Attributes:
        asked: the jobs whose frames were asked for.
        known: incidents by name.
    """

    def __init__(self, first: Frame) -> None:
        self.asked: list[str] = []
        self.known: dict[str, Incident] = {}
        self._sent: dict[str, asyncio.Queue[Frame | MegascaleError]] = defaultdict(asyncio.Queue)
        self.send(first)

    def send(self, what: Frame | MegascaleError, job: str = "") -> None:
        """Send a frame to whoever follows a job, or break off."""
        self._sent[job].put_nowait(what)

    async def live(self, job: str = "") -> AsyncIterator[Frame]:
        """Yield frames as they are sent."""
        self.asked.append(job)
        while True:
            what = await self._sent[job].get()
            if isinstance(what, MegascaleError):
                raise what
            yield what
            self._sent[job].task_done()

    async def taken(self) -> None:
        """Wait until what was sent first has been taken and shown."""
        await self._sent[""].join()

    async def incident(self, name: str) -> Incident:
        """Return what is known of an incident."""
        if name not in self.known:
            raise RefusedError(f"there is no incident {name!r}")
        return self.known[name]


class Screen:
    """What a person sees and does."""

    def __init__(self, app: TopApp, pilot: Pilot[None], controller: Controller) -> None:
        self.app, self.pilot, self.controller = app, pilot, controller

    def lines(self) -> list[str]:
        """Return the rows of the window."""
        width, height = self.app.size
        canvas = self.app.screen._compositor.render_strips()
        assert len(canvas) == height
        shown = ["".join(segment.text for segment in strip) for strip in canvas]
        assert max(map(len, shown)) <= width
        return [line.rstrip() for line in shown]

    async def until(self, condition: Callable[[str], object], what: str) -> str:
        """Return the text of the window as soon as it fulfils a condition."""
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        while asyncio.get_running_loop().time() < deadline_s:
            await self.pilot.pause()
            text = "\n".join(self.lines())
            if condition(text):
                return text
        raise AssertionError(f"waited {DEADLINE_S} s in vain: {what}; in the window:\n{text}")

    async def press(self, *keys: str) -> None:
        """Press keys."""
        await self.pilot.press(*keys)


@asynccontextmanager
async def looking(
    first: Frame, width: int = 80, height: int = 24, reader: Reader | None = None
) -> AsyncIterator[Screen]:
    """Look at a job."""
    controller = Controller(first)
    seen = TopApp(Feed(controller, first), controller.incident, "", UTC, reader=reader)
    async with seen.run_test(size=(width, height)) as pilot:
        screen = Screen(seen, pilot, controller)
        await screen.until(lambda text: "q quit" in text and "14:13:20" in text, "the first screen")
        yield screen


async def test_the_verdict_is_first_and_the_keys_are_last() -> None:
    """On 80 by 24, with a job that is not well."""
    async with looking(frame(16, {9: "lost"})) as top:
        lines = top.lines()

    assert lines[1].startswith(" ACT  Rank 9 stopped running")
    assert lines[-2] == "other jobs: eval"
    assert lines[-1] == " j next job  k previous  i incidents  r ranks  q quit  ? help"


async def test_only_keys_that_do_something_are_offered() -> None:
    """One job without incidents has no other, and nothing to show."""
    async with looking(frame(jobs=("gpt",), incidents=())) as top:
        await top.press("i", "j")

        assert top.lines()[-1] == " r ranks  q quit  ? help"
        assert top.controller.asked == [""]


async def test_keys_go_from_job_to_job() -> None:
    """Around the end; the feed is followed anew for each."""
    async with looking(frame()) as top:
        top.controller.send(msgspec.structs.replace(frame(), job="eval"), "eval")
        await top.press("j")
        await top.until(lambda text: text.startswith("job eval"), "the next job")
        await top.press("down")
        await top.until(lambda _: top.controller.asked == ["", "eval", "gpt"], "the first job again")
        await top.press("k")
        await top.until(lambda _: top.controller.asked[3:] == ["eval"], "the job before")


async def test_a_frame_that_comes_while_the_program_ends_is_not_painted() -> None:
    """Its lines are taken away before its screen is: on a busy machine a frame falls between the two."""
    async with looking(frame()) as top:
        await top.until(lambda text: "step 1,240" in text, "the job")
        shown = top.app.screen
        await shown.query(Lines).remove()

        top.app.paint()

        assert isinstance(shown, FeedScreen)
        assert shown.is_mounted
        assert not shown.can_be_painted


async def test_an_incident_is_shown_with_its_neighbours_and_left_again() -> None:
    """What the controller says of each; one that it does not know is an error on the screen, not the end."""
    async with looking(frame()) as top:
        top.controller.known["gpt-1"] = Incident("gpt-1", "gpt", 3, "recovered")
        await top.press("i")
        await top.until(lambda text: "there is no incident 'gpt-2'" in text, "an incident that is not known")
        await top.press("j")
        shown = await top.until(lambda text: "incident gpt-1 · recovered" in text, "an older incident")
        await top.press("j")
        await top.until(lambda text: "there is no incident 'gpt-2'" in text, "the newest again")
        await top.press("escape")
        await top.until(lambda text: "step 1,240" in text, "the job")

    assert "> Sep 20    recovered  gpt-1" in shown
    assert shown.splitlines()[-1] == " j next incident  k previous  i back to the job  q quit  ? help"


async def test_an_incident_longer_than_the_window_scrolls() -> None:
    """Nothing of it is cut off."""
    async with looking(frame(incidents=INCIDENTS[:1]), 80, 14) as top:
        top.controller.known["gpt-2"] = Incident(
            "gpt-2", "gpt", 3, "open", done=" ".join(f"({at} was done)" for at in range(60))
        )
        await top.press("i")
        first = await top.until(lambda text: "incident gpt-2" in text, "the incident")
        await top.press("end")
        await top.until(lambda text: "(59 was done)" in text, "its end")

    assert "(59 was done)" not in first


async def test_all_ranks_that_are_not_well_can_be_seen() -> None:
    """The job's screen counts those without room, and the screen of ranks has them, from the worst on."""
    async with looking(frame(64, {**dict.fromkeys(range(40, 60), "slow"), 61: "lost"})) as top:
        counted = "\n".join(top.lines())
        await top.press("r")
        shown = await top.until(lambda text: "21 ranks are not well" in text, "the ranks")
        await top.press("pagedown")
        await top.until(lambda text: "     59 " in text, "those below")
        await top.press("r")
        await top.until(lambda text: "step 1,240" in text, "the job")

    assert "more are not well: r lists them" in counted
    assert shown.splitlines()[3].split()[0] == "61"


async def test_help_tells_keys_and_signs() -> None:
    """On one screen of 80 by 24; the job goes on behind it."""
    async with looking(frame()) as top:
        await top.press("question_mark")
        shown = await top.until(lambda text: "q, Ctrl-C" in text, "the help")
        await top.press("question_mark")
        await top.until(lambda text: "step 1,240" in text, "the job")

    for word in ("PgDn", "X lost", "(blank) unheard", "·105", "ACT", "WATCH", "OVER"):
        assert word in shown


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_one_key_leaves(key: str) -> None:
    """Also from an incident."""
    async with looking(frame()) as top:
        await top.press("i", key)
        await top.until(lambda _: not top.app.is_running, "the end")


async def test_it_is_stopped_between_two_paints_and_never_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTSTP in the midst of a paint, whose locks are held then; with it away, SIGCONT is not heard as one more."""
    happened: list[str] = []
    monkeypatch.setattr(HeadlessDriver, "can_suspend", True)

    def note(what: str, *_: object) -> None:
        happened.append(what)

    monkeypatch.setattr(HeadlessDriver, "suspend_application_mode", partial(note, "suspend"))
    monkeypatch.setattr(HeadlessDriver, "resume_application_mode", partial(note, "resume"))
    monkeypatch.setattr(app, "_stand_still", lambda: note(f"stopped {signal.getsignal(signal.SIGCONT)!r}"))
    before = signal.signal(signal.SIGTSTP, partial(note, "within a signal"))
    try:
        async with looking(frame()) as top:
            for _ in range(2):
                happened.append("paint")
                signal.raise_signal(signal.SIGTSTP)
                top.app.paint()
                happened.append("painted")
                await top.until(lambda _: happened[-1] == "resume", "it to go on")
            assert callable(signal.getsignal(signal.SIGCONT)), "SIGCONT after a SIGSTOP paints anew"
    finally:
        signal.signal(signal.SIGTSTP, before)

    assert happened == ["paint", "painted", "suspend", f"stopped {signal.SIG_DFL!r}", "resume"] * 2


async def test_a_controller_that_goes_away_and_comes_back() -> None:
    """Since when and why is said on each screen, what was seen last stays, and nothing old looks new."""
    async with looking(frame()) as top:
        top.controller.send(ControllerUnreachableError("no controller answers at http://c:7070"))
        away = await top.until(lambda text: "trying again" in text, "that it is away")
        await top.press("r")
        ranks = await top.until(lambda text: "silent" in text and "trying again" in text, "the same with the ranks")
        await top.press("r")
        top.controller.send(msgspec.structs.replace(frame(), wall_s=NOW_S + 60))
        back = await top.until(lambda text: "trying again" not in text, "that it is back")

    assert "controller not heard since 14:13:20" in away.splitlines()[0]
    assert "AGO  Rank 9 stopped running" in away
    assert away.splitlines()[-2] == "other jobs: eval"
    assert "trying again: no controller answers at http://c:7070" in ranks.splitlines()[1]
    assert back.splitlines()[0].endswith("14:14:20")


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (300, 90)])
async def test_a_window_of_any_size_is_filled(size: tuple[int, int]) -> None:
    """Also while it changes: the verdict stays above, the keys below."""
    async with looking(frame(64, {9: "lost"})) as top:
        await top.pilot.resize_terminal(*size)
        await top.until(lambda text: "ACT" in text and len(top.lines()) == size[1], "another size")

        assert "j next" in top.lines()[-1]


async def test_only_lines_that_changed_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12,288 ranks on 140 by 40: a frame with another clock draws the first line and no other."""
    shown = frame(12_288, {5003: "lost"})
    async with looking(shown, 140, 40) as top:
        drawn: list[int] = []
        draw = Lines.render_line
        monkeypatch.setattr(Lines, "render_line", lambda self, y: drawn.append(y) or draw(self, y))
        made: list[object] = []
        monkeypatch.setattr(Footer, "compose", lambda self: made.append(self) or iter(()))
        top.controller.send(msgspec.structs.replace(shown, wall_s=NOW_S + 1))
        await top.until(lambda text: "14:13:21" in text, "the next frame")

    assert set(drawn) <= {0, 6}, "the clock, and the age of the last step"
    assert not made, "keys are the same"


async def test_ranks_of_12288_are_listed_up_to_a_bound() -> None:
    """The rest is counted, and the verb that has all of them is named, with the address that it needs."""
    async with looking(frame(12_288, {5003: "lost"}), 120, reader=Reader("--controller http://ops:7070")) as top:
        await top.press("r")
        await top.until(lambda text: "1 rank is not well" in text, "the ranks")
        await top.press("end")
        await top.until(
            lambda text: "11,776 more: `megascale-ops status --json --controller http://ops:7070` has all" in text,
            "the end",
        )


def test_the_style_of_a_whole_line_is_drawn() -> None:
    """Also where parts of it have styles of their own."""
    line = Text("all ", style="bold").append("part", style="red")

    whole, part = rendered(line, Console())

    assert whole.style is not None
    assert part.style is not None
    assert whole.style.bold
    assert part.style.bold
    assert part.style.color is not None


def test_a_control_character_never_reaches_the_terminal() -> None:
    """Whatever line it comes in."""
    strip = rendered(Text("a\x1b[2Jb\x07"), Console())

    assert "".join(segment.text for segment in strip).isprintable()


@pytest.mark.parametrize(
    ("is_there", "stdin", "stderr", "ascii_only", "takes"),
    [
        (True, True, True, False, True),
        (False, True, True, False, False),
        (True, False, True, False, False),
        (True, True, False, False, False),
        (True, True, True, True, False),
    ],
    ids=["all", "no Textual", "stdin elsewhere", "stderr elsewhere", "ASCII"],
)
def test_textual_is_used_where_it_can_work(
    monkeypatch: pytest.MonkeyPatch, *, is_there: bool, stdin: bool, stderr: bool, ascii_only: bool, takes: bool
) -> None:
    """It reads stdin and writes to stderr."""
    monkeypatch.setattr(verb, "find_spec", lambda _: is_there or None)
    monkeypatch.setattr("sys.__stdin__", SimpleNamespace(isatty=lambda: stdin))
    monkeypatch.setattr("sys.__stderr__", SimpleNamespace(isatty=lambda: stderr))
    console = SimpleNamespace(options=SimpleNamespace(ascii_only=ascii_only))

    assert verb.takes_keys(console) is takes


async def test_without_textual_the_same_is_shown_and_the_extra_is_named() -> None:
    """Until it is ended; the last line says what to install."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, color_system=None, _environ={})
    controller = Controller(frame())
    over = asyncio.Event()

    watching = asyncio.create_task(
        plain.watch(console, Feed(controller, frame()), "", over, verb.WITHOUT_TEXTUAL, Reader())
    )
    async with asyncio.timeout(DEADLINE_S):
        await controller.taken()
        over.set()
        await watching

    assert "ACT  Rank 9 stopped running" in out.getvalue()
    assert "keys and scrolling need Textual: pip install 'megascale-ops[top]'" in out.getvalue()
