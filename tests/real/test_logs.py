# SPDX-License-Identifier: Apache-2.0
"""Logs of other people's jobs, as ``inspect`` gets them: the right class and the right ranks, or none.

An input is a folder of files: one log of all ranks as a launcher merges them, a log a rank, the kernel's log beside it.
A file whose name ends in ``.gz`` is packed.
"""

import gzip
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.postmortem.examine import examine
from tests.real.cases import Case, rows


@pytest.mark.parametrize("case", rows("logs"))
def test_a_folder_of_logs_names_whom_it_should(case: Case, tmp_path: Path) -> None:
    """Where several answers are right (a class is a matter of words, two ranks disagree), one of them is given."""
    for name, text in case.given["files"].items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = text.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)

    try:
        verdict = examine([tmp_path / "job"]).verdicts[0]
    except UsageError:
        assert case.right["culprits"] == [[]]
        return

    said = list(verdict.culprits) or _by_file(case, verdict.reason)
    assert said in case.right["culprits"], verdict.reason
    assert verdict.fault in case.right["faults"], verdict.reason
    assert verdict.confidence <= case.right.get("most", 1.0), verdict.reason


def _by_file(case: Case, reason: str) -> list[int]:
    """Return the rank whose file a sentence begins with, where nothing but the name of the file tells it."""
    name = reason.partition(":")[0]
    told = case.right.get("files", {})
    return [told[name]] if name in told else []
