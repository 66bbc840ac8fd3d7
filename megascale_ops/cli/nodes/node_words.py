# SPDX-License-Identifier: Apache-2.0
"""Nodes as people read them: where they stand, their moves, how many spares there should be, with what it rests on."""

from collections.abc import Iterator

from megascale_ops.diagnosis.statistics.spares import Spares
from megascale_ops.schema.health import (
    ENGINE_STATES,
    NODE_STATES,
    OUT,
    CheckedNode,
    NodeLife,
    NodeMoves,
    NodesView,
    SelfCheckView,
)
from megascale_ops.schema.wording import clock, counted, duration, printable

NO_ENGINE = (
    "no Slurm and no Kubernetes is known here (`controller --engine`): rounds of this controller leave out what is "
    "out, and who else places jobs there does not know of it"
)


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
    checks = {one.node: one for one in view.checks}
    lines = [line for life in shown for line in [*life_lines(life), *check_lines(checks.pop(life.node, None))]]
    if not lines:
        lines = ["every node is healthy"]
    for one in checks.values():  # what a check found is held against no node that is healthy all the same
        lines += [f"{printable(one.node)}  healthy", *check_lines(one)]
    known = "1 node is" if view.known == 1 else f"{view.known:,} nodes are"
    lines += [
        "",
        f"{known} known; {view.moved_out} of at most {view.most_out} a day went by themselves",
    ]
    out = any(life.state in OUT for life in view.nodes)
    if out and not view.engine:
        lines.append(NO_ENGINE)
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
    if life.since_wall_s:
        why = f": {printable(life.reason)}" if life.reason else ""
        yield f"    since {clock(life.since_wall_s)} by {printable(life.by)}{why}"
    if life.engine is not None:
        means = ENGINE_STATES.get(life.engine.state, life.engine.state)
        yield f"    since {clock(life.engine.wall_s)} {printable(life.engine.text)} ({means})"
        if life.state == "healthy":
            yield f"    `megascale-ops nodes release {printable(life.node)}` takes that back"


def check_lines(check: CheckedNode | None) -> Iterator[str]:
    """Yield the newest self-check of a node, if there is one."""
    if check is not None:
        what = {"warn": "good, with warnings", "unmeasured": "not measured"}.get(check.status, check.status)
        worst = f": {printable(check.worst)}" if check.worst else ""
        yield f"    self-check of {clock(check.wall_s)}: {what}{worst}"


def _full_check_lines(view: SelfCheckView | None) -> Iterator[str]:
    """Yield the newest self-check of a node with its figures."""
    found = view.check if view is not None else None
    if view is None or found is None:
        return
    yield from check_lines(CheckedNode(view.node, found.status, view.asked_wall_s, found.worst))
    why = f"; {printable(view.reason)}" if view.reason else ""
    yield f"       {counted(found.made, 'check')} in {duration(found.seconds)} ({found.depth}{why})"
    yield from (f"       - {printable(one.text)}" for one in found.figures if one.text)


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
    return [*lines, *_full_check_lines(found.check)]
