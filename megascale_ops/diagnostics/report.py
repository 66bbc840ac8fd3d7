# SPDX-License-Identifier: Apache-2.0
"""What a node's self-check measured and found: what ``megascale-ops diagnose --json`` prints and ``--compare`` reads.

A number is a figure, in base units (bytes, seconds, operations; a share of one); a text is a fact. Figures of one name
and the same ``peers`` are of equal things and may be compared, on one node or on all; so may facts, which ought to be
the same. Both are empty where there is nothing to compare with. ``VERSION`` is raised when a reader of an older
report would misread it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

VERSION = 1
# 8 MiB a node: one of 64 cores and two GPUs has 74 KB. It is read from a file that another program may have written.
MOST_REPORT_BYTES = 8 << 20
_Text = Annotated[str, Meta(max_length=20_000)]
_Word = Annotated[str, Meta(max_length=4096)]

Severity = Literal["bad", "warn", "note"]
Status = Literal["good", "warn", "bad", "unmeasured"]


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One number of one thing: ``gemm_bf16`` of ``GPU 3``.

    Attributes:
        name: a row of ``diagnostics/figures.py``, which has its unit.
        of: the thing: ``GPU 3``, ``CPU 12``, ``/tmp``, ``node``.
        value: in base units; of several repetitions their median, or the best where the row says so.
        samples: the repetitions.
        peers: what its equals are; "" where it has none.
    """

    name: _Word
    of: _Word
    value: float
    samples: tuple[float, ...] = ()
    peers: _Word = ""


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """One text about one thing: the VBIOS of ``GPU 3``."""

    name: _Word
    of: _Word
    value: _Text
    peers: _Word = ""


class CheckFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a check has found, one sentence with its numbers, and what to do about it ("": nothing).

    ``bad``: to be kept out of a job. ``warn``: costs something, or may. ``note``: is not wrong.
    """

    severity: Severity
    of: _Word
    text: _Text
    next: _Text = ""


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One check: the worst of its findings, what it measured, and what it could not measure here and why."""

    check: _Word
    status: Status
    seconds: float
    findings: tuple[CheckFinding, ...] = ()
    figures: tuple[Figure, ...] = ()
    facts: tuple[Fact, ...] = ()
    unmeasured: tuple[_Text, ...] = ()


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """All checks of one node."""

    version: int
    program: _Word
    node: _Word
    depth: Literal["quick", "full"]
    began_wall_s: float
    seconds: float
    results: tuple[CheckResult, ...]


class FleetReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What reports of several nodes say together: who differs from the others."""

    version: int
    nodes: tuple[_Word, ...]
    findings: tuple[CheckFinding, ...]
    figures: int  # how many were compared, of how many kinds
    kinds: int
    incomparable: tuple[_Text, ...] = ()


class PairsReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What pairs of nodes have measured of each other: bad nodes, links, switches, and what can't be told, with why.

    Attributes:
        failed: Pairs that could not be measured, and why.
        tests: How many pairs, over all rounds.
    """

    version: int
    nodes: tuple[_Word, ...]
    bad_nodes: tuple[_Word, ...]
    bad_links: tuple[tuple[_Word, _Word], ...]
    bad_switches: tuple[_Word, ...]
    unclear: dict[str, _Text]
    failed: dict[str, _Text]
    rounds: int
    tests: int
    seconds: float
    figures: tuple[Figure, ...] = ()
