# SPDX-License-Identifier: Apache-2.0
"""The screen of ``top``: what a person sees at 3 in the morning, on a small terminal, of 12,288 ranks.

After a wanted change: ``MEGASCALE_UPDATE_GOLDEN=1 pytest tests/unit/cli/test_top_screen.py`` and read the diff.
"""

import io
import os
import re
from datetime import UTC
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from megascale_ops.cli.top import heat as top_heat
from megascale_ops.cli.top import rank_map, verdict
from megascale_ops.cli.top import ranks as top_ranks
from megascale_ops.cli.top.verdict import Look
from megascale_ops.cli.top.view import screen
from megascale_ops.schema import live
from megascale_ops.schema.live import JUDGED, UNKNOWN, Columns, Frame, Headline, Layout, Slot, Times, packed
from tests.fakes.live_frames import INCIDENTS, frame

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
LOOK = Look(100, 30, 0.4, zone=UTC, has_keys=True)


def text_of(lines: list[Text]) -> str:
    """Return lines without their colours."""
    return "\n".join(line.plain.rstrip() for line in lines) + "\n"


def compare(name: str, found: str) -> None:
    """Compare with a golden file."""
    path = GOLDEN / name
    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def test_one_screen() -> None:
    """The verdict first, then progress, ranks, incidents; other jobs at the bottom."""
    compare("top.txt", text_of(screen(frame(16, {9: "lost", 3: "slow"}), LOOK)))


def test_a_small_terminal_has_the_verdict_and_the_other_jobs() -> None:
    """Whatever else has no room."""
    compare("top_small.txt", text_of(screen(frame(64, {9: "lost"}), LOOK._replace(width=60, height=16))))


def test_a_pipe_gets_as_many_lines_as_it_takes() -> None:
    """Verbs are named, not keys that can't be pressed."""
    text = text_of(screen(frame(64, dict.fromkeys(range(20), "slow")), Look(120, zone=UTC)))

    assert "13 more are not well: `megascale-ops status`" in text
    assert "gpt-1" in text


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 200), st.integers(4, 70), st.sampled_from([1, 2, 8, 100, 1000]), st.booleans())
def test_a_screen_is_never_larger_than_the_terminal(width: int, height: int, ranks: int, away: bool) -> None:
    """Exactly as many rows, at most as many columns: nothing scrolls."""
    look = Look(width, height, 9.0 if away else 0.0, "no controller answers" if away else "", UTC, has_keys=True)

    lines = screen(frame(ranks, {0: "lost"}), look)

    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width


def test_a_controller_that_is_away_is_said_and_nothing_old_looks_new() -> None:
    """Above, in the verdict, and below; what was seen last stays."""
    calm = Headline("calm", "All 16 ranks make progress.")
    look = LOOK._replace(heard_s=12.0, away="no controller answers at http://127.0.0.1:7070")

    lines = text_of(screen(frame(headline=calm), look)).splitlines()

    assert lines[0].endswith("controller not heard since 14:13:20 (12 s)")
    assert lines[1].startswith(" OK 12 s AGO  All 16 ranks")
    assert lines[-2] == "trying again: no controller answers at http://127.0.0.1:7070"
    assert "last 50 s ago" in "".join(lines)


def test_a_controller_that_ended_with_its_job_is_no_alarm() -> None:
    """What is shown of a job that is over stays true: nothing is old, nothing is tried again, nothing is red."""
    made = frame(4, headline=Headline("over", "The job was stopped by hand at step 9."))
    assert made.pace is not None
    over = msgspec.structs.replace(made, pace=msgspec.structs.replace(made.pace, state="stopped"))

    lines = screen(over, LOOK._replace(heard_s=70.0, away="no controller at http://x"))

    text = text_of(lines)
    assert "the job is over, and so is its controller" in lines[0].plain
    assert "trying again" not in text
    assert "not heard" not in text
    assert "OVER  The job was stopped by hand" in text
    assert " · stopped · round" in lines[0].plain


def test_texts_of_ranks_never_reach_the_terminal_as_they_are() -> None:
    """Neither markup nor escape sequences: from names, reasons, sentences and phases."""
    evil = "\x1b[2J[red]\x07evil"
    headline = Headline("act", evil, evil, places=(), done=evil, command=evil)
    shown = frame(headline=headline, jobs=(evil, evil + "2"))
    assert shown.columns is not None
    columns = msgspec.structs.replace(shown.columns, phases=(evil,), phase=packed("phase", [0] * 16))
    layout = Layout((evil, "b"), packed("node", [0] * 8 + [1] * 8))
    out = io.StringIO()
    console = Console(file=out, width=100, markup=False, highlight=False, color_system=None)

    for line in screen(msgspec.structs.replace(shown, columns=columns, layout=layout), LOOK):
        console.print(line)

    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "[red]" in out.getvalue()


@pytest.mark.parametrize(
    ("sure_of", "words"), [("place", "95 % sure where, not that it hangs"), ("", "95 % sure\n")], ids=["place", "all"]
)
def test_nobody_reads_certainty_of_a_place_as_certainty_of_a_hang(sure_of: str, words: str) -> None:
    """A silence that contradicts nothing may end by itself; a stopped process does not."""
    headline = Headline("act", "Rank 1 sleeps.", "it sleeps in a system call", confidence=0.95, sure_of=sure_of)

    assert words in text_of(screen(frame(headline=headline), LOOK))


def test_a_terminal_of_ascii_gets_ascii() -> None:
    """One that can't show a dot gets a full stop."""
    text = text_of(screen(frame(64, {9: "lost"}), LOOK._replace(ascii_only=True)))

    assert text.isascii()
    assert "........" in text


def test_every_level_of_a_headline_has_a_word() -> None:
    """Those that a controller can send, and no other."""
    assert set(verdict.LEVELS) == set(live.LEVELS)


def test_before_any_job_has_joined_there_is_a_sentence() -> None:
    """And no empty tables."""
    empty = Frame(
        1, 1, 1_790_000_000.0, headline=Headline("waiting", "No job has joined this controller yet."), jobs=()
    )

    lines = [line for line in text_of(screen(empty, LOOK)).splitlines() if line]

    assert len(lines) == 2
    assert lines[1] == " WAIT  No job has joined this controller yet."


def cluster(ranks: int, bad: dict[int, str] | None = None, per_node: int = 8) -> rank_map.Cluster:
    """Return a cluster."""
    judged = [JUDGED.index((bad or {}).get(rank, "ok")) for rank in range(ranks)]
    return rank_map.Cluster(
        judged, [rank // per_node for rank in range(ranks)], [f"n{at}" for at in range(ranks // per_node)]
    )


def test_with_room_each_node_has_its_name() -> None:
    """Two nodes on a line of 30 columns."""
    drawn = rank_map.draw(cluster(24, {9: "lost", 15: "suspect"}), 30, 4)

    assert [line.plain.rstrip() for line in drawn.lines] == ["n0 ········   n1 ·X·····?", "n2 ········"]
    assert drawn.fold == 1


def test_with_less_room_nodes_stand_side_by_side() -> None:
    """The first rank of a line is told."""
    drawn = rank_map.draw(cluster(24, {9: "lost"}), 21, 2)

    assert [line.plain.rstrip() for line in drawn.lines] == [" 0 ········ ·X······", "16 ········"]


def test_a_rank_that_starts_hides_none_that_is_not_well() -> None:
    """Where one sign stands for many ranks a slow one is shown before those that start, and these before those well."""
    judged = [JUDGED.index("starting" if rank < 4_000 else "ok") for rank in range(8_192)]
    judged[7] = JUDGED.index("slow")
    cluster = rank_map.Cluster(judged, [rank // 8 for rank in range(8_192)], [])

    drawn = rank_map.draw(cluster, 80, 4)

    signs = "".join(line.plain.split(" ", 1)[-1].strip() for line in drawn.lines)
    assert drawn.fold > 1
    assert signs[-1] == rank_map.SIGNS[0]
    assert set(signs) >= {"~", "o"}
    assert "starting 4,000" not in rank_map.legend(cluster, drawn.fold).plain
    assert "starting 3,999" in rank_map.legend(cluster, drawn.fold).plain


def test_a_start_is_said_in_the_title_and_no_rank_is_called_unwell_for_it() -> None:
    """Of a round whose ranks have not stepped the first line says how many have, and how long the last start took."""
    made = frame(4, dict.fromkeys(range(3), "starting"))
    assert made.pace is not None
    pace = msgspec.structs.replace(made.pace, stepped=1, start_s=12.4, start_age_s=3.0, world_size=4)

    lines = screen(msgspec.structs.replace(made, pace=pace), LOOK)

    assert "starting 1/4, about 12 s in all" in lines[0].plain
    assert top_ranks.unwell(made) == 0


def test_one_bad_rank_of_12288_is_still_seen() -> None:
    """Folded by whole nodes; each sign shows the worst of its ranks."""
    drawn = rank_map.draw(cluster(12_288, {5003: "lost", 5002: "slow"}), 120, 8)
    text = "".join(line.plain for line in drawn.lines)

    assert len(drawn.lines) <= 8
    assert drawn.fold % 8 == 0
    assert text.count("X") == 1
    assert text.count("~") == 0
    label = len("12,288 ")
    signs = "".join(line.plain[label:] for line in drawn.lines)
    assert signs.index("X") == 5003 // drawn.fold


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 600), st.integers(1, 9), st.integers(12, 200), st.integers(1, 20), st.integers(0, 599))
def test_a_map_fits_and_loses_nobody(ranks: int, per_node: int, width: int, most: int, bad: int) -> None:
    """Whatever the terminal: every rank has a place, and a lost one is seen."""
    drawn = rank_map.draw(cluster(ranks, {bad % ranks: "lost"}, per_node), width, most)
    text = "".join(line.plain for line in drawn.lines)

    assert len(drawn.lines) <= most
    assert max(line.cell_len for line in drawn.lines) <= width + 3
    assert text.count("X") == 1


def test_nodes_that_nobody_knows_are_drawn_without_names() -> None:
    """As in the first second of a round."""
    drawn = rank_map.draw(rank_map.Cluster([5] * 16, [UNKNOWN] * 16, ()), 60, 4)

    assert drawn.lines[0].plain.startswith(" 0 ")
    assert "unheard 16" in rank_map.legend(rank_map.Cluster([5] * 16, [], ()), 1).plain


def test_whoever_is_judged_stands_before_whoever_is_slow() -> None:
    """Then steps behind, then silence, then own work; equal ranks in the order of their numbers."""
    shown = frame(8)
    assert shown.columns is not None
    columns = msgspec.structs.replace(
        shown.columns,
        judged=packed("judged", [0, 0, 0, 0, 3, 1, 0, 5]),
        behind=packed("behind", [0, 0, 2, 0, 0, 0, UNKNOWN, UNKNOWN]),
        quiet=packed("quiet", [1, 0, 2, 40, 0, 0, UNKNOWN, UNKNOWN]),
        own=packed("own", [100, 150, 100, 101, 100, 100, 0, 0]),
    )

    rows = top_ranks.standing_out(msgspec.structs.replace(shown, columns=columns), 8)

    assert [one.rank for one in rows] == [4, 5, 2, 3, 1, 0, 6, 7]
    assert (rows[6].behind, rows[6].silent_s, rows[6].own) == (-1, -1, -1)


def test_columns_that_are_not_there_are_not_known() -> None:
    """A controller tells of each rank only what it knows."""
    bare = msgspec.structs.replace(frame(3), columns=Columns(judged=packed("judged", [0, 3, 0])), layout=None)

    rows = top_ranks.standing_out(bare, 2)

    assert [one.rank for one in rows] == [1, 0]
    assert rows[0].node == rows[0].phase == ""
    assert len(screen(bare, LOOK)) == 30


@pytest.mark.parametrize("unwell", [0, 1, 3, 4, 5, 10, 200])
def test_on_80_by_24_no_rank_that_is_not_well_is_left_out_in_silence(unwell: int) -> None:
    """A few of them stand there, before any that is well; the rest is counted, and the key that shows them is said."""
    shown = frame(256, dict.fromkeys(range(7, 7 + unwell), "slow"))

    lines = text_of(screen(shown, LOOK._replace(width=80, height=23))).splitlines()

    rows = [line for line in lines if "  backward    " in line]
    named = [line for line in rows if "slow" in line]
    (told,) = [line for line in lines if "more are not well: r lists them" in line] or ["0"]
    assert len(named) + int(told.split()[0]) == unwell
    assert len(named) >= min(unwell, 3)
    assert rows[: len(named)] == named
    assert len(lines) == 23


def test_of_a_job_that_is_over_no_rank_is_called_unwell_for_being_gone() -> None:
    """All of its processes have ended, as they had to."""
    over = frame(64, dict.fromkeys(range(64), "gone"))
    assert over.pace is not None
    ended = msgspec.structs.replace(over, pace=msgspec.structs.replace(over.pace, state="finished"))

    assert "not well" in text_of(screen(over, LOOK))
    assert "not well" not in text_of(screen(ended, LOOK))


def test_incidents_without_room_are_counted() -> None:
    """And where they are is said."""
    many = tuple(msgspec.structs.replace(INCIDENTS[1], id=f"gpt-{at}") for at in range(40))

    text = text_of(screen(frame(incidents=many), LOOK))

    assert re.search(r"\nincidents, [1-6] of 40: i shows all\n  Sep 20", text)


def test_a_screen_of_12288_ranks_fits_and_shows_the_one_that_is_lost() -> None:
    """However many ranks there are, no line is longer than the terminal is wide and none falls below its end."""
    shown = frame(12_288, {5003: "lost"})

    lines = screen(shown, LOOK)

    assert len(lines) <= LOOK.height
    assert max(line.cell_len for line in lines) <= LOOK.width
    assert any("5003" in line.plain for line in lines)


def heat(ranks: int, slow: int, *, row_ranks: int = 1, most: int = 8, ascii_only: bool = False) -> top_heat.Heat:
    """Draw three stretches of time: nothing known, all alike, and one rank at twice the others' work."""
    rows = -(-ranks // row_ranks)
    late = bytes(255 if row == slow // row_ranks else 100 for row in range(rows))
    slots = tuple(
        Slot(10.0 * at, 10.0, median_s=1.0, cells=cells) for at, cells in enumerate((b"", bytes([105]) * rows, late))
    )
    return top_heat.draw(Times(row_ranks, rows, slots), slots, 8, most, ascii_only=ascii_only)


def test_each_rank_has_a_line_of_its_own_work_over_time() -> None:
    """While there is room; unknown values are blank, and how slow a rank is shows without colours."""
    drawn = heat(4, 2)

    assert [line.plain for line in drawn.lines] == ["      0  ··", "      1  ··", "      2  ·█", "      3  ··"]
    assert drawn.fold == 1
    assert [line.plain[-2:] for line in heat(4, 2, ascii_only=True).lines] == ["..", "..", ".@", ".."]


def test_the_slowest_of_12288_ranks_is_seen_in_a_line_of_many() -> None:
    """Eight lines of 1,536 ranks, each the worst of its own; the first rank of a line is told."""
    drawn = heat(12_288, 5003, row_ranks=48)

    assert (len(drawn.lines), drawn.fold) == (8, 1536)
    assert [line.plain[-1] for line in drawn.lines] == ["·", "·", "·", "█", "·", "·", "·", "·"]
    assert drawn.lines[3].plain.startswith("  4,608 ")


@pytest.mark.parametrize(("share", "sign"), [(0, " "), (1, "·"), (105, "·"), (106, "░"), (125, "░"), (126, "▒"),
                                             (160, "▒"), (161, "▓"), (200, "▓"), (201, "█"), (255, "█")])  # fmt: skip
def test_a_sign_begins_where_the_page_changes_its_colour(share: int, sign: str) -> None:
    """Calm up to 105, marked from 125 on, hottest above 200."""
    slots = (Slot(0.0, 1.0, median_s=1.0, cells=bytes([share, 100])),)

    (first, _) = top_heat.draw(Times(1, 2, slots), slots, 2, 2).lines

    assert first.plain == f"0 {sign}"


def test_whoever_has_no_equals_or_no_room_has_no_heat_map() -> None:
    """One rank is as slow as itself; a job of which no work is known, and a window of one free line, have none."""
    assert heat(1, 0).lines == []
    assert heat(4, 2, most=1).lines == []
    assert heat(4, 2, most=-3).lines == []
    slots = (Slot(0.0, 1.0, median_s=1.0), Slot(1.0, 1.0, median_s=1.0))
    assert top_heat.draw(Times(1, 4, slots), slots, 8, 8).lines == []


def test_a_slow_rank_shows_on_80_columns_with_and_without_colours() -> None:
    """Below the step times, column by column; a terminal without colours reads the same signs."""
    shown, out = frame(64, {9: "slow"}), {}
    for colours in (None, "standard"):
        stream = io.StringIO()
        console = Console(file=stream, width=80, force_terminal=True, color_system=colours, markup=False)
        for line in screen(shown, LOOK._replace(width=80, height=40)):
            console.print(line, no_wrap=True)
        out[colours] = stream.getvalue()

    plain = [line.rstrip() for line in out[None].splitlines()]
    strip = next(line for line in plain if line.startswith("step time"))
    row = next(line for line in plain if line.endswith("█"))
    assert strip.index("█") == row.index("░") == 30
    assert "\x1b[31m▓" in out["standard"]
    assert "\x1b[3" not in out[None]
    assert max(len(line) for line in plain) <= 80
    assert next(line for line in plain if line.startswith("own work to")).endswith("a line: worst of 10")
