# SPDX-License-Identifier: Apache-2.0
"""What a person asks of a job that lives: a checkpoint now, and its end."""

from typing import Annotated

import msgspec


class StopAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/jobs/JOB/stop``."""

    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class CheckpointView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``POST`` and ``GET /v1/jobs/JOB/checkpoint``: who was asked for a checkpoint, and whether one came.

    ``told``: ranks whose process got SIGUSR1. ``refused``: why others did not, by rank. ``waiting``: nodes whose agent
    has not answered. Times are wall clock seconds; 0: not asked, or none is known.
    """

    job: str
    asked_wall_s: float = 0.0
    saved_wall_s: float = 0.0  # when the last step with a checkpoint in it ended
    told: tuple[int, ...] = ()
    refused: dict[str, str] = {}
    waiting: tuple[str, ...] = ()
