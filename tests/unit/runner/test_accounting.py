# SPDX-License-Identifier: Apache-2.0
"""A job's comment in Slurm's record: the user's own stays."""

import pytest

from megascale_ops.runner.services.accounting import beside


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(null)\n", "megascale-ops: killed"),
        ("", "megascale-ops: killed"),
        ("grant 17\n", "grant 17; megascale-ops: killed"),
        ("megascale-ops: hang", "megascale-ops: killed"),
        ("grant 17; megascale-ops: hang\n", "grant 17; megascale-ops: killed"),
    ],
)
def test_our_word_stands_behind_the_users(before: str, after: str) -> None:
    """A requeued job that fails again has the newest word only."""
    assert beside(before, "megascale-ops: killed") == after
