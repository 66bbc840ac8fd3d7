# SPDX-License-Identifier: Apache-2.0
"""Step times of real runs, as the controller was told them: a line about the run, then zlib of 16-bit numbers.

Rows of the numbers: how long each step was, then each rank's own work in it, in units of 0.1 ms, little end first.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent / "step_times"
UNIT_S = 1e-4

Seconds = npt.NDArray[np.float64]


class Recorded(NamedTuple):
    """One run."""

    about: str
    wall_s: Seconds  # (steps)
    own_s: Seconds  # (steps, ranks)


def read(path: Path) -> Recorded:
    """Return a recorded run."""
    about, _, packed = path.read_bytes().partition(b"\n")
    ranks = int(about.split(b" ", 1)[0])
    rows = np.frombuffer(zlib.decompress(packed), "<u2").reshape(ranks + 1, -1) * UNIT_S
    return Recorded(about.decode(), rows[0], rows[1:].T)


def write(path: Path, about: str, wall_s: Seconds, own_s: Seconds) -> None:
    """Write a run; ``about`` begins with how many ranks it had."""
    rows = np.concatenate([wall_s[None], own_s.T]) / UNIT_S
    numbers = np.minimum(np.round(rows), 65_535).astype("<u2")
    path.write_bytes(about.encode() + b"\n" + zlib.compress(numbers.tobytes(), 9))
