# SPDX-License-Identifier: Apache-2.0
"""``diagnose --node NODE``: the check of another node, made by its agent, and its card here."""

import time
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.diagnose.telling import begun, ended, show
from megascale_ops.cli.terminal.interrupt import EXIT_INTERRUPTED, ctrl_c_ends
from megascale_ops.errors import MegascaleError

if TYPE_CHECKING:
    from megascale_ops.cards import Row
    from megascale_ops.schema.health import CheckAsk, SelfCheck, SelfCheckView

# 1 s: the agent hears of it within one, and the check takes half a minute.
_POLL_S = 1.0
# 10 s beyond the check's deadline: the controller gives it up 5 s after it.
_SLACK_S = 10.0
_MOST_FINDINGS = 12
_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "unmeasured": "dim"}
_VERDICTS = {"good": "is good", "warn": "is good, with warnings", "bad": "is bad", "unmeasured": "was not measured"}


def check_node(node: str, ask: "CheckAsk", where: tuple[str | None, str | None], *, as_json: bool) -> None:
    """Have a node checked, wait for the result, and show it.

    Args:
        node: Its name.
        ask: What is to be checked.
        where: Address of the controller and the file with its token, where they are given.
        as_json: Print the summary as JSON.

    Raises:
        UsageError: the controller refuses, with its sentence.
        MegascaleError: there is no result.
    """
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.errors import NotFoundError, RefusedError, UsageError
    from megascale_ops.link import BlockingLink

    controller, token_file = where
    place = find_place(Wanted(controller or ""), journal_too=False)
    with ctrl_c_ends(EXIT_INTERRUPTED), BlockingLink(place.url, read_token(token_file, place)) as link:
        try:
            view = link.check_node(node, ask)
        except (NotFoundError, RefusedError) as error:
            raise UsageError(str(error)) from error
        found = _wait_for(link, view, ask)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
    else:
        show(f"self-check {node} · {found.depth} · by its agent", card(found), _STYLES[found.status])
    if found.trouble and found.status != "bad":
        raise MegascaleError(f"node {node} was not checked: {found.trouble}")
    if found.status == "bad":
        click.get_current_context().exit(1)


def _wait_for(link: object, view: "SelfCheckView", ask: "CheckAsk") -> "SelfCheck":
    from megascale_ops.errors import ControllerUnreachableError
    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.health import DEADLINES_S

    assert isinstance(link, BlockingLink)
    limit_s = DEADLINES_S[ask.depth] + _SLACK_S
    began_s = time.monotonic()
    asked, away = view.id, ""
    while view.state == "waiting" and view.id == asked:
        took_s = time.monotonic() - began_s
        if took_s > limit_s:
            raise MegascaleError(f"the check of node {view.node} has no end in {limit_s:.0f} s{away}")
        begun([f"node {view.node}, for {took_s:.0f} s{away}"])
        time.sleep(_POLL_S)
        try:
            view, away = link.checked_node(view.node), ""
        except ControllerUnreachableError:  # the agent measures on, and a controller that comes back is asked
            away = "; the controller is away"
    ended()
    if view.check is None or view.id != asked:
        raise MegascaleError(f"the check of node {view.node} is forgotten: the controller was started again meanwhile")
    return view.check


def card(found: "SelfCheck") -> "list[Row]":
    """Return what is to be said of a node, in the order in which a person asks."""
    from megascale_ops.cards import Row
    from megascale_ops.schema.wording import duration, printable

    made = "1 check" if found.made == 1 else f"{found.made} checks"
    what = f"node {found.node} {_VERDICTS[found.status]}: {made} made in {duration(found.seconds)}"
    if found.trouble:
        what = f"node {found.node} {_VERDICTS[found.status]}: {found.trouble}"
    marks = {"bad": "", "warn": "warning: ", "note": "note: "}
    lines = [
        f"{marks[one.severity]}{one.text}{f' -> {one.next}' if one.next else ''}"
        for one in found.findings[:_MOST_FINDINGS]
    ]
    if len(found.findings) > _MOST_FINDINGS:
        lines.append(f"{len(found.findings) - _MOST_FINDINGS} more (--json has them)")
    rows = [
        Row("what", (what,)),
        Row("found", tuple(lines)),
        Row("measured", tuple(one.text for one in found.figures)),
        Row("not measured", found.unmeasured),
    ]
    return [Row(label, tuple(map(printable, lines))) for label, lines in rows if any(lines)]
