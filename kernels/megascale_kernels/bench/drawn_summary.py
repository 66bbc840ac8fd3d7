# SPDX-License-Identifier: Apache-2.0
"""The lines below a table of drawn shapes: how good the operator is on what it was not tuned on, and where it is not.

A choice of the operator (our kernel or the serial path) counts as wrong where the other was faster by more than
`NOISE`: that much two measurements of the same thing differ.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median

from megascale_kernels.bench.drawn_rows import DrawnRow
from megascale_kernels.bench.rows import geometric_mean

LIMITS = (0.98, 0.95)  # shares of rows below these are told
CLASSES = ((256, 1023), (1024, 4095), (4096, 16384))  # of M
LARGE = 1024  # rows from which on a launch is more than latency
SHARE = 0.10  # of serial that is communication: with less there is nothing to hide, and E divides by next to nothing
NOISE = 1.02
WORST = 5


def summary(found: Sequence[DrawnRow]) -> list[str]:
    """All lines."""
    good = [one for one in found if not one.row.note]
    failed = [f"failed: {len(found) - len(good)} of {len(found)} shapes"] if len(good) < len(found) else []
    if not good:
        return failed
    parts = (_over_serial, _over_torch, _large, _host, _classes, _choices, _model, _worst)
    return [*(line for part in parts for line in part(good)), *failed]


def _over_serial(good: Sequence[DrawnRow]) -> list[str]:
    below = ", ".join(f"below {limit:g}: {_of(good, _slower_than(limit))}" for limit in LIMITS)
    return [f"over serial: {_mean_speedup(good):.3f} (geometric mean of {len(good)}); {below}"]


def _slower_than(limit: float) -> Callable[[DrawnRow], bool]:
    return lambda one: one.row.speedup < limit


def _over_torch(good: Sequence[DrawnRow]) -> list[str]:
    against = [one for one in good if not math.isnan(one.row.torch_s)]
    if not against:
        return ["over torch's fused operator: it ran on no shape"]
    worst = min(against, key=lambda one: one.row.over_torch)
    ahead = _of(against, lambda one: one.row.over_torch > 1)
    without = f"; it failed on {len(good) - len(against)}" if len(against) < len(good) else ""
    where = f"worst {worst.row.over_torch:.3f} at {worst.drawn.label}{without}"
    return [f"over torch's fused operator: {_mean_over_torch(against):.3f}, ahead on {ahead}, {where}"]


def _large(good: Sequence[DrawnRow]) -> list[str]:
    """What is told of sizes at which a training step runs."""
    large = _within(good, LARGE, CLASSES[-1][1])
    if not large:
        return []
    below = ", ".join(f"below {limit:g}: {_of(large, _slower_than(limit))}" for limit in LIMITS)
    against = [one for one in large if not math.isnan(one.row.torch_s)]
    ahead = f", ahead of torch on {_of(against, lambda one: one.row.over_torch > 1)}" if against else ""
    return [f"M {LARGE} or more: over serial {_mean_speedup(large):.3f}; {below}{ahead}"]


def _model(good: Sequence[DrawnRow]) -> list[str]:
    """How near the cost model came, without what contests found out."""
    lines = []
    for name, pairs in (
        ("our kernel", [(one.foretold.kernel_s, one.kernel_s if one.is_serial else one.row.ours_s) for one in good]),
        ("the serial path", [(one.foretold.serial_s, one.row.serial_s) for one in good]),
    ):
        off = [foretold / took - 1 for foretold, took in pairs if not math.isnan(foretold) and not math.isnan(took)]
        if off:
            spread = math.sqrt(fmean(one**2 for one in off))
            lines.append(
                f"the cost model foretold {name} to {spread:.1%} (root mean square of {len(off)}), "
                f"between {min(off):+.0%} and {max(off):+.0%}"
            )
    return lines


def _host(good: Sequence[DrawnRow]) -> list[str]:
    timed = [one.host for one in good if not math.isnan(one.host.ours_s)]
    if not timed:
        return []
    told = []
    for name, column in zip(("serial", "torch", "ours"), zip(*timed, strict=True), strict=True):
        known = [seconds * 1e6 for seconds in column if not math.isnan(seconds)]
        told.append(f"{name} {median(known):.0f} us (most {max(known):.0f})" if known else f"{name} not measured")
    return [f"one call holds the host, median of {len(timed)} shapes: {', '.join(told)}"]


def _classes(good: Sequence[DrawnRow]) -> list[str]:
    busy = [one for one in good if one.share >= SHARE]
    lines = [_class(f"M {least}-{most}", _within(good, least, most)) for least, most in CLASSES]
    lines += [
        _class(f"communication {SHARE:.0%} of serial or more, M {least}-{most}", _within(busy, least, most))
        for least, most in CLASSES
    ]
    lines.append(_class(f"communication less than {SHARE:.0%}", [one for one in good if one.share < SHARE]))
    lines.append(_class(f"communication {SHARE:.0%} of serial or more", busy))
    return [line for line in lines if line]


def _within(some: Sequence[DrawnRow], least: int, most: int) -> list[DrawnRow]:
    return [one for one in some if least <= one.drawn.shape.m <= most]


def _class(name: str, some: Sequence[DrawnRow]) -> str:
    if not some:
        return ""
    against = [one for one in some if not math.isnan(one.row.torch_s)]
    hidden = _efficiencies(some)
    overlap = f"E {fmean(hidden):.2f} on average, {median(hidden):.2f} in the median" if hidden else "E nowhere"
    by_kernel = _efficiencies([one for one in some if not one.is_serial])
    where = f", {fmean(by_kernel):.2f} on average of the {len(by_kernel)} where the kernel ran" if by_kernel else ""
    return (
        f"{name}: {len(some)} shapes, over serial {_mean_speedup(some):.3f}, "
        f"over torch {_mean_over_torch(against):.3f}, {overlap}{where}"
    )


def _choices(good: Sequence[DrawnRow]) -> list[str]:
    serial = [one for one in good if one.is_serial]
    rest = [one for one in good if not one.is_serial]
    without = sum(math.isnan(one.kernel_s) for one in serial)
    chosen = _of(good, lambda one: one.is_serial)
    pieces = sum(one.is_in_pieces for one in rest)
    apart = f", cuBLAS in pieces for {pieces}" if pieces else ""
    better = geometric_mean([one.row.speedup * max(1.0, _known(one.lost)) for one in good])
    return [
        f"serial was chosen for {chosen}, for {without} since no kernel can serve them; {_wrong(serial, 'the kernel')}",
        f"the kernel was chosen for {len(rest) - pieces}{apart}; {_wrong(rest, 'serial')}",
        f"with the faster of the two on every shape: over serial {better:.3f} instead of {_mean_speedup(good):.3f}",
    ]


def _wrong(some: Sequence[DrawnRow], other: str) -> str:
    wrong = sorted((one for one in some if one.lost > NOISE), key=lambda one: -one.lost)
    if not wrong:
        return f"{other} would have been {NOISE - 1:.0%} faster nowhere"
    told = ", ".join(f"{one.lost:.2f} at {one.drawn.label}" for one in wrong[:WORST])
    return (
        f"{other} would have been more than {NOISE - 1:.0%} faster on {len(wrong)}, "
        f"{geometric_mean([one.lost for one in wrong]):.3f} times on average: {told}"
    )


def _worst(good: Sequence[DrawnRow]) -> list[str]:
    lines = ["worst over serial:"]
    for one in sorted(good, key=lambda one: one.row.speedup)[:WORST]:
        row = one.row
        lines.append(
            f"  {row.speedup:.3f}  {one.drawn.label}: {row.ours_s * 1e3:.3f} ms for {row.serial_s * 1e3:.3f}, "
            f"E {row.efficiency:.2f}, {row.config}"
        )
    return lines


def _of(some: Sequence[DrawnRow], holds: Callable[[DrawnRow], bool]) -> str:
    number = sum(map(holds, some))
    return f"{number} of {len(some)} ({number / len(some):.1%})"


def _known(figure: float) -> float:
    return 0.0 if math.isnan(figure) else figure


def _mean_speedup(some: Sequence[DrawnRow]) -> float:
    return geometric_mean([one.row.speedup for one in some])


def _mean_over_torch(some: Sequence[DrawnRow]) -> float:
    return geometric_mean([one.row.over_torch for one in some])


def _efficiencies(some: Sequence[DrawnRow]) -> list[float]:
    return [one.row.efficiency for one in some if not math.isnan(one.row.efficiency)]
