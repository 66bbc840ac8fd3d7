# SPDX-License-Identifier: Apache-2.0
"""The black box: one memory-mapped file per rank that survives a crash, a SIGKILL and a frozen process.

The recorder writes it, the agent reads it, and neither ever waits for the other. ``layout`` is the map, ``writer``
and ``reader`` use it, and ``blackbox.h`` is the same map for C.
"""

from megascale_ops.errors import MegascaleError


class BoxError(MegascaleError):
    """A file that is no black box of ours (wrong magic, size, version or rights), or one that cannot be made."""


class TornBoxError(BoxError):
    """A black box of ours that ends before its last ring: a copy that was cut short."""
