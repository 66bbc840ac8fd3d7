# SPDX-License-Identifier: Apache-2.0
"""One screen of ``megascale-ops top``: the verdict first, how far the job is, which ranks are late, what happened.

Pure: a frame of the live feed and the terminal's size in, exactly as many lines out as there are rows (without a
height: as many as it takes). Every line is cut to the width, so nothing scrolls and nothing flickers.

Texts come from ranks and may hold anything: they are never read as markup, and control characters are shown.
"""

from collections.abc import Iterable

from rich.text import Text

from megascale_ops.cli.terminal.incident_panel import STATE_STYLES
from megascale_ops.cli.terminal.tables import JOB_STYLES
from megascale_ops.cli.top import pace_lines, rank_map, ranks
from megascale_ops.cli.top.verdict import LEVELS, Look, age, headline, moment
from megascale_ops.schema.events import OVER
from megascale_ops.schema.folding import listed
from megascale_ops.schema.live import Frame, IncidentLine, numbers
from megascale_ops.schema.wording import doing_words, duration, printable, starting

_PLAIN = str.maketrans("·…─│╭╮╰╯", "-~-|++++")
# 3 s: agents and controller send once a second; two missed ones are still normal.
QUIET_S = 3.0
# Lines of a whole screen that ranks and incidents get at least and at most.
MOST_SLOW, MOST_INCIDENTS, LEAST_MAP, LEAST_UNWELL = 8, 6, 2, 4
# 6 names of other jobs: a line of 100 columns.
MOST_OTHERS = 6
# 16 lines of a map in a pipe, where no window sets a height.
PIPE_MAP = 16


def screen(frame: Frame, look: Look) -> list[Text]:
    """Return the screen's lines."""
    lines = [title(frame, look)]
    look = settled(frame, look)
    if frame.headline is not None:
        lines += [*headline(frame.headline, look), Text()]
    if frame.pace is not None and frame.job:
        lines += [*pace_lines.progress(frame.pace, look), *pace_lines.strip(frame.times, look)]
    last = footer(frame, look)
    if frame.pace is not None and frame.job:
        free = look.height - len(lines) - len(last)
        # Which ranks have trouble now matters more than which were slow when; 2: the heat map's legend and a gap.
        lines += [*pace_lines.heat_map(frame.times, look, min(free // 4, free - _least_body(frame) - 2)), Text()]
    room = look.height - len(lines) - len(last) if look.height else 10_000
    lines += _body(frame, look, room)
    if look.height:
        lines = lines[: max(0, look.height - len(last))]
        lines += [Text()] * (look.height - len(last) - len(lines))
    return cut([*lines, *last], look)


def has_ended(frame: Frame) -> bool:
    """Say whether the job is over: a run's own controller ends with it, and nothing more will come."""
    return frame.pace is not None and frame.pace.state in OVER


def settled(frame: Frame, look: Look) -> Look:
    """Return how to look at a frame; what is told of a job that is over stays true while nothing is heard."""
    return look._replace(away="", heard_s=0.0) if has_ended(frame) else look


def incident_rows(incidents: Iterable[IncidentLine], look: Look, now_wall_s: float, chosen: str = "") -> list[Text]:
    """Return one line for each incident; the chosen one is marked."""
    lines = []
    for one in incidents:
        nodes = [printable(node) for node in one.nodes if node not in one.what]
        mark = ">" if one.id == chosen else " "
        took = f"back after {duration(one.recovered_s)}" if one.recovered_s >= 0 else ""
        lost = f"{one.steps_lost:,} steps lost" if one.steps_lost > 0 else ""
        line = Text.assemble(
            (f"{mark} ", "bold cyan"),
            (moment(one.began_wall_s, look.zone, now_wall_s) if one.began_wall_s else " " * 8, "dim"),
            "  ",
            (f"{one.state:<9}", STATE_STYLES.get(one.state, "")),
            f"  {printable(one.id)}  {printable(one.what)}",
            f" on {', '.join(nodes)}" if nodes else "",
            ("".join(f" · {part}" for part in (took, lost) if part), "dim"),
        )
        if one.id == chosen:
            line.stylize("bold")
        lines.append(line)
    return lines


def cut(lines: Iterable[Text], look: Look) -> list[Text]:
    """Cut every line to the width, so that a terminal never wraps one, and spell it so that it can be shown."""
    found = []
    for line in lines:
        shown = line.copy()
        shown.truncate(look.width, overflow="ellipsis")
        if look.ascii_only:
            shown.plain = shown.plain.translate(_PLAIN).encode("ascii", "replace").decode()
        found.append(shown)
    return found


def title(frame: Frame, look: Look) -> Text:
    """Return the first line: which job, its state, and the controller's clock, or since when it was not heard."""
    pace = frame.pace
    left = Text("megascale-ops top", style="dim")
    if frame.job:
        left = Text.assemble(("job ", "dim"), (printable(frame.job), "bold"))
    if pace is not None and frame.job:
        state, style = doing_words(pace.state), JOB_STYLES.get(pace.state, "yellow")
        if pace.stepped >= 0:
            state, style = starting(pace.stepped, pace.world_size, pace.start_age_s, pace.start_s), "cyan"
        left.append(" · ").append(state, style=style)
        left.append(f" · round {pace.round}")
        left.append(f" · {pace_lines.count(pace.world_size, 'rank')} on {pace_lines.count(pace.nodes, 'node')}")
    if has_ended(frame) and (look.away or look.heard_s > QUIET_S):
        right = Text("the job is over, and so is its controller", style="dim")
    elif look.away or look.heard_s > QUIET_S:
        since = moment(frame.wall_s, look.zone)
        right = Text(f"controller not heard since {since} ({age(look.heard_s)})", style="bold red")
    else:
        right = Text(moment(frame.wall_s, look.zone), style="dim")
    space = look.width - left.cell_len - right.cell_len
    if space < 1:  # the name of a job may be long; the lost connection must stay visible
        left.truncate(max(0, look.width - right.cell_len - 1), overflow="ellipsis")
        space = 1
    return Text.assemble(left, " " * space, right)


def _body(frame: Frame, look: Look, room: int) -> list[Text]:
    """Share what room there is: the map takes what it needs, ranks and incidents have a share that none takes."""
    columns, layout = frame.columns, frame.layout
    judged = numbers("judged", columns.judged) if columns is not None else ()
    lines: list[Text] = []
    incidents = incident_rows((frame.incidents or ())[:MOST_INCIDENTS], look, frame.wall_s)
    if judged and room >= LEAST_MAP + 1:
        cluster = rank_map.Cluster(
            judged, numbers("node", layout.node if layout is not None else b""), layout.nodes if layout else ()
        )
        wanted = min(len(incidents), room // 6)
        share = max(_for_unwell(frame), 2 + room // 4) + _with_heading(wanted)
        most = max(LEAST_MAP, room - 1 - share) if look.height else PIPE_MAP
        drawn = rank_map.draw(cluster, look.width, most, ascii_only=look.ascii_only)
        lines += [*drawn.lines, rank_map.legend(cluster, drawn.fold, ascii_only=look.ascii_only)]
        left = room - len(lines)
        below = max(0, min(wanted, left - _for_unwell(frame) - 2))
        spare = left - 2 - _with_heading(below)
        rows = min(max(MOST_SLOW, ranks.unwell(frame)), spare) if look.height else MOST_SLOW
        slow = ranks.section(frame, rows, look)
        lines += [Text(), *slow] if slow else []
    if incidents and room - len(lines) >= 3:
        shown = incidents[: room - len(lines) - 2]
        lines += [Text(), _incidents_heading(len(shown), len(frame.incidents or ()), look), *shown]
    return lines


def _with_heading(rows: int) -> int:
    """Return the lines of a table: a gap, its heading, its rows; none where it has no rows."""
    return rows + 2 if rows else 0


def _least_body(frame: Frame) -> int:
    """Return the lines of the smallest map with its legend, and of the ranks that are not well."""
    return LEAST_MAP + 1 + _for_unwell(frame)


def _for_unwell(frame: Frame) -> int:
    """Return the lines that ranks which are not well get whatever else there is: a few, and how many more there are."""
    return _with_heading(min(ranks.unwell(frame), LEAST_UNWELL))


def _incidents_heading(shown: int, known: int, look: Look) -> Text:
    """Return the line above incidents; it shows how many have no room, and where they are."""
    if shown == known:
        return Text("incidents", style="dim")
    where = "i shows all" if look.has_keys else f"`{look.reader.command('incidents')}` lists all"
    return Text(f"incidents, {shown} of {known}: {where}", style="dim")


def alarms(frame: Frame, look: Look) -> list[Text]:
    """Return what is wrong with the controller."""
    lines = []
    if look.away and not has_ended(frame):
        lines.append(Text(f"trying again: {printable(look.away)}", style="bold red"))
    if frame.lag_s > 0.5:
        lines.append(Text(f"the controller lags {duration(frame.lag_s)} behind", style="yellow"))
    return lines


def footer(frame: Frame, look: Look) -> list[Text]:
    """Return the last lines: what is wrong with the controller, other jobs, and what was given to stand there."""
    lines = alarms(frame, look)
    others = [one for one in frame.jobs or () if one.job != frame.job]
    if others:
        told = listed([_other(one.job, one.level) for one in others], MOST_OTHERS)
        lines.append(Text(f"other jobs: {told}", style="dim"))
    if look.last_line:
        lines.append(Text(look.last_line, style="dim"))
    return lines


def _other(job: str, level: str) -> str:
    word = LEVELS.get(level, ("", ""))[0]
    return printable(job) if level in ("calm", "over") else f"{printable(job)} ({word})"
