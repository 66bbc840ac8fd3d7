# SPDX-License-Identifier: Apache-2.0
"""The controller's runbooks: every alert's page, whole, without a token or a checkout."""

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from megascale_ops.controller.server.runbooks import Runbooks, rendered
from tests.fakes.served_controller import Served, serve_controller

RUNBOOKS = sorted((Path(__file__).parents[3] / "dashboards" / "runbooks").glob("*.md"))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller that asks for a token."""
    async with serve_controller(tmp_path, "a token of the controller's own, long enough") as one:
        yield one


def words(text: str) -> list[str]:
    """Return the words of a text, without what is Markdown or punctuation."""
    return re.findall(r"\w+", text)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_page_says_all_that_its_file_says(path: Path) -> None:
    """Every word in its order, all sections, the three commands in one block; no mark of Markdown is left over."""
    markdown = path.read_text(encoding="utf-8")

    page = rendered(markdown)

    shown = html.unescape(re.sub(r"<[^>]+>", " ", page))
    said = re.sub(r"\]\(\w+\.md\)", " ", re.sub(r"^\d+\. |^```\w*$", "", markdown, flags=re.MULTILINE))
    assert words(shown) == words(said)
    assert page.count("<h2>") == 6
    assert page.count("<pre>") >= 1
    left = re.sub(r"<(pre|code)>.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"`|\*\*|\]\(|^#", left, re.MULTILINE)


def test_what_a_page_says_is_never_markup() -> None:
    """The control: angles, quotes and addresses in text, code and links stay text."""
    page = rendered('# A <b>\n\n[<i>](X.md) `<s>` [out](https://example.org) & "q"\n\n```sh\na <b> && c\n```\n')

    assert page == (
        "<h1>A &lt;b&gt;</h1>\n"
        '<p><a href="/runbooks/X">&lt;i&gt;</a> <code>&lt;s&gt;</code> [out](https://example.org) &amp; "q"</p>\n'
        "<pre>a &lt;b&gt; &amp;&amp; c</pre>"
    )


async def test_links_of_alerts_open_without_a_token(served: Served) -> None:
    """With and without an ending, as exports of either kind have it; the page runs no script."""
    async with aiohttp.ClientSession() as session:
        for name in ("JobNoProgress", "JobNoProgress.md", "JobNoProgress.html", ""):
            async with session.get(f"{served.url}/runbooks/{name}") as answer:
                text = await answer.text()

            assert answer.status == 200
            assert answer.content_type == "text/html"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert "<script" not in text
            assert "JobNoProgress" in text
        async with session.get(f"{served.url}/static/runbook.css") as style:
            assert style.status == 200
            assert style.content_type == "text/css"


@pytest.mark.parametrize("name", ["NoSuchAlert", "..%2f..%2fREADME.md", "%3Cscript%3E", "AgentDown.md.md"])
async def test_a_page_that_is_not_there_is_said_so(served: Served, name: str) -> None:
    """404 with the way to all of them, whatever the name has in it, and nothing of it is shown."""
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/runbooks/{name}") as answer:
        text = await answer.text()

    assert answer.status == 404
    assert "script" not in text


def test_a_controller_serves_without_them(tmp_path: Path) -> None:
    """An installation that has lost its pages still has a controller."""
    assert Runbooks(tmp_path)._pages == {}
