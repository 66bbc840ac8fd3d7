# SPDX-License-Identifier: Apache-2.0
"""Who ordered what: each request by which a person changes something, with its token, where it came from, its outcome.

An entry is an event of the journal under a name that no job can have. It never holds a token: a token is told by the
name that it was issued with, its scope, and eight digits of its SHA-256.
"""

import asyncio
import hashlib

from aiohttp import web

from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import AUDIT_JOB, Store
from megascale_ops.controller.server.bodies import answer, body_of, query_of
from megascale_ops.controller.server.operations import AuditQuery
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import AuditEntries, Event
from megascale_ops.schema.tokens import Grant
from megascale_ops.schema.wording import printable

# 500 characters: the settings of a policy, the reason of a stop.
_MOST_ASKED = 500


async def keep(store: Store, wall_s: float, request: web.Request, grant: Grant, status: int) -> None:
    """Journal what was asked for and what came of it; of a refused request the body is not read.

    Args:
        store: the journal.
        wall_s: when.
        request: as it came.
        grant: what its token allows.
        status: of the answer.
    """
    asked = ""
    if status < web.HTTPBadRequest.status_code:
        try:
            asked = printable((await body_of(request)).decode("utf-8", "replace"))[:_MOST_ASKED]
        except (MegascaleError, web.HTTPException, ConnectionError):
            asked = "(its body could not be read)"
    who, place = _who(request, grant), request.remote or "an unknown address"
    what = f"{request.method} {request.path}"
    event = Event(
        wall_s=wall_s,
        job=AUDIT_JOB,
        kind="audit",
        text=f"{who} from {place}: {what} {asked}".strip() + f": {status}",
        node=request.match_info.get("node", ""),
        data={
            "who": who,
            "place": place,
            "what": what,
            "asked": asked,
            "status": status,
            "job": request.match_info.get("job", ""),
        },
    )
    store.submit(Batch((event,), binding=True))


async def show(store: Store, request: web.Request) -> web.Response:
    """Answer with the newest entries, newest last."""
    asked = query_of(request, AuditQuery)
    entries = await asyncio.to_thread(store.audit, asked.limit + 1, asked.before, asked.job)
    return answer(AuditEntries(tuple(entries[-asked.limit :]), older=len(entries) > asked.limit))


def _who(request: web.Request, grant: Grant) -> str:
    """Return by which token a request came, and whose certificate was shown."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    mark = f"token {hashlib.sha256(token.encode()).hexdigest()[:8]}" if token else "no token"
    name = grant.name or ("the controller's own token" if grant.is_everything and token else grant.scope)
    transport = request.transport
    shown = transport.get_extra_info("peercert") if transport is not None else None
    subject = [value for part in (shown or {}).get("subject", ()) for key, value in part if key == "commonName"]
    certificate = f", certificate of {subject[0]}" if subject else ""
    return printable(f"{name} ({mark}{certificate})")
