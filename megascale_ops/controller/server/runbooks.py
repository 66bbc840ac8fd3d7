# SPDX-License-Identifier: Apache-2.0
"""``/runbooks/NAME``: the page of an alert, for an engineer on call with a phone, no token and no checkout.

The pages are Markdown files that come with us, and hold nothing of any job. Of Markdown this reads what they use:
headings, paragraphs, lists, blocks of commands, code, bold, links to one another. All else stays text.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from megascale_ops.controller.server.browser import HEADERS
from megascale_ops.errors import MegascaleError
from megascale_ops.shipped import shipped

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/runbook.css">
</head>
<body>
<nav><a href="/">live page</a> <a href="/runbooks/">all runbooks</a></nav>
<main>
{body}
</main>
</body>
</html>
"""
_NAME = re.compile(r"(\w+?)(?:\.md|\.html)?", re.ASCII)
_INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\((\w+)\.md\)", re.ASCII)
_ITEM = re.compile(r"(?:(-)|(\d+)\.) +")


class Runbooks:
    """The pages, read once."""

    def __init__(self, folder: Path | None = None) -> None:
        try:
            root = folder or shipped("dashboards") / "runbooks"
        except MegascaleError:
            root = None  # a controller serves without them
        self._pages = {} if root is None else {path.stem: path.read_text("utf-8") for path in sorted(root.glob("*.md"))}

    async def index(self, _request: web.Request) -> web.Response:
        """Answer with a list of all pages."""
        items = "\n".join(f'<li><a href="/runbooks/{name}">{name}</a></li>' for name in self._pages)
        return _answer("Runbooks", f"<h1>Runbooks</h1>\n<ul>\n{items}\n</ul>")

    async def page(self, request: web.Request) -> web.Response:
        """Answer with one page; its name may end with ``.md``, as links of exports do."""
        name = _NAME.fullmatch(request.match_info["name"])
        if name is None or name[1] not in self._pages:
            known = "there is no runbook of this name"
            return _answer("No such runbook", f'<p>{known}: <a href="/runbooks/">all of them</a></p>', status=404)
        return _answer(name[1], rendered(self._pages[name[1]]))


def rendered(markdown: str) -> str:
    """Return a page's Markdown as HTML; what it says is never read as markup."""
    blocks = re.split(r"^```\w*\n(.*?)^```\n?", markdown, flags=re.MULTILINE | re.DOTALL)
    parts: list[str] = []
    for index, block in enumerate(blocks):
        parts += [f"<pre>{html.escape(block.rstrip())}</pre>"] if index % 2 else _blocks(block)
    return "\n".join(parts)


def _blocks(text: str) -> Iterator[str]:
    """Yield the paragraphs, headings and lists of a text without blocks of code."""
    for paragraph in filter(None, (part.strip("\n") for part in re.split(r"\n[ \t]*\n", text))):
        heading = re.fullmatch(r"(#{1,4}) +(.+)", paragraph)
        if heading:
            level = len(heading[1])
            yield f"<h{level}>{_inline(heading[2])}</h{level}>"
        elif _ITEM.match(paragraph):
            yield _list(paragraph)
        else:
            yield f"<p>{_inline(' '.join(paragraph.split()))}</p>"


def _list(paragraph: str) -> str:
    """Return a list; a line that begins no item goes on with the one before."""
    items: list[str] = []
    for line in paragraph.splitlines():
        mark = _ITEM.match(line)
        if mark:
            items.append(line[mark.end() :])
        else:
            items[-1] += f" {line.strip()}"
    tag = "ul" if paragraph.startswith("-") else "ol"
    return f"<{tag}>\n" + "\n".join(f"<li>{_inline(item)}</li>" for item in items) + f"\n</{tag}>"


def _inline(text: str) -> str:
    """Return text with code, bold and links to other runbooks."""
    shown, end = [], 0
    for match in _INLINE.finditer(text):
        code, bold, link, name = match.groups()
        shown.append(html.escape(text[end : match.start()], quote=False))
        if code:
            shown.append(f"<code>{html.escape(code, quote=False)}</code>")
        elif bold:
            shown.append(f"<strong>{html.escape(bold, quote=False)}</strong>")
        else:
            shown.append(f'<a href="/runbooks/{name}">{html.escape(link, quote=False)}</a>')
        end = match.end()
    return "".join((*shown, html.escape(text[end:], quote=False)))


def _answer(title: str, body: str, *, status: int = 200) -> web.Response:
    page = _PAGE.format(title=html.escape(title), body=body)
    return web.Response(text=page, status=status, content_type="text/html", headers=HEADERS)
