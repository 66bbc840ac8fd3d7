# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops skew``: what people read of who waits for whom."""

from pathlib import Path

import pytest
from rich.console import Console

from megascale_ops.cli.main import main
from megascale_ops.cli.skew import MOST_ROWS, skew_view
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.collectives import SkewLink, SkewRank, SkewView
from tests.fakes.boxes import box


def shown(view: SkewView) -> str:
    """Return what a terminal of 120 columns shows."""
    console = Console(width=120, markup=False, color_system=None)
    with console.capture() as capture:
        console.print(skew_view(view))
    return capture.get()


def test_the_culprit_its_cost_and_the_silent_areshown() -> None:
    """Forty ranks: the first 32 rows, the rest counted; a slow link and silent ranks in a sentence each."""
    ranks = tuple(SkewRank(rank, f"node-{rank // 8}", 0.05, 0.0, 1e-4, 2e-3, 0.1) for rank in range(1, 40))
    culprit = SkewRank(12, "node-1", 0.001, 0.05, 4e-3, 9e-3, 0.9, 0.031, "gpu")
    link = SkewLink((3, 4), ("pp-3",), 4.0, 0.02, "the link between ranks 3-4 is \x1b[31mslow")

    text = shown(SkewView("job", "watching", 60.0, 1000, 3, 0.01, "calm", (culprit, *ranks), (link,), (40, 41, 42)))

    assert "slow (gpu)" in text
    assert "3.1 %" in text
    assert "4.00 ms" in text
    assert f"and {40 - MOST_ROWS} more ranks" in text
    assert "the link between ranks 3-4" in text
    assert "\x1b[31m" not in text
    assert "ranks 40-42 told no collective" in text


def test_an_engine_that_is_off_says_why() -> None:
    """One line, no table."""
    assert shown(SkewView("job", "off: NumPy is not installed here")) == "job job · off: NumPy is not installed here\n"


def test_a_run_that_is_over_leads_to_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the replay where an incident kept black boxes, else to the report: never to a verb that finds nothing."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    store = open_store(f"sqlite:///{tmp_path / 'journal.db'}")
    store.submit(Batch(job="toy", record=b"{}"))
    store.close()
    line = ["--run-dir", str(tmp_path)]

    codes = [main(["skew", *line])]
    nothing = capsys.readouterr().err
    for rank in range(3):
        box(tmp_path / "incidents" / "toy-1" / "vm", rank, 3)
    codes += [main(["skew", *line]), main(["whatif", *line])]
    kept = capsys.readouterr()

    assert codes == [1, 1, 0]
    assert f"`megascale-ops report {' '.join(line)}` shows who was slow" in nothing
    assert f"`megascale-ops whatif {' '.join(line)}` replays what" in kept.err
    assert "job toy: 3 ranks" in kept.out


def test_who_is_late_only_below_python_is_not_called_ok() -> None:
    """Where collectives can't be seen a rank that is not named may still be slow; that is said."""
    rows = (SkewRank(0, "n0"), SkewRank(1, "n0", cost=0.1, verdict="compute"))
    told = "49% of the collectives are started below Python"

    blind = shown(SkewView("toy", "watching", ranks=rows, unseen=told))
    waiting = shown(SkewView("toy", "waiting: no collectives have been told yet", unseen=told))
    seen = shown(SkewView("toy", "watching", ranks=rows))

    assert "not known" in blind
    assert "slow (compute)" in blind
    assert " ok" not in blind
    assert told in blind
    assert told in waiting
    assert " ok" in seen
    assert "not known" not in seen
