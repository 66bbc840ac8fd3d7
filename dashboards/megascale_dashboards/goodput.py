# SPDX-License-Identifier: Apache-2.0
"""Incidents and goodput: where every second of the wall clock went, what broke, and how long each repair took."""

from megascale_dashboards.asking import GOODPUT, JOB, Ask
from megascale_dashboards.frame import INCIDENTS, RESTARTS, Page, Section, job_variable
from megascale_dashboards.maps import timeline_card
from megascale_dashboards.panels import Card, bar_card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

WALL = f"megascale_wall_seconds{{{JOB}}}"
INCIDENT_S = f"megascale_incident_seconds_total{{{JOB}}}"
# 0.9 and 0.95: jobs of ten thousand GPUs are run at 0.9 and above, so below it hours are lost.
GOOD = limits((0.9, "yellow"), (0.95, "green"), base="red")


FAILED_SAVES = f"megascale_checkpoint_failed_saves_total{{{JOB}}}"
# Of CheckpointManager only what is sealed counts: behind the training a step with a save in it has only begun one.
SAVED = (
    f"((max(max_over_time(megascale_checkpoint_sealed_timestamp_seconds{{{JOB}}}[1d])) "
    f"and on () max(megascale_checkpoint_stall_seconds{{{JOB}}})) "
    f"or (max(megascale_checkpoint_last_success_timestamp_seconds{{{JOB}}} > 0) unless on () max({FAILED_SAVES}) > 0))"
)


# Warnings and what turned out harmless stopped nothing.
STOPPED = f'sum(megascale_incidents_total{{{JOB}, class!~"warned|harmless"}})'


def goodput_cards(text: str, *windows: str, width: int = 4) -> tuple[Card, ...]:
    """Return goodput of some windows: now, the last hour, with what is to be said of it, and the whole job."""
    return tuple(
        stat_card(
            title,
            said,
            (Ask(f'megascale_goodput_ratio{{{JOB}, window="{window}"}}'),),
            width=width,
            unit="percentunit",
            colours=GOOD,
            empty="too early",
        )
        for title, said, window in (
            (
                "Goodput now",
                "The same of the last five minutes: does what was done help? A restart takes it down for a while.",
                "now",
            ),
            ("Goodput, last hour", text, "hour"),
            ("Goodput, whole job", "The same since the job began.", "job"),
        )
        if window in windows
    )


def _verdict() -> tuple[Card, ...]:
    return (
        *goodput_cards("Share of the wall clock spent in steps that count and that nobody held up.", "hour", "job"),
        stat_card(
            "Effective training time",
            "Share of the wall clock in steps that count, held up or not, checkpoints included: as MegaScale and "
            "Llama 3 report it. The gap to goodput is what stragglers cost.",
            (Ask(f'megascale_effective_training_time_ratio{{{JOB}, window="job"}}'),),
            unit="percentunit",
            colours=GOOD,
            empty="too early",
        ),
        stat_card(
            "Wall clock per incident",
            "Time between incidents that stopped the job, on average (MTBF). Meta saw one in 2.8 h on 16,384 "
            "GPUs; far less than that, scaled to this job, means that something specific is broken.",
            (Ask(f"sum(megascale_job_wall_seconds{{{JOB}}}) / ({STOPPED} > 0)"),),
            unit="s",
            empty="no incident",
        ),
        stat_card(
            "Time per incident",
            "Detection to the step where training was before, on average. Above 10 min: look below at which stage.",
            (Ask(f"sum({INCIDENT_S}) / ({STOPPED} > 0)"),),
            unit="s",
            colours=limits((300, "yellow"), (600, "red")),
            empty="no incident",
        ),
        stat_card(
            "Age of the last checkpoint",
            "What a crash would cost now. Yellow from 30 min, red from 1 h: look why it isn't written.",
            (Ask(f"time() - {SAVED}"),),
            unit="s",
            colours=limits((1800, "yellow"), (3600, "red")),
            empty="none seen",
        ),
    )


def _where() -> tuple[tuple[Card, ...], ...]:
    return (
        (
            line_card(
                "Goodput",
                "The line of now (five minutes) falls with each incident and comes back, the hour's has a dent, the "
                "job's is what it all adds up to.",
                (
                    Ask(f"megascale_goodput_ratio{{{JOB}}}", "goodput, {{window}}"),
                    Ask(f"megascale_effective_training_time_ratio{{{JOB}}}", "effective, {{window}}"),
                ),
                unit="percentunit",
                most=1.0,
            ),
            bar_card(
                "Where the wall clock went",
                "Every second of the job in one class; the bars add up to its age. What is not train is what can be "
                "won: straggle (Stragglers), checkpoint (write less often or asynchronously), recompute (write more "
                "often), detect (patience), reload (storage).",
                (Ask(f"sort_desc(sum by (class) ({WALL}))", "{{class}}"),),
                width=12,
                unit="s",
            ),
        ),
        (
            line_card(
                "Lost time by reason",
                "All classes but train, stacked, since the job began. A step up is an incident; a slope is a straggler "
                "or a checkpoint that is too slow.",
                (Ask(f'sum by (class) (megascale_wall_seconds{{{JOB}, class!="train"}})', "{{class}}"),),
                width=12,
                unit="s",
                stacked=True,
            ),
            *_of_saves(),
        ),
        _of_restores(),
    )


def _of_saves() -> tuple[Card, ...]:
    return (
        line_card(
            "What a save takes",
            "Of CheckpointManager, the slowest node: stall is what the training waits for, written how long the "
            "rest goes on beside it. Written for longer than the interval, saves wait for each other: save less "
            "often, or on the nodes.",
            (
                Ask(f"max(megascale_checkpoint_stall_seconds{{{JOB}}})", "stall"),
                Ask(f"max(megascale_checkpoint_write_seconds{{{JOB}}})", "written"),
            ),
            width=6,
            unit="s",
        ),
        line_card(
            "What a restore takes",
            "Of CheckpointManager, the slowest node, the search for the checkpoint included. Longer than a "
            "restart's other stages: a tier on the nodes, or faster storage.",
            (Ask(f"max(megascale_checkpoint_restore_seconds{{{JOB}}})", "restore"),),
            width=6,
            unit="s",
        ),
    )


def _of_restores() -> tuple[Card, ...]:
    return (
        bar_card(
            "Where checkpoints were restored from",
            "By the present processes. buddy: a node had lost its files, and the copy on another one was read. "
            "shared or store though there is a tier on the nodes: too many nodes went at once.",
            (Ask(f"sort_desc(max by (tier) (megascale_checkpoint_restores_total{{{JOB}}}))", "{{tier}}"),),
            width=12,
        ),
        stat_card(
            "Checkpoints passed over",
            "Found damaged by a restore, which went on to an older one. Any is a fault of storage to look into: "
            "`megascale-ops checkpoint verify` names the files.",
            (Ask(f"max(megascale_checkpoint_passed_over_total{{{JOB}}})"),),
            width=4,
            height=8,
            colours=limits((1, "yellow")),
            empty="none seen",
        ),
        stat_card(
            "Restores that failed",
            "There were checkpoints and none could be loaded; the log of rank 0 says why.",
            (Ask(f"max(megascale_checkpoint_failed_restores_total{{{JOB}}})"),),
            width=4,
            height=8,
            colours=limits((1, "red")),
            empty="none seen",
        ),
        stat_card(
            "Saves that failed",
            "Of CheckpointManager, since the processes began. Training goes on and the next save tries again; the "
            "log of rank 0 says why (`the save of step ... failed`).",
            (Ask(f"max({FAILED_SAVES})"),),
            width=4,
            height=8,
            colours=limits((1, "red")),
            empty="none seen",
        ),
    )


def _incidents() -> tuple[tuple[Card, ...], ...]:
    return (
        (
            bar_card(
                "Incidents by class",
                "Since the job began. One class that stands out is one thing to mend.",
                (Ask(f"sort_desc(sum by (verdict) (megascale_incidents_total{{{JOB}}}))", "{{verdict}}"),),
                empty="no incident",
            ),
            bar_card(
                "Restarts by cause",
                "Ten for one cause within an hour are the usual budget: `megascale-ops policy show` has this job's.",
                (Ask(f"sort_desc(sum by (reason) (megascale_restarts_total{{{JOB}}}))", "{{reason}}"),),
                empty="no restart",
            ),
            bar_card(
                "Time in each stage of an incident",
                "On average, of those that are over. detect: until it was seen. diagnose: until the culprit was named. "
                "check: nodes measured themselves. restart: processes and communicators. reload: the checkpoint. "
                "recompute: steps done twice.",
                (Ask(f"sum by (stage) ({INCIDENT_S}) / on () group_left () ({STOPPED} > 0)", "{{stage}}"),),
                unit="s",
                empty="no incident",
            ),
        ),
        (
            timeline_card(
                "Open incidents over time",
                "A band as long as the incident was open. `megascale-ops incidents` lists them, `megascale-ops why` "
                "tells each with its evidence.",
                (Ask(f"megascale_incident_open{{{JOB}}} > 0", "{{verdict}}"),),
                width=12,
                empty="none",
            ),
            timeline_card(
                "State of the job",
                "running and degraded train, all others cost.",
                (Ask(f"max by (state) (megascale_job_state_info{{{JOB}}}) == 1", "{{state}}"),),
                width=12,
            ),
        ),
        _machines(),
    )


def _machines() -> tuple[Card, ...]:
    return (
        table_card(
            "Hardware remembered as bad",
            "GPUs that were to blame before, by their UUID, and where they are now. One that is back under a job "
            "will be to blame again: have it replaced, then forget it with `megascale-ops bad-hardware forget`.",
            (Ask("topk(100, max by (node, uuid, reason) (megascale_gpu_bad_info))"),),
            ("node", "uuid", "reason"),
            width=12,
            height=7,
            empty="none",
        ),
        table_card(
            "Nodes that are not healthy",
            "Where each stands as a machine: quarantined, draining, under check, suspect, back. Why, and how it "
            "came there: `megascale-ops nodes history` with its name; `megascale-ops nodes release` takes it back.",
            (Ask("topk(100, max by (node, state) (megascale_node_life_info))"),),
            ("node", "state"),
            width=12,
            height=7,
            empty="none",
        ),
    )


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=GOODPUT,
        title="MegaScale: Incidents and goodput",
        text="Where did the time go, what broke how often, and which repair takes too long?",
        sections=(
            Section("", (_verdict(),)),
            Section("Where the time went", _where()),
            Section("Incidents", _incidents()),
        ),
        variables=(job_variable(),),
        notes=(INCIDENTS, RESTARTS),
        window="now-24h",
        refresh="1m",
    )
