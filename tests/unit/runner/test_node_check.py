# SPDX-License-Identifier: Apache-2.0
"""Whether a node may join after it was measured: what its report says decides, and nothing else."""

import msgspec
import pytest

from megascale_ops.diagnostics.report import VERSION, CheckFinding, CheckResult, NodeReport
from megascale_ops.runner.node_check import refusal_of, report_of


def report(*findings: CheckFinding) -> bytes:
    """Return a report as the verb prints it."""
    result = CheckResult("gemm", "good", 1.0, findings)
    return msgspec.json.encode(NodeReport(VERSION, "megascale-ops", "n", "quick", 1.0, 24.0, (result,)))


def test_bad_findings_keep_a_node_out() -> None:
    """The first three are told, the others counted; warnings and notes keep out none."""
    bad = [CheckFinding("bad", f"GPU {number}", f"GPU {number}: slow") for number in range(5)]
    mild = [CheckFinding("warn", "node", "the clock is off"), CheckFinding("note", "node", "swap is used")]
    refused, joined = report_of(report(*bad, *mild)), report_of(report(*mild))

    assert refused is not None
    assert joined is not None
    assert refusal_of(refused) == "GPU 0: slow; GPU 1: slow; GPU 2: slow; and 2 more"
    assert refusal_of(joined) == ""


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\xff", b"[" * 100_000, b'{"seconds": "x", "results": []}'])
def test_what_is_no_report_decides_nothing(data: bytes) -> None:
    """A program that failed has not measured the node."""
    assert report_of(data) is None
