# SPDX-License-Identifier: Apache-2.0
"""What the emulator refuses, and what it gives up on."""

from megascale_kernels.errors import KernelError


class EmulationError(KernelError):
    """The emulator cannot run this, or a kernel did what no device would survive (memory out of bounds)."""


class StuckError(EmulationError):
    """No program moves any more, or the budget of steps is spent; the message lists the waiting programs."""
