# SPDX-License-Identifier: Apache-2.0
"""Whole runs of small clusters: the real controller meets faults that are known, and health that is legitimate."""

from unittest.mock import patch

import msgspec
import pytest

from megascale_ops.controller import going_on
from megascale_ops.diagnosis.stragglers.step_table import LARGE
from megascale_ops.errors import UsageError
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.sim import world
from megascale_ops.sim.faults import read_faults
from megascale_ops.sim.kinds import KINDS
from megascale_ops.sim.laws import DAY_S
from megascale_ops.sim.report import Report
from megascale_ops.sim.settings import Settings
from megascale_ops.sim.simulate import compare, simulate
from tests.matrix import wide

# Seven minutes of 16 ranks with steps of 2 s take half a second of CPU; absentees get one minute, not nine.
SMALL = Settings(
    ranks=16,
    ranks_per_node=4,
    pp=1,
    hours=0.12,
    seed=1,
    faults=(),
    step_s=2.0,
    checkpoint_every_s=60.0,
    checkpoint_write_s=5.0,
    start_s=10.0,
    load_s=5.0,
    policy=JobPolicy(absent_patience_s=60.0),
)


def run(*faults: str, **changes: object) -> Report:
    """Simulate the small cluster."""
    return simulate(msgspec.structs.replace(SMALL, **changes), read_faults(faults))


def test_without_faults_nothing_is_lost_but_the_start_and_the_stalls_of_checkpoints() -> None:
    """No incident, no restart; the ledger's ratio is one minus the start and the checkpoints, and so says the truth."""
    found = run()

    assert (found.state, found.incidents, found.restarts, found.refused) == ("running", (), 0, ())
    spent = {row: seconds for row, seconds in found.rows.items() if seconds}
    assert spent.keys() <= {"train", "straggle", "checkpoint", "start"}
    assert spent.get("straggle", 0.0) < 0.03 * sum(spent.values())
    assert spent["checkpoint"] == pytest.approx(6 * SMALL.checkpoint_stall_s, abs=0.1)
    whole_s = sum(spent.values())
    lost_s = spent["start"] + spent["checkpoint"] + spent.get("straggle", 0.0)
    assert found.ratio == pytest.approx(1.0 - lost_s / whole_s, abs=1e-3)
    assert found.effective == pytest.approx(found.true_effective, abs=0.01)  # it ends with the last whole step


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_each_kind_is_named_with_its_class_and_its_culprit(kind: str) -> None:
    """One incident, about that fault, that names it; and the job trains again where it was stopped."""
    found = run(f"{kind}@0.03:0.4", hours=0.09)  # the slowest recovery, behind a GPU that hangs, is over after 0.075

    assert [fault.kind for fault in found.faults] == [kind]
    assert all(fault.is_right for fault in found.faults), found.incidents
    assert {incident.about for incident in found.incidents} == {0}
    assert found.precision == found.recall == 1.0
    assert found.state in ("running", "degraded", "catching_up")
    assert found.effective == pytest.approx(found.true_effective, abs=0.03)


@pytest.mark.parametrize(
    "legitimate",
    [
        {"evaluate_every_s": 100.0, "evaluate_s": 60.0},
        {"first_step_s": 120.0},
        {"noise": 0.05, "uneven": 0.0},
        {"checkpoint_stall_s": 30.0},
        {"start_s": 120.0},
    ],
    ids=["evaluation", "slow first step", "noise", "long save", "slow start"],
)
def test_what_is_legitimate_is_no_incident(legitimate: dict[str, float]) -> None:
    """A declared evaluation, a compilation, noise, a long save, a slow start: nobody is accused, nothing is stopped."""
    found = run(**legitimate)

    assert (found.incidents, found.restarts, found.state) == ((), 0, "running")
    assert found.steps > 40


def test_the_ledger_counts_no_step_twice_where_faults_follow_each_other() -> None:
    """Two faults come before training is where it had been: the ledger's share is that of the steps that are left."""
    found = run(
        *("segfault@0.07:0.2", "killed@0.09:0.4", "gpu_error@0.11:0.7"), hours=0.2, checkpoint_every_s=300.0, seed=1
    )

    assert found.restarts == 3
    assert found.rows["recompute"] > 300.0
    assert found.effective == pytest.approx(found.true_effective, abs=0.015)


def test_the_same_seed_gives_the_same_bytes() -> None:
    """Two runs of one seed are equal to the byte, faults drawn from a law included; another seed gives another run."""
    law = {"faults": ("fail-slow", "llama3"), "hours": 0.06}

    first, again, other = (
        msgspec.json.encode(run("segfault@0.02", "hang@0.035", seed=seed, **law)) for seed in (5, 5, 6)
    )

    assert first == again
    assert first != other


def test_heartbeats_that_are_left_out_change_no_verdict() -> None:
    """With one heartbeat a second throughout, the same faults get the same verdicts, within a second or so."""
    faults = ("network_error@0.03:0.4", "host_lost@0.1:0.7")

    usual, every = run(*faults, hours=0.16), run(*faults, hours=0.16, every_heartbeat=True)

    assert [one.fault for one in usual.incidents] == ["nccl_error", "node_lost"]
    assert every.heartbeats > 1.3 * usual.heartbeats
    assert [(one.fault, one.culprits, one.nodes) for one in every.incidents] == [
        (one.fault, one.culprits, one.nodes) for one in usual.incidents
    ]
    assert every.effective == pytest.approx(usual.effective, abs=5e-3)


def test_a_machine_that_is_bad_is_measured_and_kept_out() -> None:
    """The next round has a spare in its place; without a spare the job waits, and the ledger calls that idle."""
    with_spare = run("gpu_error@0.03:0.4", spares=1)
    without = run("gpu_error@0.03:0.4", spares=0)

    assert with_spare.rows["idle"] == 0.0
    assert with_spare.state in ("running", "catching_up")
    assert len(with_spare.faults) == 1
    assert without.rows["idle"] > 100.0 or len(without.faults) > 1


def test_a_rank_that_stays_slow_is_followed_over_a_restart_that_numbers_it_anew() -> None:
    """The node before it breaks, a spare comes last: the next round's verdict names the same GPU by its new rank."""
    policy = JobPolicy(absent_patience_s=60.0, actions={"straggler": "warn"})
    found = run("slow@0.03:0.6", "gpu_error@0.08:0.1", spares=1, hours=0.2, policy=policy)

    slow = [one for one in found.incidents if one.fault == "straggler"]
    assert [one.culprits for one in slow] == [(9,), (5,)]
    assert {one.nodes for one in slow} == {("node-00002",)}
    assert [one.is_right for one in found.incidents] == [True, True, True]


@pytest.mark.matrix
def test_what_another_policy_would_have_cost_is_told() -> None:
    """Asleep in its backward pass a rank is waited for 64 s, whatever an absentee gets; with 240 s, 176 s longer."""
    settings = msgspec.structs.replace(SMALL, policy=JobPolicy())

    answer = compare(settings, read_faults(["hang@0.03:0.4"]), ["absent_patience_s=300", "stuck_patience_s=240"])

    absent, stuck = answer.choices
    assert (absent.setting, stuck.setting) == ("absent_patience_s=300", "stuck_patience_s=240")
    assert absent.saved_s == 0.0
    assert stuck.saved_s == pytest.approx(-176.0, abs=15.0)


def test_a_slow_rank_is_let_go_once_the_checkpoint_is_written_and_not_while_it_is() -> None:
    """At the cheapest moment of all: what is made again is what was made since, not all since the one before."""
    policy = JobPolicy(absent_patience_s=60.0, restart_price_s=1.0)
    saves = {"checkpoint_every_s": 150.0, "checkpoint_write_s": 50.0}

    found = run("slow@0.04:0.4", hours=0.18, spares=1, policy=policy, **saves)

    assert (found.restarts, found.evictions) == (1, 1)
    assert 40.0 < found.rows["recompute"] < 90.0


def test_faults_that_come_while_the_job_starts_wait_until_it_trains() -> None:
    """A fault in the first seconds hits a rank that makes steps."""
    found = run("segfault@0.0001")

    assert found.faults[0].at_s > SMALL.start_s
    assert found.faults[0].is_right


def test_a_loss_that_is_lost_in_a_step_that_never_ends_comes_again() -> None:
    """A rank dies in the same step: no step shows the loss, and nobody can name it; after the restart it is named."""
    found = run("nan@0.0301:0.2", "segfault@0.0302:0.7", hours=0.12)

    assert [fault.kind for fault in found.faults] == ["segfault", "nan"]
    assert [fault.is_right for fault in found.faults] == [True, True]
    assert found.faults[1].at_s > found.faults[0].at_s + 10.0


def test_a_fault_after_the_end_is_refused() -> None:
    """It would be left out without a word."""
    with pytest.raises(UsageError, match="would come after the end"):
        run("hang@0.25")


def test_a_day_of_faults_is_about_as_many_as_were_counted() -> None:
    """Over many seeds the laws give the number of faults that their sources count, within 10 %."""
    import numpy as np

    from megascale_ops.sim.faults import draw
    from megascale_ops.sim.laws import LAWS

    days = 100
    for name, law in LAWS.items():
        settings = Settings(ranks=98_304, hours=24.0, faults=(name,))
        drawn = [fault for seed in range(days) for fault in draw(settings, np.random.default_rng(seed))]
        expected = law.events_a_day(98_304, 8)
        assert len(drawn) / days == pytest.approx(expected, rel=0.1), name
        assert all(0 <= fault.at_s <= DAY_S for fault in drawn)


@pytest.mark.parametrize(
    ("named", "ranks", "pp", "hours"),
    wide(
        [
            pytest.param(("slow@0.04:0.7", "segfault@0.08:0.3"), LARGE, 1, 0.105, id="go on"),
            pytest.param(("hang@0.03:0.3",), 128, 1, 0.065, id="stand"),
            pytest.param(("gpu_hang@0.03:0.3",), 128, 1, 0.065, id="GPU"),
            pytest.param(("network_hang@0.03:0.3",), 128, 2, 0.065, id="network"),
        ],
        keep=["go on", "stand"],
    ),
)
def test_heartbeats_handed_in_together_are_those_that_were_sent(
    monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...], ranks: int, pp: int, hours: float
) -> None:
    """Hundreds of ranks, of which one is slow and one dies, or one hangs: the report is the same both ways."""
    # Of fewer than 1,024 ranks none would be: both runs would be one and the same.
    monkeypatch.setattr(world, "LEAST_COLUMNS", ranks)
    monkeypatch.setattr(going_on, "LARGE", ranks)
    large = msgspec.structs.replace(
        SMALL, ranks=ranks, ranks_per_node=ranks // 16, tp=8, pp=pp, hours=hours, start_s=5.0
    )
    faults = read_faults(named)

    with patch.object(world.World, "_say", autospec=True, side_effect=world.World._say) as said:
        together = simulate(large, faults)
        alone = said.call_count
        each = simulate(msgspec.structs.replace(large, columns=False), faults)

    assert msgspec.json.encode(together) == msgspec.json.encode(each)
    assert {fault.is_right for fault in together.faults} == {True}
    assert said.call_count - alone == each.heartbeats > 1500
    assert alone < 0.25 * together.heartbeats  # the control: most of them were handed in together


def test_a_run_that_has_no_time_left_tells_how_far_it_came() -> None:
    """It ends after a whole minute, and counts what happened until then."""
    minutes = iter(range(100))

    found = simulate(SMALL, read_faults(("segfault@0.11:0.4",)), ends_early=lambda: next(minutes) == 3)

    assert (found.hours, found.wall_s) == (pytest.approx(4 / 60, abs=2e-3), pytest.approx(240.0, abs=1.0))
    assert found.faults == ()
    assert 0.5 < found.true_effective < 1.0
