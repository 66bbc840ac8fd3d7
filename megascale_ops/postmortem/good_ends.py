# SPDX-License-Identifier: Apache-2.0
"""A job that ended well: what it says so by, and that nothing speaks against it.

Most of what looks like last words was survived: a sample that could not be read, a store that was slow, a row of a
GPU's memory that was replaced. Where a log ends with a sentence of a training that is complete, and no rank lost a peer
or fell silent behind an error, none of it ended anything.

Pure: texts in, a line out.
"""

import re
from collections.abc import Mapping, Sequence

from megascale_ops.diagnosis.exits.last_words import heard_in, weight_of
from megascale_ops.diagnosis.exits.prefixes import TRACEBACK_BEGINS, strip_prefix
from megascale_ops.diagnosis.exits.word_rows import CAUSE

# As much of a log as its end is looked for in, and the last 60 lines for the sentence: trackers print summaries.
_SOUGHT, _LAST_LINES = 32_000, 60
# 51: the weight of a line about a step, more than any other line has.
_OF_A_STEP = 50
_SENTENCE = re.compile(
    r"\b(?:train(?:ing)?|fit(?:ting)?|fine-?tuning|pre-?training|job|run|PyTorchJob \S{1,80})\b"
    r"(?:,? \w{1,20}){0,3}? (?:complete[d]?|finished|done|succeeded)\b"
    r"|^(?:\S{1,40} ){0,3}(?:[Ff]inished|[Cc]ompleted) (?:training|pre-?training|fine-?tuning|fit)\b"
    r"|\bexits successfully\b|\bexit(?:ed)?(?: with)? (?:status|code)[ :=]{1,3}0\b"
    r"|`?Trainer\.fit`? stopped: `?max_(?:steps|epochs)|['\"]train_runtime['\"]:|^done\b"
    r"|[Cc]oordination agent has successfully shut down|\bworker group successfully finished",
    re.IGNORECASE,
)
# What is waited for, or is not so.
_NOT_YET = re.compile(r"\b(?:not|n't|until|before|once|when|if|unless|never|wait(?:s|ing)?|cannot)\b", re.IGNORECASE)
# How Python's loggers and their like begin a record: "ERROR:root:", "2026-... - ERROR - ", "[ERROR] ", "| ERROR    |".
_RECORD = re.compile(r"(?:^|[\s|\[(-])(?:ERROR|WARNING|WARN|error|warning|warn)\b ?[:\])|-]?")
# A batch system's word on a step or a job, which it may have begun anew; and a time of day with its date.
_CANCEL = re.compile(r"\*\*\* (?:JOB|STEP) .{0,120}CANCELLED")
_DATE = re.compile(r"\b(20\d\d-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
# What a launcher says as it stops ranks.
_STOPS = re.compile(
    r"closing signal SIG|death signal|Killing subprocess|exitcode|CANCELLED|Terminat(?:ed|ing)\b|Killed\b"
)


def good_end(texts: Mapping[int, str]) -> str:
    """Return the sentence by which a job ended well, "" where none says so or something speaks against it.

    Of a job that has not ended: the step to which all ranks that told of an error went on, where each was a record of a
    logger, for what ends a process is printed by no logger.

    Args:
        texts: what each rank printed, by -1 what no rank did.
    """
    found = ""
    went_on: list[str] = []
    cancels: list[str] = []
    tails = {rank: text[-_SOUGHT:] for rank, text in texts.items()}
    if not any(TRACEBACK_BEGINS in tail or _sentence_of(tail) for tail in tails.values()):
        return ""
    for rank, tail in tails.items():
        spoken = heard_in(tail)
        if any(one.row.consequence for one in spoken):
            return ""
        causes = [one.line for one in spoken if one.row.role == CAUSE]
        if rank < 0 and all(map(_CANCEL.search, causes)):
            cancels, causes = causes, []
        behind = tail[tail.rfind(causes[-1]) + len(causes[-1]) :] if causes else tail
        sentence = _sentence_of(behind)
        steps = [line for line in behind.splitlines() if weight_of(line) > _OF_A_STEP] if causes else []
        if causes and not sentence and not steps:
            return ""
        if causes and steps:
            went_on.append(steps[-1].strip()[:200] if all(_is_logged(tail, cause) for cause in causes) else "")
        found = found or sentence
    if cancels:
        return found if _is_over(cancels, [tail for rank, tail in tails.items() if rank >= 0]) else ""
    return found or (went_on[0] if all(went_on) and went_on and not _STOPS.search("\n".join(texts.values())) else "")


def _is_over(cancels: Sequence[str], tails: Sequence[str]) -> bool:
    """Return whether a batch system has cancelled an attempt that came before the one that ended well.

    By their times, where both have them; else each rank must say that it is done, for one that is cancelled does not.
    """
    ends = [_end_of(tail) for tail in tails]
    dates = [_date_of(line) for line in cancels]
    dated = [date for line in ends if (date := _date_of(line))]
    if all(dates) and dated:
        return min(dated) > max(dates)
    return bool(ends) and all(ends)


def _date_of(line: str) -> str:
    """Return the last date with a time of day in a line, as it sorts; "" without one."""
    return " ".join([*_DATE.finditer(line)][-1].groups()) if _DATE.search(line) else ""


def _end_of(text: str) -> str:
    """Return the line with the sentence that a text ends with, and with what stands before it; "" without one."""
    if not (sentence := _sentence_of(text)):
        return ""
    behind = text[text.rfind(sentence) + len(sentence) :].splitlines()
    if any(weight_of(line) > _OF_A_STEP for line in behind):
        return ""
    return next(line for line in reversed(text.splitlines()) if sentence in line)


def _is_logged(text: str, line: str) -> bool:
    """Return whether a logger's record of an error, or of a warning, stands right before the traceback of a line."""
    begins = text.rfind(TRACEBACK_BEGINS, 0, text.rfind(line))
    before = text[:begins].rstrip().rpartition("\n")[2] if begins > 0 else ""
    return _RECORD.search(strip_prefix(before)[:120]) is not None


def _sentence_of(text: str) -> str:
    lines = [bare for line in text.splitlines()[-2 * _LAST_LINES :] if (bare := strip_prefix(line).strip())]
    said = (line for line in reversed(lines[-_LAST_LINES:]) if _SENTENCE.search(line) and not _NOT_YET.search(line))
    return next(said, "")[:200]
