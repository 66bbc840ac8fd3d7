# SPDX-License-Identifier: Apache-2.0
"""A job that ended well: what it says so by, and that nothing speaks against it.

Most of what looks like last words was survived: a sample that could not be read, a store that was slow, a row of a
GPU's memory that was replaced. Where a log ends with a sentence of a training that is complete, and no rank lost a peer
or fell silent behind an error, none of it ended anything.

Pure: texts in, a line out.
"""

import re
from collections.abc import Mapping

from megascale_ops.diagnosis.exits.last_words import heard_in, weight_of
from megascale_ops.diagnosis.exits.prefixes import strip_prefix
from megascale_ops.diagnosis.exits.word_rows import CAUSE

# As much of a log as its end is looked for in, and the last 60 lines for the sentence: trackers print summaries.
_SOUGHT, _LAST_LINES = 64_000, 60
# 51: the weight of a line about a step, more than any other line has.
_OF_A_STEP = 50
_SENTENCE = re.compile(
    r"\b(?:train(?:ing)?|fit(?:ting)?|fine-?tuning|pre-?training|job|run|PyTorchJob \S{1,80})\b"
    r"(?:,? \w{1,20}){0,3}? (?:complete[d]?|finished|done|succeeded)\b"
    r"|^(?:\S{1,40} ){0,3}(?:[Ff]inished|[Cc]ompleted) (?:training|pre-?training|fine-?tuning|fit)\b"
    r"|\bexits successfully\b|\bexit(?:ed)?(?: with)? (?:status|code)[ :=]{1,3}0\b"
    r"|`?Trainer\.fit`? stopped: `?max_(?:steps|epochs)|['\"]train_runtime['\"]:|^done\b"
    r"|[Cc]oordination agent has successfully shut down",
    re.IGNORECASE,
)
# What is waited for, or is not so.
_NOT_YET = re.compile(r"\b(?:not|n't|until|before|once|when|if|unless|never|wait(?:s|ing)?|cannot)\b", re.IGNORECASE)


def good_end(texts: Mapping[int, str]) -> str:
    """Return the sentence by which a job ended well, "" where none says so or something speaks against it.

    Args:
        texts: what each rank printed, by -1 what no rank did.
    """
    found = ""
    for text in texts.values():
        tail = text[-_SOUGHT:]
        spoken = heard_in(tail)
        if any(one.row.consequence for one in spoken):
            return ""
        causes = [one.line for one in spoken if one.row.role == CAUSE]
        behind = tail[tail.rfind(causes[-1]) + len(causes[-1]) :] if causes else tail
        sentence = _sentence_of(behind)
        if causes and not sentence and not any(weight_of(line) > _OF_A_STEP for line in behind.splitlines()):
            return ""
        found = found or sentence
    return found


def _sentence_of(text: str) -> str:
    lines = [bare for line in text.splitlines() if (bare := strip_prefix(line).strip())][-_LAST_LINES:]
    said = (line for line in reversed(lines) if _SENTENCE.search(line) and not _NOT_YET.search(line))
    return next(said, "")[:200]
