# SPDX-License-Identifier: Apache-2.0
"""What is found and what is judged: findings are facts with a number, a verdict is what they add up to.

And a node's self-check: what is asked for, and what of its report others want to know. The report itself stays with who
made it: one of 64 cores has 74 KB. Its findings, the figures as medians and ranges, and what could not be measured are
a few hundred bytes a line.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Bytes, Count, Line, Pids, Seconds, Share, Text, WallSeconds, Word

# As many lines as a card shows, a message has room for and a page can draw.
MOST_FINDINGS, MOST_FIGURES, MOST_UNMEASURED, MOST_GPUS = 32, 64, 32, 64
# Half a minute and ten minutes are what the checks are meant to take; one that hangs takes its own deadline more.
DEADLINES_S = {"quick": 120.0, "full": 900.0}
STATUSES = ("good", "warn", "bad", "unmeasured")

Status = Literal["good", "warn", "bad", "unmeasured"]
Depth = Literal["quick", "full"]


class HostReading(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One look at a node's host (fractions of one; bytes)."""

    cpu_busy: Share = 0.0
    load_1m: Share = 0.0
    memory_used: Share = 0.0
    memory_available_bytes: Bytes = 0
    swap_used: Share = 0.0
    shm_free_bytes: Bytes = 0
    disk_free_bytes: Bytes = 0
    cores: Count = 0
    has_shm: bool = True  # the folder of the black boxes could be queried for its space
    has_disk: bool = True  # the same of a run folder; without a job there is none


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact for or against a verdict; ``text`` is a sentence with the number in it."""

    name: str
    text: str
    source: str  # black box, progress board, process, stderr, exit status, heartbeat, stacks, ...
    rank: int = -1
    node: str = ""
    value: float = 0.0
    unit: str = ""


class HardwareFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a node's hardware or host now, as its agent sees it.

    ``name`` is a word for programs (xid_79, gpu_lost, throttled_hw_thermal, port_down_mlx5_0_1, oom_kill, ...; where
    the kernel named a device, with that behind it: nvme_lost_nvme4),
    ``text`` a sentence with its number. Ends with its reason; what happened once stays for ten minutes.
    """

    name: Word
    text: Text
    check: Word  # of the check: gpu, kernel_log, fabric, a collector of the agent's table; or the check that hangs
    severity: Word = "warn"  # note (evidence, no worry), warn, fail
    gpu: Word = ""  # UUID
    since_wall_s: WallSeconds = 0.0
    last_wall_s: WallSeconds = 0.0  # of something that happens: when it last did
    count: Count = 1
    is_bad: bool = False  # the GPU is in doubt also after a restart: to be remembered
    pids: Pids = ()  # processes that it is about


class BadHardware(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU that failed, remembered by its UUID until an operator marks it as mended or replaced."""

    uuid: str
    reason: str  # name of the finding
    node: str  # where it was when it last failed
    text: str
    since_wall_s: float
    last_wall_s: float
    count: int = 1  # how often, at least a minute apart


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ranks or nodes to blame, for what, how sure we are and why.

    ``confidence`` is in 0..1; where ``sure_of`` is "place" it is of which rank stands still and where, and not that it
    hangs: a silence that contradicts nothing may end by itself. ``otherwise`` is what would have changed the verdict.
    ``cause`` narrows a straggler down (compute, input, host, starved, gc, launch, gpu, throttled) or a slow link (link,
    network); ``excess`` is a slow rank's own work above its equals', as a share of theirs, and ``cost`` the share of
    every step that it costs all ranks, in 0..1.
    """

    fault: str
    reason: str
    confidence: float
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    since_wall_s: float = 0.0
    since_step: int = -1
    round: int = 0
    action: str = "none"  # none, ignore, warn, wait, restart, evict (restart without the nodes), stop
    evidence: tuple[Finding, ...] = ()
    otherwise: str = ""
    cause: str = ""
    cost: float = 0.0
    place: str = ""  # of a silence: the script's line and the collective, the same words the next time it happens
    sure_of: str = ""  # "place", or "" for all its fields
    excess: float = 0.0


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
