# SPDX-License-Identifier: Apache-2.0
"""Where in a job a rank is when something happens to it: the arguments of a misdeed and of a legitimate wait."""

from pathlib import Path
from typing import NamedTuple


class Scene(NamedTuple):
    """Where the rank is when it happens."""

    rank: int
    world: int
    folder: Path
    seconds: float
