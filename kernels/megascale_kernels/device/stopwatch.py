# SPDX-License-Identifier: Apache-2.0
"""The GPU's clock between two kernels of a stream, noted by a kernel of one thread."""

import triton
import triton.language as tl

from megascale_kernels.device.signals import now_ns


@triton.jit(do_not_specialize=("after_ns",), do_not_specialize_on_alignment=("at_ptr",))
def note_time_kernel(at_ptr, after_ns):
    """Do nothing for `after_ns` nanoseconds, then store the clock's at `at_ptr`, int64."""
    begun_ns = now_ns()
    while now_ns() - begun_ns < after_ns:
        pass
    tl.store(at_ptr, now_ns())
