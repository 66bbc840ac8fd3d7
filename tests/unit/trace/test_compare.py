# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: the report's own figures, what changed, and what is not known."""

from datetime import UTC

from megascale_ops.ledger import US
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import History
from megascale_ops.trace.compare import Figure, Side, figures, losses, verdicts
from megascale_ops.trace.report_facts import Gathered, Report, Told, reckon
from tests.fakes.step_histories import ORIGIN_S, history_of


def told(number: int, fault: str, *culprits: int, ordered: float = 0.0) -> Told:
    """Return an incident."""
    marks = Marks(began=ORIGIN_S + 5, detected=ORIGIN_S + 6, ordered=ordered)
    verdict = Verdict(fault, "for a test", 0.9, culprits=culprits)
    return Told(Incident(f"gpt-{number}", "gpt", 1, "recovered", marks, verdict), ())


def report(history: History | None, *incidents: Told, wall_s: float = 44.0) -> Report:
    """Return a run's report."""
    return reckon(
        Gathered(
            "gpt", "finished", ORIGIN_S, ORIGIN_S + wall_s, history, incidents, (), (), "a test", "0", ORIGIN_S, UTC
        )
    )


def by_name(one: Report, other: Report) -> dict[str, Figure]:
    """Return the figures of two runs by name."""
    return {figure.name: figure for figure in figures(Side(one, "one"), Side(other, "other"))}


def test_the_figures_are_the_report_s_own() -> None:
    """Nothing is counted a second time: typical step, training share, wall time, furthest step."""
    one = report(history_of(4, 40))
    other = report(history_of(4, 40, slow=(2,), slow_steps=range(40)), wall_s=88.0)

    found = by_name(one, other)

    assert found["typical step"].values == (one.step_s, other.step_s)
    assert other.step_s > one.step_s
    assert found["typical step"].change.startswith("+")
    assert found["training (goodput)"].values == (one.ledger.share("train"), other.ledger.share("train"))
    assert found["training (goodput)"].change.endswith(" points")
    assert found["wall time"].values == (44.0, 88.0)
    assert found["wall time"].change == "+100.0%"
    assert found["ranks"].shown == ("4", "4")
    assert found["ranks"].change == ""


def test_what_is_not_known_is_said_and_not_compared() -> None:
    """A run without a history of steps has wall time and incidents, and no step time."""
    found = by_name(report(None), report(history_of(4, 40)))

    assert found["typical step"].shown[0] == "not known"
    assert found["typical step"].change == ""
    assert found["training (goodput)"].values[0] is None
    assert found["longest step"].values[0] is None


def test_verdicts_are_counted_by_class_and_rank() -> None:
    """The same fault of the same rank counts together, the most frequent first; stops are those that were ordered."""
    one = report(None, told(1, "killed", 3, ordered=ORIGIN_S + 7), told(2, "killed", 3), told(3, "straggler", 1))

    found = by_name(one, report(None))

    assert verdicts(one) == [("killed (rank 3)", 2), ("straggler (rank 1)", 1)]
    assert found["stops"].values == (1.0, 0.0)
    assert (found["incidents"].values, found["incidents"].change) == ((3.0, 0.0), "-3")


def test_lost_time_is_told_row_by_row() -> None:
    """Every row of the ledger that cost one of the two something, in seconds that add up with training."""
    one, other = report(history_of(4, 40)), report(None)

    rows = {row: (before_s, after_s) for row, before_s, after_s in losses(one, other)}

    assert "train" not in rows
    assert all(before_s or after_s for before_s, after_s in rows.values())
    assert round(sum(after_s for _, after_s in rows.values()) + other.ledger.rows["train"] / US, 6) == 44.0
