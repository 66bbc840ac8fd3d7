# SPDX-License-Identifier: Apache-2.0
"""Lines of kernels' logs that others met, read as an agent reads them: by file, with its GPUs and its process table.

``given``: ``lines``, which become records of ``/dev/kmsg`` a millisecond apart (``records = true``: they are that
already); ``threads``, whose process is another (thread -> process). GPUs 0 to 7 stand at 0000:18:00 to 0000:1f:00.
``right``: ``findings``, each with its name and severity, and where they count ``gpu`` (its number), ``pid``, ``bad``
(the GPU is remembered), ``count``, ``says`` (words in the sentence). None but these.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
from megascale_agents.collectors import kernel_rules, kernel_rules_io, kernel_rules_net, kernel_rules_storage
from megascale_agents.collectors.gpu_values import Identity
from megascale_agents.collectors.kernel_log import KernelLog
from megascale_agents.hardware.kernel_log_watch import KernelWatch

from megascale_ops.schema.health import HardwareFinding
from tests.real.cases import Case, cases, rows

GPUS = {f"0000:{0x18 + index:02x}:00": Identity(index, f"GPU-{index}") for index in range(8)}
NOW_S = 1000.0


def found_in(given: dict[str, Any], folder: Path) -> list[HardwareFinding]:
    """What an agent finds in a log that lies in a file."""
    path = folder / "kmsg"
    path.write_bytes(b"")
    for thread, process in given.get("threads", {}).items():
        (folder / thread).mkdir()
        (folder / thread / "status").write_text(f"Name:\tpython\nTgid:\t{process}\nPid:\t{thread}\n")
    watch = KernelWatch(KernelLog(str(path), "", "boot"), GPUS.get, lambda: NOW_S, str(folder))
    watch.poll_log(1.0)
    seq = itertools.count(1)
    heads = itertools.repeat("") if given.get("records") else (f"4,{one},{900_000_000 + one * 1000},-;" for one in seq)
    path.write_text("".join(f"{head}{line}\n" for head, line in zip(heads, given["lines"], strict=False)))
    found = watch.poll_log(NOW_S) or []
    watch.close()
    return sorted(found, key=lambda one: (one.name, one.text))


def told(one: HardwareFinding, wanted: dict[str, Any]) -> dict[str, Any]:
    """Of a finding what the right answer speaks of."""
    everything = {
        "name": one.name,
        "severity": one.severity,
        "gpu": int(one.gpu.removeprefix("GPU-") or "-1"),
        "pid": one.pids[0] if one.pids else 0,
        "bad": one.is_bad,
        "count": one.count,
        "says": wanted.get("says", "") if wanted.get("says", "") in one.text else one.text,
    }
    return {key: everything[key] for key in {"name", "severity", *wanted}}


@pytest.mark.parametrize("case", rows("kernel_log"))
def test_what_a_log_tells_is_found(case: Case, tmp_path: Path) -> None:
    """Kind and severity of each line, and which GPU, device or process it is about; nothing else."""
    right = sorted(case.right["findings"], key=lambda one: str(one["name"]))

    found = found_in(case.given, tmp_path)

    wanted = [*right, *({} for _ in found[len(right) :])]
    assert [told(one, want) for one, want in zip(found, wanted, strict=False)] == right


def test_every_rule_has_an_input() -> None:
    """A kind of line that no input shows would be a guess."""
    named = {one["name"] for case in cases("kernel_log") for one in case.right["findings"]}
    rules = (*kernel_rules.RULES, *kernel_rules_io.RULES, *kernel_rules_net.RULES, *kernel_rules_storage.RULES)

    silent = {rule.name for rule in rules if not rule.ends and not any(str(one).startswith(rule.name) for one in named)}

    assert not silent


def test_the_inputs_hold_harmless_lines_too() -> None:
    """Negative controls: hundreds of kinds of lines of sound machines, of which nothing is told."""
    harmless = [line for case in cases("kernel_log") if not case.right["findings"] for line in case.given["lines"]]

    assert len(set(harmless)) > 150


def test_every_pattern_is_one() -> None:
    """Patterns are compiled when a line asks for them; one with a mistake in it is seen here, and not on a node."""
    rules = (*kernel_rules.RULES, *kernel_rules_io.RULES, *kernel_rules_net.RULES, *kernel_rules_storage.RULES)

    unlike = [rule for rule in rules if rule.pattern.pattern != rule.words]

    assert len(rules) > 150
    assert not unlike
