# SPDX-License-Identifier: Apache-2.0
"""Kernels of one warp between two others of a stream: wait for the host, and note the GPU's clock."""

import triton
import triton.language as tl

from megascale_kernels.device.signals import now_ns


@triton.jit(do_not_specialize_on_alignment=("at_ptr",))
def note_time_kernel(at_ptr):
    """Store the GPU's clock, nanoseconds, at `at_ptr`, int64."""
    tl.store(at_ptr, now_ns())


@triton.jit(do_not_specialize=("most_ns",), do_not_specialize_on_alignment=("gate_ptr",))
def hold_kernel(gate_ptr, most_ns):
    """Wait until the word at `gate_ptr`, int32 in host memory, is not zero, or `most_ns` nanoseconds have passed."""
    begun_ns = now_ns()
    while (tl.load(gate_ptr, volatile=True) == 0) & (now_ns() - begun_ns < most_ns):
        pass
