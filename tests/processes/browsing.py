# SPDX-License-Identifier: Apache-2.0
"""A browser on the controller's page, what went wrong in it, and a job whose texts are all markup."""

import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from megascale_ops.controller.job.round import Round
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import EvidenceItem, Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.trace.browser import find_browser
from tests.fakes.served_controller import Served
from tests.processes.launch import PATIENCE_S

# Chromium draws the list below its address line as pages, beside each visitor's own: 0.5 s of CPU time a visitor. The
# others are what Playwright leaves out as well: the last such argument is all that counts.
LEFT_OUT = (
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "WebUIOmniboxFullPopup", "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter",
    "PaintHolding", "ThirdPartyStoragePartitioning", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled",
    "PreconnectToSearch",
)  # fmt: skip
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    f"--disable-features={','.join(LEFT_OUT)}",
]  # fmt: skip
MS = 1000.0
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&amp;'
# What is written on canvases from now on, until it is read.
LISTEN = """() => {
    window.written = new Set();
    const fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
        window.written.add(`${this.canvas.id}: ${text}`);
        return fill.call(this, text, ...place);
    };
}"""


class Seen:
    """A page, and what went wrong in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        page.on("console", lambda line: self.wrong.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url))

    async def says(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until an element holds a text."""
        found = self.page.locator(selector).filter(has_text=text).first
        try:
            await found.wait_for(timeout=PATIENCE_S * MS)
        except Exception as error:
            body = await self.page.locator("body").inner_text()
            raise AssertionError(f"{selector} never said {text!r}; the page says:\n{body}") from error

    async def text(self, selector: str) -> str:
        """Return what an element says."""
        return await self.page.locator(selector).inner_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One browser for all tests of a file: its start, and its driver's, take more CPU than most pages."""
    try:
        browser_path = find_browser()
    except MegascaleError as error:
        pytest.skip(f"no browser can be had here: {error}")
    async with async_playwright() as play:
        started = await play.chromium.launch(executable_path=browser_path, args=ARGUMENTS, timeout=PATIENCE_S * MS)
        yield started
        await started.close()


class Open(Protocol):
    """Open an address as a visitor of its own, who has nothing of the others', until the block ends."""

    def __call__(
        self, url: str, *, width: int = 1280, dark: bool = False, touch: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Seen]:
        """Open it; sizes in CSS pixels."""


@pytest.fixture
def opened(browser: Browser) -> Open:
    """Return a function that opens an address."""

    @contextlib.asynccontextmanager
    async def visit(url: str, *, width: int = 1280, dark: bool = False, touch: bool = False) -> AsyncIterator[Seen]:
        context = await browser.new_context(
            viewport={"width": width, "height": 844},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",  # a dot that pulses is drawn 60 times a second: 0.09 s of CPU time each
            has_touch=touch,
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(PATIENCE_S * MS)  # Playwright's own 30 s are not enough beside other work
        try:
            seen = Seen(await context.new_page())
            # Hidden, or given no frames, a page of ours draws nothing: once two tests waited in vain for one.
            await seen.page.bring_to_front()
            await seen.page.wait_for_function("() => new Promise((go) => requestAnimationFrame(() => go(true)))")
            await seen.page.goto(url)
            yield seen
        finally:
            await context.close()

    return visit


async def poison(served: Served) -> None:
    """Let a job have markup wherever a job can have text."""
    # No agent sends heartbeats for this node: however long the browser takes to start, it is not lost.
    policy = JobPolicy(node_lost_s=3600.0)
    join = Join("evil", "a", "r", "j", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
    reply = await served.loop.joining.join(join, PATIENCE_S)
    assert reply.status == "go"
    verdict = Verdict(
        "exception", f"rank 1: RuntimeError: {EVIL}", 0.9, (1,), (EVIL,), cause=EVIL, action="restart",
        evidence=(Finding("x", EVIL, EVIL),), otherwise=EVIL,
    )  # fmt: skip
    incident = Incident(
        "evil-1", "evil", 1, "open", Marks(began=time.time() - 5, detected=time.time() - 4), verdict, EVIL,
        evidence=(EvidenceItem("stacks", ok=True, rank=1, text=EVIL, path=EVIL, frames=(EVIL,)),
                  EvidenceItem(EVIL, ok=False, rank=0, text=EVIL)),
        folder=EVIL,
    )  # fmt: skip
    job = served.loop.jobs["evil"]
    job.change(
        members=tuple(msgspec.structs.replace(one, node=EVIL) for one in job.record.members), reason=EVIL,
        incident="evil-1",
    )  # fmt: skip
    job.round = Round(job.record)
    served.loop.transitions.put_incident(job, incident)
    served.loop.transitions.note(job, "evil", EVIL)
    served.loop.transitions.save(job)
