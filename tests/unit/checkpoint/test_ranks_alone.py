# SPDX-License-Identifier: Apache-2.0
"""Agreement in a world of one; several ranks are tested with real processes."""

import pytest

from megascale_ops.checkpoint.ranks import Ranks, cause_of
from megascale_ops.errors import CheckpointError


def refuse() -> None:
    """Fail as torch does when its disk is full."""
    full = OSError(28, "No space left on device")
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nlong trace") from full


def test_alone_there_is_nobody_to_ask() -> None:
    """Without a process group, rank 0 leads a world of one."""
    ranks = Ranks()

    assert (ranks.rank, ranks.world_size, ranks.leads) == (0, 1, True)
    assert ranks.agree("counting", lambda: 3) == [3]


def test_a_failure_is_told_in_the_words_of_the_system() -> None:
    """The full disk, not what torch made of it; the trace stays attached."""
    with pytest.raises(CheckpointError, match=r"^saving step 3 failed: No space left on device$") as caught:
        Ranks().agree("saving step 3", refuse)

    assert isinstance(caught.value.__cause__, RuntimeError)


def test_every_cause_is_one_line() -> None:
    """Whatever its text, and a sentence of ours stays as it is."""
    assert cause_of(ValueError("first\nsecond")) == "ValueError: first"
    assert cause_of(KeyboardInterrupt()) == "KeyboardInterrupt: KeyboardInterrupt"
    assert cause_of(CheckpointError("a sentence")) == "a sentence"
