# SPDX-License-Identifier: Apache-2.0
"""Coded computation in the simulator: what a step takes by kind of code, and who is still busy when it ends."""

import msgspec
import numpy as np
import pytest

from megascale_ops.errors import UsageError
from megascale_ops.sim.mesh import Layout
from megascale_ops.sim.redundancy import Redundancy, read_code
from megascale_ops.sim.settings import Settings, checked
from megascale_ops.sim.steps import NETWORK, StepModel

FREE = np.zeros(4)


def steps(coded: str, slower: dict[int, float], count: int = 4) -> list[float]:
    """Return what steps of four replicas of one rank take, without noise."""
    settings = checked(
        Settings(ranks=4, ranks_per_node=1, pp=1, step_s=1.0, noise=0.0, uneven=0.0, faults=(), coded=coded)
    )
    model = StepModel(settings, Layout(settings), np.random.default_rng(0))
    return [model.make(step, slower, 0.0, 0.0, 1.0).wall_s for step in range(count)]


def test_a_step_of_a_code_is_that_of_the_slowest_it_waits_for() -> None:
    """All do s + 1 times the work, and any slowness of one costs nothing; without a code it is waited for."""
    work, network = 1.0 - NETWORK, NETWORK

    assert steps("", {2: 9.0}) == pytest.approx([10.0 * work + network] * 4)
    for kind in ("fractional", "cyclic", "clustered"):
        assert steps(f"s=1,kind={kind}", {}) == pytest.approx([2.0 * work + network] * 4)
        assert steps(f"s=1,kind={kind}", {2: 9.0}) == pytest.approx([2.0 * work + network] * 4)
    assert steps("s=1,kind=cyclic,pieces=2", {2: 9.0}) == pytest.approx([3.0 * work + network / 2] * 4)
    assert steps("s=1,kind=cyclic", {2: 9.0, 3: 1.0}, 1) == pytest.approx([4.0 * work + network])
    assert steps("s=1,kind=clustered", {1: 9.0, 3: 9.0}) == pytest.approx([2.0 * work + network] * 4)


def test_a_late_replica_goes_on_and_then_takes_the_newest_step() -> None:
    """It is busy with the old one for as long as that takes; a step that it has not begun adds nothing."""
    code = Redundancy(1, "cyclic", 1, 1)
    once_s = np.array([1.0, 1.0, 1.0, 3.5])

    end_s, busy_s = code.close(once_s, FREE)
    assert (end_s, busy_s.tolist()) == (2.0, [0.0, 0.0, 0.0, 5.0])
    end_s, busy_s = code.close(once_s, busy_s)
    assert (end_s, busy_s.tolist()) == (2.0, [0.0, 0.0, 0.0, 3.0])


def test_several_messages_cost_nothing_while_all_are_equal() -> None:
    """A part is there when the first who has it is done; what another had begun it has to finish."""
    code = Redundancy(1, "multi", 1, 2)

    end_s, busy_s = code.close(np.ones(4), FREE)
    assert (end_s, busy_s.tolist()) == (1.0, [0.0] * 4)
    end_s, busy_s = code.close(np.array([1.0, 1.0, 1.0, 9.0]), FREE)
    assert end_s == pytest.approx(2.25)  # replica 2 has waited a quarter before it began the part of replica 3
    assert busy_s.tolist() == pytest.approx([0.0, 0.0, 0.0, 6.75])
    end_s, busy_s = code.close(np.array([1.0, 1.0, 1.0, 1.5]), FREE)
    assert end_s == pytest.approx(1.5)
    assert busy_s.tolist() == pytest.approx([0.75, 0.75, 0.75, 0.0])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("s=1,sort=cyclic", "can't be read at 'sort=cyclic': give s=1,kind=cyclic"),
        ("cyclic", "can't be read at 'cyclic'"),
        ("s=one", "s, pieces and messages are whole numbers"),
        ("s=4", "4 workers can't do without 4 of them"),
        ("s=2,kind=fractional", "that 3 divides, and 4 is none"),
        ("kind=raid", "no gradient code 'raid'"),
    ],
)
def test_a_setting_that_is_no_code_is_refused(text: str, sentence: str) -> None:
    """Before anything begins, by what the replicas are."""
    with pytest.raises(UsageError, match=sentence):
        checked(Settings(ranks=4, ranks_per_node=1, pp=1, coded=text))


def test_defaults_and_spaces() -> None:
    """Nothing but s is needed, and no code is no code."""
    assert read_code(" s = 2 ", 12) == Redundancy(2, "clustered", 1, 1)
    assert read_code("s=3,kind=multi,messages=2", 12) == Redundancy(3, "multi", 1, 2)
    assert read_code("", 12) is None
    assert msgspec.structs.asdict(Settings())["coded"] == ""
