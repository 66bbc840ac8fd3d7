# SPDX-License-Identifier: Apache-2.0
"""Last words of other people's jobs: the right class and the right ranks, or none.

Each input is judged as often as it can reach the judge: with a recorder in the ranks (the exception, the step and the
calls are in a black box), with an agent that reads their output, and with what the runner alone reads at their end.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from megascale_agents.ranks.stderr_scanner import LogScanner

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.diagnosis.exits.last_traceback import read
from megascale_ops.diagnosis.exits.last_words import end_of
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import HostReading, Verdict
from megascale_ops.schema.messages import CollectiveFact, RankExit
from megascale_ops.schema.progress import LastWords, RankReport
from tests.real.cases import Case, rows

WAYS = ("recorder", "agent", "runner")
TAIL = 4000  # as much of stderr as a runner reads at an end


@pytest.mark.parametrize("case", rows("last_words"))
@pytest.mark.parametrize("way", WAYS)
def test_last_words_name_whom_they_should(case: Case, way: str, tmp_path: Path) -> None:
    """The class and the culprits are right, and where it is not certain the verdict says so."""
    if way not in case.given.get("ways", WAYS):
        pytest.skip("this input needs another way")
    right = case.right

    verdict = _judge(case.given, way, tmp_path)

    assert (verdict.fault, list(verdict.culprits)) == (right["fault"], right.get("culprits", [])), verdict.reason
    assert right.get("least", 0.0) <= verdict.confidence <= right.get("most", 1.0), verdict.reason
    assert verdict.fault in FAULTS
    for words in right.get("says", []):
        assert words in verdict.reason
    if "nodes" in right:
        assert list(verdict.nodes) == right["nodes"]


def _judge(given: dict[str, Any], way: str, folder: Path) -> Verdict:
    ended, reports, hosts = [], {}, {}
    for told in given["ranks"]:
        for rank in told.get("ranks", [told.get("rank", 0)]):
            exit_, words = _end_of(rank, told, way, folder)
            node = told.get("node", f"n{rank // 8}")
            ended.append(Ended(node, exit_, told.get("ago_s", 0.1)))
            if way != "runner":
                reports[rank] = RankReport(rank, rank, exit_.pid, 1, last_words=words)
            if "memory_used" in told:
                hosts[node] = HostReading(memory_used=told["memory_used"])
    size = given.get("world", len(ended))
    return judge_exits(
        ended, world_size=size, missing=given.get("missing", ()), reports=reports, hosts=hosts, round_=1, wall_s=1e6
    )


def _end_of(rank: int, told: dict[str, Any], way: str, folder: Path) -> tuple[RankExit, tuple[LastWords, ...]]:
    """Return how a rank ended, as its runner tells it, and the words that its agent has told."""
    code = -signal.Signals[told["signal"]] if "signal" in told else told.get("code", 1)
    path = folder / f"{rank}.stderr"
    steps = [-1]
    scanner = LogScanner(str(path), None, lambda: steps[0])
    text = ""
    for piece in [*told.get("earlier", []), {"text": told.get("stderr", "")}]:
        steps[0] = piece.get("steps_seen", told.get("steps_seen", 50)) if way == "recorder" else -1
        text += piece["text"].replace("RANK_", str(rank)) * piece.get("times", 1)
        path.write_text(text)
        scanner.poll_stderr()
    scanner.close()
    by_us = told.get("by_us", False)
    plain = RankExit(
        rank, rank, 100 + rank, code, 0.0, by_us=by_us, stderr_tail="" if by_us else end_of(text[-32_000:], TAIL)
    )
    if way != "recorder" or told.get("no_box"):
        return plain, scanner.last_words
    seen = told.get("steps_seen", 50)
    error = read(plain.stderr_tail) if code > 0 else None
    if error is not None:
        error = msgspec.structs.replace(error, step=seen - 1)
    boxed = RankExit(
        rank, rank, 100 + rank, code, 0.0, by_us=by_us, stderr_tail=plain.stderr_tail, steps_seen=seen, step=seen - 1,
        phase=told.get("phase", "forward"), error=error,
        calls=tuple(_calls(told.get("calls", []))),
    )  # fmt: skip
    return boxed, scanner.last_words


def _calls(groups: list[dict[str, Any]]) -> Iterator[CollectiveFact]:
    """Return the last calls of a rank in each of its groups: all over, but for the one that it is inside of."""
    for one in groups:
        for seq in range(max(1, one["last"] - 3), one["last"] + 1):
            done = seq < one["last"] or not one.get("inside", False)
            yield CollectiveFact(one.get("group", "0"), seq, one.get("function", "all_reduce"), done=done)
