# SPDX-License-Identifier: Apache-2.0
"""The verdict card as a person sees it, compared with golden files.

After a wanted change of the card: ``MEGASCALE_UPDATE_GOLDEN=1 pytest tests/unit/cli/test_cards.py`` and read the diff.
"""

import io
import os
from datetime import UTC, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from megascale_ops.cards import Reader, card, next_command, plain_incident
from megascale_ops.cli.config.table import settings_view
from megascale_ops.cli.terminal.incident_panel import render_incident
from megascale_ops.cli.terminal.tables import incidents_view, status_view
from megascale_ops.schema.events import Incident, Incidents, JobStatus, Marks, NodeStatus, RankStatus, Status
from megascale_ops.schema.health import Finding, HostReading, Verdict
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.progress import ProcessReading, Progress, RankReport
from megascale_ops.schema.wording import clock, duration, printable

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
BEGAN_S = 1_790_000_000.0

FROZEN = Incident(
    id="gpt-2",
    job="gpt",
    round=2,
    state="recovered",
    marks=Marks(
        began=BEGAN_S,
        detected=BEGAN_S + 0.4,
        named=BEGAN_S + 1.9,
        ordered=BEGAN_S + 1.9,
        stopped=BEGAN_S + 2.0,
        formed=BEGAN_S + 2.1,
        stepped=BEGAN_S + 3.35,
    ),
    verdict=Verdict(
        fault="frozen",
        reason="the process of rank 2 has been in state T for 1.5 s while 3 ranks wait for it in the same collective",
        confidence=0.97,
        culprits=(2,),
        nodes=("node-a",),
        since_wall_s=BEGAN_S,
        since_step=118,
        round=2,
        action="restart",
        evidence=(
            Finding("state", "rank 2 (pid 4711) is in state T since 1.5 s", "process", rank=2, node="node-a"),
            Finding("collective", "ranks 0, 1 and 3 wait in all_reduce 236, rank 2 never arrived", "black box"),
        ),
        otherwise="SIGCONT within 1.5 s would have ended it without a restart",
    ),
    done="all 4 ranks were stopped and restarted as round 3 from the checkpoint of step 110",
    step_before=118,
    step_after=110,
    evidence=(
        EvidenceItem("stacks", ok=False, rank=2, text="no answer: the process is stopped"),
        EvidenceItem("stderr", ok=True, rank=2, text="step 118", path="/runs/gpt/incidents/gpt-2/rank-2.stderr"),
    ),
    folder="/runs/gpt/incidents/gpt-2",
)
ABSENT = Incident(
    id="gpt-4",
    job="gpt",
    round=2,
    marks=Marks(began=BEGAN_S, detected=BEGAN_S + 5.2, named=BEGAN_S + 5.3),
    verdict=Verdict(
        fault="sleeping",
        reason=(
            "rank 1 has not come to all_reduce #41 of group 0, where 3 ranks wait: it sleeps in a system call in "
            "upload (/home/u/train.py:40); silent for 9.2 s"
        ),
        confidence=0.95,
        culprits=(1,),
        nodes=("node-a",),
        since_wall_s=BEGAN_S,
        since_step=118,
        round=2,
        otherwise="another class, had it been somewhere else at the next look; nothing, had it come to the collective",
        sure_of="place",
    ),
    done="nothing yet: it is acted upon if it lasts until 2026-09-21 14:22:20.0 +0000 (540 s in all)",
    folder="/runs/gpt/incidents/gpt-4",
)
UNJUDGED = Incident(id="gpt-3", job="gpt", round=3, marks=Marks(detected=BEGAN_S + 60))

JOB = JobStatus(
    job="gpt",
    state="running",
    round=3,
    world_size=4,
    step=1240,
    step_p50_s=0.051,
    restarts=2,
    since_wall_s=BEGAN_S,
    nodes=(
        NodeStatus(
            "node-a",
            agent_age_s=0.4,
            runner_age_s=1.1,
            host=HostReading(cpu_busy=0.93, memory_used=0.41, shm_free_bytes=7 << 30, disk_free_bytes=120 << 30),
        ),
        NodeStatus("node-b", runner_age_s=12.0),
    ),
    ranks=(
        RankStatus(
            "node-a",
            RankReport(
                0,
                0,
                4700,
                3,
                progress=Progress(step=1240, phase="forward", step_p50_s=0.051),
                process=ProcessReading(state="S"),
            ),
            silent_s=0.03,
        ),
        RankStatus(
            "node-b",
            RankReport(1, 0, 4711, 3, progress=Progress(), process=ProcessReading(state="T")),
            silent_s=3.2,
            judged="suspect",
        ),
    ),
    incidents=2,
    useful_ratio=0.931,
    goodput=0.874,
    goodput_hour=0.912,
    goodput_now=0.956,
    reason="rank 1 is stopped (state T)",
)


def shown(renderable: object, *, color: bool = False, width: int = 100) -> str:
    """Return what a terminal of this width would show."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, markup=False, highlight=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def check_golden(name: str, text: str) -> None:
    """Compare with the golden file, or write it when asked to."""
    path = GOLDEN / name
    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("why_frozen.txt", plain_incident(FROZEN, UTC) + "\n"),
        ("why_absent.txt", plain_incident(ABSENT, UTC) + "\n"),
        ("why_unjudged.txt", plain_incident(UNJUDGED, UTC) + "\n"),
        ("card_frozen.txt", shown(render_incident(FROZEN, UTC))),
        ("incidents.txt", shown(incidents_view((FROZEN, UNJUDGED), UTC), width=120)),
        ("status.txt", shown(status_view(Status(1, BEGAN_S, 0.9, (JOB,))))),
    ],
)
def test_what_a_person_reads(name: str, text: str) -> None:
    """Cards and tables look exactly as in tests/golden/cli."""
    check_golden(name, text)


def test_plain_card_is_narrow_and_its_paths_can_be_copied() -> None:
    """Sentences are wrapped; a path or a command stays in one piece, however long it is."""
    path = "/runs/a-long-name" + "/another-folder" * 10 + "/rank-2.stderr"
    evidence = (EvidenceItem("stderr", ok=True, rank=2, text="step 118", path=path),)
    long = msgspec.structs.replace(FROZEN, done="word " * 200, evidence=evidence)

    lines = plain_incident(long, UTC).splitlines()

    assert all(len(line) <= 100 or path in line for line in lines)
    assert sum(line.endswith(path) for line in lines) == 2


def test_a_ranks_words_are_shown_not_obeyed() -> None:
    """Escape sequences and markup in a rank's last words change nothing on the terminal."""
    verdict = Verdict(fault="exception", reason="\x1b[2Jboom [red]x[/red]\nsecond line", confidence=1.0, culprits=(0,))
    nasty = msgspec.structs.replace(FROZEN, verdict=verdict)

    text = shown(render_incident(nasty, UTC), color=False)

    assert "\x1b[2J" not in text + plain_incident(nasty, UTC)
    assert "\\x1b[2Jboom [red]x[/red] second line" in text


def test_many_ranks_and_much_evidence_stay_on_one_screen() -> None:
    """A verdict over a thousand ranks with a hundred findings still is a card, and says what it left out."""
    findings = tuple(Finding("f", f"fact {number}", "black box") for number in range(100))
    verdict = Verdict("node_lost", "gone", 1.0, culprits=tuple(range(0, 2000, 2)), evidence=findings)

    text = plain_incident(msgspec.structs.replace(FROZEN, verdict=verdict), UTC)

    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 992 more" in text
    assert "94 more: megascale-ops why gpt-2 --json" in text
    assert len(text.splitlines()) < 40


def test_stacks_of_many_ranks_are_one_line() -> None:
    """Neighbours in the same place share a range; who is to blame has lines of its own."""
    items = [EvidenceItem("stacks", ok=True, rank=rank, frames=("all_reduce (ddp.py:9)",)) for rank in range(64)]
    items[2] = EvidenceItem("stacks", ok=True, rank=2, frames=("read (data.py:3)",), path="/runs/rank-2.stacks")

    text = plain_incident(msgspec.structs.replace(FROZEN, evidence=tuple(items)), UTC)

    assert "stacks: 0-1,3-63: all_reduce (ddp.py:9); 2: read (data.py:3)" in text
    assert "stacks of rank 2: /runs/rank-2.stacks" in text
    assert "of rank 5" not in text


def test_evidence_of_several_lines_is_one_sentence_with_its_parts_apart() -> None:
    """On a card a piece of evidence is one line; where its own lines ended is still to be seen."""
    item = EvidenceItem("collectives", ok=True, rank=2, text="pg 0: entered 104\nnot finished: all_gather 104")

    text = plain_incident(msgspec.structs.replace(FROZEN, evidence=(item,)), UTC)

    assert "collectives of rank 2: pg 0: entered 104; not finished: all_gather 104" in " ".join(text.split())


def test_a_fault_that_this_version_does_not_know_is_still_named() -> None:
    """A newer controller's fault class is printed as it is."""
    rows = dict(card(msgspec.structs.replace(FROZEN, verdict=Verdict("gremlins", "?", 0.5)), UTC))

    assert rows["what"] == ("gremlins",)


@pytest.mark.parametrize(
    ("incident", "command"),
    [
        (FROZEN, "less /runs/gpt/incidents/gpt-2/rank-2.stderr"),
        (UNJUDGED, "megascale-ops status --job gpt"),
        (msgspec.structs.replace(FROZEN, evidence=()), "ls /runs/gpt/incidents/gpt-2"),
        (msgspec.structs.replace(FROZEN, evidence=(), folder=""), "megascale-ops why gpt-2 --json"),
    ],
)
def test_next_command_shows_what_tells_most(incident: Incident, command: str) -> None:
    """Open incidents lead to the live view, closed ones to the culprit's evidence, then to the folder."""
    assert next_command(incident) == command


KILLED = Incident(
    id="gpt-9",
    job="gpt",
    round=1,
    state="recovered",
    folder="/runs/gpt/incidents/gpt-9",
    verdict=Verdict("killed", "kill -9", 0.95, culprits=(1,)),
    evidence=(
        EvidenceItem("stderr", ok=True, rank=1, path="/runs/gpt/incidents/gpt-9/a/rank-1.stderr.txt"),
        EvidenceItem("black_box", ok=True, rank=1, path="/runs/gpt/incidents/gpt-9/a/rank-1.box"),
        EvidenceItem("kernel", ok=True, rank=0, text="kernel log: of another", path="/x"),
        EvidenceItem("kernel", ok=True, rank=1, text="kernel log: no line\nwho: nobody knows", path="/runs/k.txt"),
    ),
)


@pytest.mark.parametrize(
    ("there", "command"),
    [
        (("/runs/k.txt", "/runs/gpt/incidents/gpt-9/a/rank-1.box"), "less /runs/k.txt"),
        (("/runs/gpt/incidents/gpt-9/a/rank-1.box",), "megascale-ops inspect /runs/gpt/incidents/gpt-9/a/rank-1.box"),
        (("/runs/gpt/incidents/gpt-9",), "ls /runs/gpt/incidents/gpt-9"),
        ((), "megascale-ops why gpt-9 --json --controller http://c:1"),
    ],
)
def test_a_command_leads_to_what_is_there(there: tuple[str, ...], command: str) -> None:
    """What is not on this machine, or is empty, is not offered; a verb names the controller that was asked."""
    assert next_command(KILLED, Reader("--controller http://c:1", there.__contains__)) == command


def test_a_warning_leads_to_the_job_that_it_is_about() -> None:
    """A straggler stops nothing, so nothing is preserved and there is no folder; when the run is over, to its card."""
    straggler = msgspec.structs.replace(KILLED, state="watching", evidence=())

    assert next_command(straggler, Reader()) == "megascale-ops status --job gpt"
    assert next_command(straggler, Reader("--job gpt", lambda _: False, is_live=False)) == (
        "megascale-ops why gpt-9 --json --job gpt"
    )


def test_a_killed_rank_s_card_says_what_the_kernel_knows() -> None:
    """First of all evidence, of the rank to blame alone; an empty stderr is said to be so, and no path leads to it."""
    evidence = next(row.lines for row in card(KILLED, UTC) if row.label == "evidence")

    assert evidence[:2] == ("kernel log: no line", "who: nobody knows")
    assert "stderr of rank 1: it wrote nothing" in evidence
    assert not any("of another" in line for line in evidence)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0 ms"), (0.38, "380 ms"), (2.41, "2.41 s"), (725.2, "12 min 5 s"), (7260, "2 h 1 min")],
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    """Each size of duration has the precision a person wants."""
    assert duration(seconds) == text


def test_clock_carries_its_offset() -> None:
    """A time can be compared with the logs of another machine."""
    assert clock(BEGAN_S, timezone(timedelta(hours=2))).endswith(" +0200")


def test_printable_keeps_letters_of_every_language() -> None:
    """Only control characters are replaced."""
    assert printable("größer\tals 時") == "größer als 時"


def test_a_job_of_twelve_thousand_ranks_shows_the_sick_ones_first() -> None:
    """Ranks that are not well are listed before the others are counted."""
    ranks = tuple(
        RankStatus("n", RankReport(rank, 0, rank, 1), judged="lost" if rank == 12_000 else "ok")
        for rank in range(12_288)
    )

    text = shown(status_view(Status(1, BEGAN_S, 0.0, (msgspec.structs.replace(JOB, ranks=ranks),))))

    assert "12000" in text
    assert "and 12,256 more ranks: --json lists them all" in text


def test_an_empty_controller_says_so() -> None:
    """No job is a sentence, not an empty table."""
    assert shown(status_view(Status(1, BEGAN_S, 0.0))) == "no job has joined this controller yet\n"


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR set not even a terminal gets colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    text = shown(incidents_view(Incidents((FROZEN,)).incidents, UTC), color=True)

    assert "\x1b[3" not in text


def test_settings_table_shows_value_and_origin() -> None:
    """Every setting stands beside where it came from."""
    from megascale_ops.cli.config.configuration import Effective

    rows = [Effective("run", "job", "gpt", "command line"), Effective("agent", "controller", None, "not set")]

    text = shown(settings_view(rows))

    assert "run.job" in text
    assert "'gpt'" in text
    assert "not set" in text


def test_free_space_that_is_not_known_is_blank_and_a_full_disk_is_not() -> None:
    """0 B is told only where it was measured."""
    full = HostReading(disk_free_bytes=0, shm_free_bytes=0)
    unknown = HostReading(has_disk=False, has_shm=False)
    job = JobStatus(
        "gpt", "running", 1, 1, 5, 0.1, 0, 0.0, nodes=(NodeStatus("a", host=full), NodeStatus("b", host=unknown))
    )

    lines = shown(status_view(Status(1, 0.0, 0.0, (job,)))).splitlines()

    assert [line.count("0 B") for line in lines if line.startswith(("a ", "b "))] == [2, 0]
