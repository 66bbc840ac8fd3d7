# SPDX-License-Identifier: Apache-2.0
"""Waits that end by themselves are left alone, whatever they are and however long they may last; drawn at random.

Of each kind 8 are drawn here, 360 of 45 kinds; three in ten last as long as is granted but for a thousandth.
"""

from random import Random

import pytest

from megascale_ops.chaos.legitimate import WAITS
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.drawn_waits import ASLEEP, FLAPS, FORMS, LATE_GPU, LOOKS_LIKE, draw, is_hurt

EACH = 8
ENDLESS = (ASLEEP, LATE_GPU, FLAPS, FORMS)


def test_every_known_wait_is_drawn() -> None:
    """A kind that is added to the list of waits is drawn here, too."""
    assert set(WAITS) <= set(LOOKS_LIKE)


@pytest.mark.parametrize("kind", LOOKS_LIKE)
def test_no_drawn_wait_brings_a_restart(kind: str) -> None:
    """By the policy that users have, at ten moments of each."""
    chance = Random(f"drawn {kind}")  # noqa: S311  nothing is secret

    hurt = [wait for wait in (draw(kind, chance) for _ in range(EACH)) if is_hurt(wait, chance)]

    assert hurt == []


@pytest.mark.parametrize("kind", [kind for kind, shown in LOOKS_LIKE.items() if shown is ASLEEP])
def test_the_same_wait_inside_a_backward_pass_is_taken_for_a_hang(kind: str) -> None:
    """The negative control, and the price: asleep for more than a minute there, with no work, child or phase."""
    chance = Random(f"inside {kind}")  # noqa: S311  nothing is secret
    wait = draw(kind, chance)._replace(phase="backward", step_s=0.5, slowest=1.1, lasts_s=500.0)

    assert is_hurt(wait, chance)
    assert not is_hurt(wait._replace(phase="forward"), chance)
    assert not is_hurt(wait._replace(lasts_s=59.0), chance)


@pytest.mark.parametrize("kind", [kind for kind, shown in LOOKS_LIKE.items() if shown in ENDLESS])
def test_what_lasts_longer_than_is_granted_is_acted_upon(kind: str) -> None:
    """Patience ends: the drawn waits are left alone because they are shorter, not because no judge looks."""
    chance = Random(f"long {kind}")  # noqa: S311  nothing is secret
    wait = draw(kind, chance)._replace(step_s=0.5, slowest=1.1)

    assert is_hurt(wait._replace(lasts_s=1.3 * LOOKS_LIKE[kind].most_s), chance)


def test_a_policy_of_a_minute_for_all_would_hurt_them() -> None:
    """A smaller number instead of evidence: most waits of some minutes would be restarted."""
    chance = Random(5)  # noqa: S311  nothing is secret
    waits = [draw("http_silent", chance)._replace(step_s=0.5, slowest=1.1, lasts_s=300.0) for _ in range(10)]

    assert all(is_hurt(wait, chance, JobPolicy(absent_patience_s=60.0)) for wait in waits)
    assert not any(is_hurt(wait, chance) for wait in waits)
