# SPDX-License-Identifier: Apache-2.0
"""Nodes as people read them: where they stand, their moves, how many spares there should be, with what it rests on."""

from collections.abc import Iterator

from megascale_ops.diagnosis.statistics.spares import Spares
from megascale_ops.schema.health import NODE_STATES, NodeLife, NodeMoves, NodesView
from megascale_ops.schema.wording import clock, duration, printable


def spares_lines(answer: Spares, whence: str, *, is_repair_given: bool) -> list[str]:
    """Return the answer and all that it rests on."""
    last = answer.shares[-1]
    out_whence = "given by --repair" if is_repair_given else "the median so far"
    fewer = f"; {answer.spares - 1} would be enough {answer.shares[-2]:.2%}" if answer.spares else ""
    return [
        f"{answer.spares} spare nodes for {answer.nodes:,}: all places are filled {last:.2%} of the time{fewer}",
        f"    failures: {answer.rate:.3g} a node and day ({whence})",
        f"    out for:  {duration(answer.out_s)} each time ({out_whence})",
        f"    so a node is out with p = {answer.p_out:.3g}; how many are at once is binomial (n = {answer.nodes:,})",
        "    faults of several nodes at once (a switch, a rack) come on top",
    ]


def lines_of(view: NodesView) -> list[str]:
    """Return where nodes stand as people read it: the worst first."""
    order = list(NODE_STATES)
    shown = sorted(view.nodes, key=lambda life: (order.index(life.state) if life.state in order else -1, life.node))
    lines = [line for life in shown for line in life_lines(life)]
    if not lines:
        lines = ["every node is healthy"]
    lines += [
        "",
        f"{view.known:,} nodes are known; {view.moved_out} of at most {view.most_out} a day went by themselves",
    ]
    if view.spared:
        lines.append(
            f"{', '.join(view.spared)} would be out, had that limit not been reached: `megascale-ops nodes quarantine "
            "NODE` or `release NODE` decides"
        )
    return lines


def life_lines(life: NodeLife) -> Iterator[str]:
    """Yield where one node stands, and why."""
    until = "until it is released" if life.is_held else f"until {clock(life.until_wall_s)}" if life.until_wall_s else ""
    yield f"{printable(life.node)}  {life.state} {until}".rstrip() + f"  ({NODE_STATES.get(life.state, '')})"
    yield f"    since {clock(life.since_wall_s)} by {printable(life.by)}: {printable(life.reason)}"


def history_of(found: NodeMoves) -> list[str]:
    """Return a node's moves as people read them, oldest first, and where it stands."""
    lines = []
    for move in found.moves:
        what = move.event.replace("_", " ")
        led = (
            f"{move.before.state} -> {move.after.state}" if move.before.state != move.after.state else move.after.state
        )
        of_job = f" (job {printable(move.job)})" if move.job else ""
        lines.append(f"{move.number:>5}  {clock(move.wall_s)}  {led}: {what}, by {printable(move.by)}{of_job}")
        lines += [f"       {printable(move.reason)}"] if move.reason else []
        lines += [f"       - {printable(text)}" for text in move.evidence]
    if not lines:
        lines = [f"{printable(found.node.node)} has never been anything but healthy"]
    else:
        lines += ["", *life_lines(found.node)]
    return lines
