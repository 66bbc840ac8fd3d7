# SPDX-License-Identifier: Apache-2.0
"""A profiler's events become one row for each kernel, with what each has used itself."""

import pytest

from megascale_ops.recorder.torch_hooks.kernel_times import Span, own_times, short, summarise
from megascale_ops.schema.kernels import KernelTime


def test_an_operators_own_time_is_without_what_it_calls() -> None:
    """``linear`` calls ``mm`` and ``add``; another thread's operator at the same time is no part of it."""
    spans = [
        Span("aten::mm", 1, 1_100, 600),
        Span("aten::linear", 1, 1_000, 1_000),
        Span("aten::add", 1, 1_700, 250),
        Span("inside add", 1, 1_750, 50),
        Span("aten::mm", 2, 1_200, 300),
        Span("aten::mm", 1, 2_000, 100),
    ]

    found = sorted(own_times(spans))

    assert found == [
        ("aten::add", 200),
        ("aten::linear", 150),
        ("aten::mm", 100),
        ("aten::mm", 300),
        ("aten::mm", 600),
        ("inside add", 50),
    ]


def test_operators_that_begin_together_nest_by_length() -> None:
    """The longer one is outside, in whatever order they come."""
    assert sorted(own_times([Span("inner", 1, 0, 40), Span("outer", 1, 0, 100)])) == [("inner", 40), ("outer", 60)]


def test_kernels_of_a_gpu_do_not_nest() -> None:
    """Two streams overlap; each kernel keeps all its time."""
    found = sorted(own_times([Span("gemm", 0, 0, 100), Span("nccl", 0, 10, 500)]))

    assert found == [("gemm", 100), ("nccl", 500)]


def test_the_longest_kernels_are_kept_and_the_others_counted() -> None:
    """Of four kernels two: calls, sum, median and lower quartile in microseconds."""
    spans = [Span("long", 0, 0, ns) for ns in (4_000, 1_000, 2_000, 3_000)]
    spans += [Span("middle", 0, 0, 5_000), Span("short", 0, 0, 300), Span("shorter", 0, 0, 200)]

    kept, left_out, left_out_us = summarise(spans, 2)

    assert kept == (KernelTime("long", 4, 10.0, 2.5, 1.0), KernelTime("middle", 1, 5.0, 5.0, 5.0))
    assert (left_out, left_out_us) == (2, 0.5)


def test_nothing_makes_nothing() -> None:
    """A step without an event, or with one that never ended."""
    assert summarise([Span("open", 1, 5, -1)]) == ((), 0, 0.0)


@pytest.mark.parametrize("at", [0, 100, 380])
def test_names_that_are_cut_stay_apart(at: int) -> None:
    """Two templates of 400 characters that differ in one place, wherever that is."""
    first = "void cutlass::Kernel<" + "ab" * 190
    second = first[:at] + "X" + first[at + 1 :]

    assert len(short(first)) <= 120
    assert short(first) != short(second)
    assert short("aten::mm") == "aten::mm"
    assert short("a\x1b[31m") == "a?[31m"
