# SPDX-License-Identifier: Apache-2.0
"""The nodes of a job that are not simply healthy as machines, or that an engine has out by us, with what may be typed.

Pure: reads what the loop knows and changes nothing of it.
"""

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.nodes.book import NodeBook
from megascale_ops.schema.health import ENGINE_STATES, NODE_STATES, NodeLife
from megascale_ops.schema.live import NodeLine

# 50 nodes: more than a person reads; ``megascale-ops nodes list`` has all.
MOST_NODES = 50
_ORDER = tuple(NODE_STATES)


def node_lines(book: NodeBook, job: Job) -> tuple[NodeLine, ...]:
    """Return the lines of the job's nodes, and of those that wait for it; the worst first."""
    shown = [life for life in book.shown() if life.node in job.round.places or life.node in job.runners]
    shown.sort(key=lambda life: (_ORDER.index(life.state), life.node))
    return tuple(map(_line, shown[:MOST_NODES]))


def _line(life: NodeLife) -> NodeLine:
    word = "history" if life.state in ("under check", "back") else "release"
    return NodeLine(
        life.node,
        life.state,
        NODE_STATES[life.state],
        life.reason,
        life.by,
        life.since_wall_s,
        0.0 if life.is_held else life.until_wall_s,
        f"megascale-ops nodes {word} {life.node}",
        f"{life.engine.text} ({ENGINE_STATES.get(life.engine.state, life.engine.state)})" if life.engine else "",
    )
