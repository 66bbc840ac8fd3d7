# SPDX-License-Identifier: Apache-2.0
"""What a controller answers that waits for its turn: how it is, who leads, and otherwise whom to ask instead."""

import msgspec
from aiohttp import web

from megascale_ops import __version__
from megascale_ops.controller.access import Access, may_read_all
from megascale_ops.controller.server.connections import encode_error, watched
from megascale_ops.controller.server.standing import Standing
from megascale_ops.errors import RefusedError
from megascale_ops.exposition import Page, encoded
from megascale_ops.schema.events import Health
from megascale_ops.schema.messages import MAX_BODY_BYTES


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

    async def elsewhere(_request: web.Request) -> web.Response:
        return standing.refusal()

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[watched])
    app.router.add_get("/leader", standing.show)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", to_the_leader)
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
    page.add("megascale_controller_journal_failing", [((), float(view.database != "ok"))])
    return page
