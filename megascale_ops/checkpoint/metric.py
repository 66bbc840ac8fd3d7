# SPDX-License-Identifier: Apache-2.0
"""What a manifest says of the number by which a state is measured."""

import logging
import math

import msgspec

_log = logging.getLogger("megascale_ops.checkpoint")


def measured(step: int, metric: float | None) -> float | msgspec.UnsetType:
    """What a manifest says of a metric."""
    if metric is None:
        return msgspec.UNSET
    number = float(metric)
    if not math.isfinite(number):
        _log.warning("the metric of step %d is %s, so the checkpoint is saved without", step, number)
        return msgspec.UNSET
    return number
