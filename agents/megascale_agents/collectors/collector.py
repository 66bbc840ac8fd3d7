# SPDX-License-Identifier: Apache-2.0
"""What a collector of the table (``table.py``) is: a file of functions, asked in a thread of its own.

    PACE                 how often, how long at most and for which share of a core it may look, with the reason
    METRICS              metrics that no other program or dashboard of ours knows; those stand in ``schema/metrics.py``
    read(place)          look; may raise anything, FileNotFoundError or NotHereError where there is nothing to look at
    parse(raw, before)   what was read as a value; ``before`` is the value of the look before, None at first
    judge(value, passed_s)  what is wrong, by a value and the time since the look before
    samples(value)       for a scrape: name, the labels' values after the node's, number

``METRICS`` and ``judge`` may be left out. A look that is late, fails or finds nothing is reported by the caller
(``hardware/checks.py``): as a finding, as the check's status, as counted time-outs and errors.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from megascale_agents.ownership.rights import Owner

# A metric's name, its labels' values after that of the node, and a number.
Sample = tuple[str, tuple[str, ...], float]


class NotHereError(Exception):
    """What this check looks at does not exist on this node; looked for again now and then."""


class Pace(NamedTuple):
    """How often, how long at most, and for which share of a core at most."""

    every_s: float
    deadline_s: float
    share: float = 0.002


class Place(NamedTuple):
    """Where to look. A job runs in ``run_dir`` ("": none runs), and what its ``owner`` may not see is not looked at."""

    proc_root: str = "/proc"
    sys_root: str = "/sys"
    box_root: str = ""
    run_dir: str = ""
    owner: Owner | None = None  # None: the agent's user


@runtime_checkable
class Collector(Protocol):
    """The functions that every file of the table has."""

    PACE: Pace

    def read(self, place: Place) -> Any:  # noqa: ANN401  only the collector itself parses what it reads
        """Look; called in a thread of its own."""

    def parse(self, raw: Any, before: Any) -> Any:  # noqa: ANN401  likewise
        """Return what was read as a value."""

    def samples(self, value: Any) -> Iterable[Sample]:  # noqa: ANN401  likewise
        """Return a value as numbers for a scrape."""
