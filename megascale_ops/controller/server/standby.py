# SPDX-License-Identifier: Apache-2.0
"""What a controller answers that waits for its turn: how it is, who leads, and otherwise whom to ask instead."""

import contextlib

import msgspec
from aiohttp import web

from megascale_ops import __version__
from megascale_ops.controller.access import Access, may_read_all, may_speak_for
from megascale_ops.controller.server.bodies import body_of, decode
from megascale_ops.controller.server.connections import encode_error, watched
from megascale_ops.controller.server.standing import Standing
from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.exposition import Page, encoded
from megascale_ops.schema.events import Health
from megascale_ops.schema.messages import MAX_BODY_BYTES
from megascale_ops.schema.ranges import Word


class _Speaker(msgspec.Struct, frozen=True):
    """What a standby reads of a heartbeat."""

    node: Word


_speakers = msgspec.json.Decoder(_Speaker)


def application(standing: Standing, access: Access) -> web.Application:
    """Return the application to serve.

    Args:
        standing: how this controller stands.
        access: who may read its metrics.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(_health(standing)), content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        try:
            may_read_all(access.grant(request.headers))
        except RefusedError as error:
            return web.Response(status=401, body=encode_error(str(error)), content_type="application/json")
        written = encoded(_page(standing), request.headers.get("Accept", ""))
        return web.Response(body=written.body, headers={"Content-Type": written.content_type})

    async def to_the_leader(_request: web.Request) -> web.Response:
        leader = standing.view().leader
        return web.Response(status=307, headers={"Location": f"{leader}/"}) if leader else standing.refusal()

    async def agents(request: web.Request) -> web.Response:
        # What is not understood is refused like all else, and counts for nothing.
        with contextlib.suppress(RefusedError, UsageError, web.HTTPRequestEntityTooLarge):
            grant = access.grant(request.headers)
            node = decode(_speakers, await body_of(request)).node
            may_speak_for(grant, node)
            standing.refused(request, node)
        return standing.refusal()

    async def elsewhere(_request: web.Request) -> web.Response:
        return standing.refusal()

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[watched])
    app.router.add_get("/leader", standing.show)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", to_the_leader)
    app.router.add_post("/v1/heartbeat", agents)
    app.router.add_route("*", "/{anything:.*}", elsewhere)
    return app


def _health(standing: Standing) -> Health:
    view = standing.view()
    return Health(
        status="standby" if view.database == "ok" else "degraded",
        journal=view.database,
        journal_kept=0,
        lag_s=0.0,
        judgement=f"the leader is at {view.leader}" if view.leader else "no leader is known",
    )


def _page(standing: Standing) -> Page:
    view, page = standing.view(), Page()
    page.add("megascale_build_info", [((__version__, "controller"), 1.0)])
    page.add("megascale_controller_leader", [((), 0.0)])
    page.add("megascale_controller_epoch", [((), float(view.epoch))])
    for name, value in standing.figures().items():
        page.add(name, [((), value)])
    page.add("megascale_controller_journal_failing", [((), float(view.database != "ok"))])
    return page
