# SPDX-License-Identifier: Apache-2.0
"""The live page's own files, as they lie in ``web/``: served without a token, since they hold nothing of any job.

The page asks for nothing from elsewhere and its policy forbids it to: no script, style, font or picture but these, no
frame around it, no plugin. So a name or a line of stderr that made it into the page as markup would still do nothing.
"""

import hashlib
from pathlib import Path

from aiohttp import web

WEB = Path(__file__).parents[1] / "live" / "web"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Fetched each time, answered with 304 while nothing has changed: an update of the controller is seen at once.
    "Cache-Control": "no-cache",
}


class Pages:
    """The files, read once."""

    def __init__(self, folder: Path = WEB) -> None:
        self._files = {
            path.name: (_TYPES[path.suffix], path.read_bytes())
            for path in sorted(folder.iterdir())
            if path.suffix in _TYPES
        }
        self._tags = {name: hashlib.sha256(body).hexdigest()[:16] for name, (_type, body) in self._files.items()}

    async def index(self, request: web.Request) -> web.Response:
        """Answer with the page."""
        return self._answer(request, "index.html") or web.Response(status=404)

    async def static(self, request: web.Request) -> web.Response:
        """Answer with one of its files."""
        return self._answer(request, request.match_info["name"]) or web.Response(status=404, headers=HEADERS)

    def _answer(self, request: web.Request, name: str) -> web.Response | None:
        if name not in self._files:
            return None
        kind, body = self._files[name]
        tag = f'"{self._tags[name]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)
