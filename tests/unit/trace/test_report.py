# SPDX-License-Identifier: Apache-2.0
"""The report as text: all that must be in it is, nothing foreign is read as markup, nothing is asked for outside."""

import base64
import json
import re
from datetime import UTC
from html import escape
from pathlib import Path

import pytest

from megascale_ops.cards import Reader
from megascale_ops.ledger import ROWS
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import History, Place
from megascale_ops.schema.identity import Mesh
from megascale_ops.trace import report as report_module
from megascale_ops.trace.report import render
from megascale_ops.trace.report_facts import Gathered, Setting, Told, reckon
from megascale_ops.trace.report_neighbours import neighbourhood
from megascale_ops.trace.report_plot import plot_of
from tests.fakes.step_histories import ORIGIN_S, history_of

EVIL = "</script><script>alert(1)</script><img src=http://example.org/x>"


def told(number: int, state: str, culprits: tuple[int, ...] = (), reason: str = "it sleeps", **marks: float) -> Told:
    """Return an incident with a card."""
    incident = Incident(
        id=f"gpt-{number}",
        job="gpt",
        round=1,
        state=state,
        marks=Marks(**{name: ORIGIN_S + at for name, at in marks.items()}),
        verdict=Verdict("sleeping", reason, 0.9, culprits=culprits, nodes=("node-0",)),
    )
    return Told(incident, (("what", ("sleeping",)), ("reason", (reason,)), ("next", ("less file",))))


def gathered(history: History | None, *incidents: Told, notes: tuple[str, ...] = ()) -> Gathered:
    """Return what a report is made of."""
    return Gathered(
        job="gpt", state="running", began_wall_s=ORIGIN_S, until_wall_s=ORIGIN_S + 44, history=history, told=incidents,
        settings=(Setting("silence_floor_s", "10", "5", is_changed=True),), notes=notes, source="a test", version="0.0",
        made_wall_s=ORIGIN_S + 50, zone=UTC,
    )  # fmt: skip


def without_plotly(page: str) -> str:
    """Return the page without plotly.js, which is not ours to judge."""
    from plotly.offline import get_plotlyjs

    assert get_plotlyjs() in page
    return page.replace(get_plotlyjs(), "")


def test_all_of_it_is_there() -> None:
    """What goes on first, cards, picture, neighbours, ledger, incidents for which nothing was done, settings."""
    history = history_of(4, 40, slow=(2,), slow_steps=range(20, 40))
    done = told(1, "harmless", (1,), "a false alarm", began=5, detected=6)
    now = told(2, "watching", (2,), "it is slow", began=24, detected=25)

    page = without_plotly(render(reckon(gathered(history, done, now, notes=("the cellar is dark",)))))

    assert page.index("Now: sleeping") < page.index("the cellar is dark") < page.index("Verdicts")
    for part in (
        *("it is slow", "a false alarm", "less file", "Rank 2", "The mesh is not known", "straggle"),
        *("silence_floor_s", "changed while it lived", "rank 3 · node-0", "typical step"),
    ):
        assert part in page
    assert page.index('id="plot"') < page.index("Where the wall time went")


def test_the_headline_leads_to_where_the_report_is_from() -> None:
    """Of a shared controller: without its address the command would ask the newest run's own."""
    reader = Reader("--controller http://ops:7070 --token-file '/etc/a token'")
    one = gathered(None, told(1, "recovered", (1,), "it sleeps", began=5, detected=6))

    page = render(reckon(one._replace(reader=reader)))

    command = "megascale-ops why gpt-1 --controller http://ops:7070 --token-file '/etc/a token'"
    assert f"<code>{escape(command)}</code>" in page


def test_the_picture_has_every_rank_and_column() -> None:
    """As packed float32, with the incidents' marks at their times."""
    history = history_of(4, 40, slow=(2,), slow_steps=range(20, 40))
    report = reckon(gathered(history, told(1, "recovered", (2,), began=10, detected=11, ordered=12, stepped=20)))

    plot = plot_of(report)

    assert plot is not None
    assert (plot["late"]["rows"], plot["late"]["columns"]) == (4, len(plot["reached"]))
    assert len(base64.b64decode(plot["late"]["f4"])) == 4 * 4 * len(plot["reached"])
    assert len(plot["edges"]) == len(plot["reached"]) + 1
    assert plot["marks"] == [
        {"from": (ORIGIN_S + 10) * 1000, "until": (ORIGIN_S + 20) * 1000, "name": "#1 sleeping", "stopped": True}
    ]
    assert json.loads(json.dumps(plot)) == plot


def test_foreign_texts_are_shown_and_never_obeyed() -> None:
    """A rank's last words, a node's name, a job's setting: whatever they hold stays text."""
    history = history_of(2, 10)
    places = tuple(Place(place.rank, EVIL) for place in history.facts.places)
    history = history._replace(facts=_with_places(history, places))

    page = without_plotly(render(reckon(gathered(history, told(1, "open", (0,), EVIL, began=5), notes=(EVIL,)))))

    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img" not in page


def test_nothing_is_asked_for_outside() -> None:
    """No address to load from in anything that we wrote, and the page forbids itself all of them."""
    page = without_plotly(render(reckon(gathered(history_of(2, 10)))))

    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", page)
    assert "default-src 'none'" in page


def test_without_a_history_there_is_a_small_page() -> None:
    """It says what is missing, and carries no plotly."""
    page = render(reckon(gathered(None, told(1, "ended", (2,), began=5, detected=6, stopped=7), notes=("no history",))))

    assert "There is no picture" in page
    assert "only what incidents tell is divided" in page
    assert len(page) < 40_000


def test_a_clean_run_says_so() -> None:
    """No incident, and no rank late."""
    assert "No incident was noticed" in render(reckon(gathered(history_of(2, 10))))


def test_missing_plotly_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, as for every extra."""
    from megascale_ops.cli.main import main

    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    monkeypatch.setattr("megascale_ops.cli.sources.report.gather", lambda *_: gathered(history_of(2, 10)))

    code = main(["report", "gpt", "-o", "/nowhere/r.html"])

    assert code == 1
    assert "needs plotly, which is not installed: pip install 'megascale-ops[report]'" in capsys.readouterr().err


def test_neighbours_are_those_of_the_same_groups() -> None:
    """2 x 2 x 2: along each axis those that differ in it alone."""
    places = [Place(rank, f"node-{rank // 4}", Mesh(tp=rank % 2, pp=rank // 4, dp=rank // 2 % 2)) for rank in range(8)]

    hood = neighbourhood(5, places)

    assert {group.name: group.ranks for group in hood.groups} == {
        "tensor group (TP)": (4, 5),
        "pipeline group (PP)": (1, 5),
        "data group (DP)": (5, 7),
        "same node": (4, 5, 6, 7),
    }


def test_expert_groups_are_cut_out_of_the_data_axis() -> None:
    """Where the expert place follows from the data place: runs of data places."""
    places = [Place(rank, "a", Mesh(tp=0, pp=0, dp=rank, ep=rank % 4)) for rank in range(8)]

    groups = {group.name: group.ranks for group in neighbourhood(5, places).groups}

    assert groups["expert group (EP)"] == (4, 5, 6, 7)
    assert groups["data group (DP)"] == tuple(range(8))


def test_of_a_large_group_the_nearest_are_drawn() -> None:
    """And the rest is counted."""
    places = [Place(rank, "a", Mesh(dp=rank)) for rank in range(1000)]

    (data, _node) = neighbourhood(500, places).groups

    assert (len(data.ranks), data.size) == (64, 1000)
    assert 500 in data.ranks
    assert neighbourhood(5000, places).groups == ()


def _with_places(history: History, places: tuple[Place, ...]):  # type: ignore[no-untyped-def]  # noqa: ANN202  the struct's own type
    from msgspec.structs import replace

    return replace(history.facts, places=places)


def test_a_clean_run_looks_clean() -> None:
    """No rank is called a suspect, and a lateness of noise is pale; one of a tenth of a step is not."""
    clean = without_plotly(render(reckon(gathered(history_of(4, 40)))))
    slow = without_plotly(render(reckon(gathered(history_of(4, 40, slow=(2,), slow_steps=range(40))))))

    assert "Neighbourhood of the slowest rank" in clean
    assert "No verdict names a rank." in clean
    assert max(map(int, re.findall(r"--heat:(\d+)", clean))) < 20
    assert max(map(int, re.findall(r"--heat:(\d+)", slow))) > 60


def test_every_row_of_the_ledger_has_a_colour() -> None:
    """Without one its bar and its chip can't be seen."""
    css = (Path(report_module.__file__).parent / "report.css").read_text(encoding="utf-8")

    assert [
        row for row in ROWS if not re.search(rf"^\.{row} {{ background|}} \.{row} {{ background", css, re.MULTILINE)
    ] == []
