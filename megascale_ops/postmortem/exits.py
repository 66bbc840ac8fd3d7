# SPDX-License-Identifier: Apache-2.0
"""From logs to how ranks ended, where no runner has seen it: by their last words, and by a launcher's summary.

What a launcher of others wrote of exit statuses counts (torchrun's failures, ``exitcode : -9``); without it a rank
whose words speak for an end is taken to have ended with an error, and one whose words do not to have been stopped by
its launcher, which is how most ranks of a failed job end.
"""

import re
from collections.abc import Mapping

import msgspec

from megascale_ops.diagnosis.exits.classify import Ended, classify
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.diagnosis.exits.last_words import end_of
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit

# As much as a runner reads of stderr, and as much as its end is looked for in.
_TAIL, _SOUGHT = 4000, 64_000
_FAILURE = re.compile(r"rank\s*: (?P<rank>\d{1,6}) \(local_rank: \d{1,6}\)\s+exitcode\s*: (?P<code>-?\d{1,4})")
_ROOT = re.compile(r"Root Cause \(first observed failure\):.{0,400}?rank\s*: (\d{1,6})", re.DOTALL)
# 2 s: the rank that a launcher has seen fail first.
_EARLIER_S = 2.0
_NOTHING_SAID = "exit_code"
_BOX = "black box"
_DUMPS = (
    "what each rank called: dumps of the flight recorder, which the next hang leaves with "
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1"
)
_CANCELLED = "cancelled"


def judge_logs(logs: Mapping[int, str], launchers: str = "") -> Verdict:
    """Return the verdict on how ranks ended.

    Args:
        logs: what each rank printed.
        launchers: what was printed by no rank.
    """
    # What a rank's own log quotes is of a launcher below it, which counts ranks of its own.
    codes = {int(found["rank"]): int(found["code"]) for found in _FAILURE.finditer(launchers)}
    roots = {int(found[1]) for found in _ROOT.finditer(launchers)}
    ended = []
    for rank, text in sorted(logs.items()):
        tail = end_of(text[-_SOUGHT:], _TAIL)
        exit_ = RankExit(rank, rank, 1 + rank, codes.get(rank, 1), 0.0, stderr_tail=tail)
        one = Ended("", exit_, _EARLIER_S if rank in roots else 0.1, has_status=rank in codes, has_time=False)
        judged = classify(one, None, None)
        if rank not in codes and judged.fault == _NOTHING_SAID:
            one = one._replace(exit=RankExit(rank, rank, 1 + rank, -15, 0.0, by_us=True))
        elif rank not in codes and judged.fault == "killed" and _CANCELLED in judged.said:
            one = one._replace(exit=msgspec.structs.replace(exit_, code=-15))
        ended.append(one)
    for rank in sorted(set(codes) - set(logs)):
        exit_ = RankExit(rank, rank, 1 + rank, codes[rank], 0.0)
        ended.append(Ended("", exit_, _EARLIER_S if rank in roots else 0.1, has_time=False))
    size = 1 + max(one.exit.rank for one in ended)
    verdict = judge_exits(ended, world_size=size, missing=(), reports={}, hosts={}, round_=0, wall_s=0.0)
    if _BOX in verdict.otherwise:  # there was none
        verdict = msgspec.structs.replace(verdict, otherwise=_DUMPS)
    asked = verdict.fault == "killed" and all(one.exit.code == -15 for one in ended if not one.exit.by_us)
    if asked:  # who was asked to go was asked for a reason, which may stand in no log
        return msgspec.structs.replace(verdict, confidence=min(verdict.confidence, 0.5))
    if verdict.fault == "unknown" and all(one.exit.by_us for one in ended):
        return msgspec.structs.replace(verdict, reason="no log tells why its rank ended", nodes=())
    return verdict
