# SPDX-License-Identifier: Apache-2.0
"""All ranks leave with one code of their framework: the only one whose logger tells of its own error is named."""

import pytest

from megascale_ops.diagnosis.exits.victims_words import Told, blame_reporter
from megascale_ops.schema.health import Verdict

SAID = "ERROR:rerun:Unexpected result nan on rank 3 at iteration #3\n"


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        ({3: SAID}, (3,)),
        ({3: f"2026-11-27 10:00:00 {SAID}"}, (3,)),
        ({3: "WARNING:rerun:Unexpected result nan on rank 3\n"}, (0, 1, 2, 3)),
        ({2: SAID}, (0, 1, 2, 3)),  # of another rank
        ({3: SAID, 1: SAID.replace("rank 3", "rank 1")}, (0, 1, 2, 3)),
        ({0: SAID.replace("rank 3", "rank 0")}, (0, 1, 2, 3)),  # it may speak for all
        ({3: f"{SAID}ERROR: rank 1 has ended\n"}, (0, 1, 2, 3)),
        ({}, (0, 1, 2, 3)),
    ],
    ids=["own", "after-a-time", "a-warning", "anothers", "two", "rank-0", "about-two", "nobody"],
)
def test_the_only_rank_with_an_error_of_its_own_is_named(texts: dict[int, str], named: tuple[int, ...]) -> None:
    """Words about another rank, of several ranks, or a warning change nothing."""
    verdict = Verdict(fault="exit_code", reason="ranks 0-3: exit code 16", confidence=0.95, culprits=(0, 1, 2, 3))

    told = blame_reporter(verdict, [Told("n", rank, texts.get(rank, "INFO: exits with 16\n")) for rank in range(4)])

    assert told.culprits == named
    assert told.confidence == (0.6 if named == (3,) else 0.95)
