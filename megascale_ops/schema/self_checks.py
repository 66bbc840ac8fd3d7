# SPDX-License-Identifier: Apache-2.0
"""What travels of a node's self-check: what is asked for, and what of the report a person and a program want to know.

The report itself stays with who made it: one of 64 cores has 74 KB. Its findings, the figures as medians and ranges,
and what could not be measured are a few hundred bytes a line.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Count, Line, Seconds, Text, WallSeconds, Word

# As many lines as a card shows, a message has room for and a page can draw.
MOST_FINDINGS, MOST_FIGURES, MOST_UNMEASURED, MOST_GPUS = 32, 64, 32, 64
# Half a minute and ten minutes are what the checks are meant to take; one that hangs takes its own deadline more.
DEADLINES_S = {"quick": 120.0, "full": 900.0}
STATUSES = ("good", "warn", "bad", "unmeasured")

Status = Literal["good", "warn", "bad", "unmeasured"]
Depth = Literal["quick", "full"]


class CheckAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/nodes/NODE/check``, and what an agent is told: which checks; none named: all of them.

    ``preempt``: also where a job trains on the node: its steps are slower meanwhile, and figures are of a shared node.
    """

    depth: Depth = "quick"
    checks: Annotated[tuple[Word, ...], Meta(max_length=32)] = ()
    preempt: bool = False


class CheckedFigure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of figure over its equals, in base units (bytes, seconds, operations): the median and the range."""

    name: Word  # of a row of diagnostics/figures.py
    of: Line  # "GPU 3", or how many: "8 of them"
    value: float
    least: float
    most: float
    text: Text = ""  # the same as people read it


class CheckedFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one check has found; see ``diagnostics/report.py``."""

    severity: Literal["bad", "warn", "note"]
    of: Line
    text: Text
    next: Text = ""
    check: Word = ""


class SelfCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a self-check of a node has shown, the worst first.

    Attributes:
        status: The worst of its findings; bad also where it was killed at its deadline; unmeasured: there is none.
        made: How many checks were made.
        gpus: UUID by label (``GPU 3``), so that a finding is told of a GPU that is known otherwise.
        trouble: Why there is no report, where there is none.
    """

    node: Word
    depth: Depth
    status: Status
    began_wall_s: WallSeconds = 0.0
    seconds: Seconds = 0.0
    made: Count = 0
    findings: Annotated[tuple[CheckedFinding, ...], Meta(max_length=MOST_FINDINGS)] = ()
    figures: Annotated[tuple[CheckedFigure, ...], Meta(max_length=MOST_FIGURES)] = ()
    unmeasured: Annotated[tuple[Text, ...], Meta(max_length=MOST_UNMEASURED)] = ()
    gpus: Annotated[dict[Word, Word], Meta(max_length=MOST_GPUS)] = {}
    trouble: Text = ""

    @property
    def worst(self) -> str:
        """Return its worst finding, a sentence; "" where nothing is wrong."""
        if self.trouble:
            return self.trouble
        return next((one.text for one in self.findings if one.severity != "note"), "")


class SelfCheckView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``POST`` and ``GET /v1/nodes/NODE/check``: the newest one of a node.

    ``state``: waiting (asked for and not answered), done, none (there has been none since this controller began).
    """

    node: str
    state: str
    id: str = ""
    asked_wall_s: float = 0.0
    reason: str = ""  # why it was asked for
    check: SelfCheck | None = None
