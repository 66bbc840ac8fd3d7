# SPDX-License-Identifier: Apache-2.0
"""Before anything is started: a controller that has no time yet is asked again, one that is not there is not."""

import pytest

from megascale_ops.errors import ControllerUnreachableError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.ground import check_controller


@pytest.mark.parametrize(
    ("cause", "answers_at", "asked", "fails"),
    [
        (TimeoutError(), 3, 3, False),
        (TimeoutError(), 4, 3, True),
        (ConnectionRefusedError(), 2, 1, True),
        (TimeoutError(), 1, 1, False),
    ],
)
def test_who_has_no_time_is_asked_three_times(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, answers_at: int, asked: int, *, fails: bool
) -> None:
    """Thousands of runners start at once; where nobody listens the user hears it at once."""
    count = 0

    def status(_link: BlockingLink) -> None:
        nonlocal count
        count += 1
        if count < answers_at:
            raise ControllerUnreachableError("no answer") from cause

    monkeypatch.setattr(BlockingLink, "status", status)

    if fails:
        with pytest.raises(ControllerUnreachableError):
            check_controller("http://127.0.0.1:1", "")
    else:
        check_controller("http://127.0.0.1:1", "")

    assert count == asked
