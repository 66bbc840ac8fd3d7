# SPDX-License-Identifier: Apache-2.0
"""The addresses of nodes: where they stand, how they came there, and what a person wants done with one."""

import msgspec
from aiohttp import web

from megascale_ops.controller.loop import Loop
from megascale_ops.controller.server.bodies import answer, body_of, decode
from megascale_ops.errors import NotFoundError, UsageError
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.nodes import NodeAsk, NodeMoves
from megascale_ops.suggest import unknown

_asks = msgspec.json.Decoder(NodeAsk)
_WORDS = ("quarantine", "release", "undo")


class NodeLives:
    """The handlers. Tokens of jobs and nodes see and change none of it: nodes belong to all jobs."""

    def __init__(self, loop: Loop) -> None:
        self._nodes = loop.nodes

    async def all(self, _request: web.Request) -> web.Response:
        """Answer with the nodes that are not simply healthy."""
        return answer(self._nodes.view())

    async def moves(self, request: web.Request) -> web.Response:
        """Answer with a node's moves."""
        return answer(self._shown(request.match_info["node"]))

    async def ask(self, request: web.Request) -> web.Response:
        """Do what a person asks for, and answer with where the node stands then."""
        asked, node = decode(_asks, await body_of(request)), request.match_info["node"]
        check_name("node", node)
        by = asked.by or "somebody"
        if asked.do == "quarantine":
            self._nodes.quarantine(node, by, asked.reason, asked.for_s)
        elif asked.do == "release":
            self._nodes.release(node, by, asked.reason)
        elif asked.do == "undo":
            self._nodes.undo(node, by, asked.reason)
        else:
            raise UsageError(f"{unknown('word', asked.do, _WORDS)} A node takes {', '.join(_WORDS)}")
        return answer(self._shown(node))

    def _shown(self, node: str) -> NodeMoves:
        book = self._nodes.book
        moves = book.moves_of(node)
        if not moves and node not in self._nodes.names():
            raise NotFoundError(f"nothing is known of a node {node!r}")
        return NodeMoves(book.life(node), moves)
