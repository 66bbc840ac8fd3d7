# SPDX-License-Identifier: Apache-2.0
"""Coded stochastic ADMM: agents agree on the least squares solution, coded or not; and the tally of who was late."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from megascale_ops.coded import Agent, Combined, Gathered, GradientCode
from megascale_ops.coded.tally import FILE, Record, Tally
from megascale_ops.errors import UsageError

AGENTS, EDGES, FEATURES, COUNT = 4, 3, 3, 40


def data() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return samples and labels by agent and partition."""
    chance = np.random.default_rng(5)
    truth = chance.standard_normal(FEATURES)
    made = []
    for _ in range(AGENTS):
        parts = [chance.standard_normal((COUNT, FEATURES)) for _ in range(EDGES)]
        made.append([(part, part @ truth + 0.1 * chance.standard_normal(COUNT)) for part in parts])
    return made


def rounds(code: GradientCode | None, turns: int, batch: int = 0) -> np.ndarray:
    """Return the token after so many turns; with a code one edge worker, another each turn, never answers."""
    samples = data()
    agents = [Agent(FEATURES, AGENTS, decays=bool(batch)) for _ in range(AGENTS)]
    token = np.zeros(FEATURES)
    for turn in range(turns):
        agent, parts = agents[turn % AGENTS], samples[turn % AGENTS]
        where = (turn * batch + np.arange(batch)) % COUNT if batch else np.arange(COUNT)
        gradients = np.array([part[where].T @ (part[where] @ agent.x - labels[where]) for part, labels in parts])
        if code is None:
            total = gradients.sum(axis=0)
        else:
            arrived = {
                (edge, 0): code.encode(edge, {one: gradients[one] for one in code.partitions_of(edge)})
                for edge in range(EDGES)
                if edge != turn % EDGES
            }
            total = code.combine(arrived, FEATURES).vector
        token = agent.turn(turn + 1, token, total / (EDGES * len(where)))
    return token


def solution() -> np.ndarray:
    """Return the minimum of the sum of all costs."""
    parts = [part for agent in data() for part in agent]
    found: np.ndarray = np.linalg.lstsq(
        np.vstack([part for part, _ in parts]), np.concatenate([labels for _, labels in parts]), rcond=None
    )[0]
    return found


def test_agents_agree_on_the_solution_and_a_straggler_changes_nothing() -> None:
    """With whole gradients the token gets there; without one edge worker in each turn it takes the same way."""
    plain = rounds(None, 800)

    assert np.linalg.norm(plain - solution()) < 1e-6
    assert np.abs(rounds(GradientCode(EDGES, 1, "cyclic"), 800) - plain).max() < 1e-12


def test_mini_batches_come_near_and_nearer() -> None:
    """Stochastic gradients: a hundred times as many turns leave a smaller error, by less than a hundredth of 1/sqrt."""
    early, late = (np.linalg.norm(rounds(None, turns, batch=4) - solution()) for turns in (40, 4000))

    assert late < early / 3
    assert late < 0.05


@pytest.mark.parametrize("wrong", [{"rho": 0.0}, {"c_tau": -1.0}, {"c_gamma": float("nan")}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    """In one sentence with all three."""
    with pytest.raises(UsageError, match="must be positive numbers"):
        Agent(3, 2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="0 agents with 3 numbers"):
        Agent(3, 0)


def gathered(*late: int, is_exact: bool = True, behind: float = 0.0) -> Gathered:
    """Return a step that closed without some workers; ``behind``: worker 1's late answer came."""
    combined = Combined(np.zeros(1), is_exact, 0.0 if is_exact else 0.3, late, 1.0)
    return Gathered(combined, 0.5, late, (), {1: behind} if behind else {})


def test_a_worker_is_told_when_it_stays_late_and_when_it_is_back(tmp_path: Path) -> None:
    """Once each; whoever is last by chance is not told, and counts stand in the record."""
    tally = Tally("cyclic", 4, 1, 2)
    told = []
    for step in range(60):
        late = (1,) if 10 <= step < 30 else (step % 4,)
        told += tally.note(step, gathered(*late, behind=0.25 if step == 30 else 0.0))
    tally.write(tmp_path)

    record = msgspec.json.decode((tmp_path / FILE).read_bytes(), type=Record)
    assert [line.split(": ", 1)[1] for line in told] == [
        "step 16: 8 of the last 10 without worker 1",
        "step 39: worker 1 is back in time",
    ]
    assert record.by_worker[1].late == 20 + 10
    assert (record.by_worker[1].came_late, record.by_worker[1].behind_s) == (1, 0.25)
    assert (record.steps, record.took_s, record.approximate_steps) == (60, 30.0, 0)


def test_an_approximate_step_is_told_with_how_far_it_is_off() -> None:
    """Each one: it is no sum of all partitions."""
    tally = Tally("cyclic", 4, 1, 2)

    assert tally.note(7, gathered(1, 2, is_exact=False)) == [
        "coded: step 7 is approximate, off by 30.0%: without workers 1, 2"
    ]
    assert tally.record.approximate_steps == 1
