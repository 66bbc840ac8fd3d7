# SPDX-License-Identifier: Apache-2.0
"""On call: what is wrong, since when, with which ranks, and what to do; everything else is a click away."""

from megascale_dashboards.asking import JOB, ON_CALL, Ask, bucket_quantile, placed
from megascale_dashboards.frame import CHECKPOINTS, INCIDENTS, RESTARTS, Page, Section, job_variable, xids
from megascale_dashboards.goodput import goodput_cards
from megascale_dashboards.maps import timeline_card
from megascale_dashboards.panels import ANY, Card, bar_card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

# 30 s: ten times a long step, or a checkpoint of a large model; 120 s: whatever it is, a person should look.
STUCK = limits((30, "yellow"), (120, "red"))
# Of this job, of any node, and whatever is critical.
FIRING = " or ".join(f'ALERTS{{alertstate="firing", {which}}}' for which in (JOB, 'node!=""', 'severity="critical"'))
# The nodes of this job.
HERE = f"count by (node) (megascale_rank_info{{{JOB}}})"


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card(
            "Verdict",
            "What the controller says is wrong now: the class of each open incident or warning, or the suspicion of a "
            "hang. `megascale-ops why` tells it in a sentence: rank, node, GPU, evidence, what is being done. Red: "
            "read that before you touch anything, recovery may be under way.",
            (
                Ask(f"megascale_incident_open{{{JOB}}} > 0", "{{verdict}}"),
                Ask(f"megascale_hang_suspected{{{JOB}}} > 0", "hang? {{verdict}}"),
            ),
            width=10,
            names=True,
            colours=ANY,
            empty="no open incident",
        ),
        stat_card(
            "State",
            "Where the job stands in recovery. running and degraded train; stopping to catching_up are on the way back "
            "by themselves: wait. failed has given up: read the last incident.",
            (Ask(f"megascale_job_state_info{{{JOB}}} == 1", "{{state}}"),),
            names=True,
            empty="job not known",
        ),
        stat_card(
            "Stuck for",
            "Time since any rank of the job finished a step, changed phase or entered a collective; 0 when it is not "
            "running. Yellow from 30 s (a long step or a checkpoint), red from 120 s: `megascale-ops status` says who "
            "is waited for.",
            (Ask(f"megascale_stuck_seconds{{{JOB}}}"),),
            unit="s",
            colours=STUCK,
            empty="not running",
        ),
        stat_card(
            "Ranks",
            "Ranks by what the controller thinks of them. Any suspect or lost rank stands in a table below.",
            (Ask(f"sum by (judged) (megascale_job_ranks{{{JOB}}})", "{{judged}}"),),
            width=6,
        ),
    )


def _figures() -> tuple[Card, ...]:
    return (
        stat_card(
            "Step",
            "Last step that every rank has finished. It falls back after a restart by what was lost.",
            (Ask(f"megascale_job_step{{{JOB}}}"),),
            width=3,
            unit="none",
        ),
        stat_card(
            "Since the last step",
            "Time since any rank finished a step. Yellow from 30 s, red from 120 s, unless the job evaluates, saves or "
            "compiles: What ranks are doing says so.",
            (Ask(f"time() - megascale_job_last_step_timestamp_seconds{{{JOB}}}"),),
            width=3,
            unit="s",
            colours=STUCK,
            empty="none yet",
        ),
        stat_card(
            "Median step",
            "Median wall time of recent steps. Compare with the picture below: a lasting rise is a straggler or a "
            "slower fabric.",
            (Ask(f"megascale_job_step_seconds{{{JOB}}}"),),
            width=3,
            unit="s",
        ),
        *goodput_cards(
            "Share of the wall clock spent in steps that count and that nobody held up. Below 0.9 a tenth of the "
            "machine is lost: see Incidents and goodput for what took it.",
            *("now", "hour", "job"),
            width=3,
        ),
        stat_card(
            "Restarts in all",
            "Restarts of this job by the controller. Ten for one cause within an hour are the usual budget, then the "
            "job ends: look at the cause under Incidents and goodput long before.",
            (Ask(f"sum(megascale_restarts_total{{{JOB}}}) or vector(0)"),),
            width=3,
            unit="none",
        ),
        stat_card(
            "Ranks on sick nodes",
            "Ranks whose node fails a health check now. They may not be at fault yet: they are the first to suspect.",
            (
                Ask(
                    f"count(megascale_rank_info{{{JOB}}} and on (node) (megascale_health_check_status == 2)) "
                    "or vector(0)"
                ),
            ),
            width=3,
            unit="none",
            colours=limits((1, "orange")),
        ),
    )


def _suspects() -> tuple[Card, ...]:
    score = f"topk(20, sum by (job, rank, cause) (megascale_straggler_score_ratio{{{JOB}}}))"
    named = f"topk(20, max by (job, rank, verdict) (megascale_suspect_confidence_ratio{{{JOB}}}))"
    silent = f"topk(10, max by (job, rank) (megascale_rank_silent_seconds{{{JOB}}}))"
    return (
        table_card(
            "Who is named",
            "Ranks that a verdict names now, where they are, for what, and how sure it is. Below 0.8 read "
            "`megascale-ops why` before you act: it says what would have changed the verdict.",
            (Ask(placed(named, "node", "local_rank", "gpu_uuid"), "how sure"),),
            ("rank", "node", "local_rank", "gpu_uuid", "verdict"),
            width=9,
            units={"how sure": "percentunit"},
            empty="nobody",
        ),
        table_card(
            "Who holds the job up",
            "Ranks that make every step longer, what they cost (share of each step) and why. Click at the rank for its "
            "history, at the node for its hardware. At 0.1 an hour loses six minutes, about what "
            "a restart without it costs: `megascale-ops policy show` says whether that happens by itself.",
            (Ask(placed(f"sum by (job, rank, cause) ({score})", "node", "local_rank", "gpu_uuid"), "cost"),),
            ("rank", "node", "local_rank", "gpu_uuid", "cause"),
            width=8,
            units={"cost": "percentunit"},
            colours=limits((0.05, "yellow"), (0.1, "red")),
            empty="nobody",
        ),
        table_card(
            "Silent longest",
            "Ranks that have shown no progress for the longest time, and where they stand. When the job is stuck the "
            "culprit is often the one that differs: another phase, another node. `megascale-ops status` lists all; "
            "once there is an incident, `megascale-ops why` has their stacks.",
            (Ask(placed(silent, "node", "local_rank", "tp", "pp", "dp"), "silent for"),),
            ("rank", "node", "local_rank", "tp", "pp", "dp"),
            width=7,
            units={"silent for": "s"},
            colours=STUCK,
        ),
    )


def _signs() -> tuple[Card, ...]:
    return (
        bar_card(
            "What ranks are doing",
            "Number of ranks in each phase. In a healthy job they move together; one rank alone in a phase while all "
            "others wait is the one to look at.",
            (Ask(f"count by (phase) (megascale_rank_phase_info{{{JOB}}})", "{{phase}}"),),
            width=6,
        ),
        table_card(
            "Alerts that fire",
            "Alerts of this job and of all nodes. Each has a runbook: symptom, meaning, first three commands, how to "
            "undo what was done.",
            (Ask(f"topk(100, max by (alertname, severity, node, rank) ({FIRING}))"),),
            ("alertname", "severity", "node", "rank"),
            width=8,
            empty="none fires",
        ),
        table_card(
            "Sick hardware under this job",
            "Health checks that warn (1) or fail (2), or can't answer (3), on nodes where this job runs. A check that "
            "can't answer is a sign too: a hung driver looks like that.",
            (
                Ask(
                    "topk(100, max by (node, check) (megascale_health_check_status > 0) "
                    f"and on (node) count by (node) (megascale_rank_info{{{JOB}}}))",
                    "status",
                ),
            ),
            ("node", "check"),
            width=10,
            colours=limits((1, "yellow"), (2, "red"), (3, "purple")),
            words={"1": "warns", "2": "fails", "3": "no answer"},
            empty="all checks pass",
        ),
    )


def _words() -> tuple[Card, ...]:
    odd = f'megascale_rank_process_info{{{JOB}, state=~"blocked|stopped|traced|gone"}}'
    return (
        table_card(
            "Processes that do not run",
            "Ranks whose process is stopped, traced by a debugger, gone, or blocked in the kernel (dead storage, a "
            "hung driver). In a hang these are the first to look at; the controller restarts the job by itself.",
            (Ask(f"topk(50, max by (rank, node, state) ({odd}))"),),
            ("rank", "node", "state"),
            empty="all run",
        ),
        table_card(
            "What ranks wrote before they died",
            "Known lines of stderr since the agents began, by node. A name with peer or timeout is a survivor's word "
            "about somebody else; the others name what happened to the rank itself.",
            (
                Ask(
                    f"topk(50, sum by (node, pattern) (megascale_agent_log_matches_total) and on (node) {HERE})",
                    "lines",
                ),
            ),
            ("node", "pattern"),
            empty="nothing known",
        ),
    )


def _history() -> tuple[tuple[Card, ...], ...]:
    durations = f"megascale_step_duration_seconds_bucket{{{JOB}}}"
    return (
        (
            timeline_card(
                "State over time",
                "What the job did when. Red marks above are incidents, orange ones restarts.",
                (Ask(f"max by (state) (megascale_job_state_info{{{JOB}}}) == 1", "{{state}}"),),
                height=6,
            ),
        ),
        (
            line_card(
                "Progress",
                "A straight line is a healthy job; flat is stuck; a drop is what a restart lost.",
                (Ask(f"megascale_job_step{{{JOB}}}", "step"),),
                unit="none",
                least=None,
            ),
            line_card(
                "Time of a step",
                "The slowest rank's wall time of each step: median and the longest in a hundred. A gap between the two "
                "is a straggler that comes and goes, a rise of both is something that all share.",
                (
                    Ask(bucket_quantile(0.5, durations), "median"),
                    Ask(bucket_quantile(0.99, durations), "99 %"),
                    Ask(f"megascale_job_step_seconds{{{JOB}}}", "median of ranks"),
                ),
                unit="s",
            ),
        ),
    )


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=ON_CALL,
        title="MegaScale: On call",
        text="Is the job well? If not: what, who, since when, and is it being dealt with?",
        sections=(
            Section("", (_verdict(), _figures())),
            Section("Who and where", (_suspects(), _signs(), _words())),
            Section("Since when", _history()),
        ),
        variables=(job_variable(),),
        notes=(INCIDENTS, RESTARTS, CHECKPOINTS, xids("", f"and on (node) {HERE}")),
        refresh="10s",
    )
