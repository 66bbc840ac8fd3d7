# SPDX-License-Identifier: Apache-2.0
"""From what a check's process answered to its result: the check's own judgement, its equals', then its model's.

Pure.
"""

from collections.abc import Callable, Iterable, Sequence

from megascale_ops.diagnostics import equals, expected
from megascale_ops.diagnostics.check import Check, Reading
from megascale_ops.diagnostics.figures import shown
from megascale_ops.diagnostics.report import CheckFinding, CheckResult, Figure, Status

# What to do about one that is slower than its equals, by the first word of what it is.
_NEXT = {
    "GPU": "keep it out of the job, check it again with `diagnose --full`; then power, cooling and seating",
    "CPU": "look at what else runs there (top), at its clock (turbostat, cpupower frequency-info) and the kernel's log",
}
_OTHERWISE = "compare with the same check of another node, and look at what else uses it"
_ORDER = {"bad": 0, "warn": 1, "note": 2}


def result_of(
    check: Check, reading: Reading, judge: Callable[[Reading], Sequence[CheckFinding]], seconds: float
) -> CheckResult:
    """Return the result of a check that has measured."""
    slow = slower_than_equals(reading.figures)
    named = {one.of for one in slow}
    by_model = [found for one in reading.figures if (found := expected.judge(one)) and found.of not in named]
    findings = sorted((*judge(reading), *slow, *by_model), key=lambda one: _ORDER[one.severity])
    nothing = not reading.figures and not reading.facts
    status: Status = "unmeasured" if nothing and not findings else worst(findings)
    return CheckResult(check.name, status, seconds, tuple(findings), reading.figures, reading.facts, reading.unmeasured)


def troubled(check: Check, trouble: str, seconds: float) -> CheckResult:
    """Return the result of a check whose process hung or died: that is what it has found."""
    text = f"the check of {check.about} {trouble}"
    following = "look at what it asks: the kernel's log (dmesg), the driver (nvidia-smi), the mounts (df)"
    finding = CheckFinding(check.severity, "node", text, following)
    return CheckResult(check.name, worst([finding]), seconds, (finding,))


def unmeasured(check: Check, why: str, seconds: float = 0.0) -> CheckResult:
    """Return the result of a check that has nothing to measure here: no verdict."""
    return CheckResult(check.name, "unmeasured", seconds, unmeasured=(why,))


def slower_than_equals(figures: Iterable[Figure]) -> list[CheckFinding]:
    """Return a finding for each figure that is slower than its equals."""
    return [told_slow(one, comparison) for comparison in equals.compare(figures) for one in comparison.slow]


def told_slow(one: equals.Slow, comparison: equals.Comparison) -> CheckFinding:
    """Return the sentence about one that is slower than its equals."""
    name, than = one.figure.name, "more" if comparison.kind.lower_is_better else "less"
    others = "the other one's" if comparison.size == 2 else f"the median of the {comparison.size - 1} others,"
    text = (
        f"{one.figure.of}: {comparison.kind.what} {shown(name, one.figure.value)}, {one.short:.1%} {than} than "
        f"{others} {shown(name, one.others)} (named from {one.bar:.1%} on)"
    )
    what = one.figure.of.rpartition("/")[2].split(" ")[0]
    return CheckFinding(comparison.kind.severity, one.figure.of, text, _NEXT.get(what, _OTHERWISE))


def worst(findings: Sequence[CheckFinding]) -> Status:
    """Return the status that findings add up to; notes are no fault."""
    severities = {one.severity for one in findings}
    return "bad" if "bad" in severities else "warn" if "warn" in severities else "good"
