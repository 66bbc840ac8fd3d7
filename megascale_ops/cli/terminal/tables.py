# SPDX-License-Identifier: Apache-2.0
"""Tables for people: jobs with their nodes and ranks, incidents.

``megascale-ops status`` must stay readable for 12,288 ranks, so ranks that are not well come first and the rest is
counted. Every table has a JSON twin (``--json``); nothing here is meant to be parsed.
"""

from collections.abc import Iterable
from datetime import tzinfo

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megascale_ops.cards import ranks_named
from megascale_ops.cli.terminal.incident_panel import STATE_STYLES
from megascale_ops.schema.events import Incident, JobStatus, NodeStatus, RankStatus, Status
from megascale_ops.schema.wording import clock, doing_words, duration, percent, printable, starting

# 32 rows of each: four nodes of eight ranks fit a tall terminal; above that only what is not well is listed first.
MOST_ROWS = 32

JUDGED_STYLES = {"ok": "green", "slow": "yellow", "suspect": "yellow", "lost": "red", "starting": "cyan"}
JOB_STYLES = {"running": "green", "finished": "cyan", "stopped": "cyan", "failed": "red"}


def status_view(status: Status) -> RenderableType:
    """Return all jobs of a status, each with its nodes and ranks."""
    if not status.jobs:
        return Text("no job has joined this controller yet")
    parts: list[RenderableType] = []
    for job in status.jobs:
        parts.extend([_headline(job), Text("")])
        parts.extend([_nodes(job.nodes), Text("")] if job.nodes else [])
        parts.extend([_ranks(job.ranks), Text("")] if job.ranks else [])
    # 0.5 s: half a heartbeat; a controller that lags more judges more slowly, and the user should see it.
    if status.controller_lag_s > 0.5:
        parts.append(Text(f"the controller lags {duration(status.controller_lag_s)} behind", style="yellow"))
    return Group(*parts)


def incidents_view(incidents: Iterable[Incident], zone: tzinfo | None = None) -> RenderableType:
    """Return one row for each incident, newest last."""
    table = plain_table("incident", "when", "what", "who", "recovered in", "steps lost", "state")
    for incident in incidents:
        verdict = incident.verdict
        began = incident.marks.began or incident.marks.detected
        stepped = incident.marks.stepped
        lost = incident.step_before - incident.step_after if min(incident.step_before, incident.step_after) >= 0 else -1
        who = ranks_named(verdict.culprits) if verdict else ""
        table.add_row(
            incident.id,
            clock(began, zone) if began else "",
            verdict.fault if verdict else "not judged yet",
            who + (f" on {', '.join(verdict.nodes)}" if verdict and verdict.nodes else ""),
            duration(stepped - began) if stepped and began else "",
            f"{lost:,}" if lost >= 0 else "",
            Text(incident.state, style=STATE_STYLES.get(incident.state, "")),
        )
    return table


def _headline(job: JobStatus) -> RenderableType:
    facts = [f"round {job.round}", f"{job.world_size} {'rank' if job.world_size == 1 else 'ranks'}"]
    if job.step >= 0:
        facts.append(f"step {job.step:,}")
    if job.step_p50_s > 0:
        facts.append(f"{duration(job.step_p50_s)} a step")
    facts.append(f"{job.restarts} {'restart' if job.restarts == 1 else 'restarts'}")
    if job.incidents:
        facts.append(f"{job.incidents} {'incident' if job.incidents == 1 else 'incidents'}")
    if job.useful_ratio >= 0 and job.goodput < 0:  # two shares of like meaning are one too many
        facts.append(f"{percent(job.useful_ratio)} useful")
    if job.goodput >= 0:
        late = ((job.goodput_hour, "in the last hour"), (job.goodput_now, "in the last 5 min"))
        more = "".join(f", {percent(share)} {when}" for share, when in late if share >= 0)
        facts.append(f"{percent(job.goodput)} training{more}")
    line = Text.assemble(("job ", "dim"), (job.job, "bold"), " · ")
    if job.stepped >= 0:
        line.append(starting(job.stepped, job.world_size, job.start_age_s, job.start_s), style="cyan")
    else:
        line.append(doing_words(job.state), style=JOB_STYLES.get(job.state, "yellow"))
    line.append(" · " + " · ".join(facts))
    if job.reason:
        line.append(f"\n{printable(job.reason)}", style="dim")
    return line


def _nodes(nodes: tuple[NodeStatus, ...]) -> RenderableType:
    table = plain_table("node", "agent heard", "runner heard", "cpu", "memory", "shm free", "disk free")
    # The longest silence first: with 1,536 nodes that is the one to look for.
    for node in sorted(nodes, key=lambda node: (-max(node.agent_age_s, node.runner_age_s), node.node))[:MOST_ROWS]:
        host = node.host
        table.add_row(
            node.node,
            _age(node.agent_age_s),
            _age(node.runner_age_s),
            f"{host.cpu_busy * 100:.0f} %" if host else "",
            f"{host.memory_used * 100:.0f} %" if host else "",
            data_size(host.shm_free_bytes) if host and host.has_shm else "",
            data_size(host.disk_free_bytes) if host and host.has_disk else "",
        )
    return _with_rest(table, len(nodes), "nodes")


def _ranks(ranks: tuple[RankStatus, ...]) -> RenderableType:
    table = plain_table("rank", "node", "step", "step time", "phase", "moved", "process", "judged")
    order = {"lost": 0, "suspect": 1, "slow": 2}
    if len(ranks) > MOST_ROWS:
        ranks = tuple(sorted(ranks, key=lambda rank: (order.get(rank.judged, 3), rank.report.rank)))
    for rank in ranks[:MOST_ROWS]:
        progress = rank.report.progress
        table.add_row(
            str(rank.report.rank),
            rank.node,
            f"{progress.step:,}" if progress and progress.step >= 0 else "",
            duration(progress.step_p50_s) if progress and progress.step_p50_s > 0 else "",
            printable(progress.phase) if progress else "",
            _age(rank.silent_s),
            f"{rank.report.pid} {rank.report.process.state or 'gone'}",
            Text(_judged(rank), style=JUDGED_STYLES.get(rank.judged, "")),
        )
    return _with_rest(table, len(ranks), "ranks")


def _judged(rank: RankStatus) -> str:
    """Return the word for a rank; of a slow one why, and what it costs."""
    return f"slow ({rank.cause or 'no cause seen'}, {percent(rank.cost)})" if rank.judged == "slow" else rank.judged


def _with_rest(table: RenderableType, rows: int, of_what: str) -> RenderableType:
    if rows <= MOST_ROWS:
        return table
    return Group(table, Text(f"and {rows - MOST_ROWS:,} more {of_what}: --json lists them all", style="dim"))


def plain_table(*columns: str) -> Table:
    """Return an empty table as all of ours look."""
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for column in columns:
        numeric = column in {"rank", "step", "step time", "moved", "steps lost", "recovered in", "cpu", "memory"}
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _age(seconds: float) -> str:
    return "" if seconds < 0 else f"{duration(seconds)} ago"


def data_size(count: int) -> str:
    """Return a number of bytes in the unit that fits it."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
