# SPDX-License-Identifier: Apache-2.0
"""The GPU's clock between two kernels of a stream, noted by a kernel of one thread."""

import triton
import triton.language as tl

from megascale_kernels.device.signals import now_ns


@triton.jit(do_not_specialize_on_alignment=("at_ptr",))
def note_time_kernel(at_ptr):
    """Store nanoseconds at `at_ptr`, int64."""
    tl.store(at_ptr, now_ns())
