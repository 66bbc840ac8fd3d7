# SPDX-License-Identifier: Apache-2.0
"""The addresses of nodes: where they stand, how they came there, and what a person wants done with one.

Tokens of jobs and nodes see and change none of it: nodes belong to all jobs.
"""

import msgspec
from aiohttp import web

from megascale_ops.controller.job.node_moves import NodeMoves as Moves
from megascale_ops.controller.server.bodies import answer, body_of, decode
from megascale_ops.errors import NotFoundError, UsageError
from megascale_ops.schema.health import NodeAsk, NodeMoves
from megascale_ops.schema.identity import check_name
from megascale_ops.suggest import unknown

_asks = msgspec.json.Decoder(NodeAsk)
_WORDS = ("quarantine", "release", "undo")


async def show_all(nodes: Moves, _request: web.Request) -> web.Response:
    """Answer with the nodes that are not simply healthy."""
    return answer(nodes.view())


async def show_moves(nodes: Moves, request: web.Request) -> web.Response:
    """Answer with a node's moves."""
    return answer(_shown(nodes, request.match_info["node"]))


async def do(nodes: Moves, request: web.Request) -> web.Response:
    """Do what a person asks for, and answer with where the node stands then."""
    asked, node = decode(_asks, await body_of(request)), request.match_info["node"]
    check_name("node", node)
    by = asked.by or "a person"
    if asked.do == "quarantine":
        nodes.quarantine(node, by, asked.reason, asked.for_s)
    elif asked.do == "release":
        nodes.release(node, by, asked.reason)
    elif asked.do == "undo":
        nodes.undo(node, by, asked.reason)
    else:
        raise UsageError(f"{unknown('word', asked.do, _WORDS)} A node takes {', '.join(_WORDS)}")
    return answer(_shown(nodes, node))


def _shown(nodes: Moves, node: str) -> NodeMoves:
    moves, is_unheard = nodes.book.moves_of(node), node not in nodes.names()
    check = nodes.checks.of(node)
    if not moves and is_unheard and check.check is None:
        raise NotFoundError(f"nothing is known of a node {node!r}")
    return NodeMoves(nodes.book.life(node), moves, check if check.check is not None else None, is_unheard)
