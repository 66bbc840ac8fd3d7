# SPDX-License-Identifier: Apache-2.0
"""What a coded job did without: counted by worker, told when it lasts, and kept as a file beside the run.

A step that closes without its slowest worker is no news: of equals one is always the last. So a worker is told when it
was late for most of the last steps, and again when it is back.
"""

from collections import deque
from pathlib import Path

import msgspec

from megascale_ops.coded.master import Gathered
from megascale_ops.whole_file import write_whole

# Ten steps: by chance alone a worker is late for eight of ten when it is late for every second, which is no equal.
_WINDOW, _MOST, _FEWEST = 10, 8, 2
FILE = "coded.json"


class WorkerTally(msgspec.Struct):
    """One worker: steps that closed without its answer, and answers to steps that had closed."""

    late: int = 0
    came_late: int = 0
    behind_s: float = 0.0  # the longest
    is_slow: bool = False


class Record(msgspec.Struct):
    """A whole job, as ``coded.json`` has it."""

    kind: str
    workers: int
    stragglers: int
    load: int
    steps: int
    approximate_steps: int
    took_s: float
    by_worker: dict[int, WorkerTally]


class Tally:
    """Counts over the steps of one job.

    Args:
        kind: of the code.
        workers: n.
        stragglers: s.
        load: partitions that each worker computes.
    """

    def __init__(self, kind: str, workers: int, stragglers: int, load: int) -> None:
        self.record = Record(kind, workers, stragglers, load, 0, 0, 0.0, {one: WorkerTally() for one in range(workers)})
        self._recent: deque[frozenset[int]] = deque(maxlen=_WINDOW)

    def note(self, step: int, gathered: Gathered) -> list[str]:
        """Count a step, and return what is worth a line."""
        record = self.record
        record.steps += 1
        record.took_s += gathered.took_s
        self._recent.append(frozenset(gathered.late))
        told = []
        if not gathered.combined.is_exact:
            record.approximate_steps += 1
            combined = gathered.combined
            absent = ", ".join(map(str, combined.without))
            told.append(f"coded: step {step} is approximate, off by {combined.off:.1%}: without workers {absent}")
        for worker, tally in record.by_worker.items():
            tally.late += worker in gathered.late
            if worker in gathered.behind_s:
                tally.came_late += 1
                tally.behind_s = max(tally.behind_s, gathered.behind_s[worker])
            count = sum(worker in late for late in self._recent)
            if count >= _MOST and not tally.is_slow:
                tally.is_slow = True
                told.append(f"coded: step {step}: {count} of the last {len(self._recent)} without worker {worker}")
            elif tally.is_slow and count <= _FEWEST:
                tally.is_slow = False
                told.append(f"coded: step {step}: worker {worker} is back in time")
        return told

    def write(self, folder: Path) -> None:
        """Write ``coded.json`` into a folder."""
        write_whole(folder / FILE, msgspec.json.format(msgspec.json.encode(self.record), indent=1))
