# SPDX-License-Identifier: Apache-2.0
"""The matrix is whole, says what is right in words that exist, and every row can be injected."""

import pytest

from megascale_ops.chaos.faults import BY_NAME, KINDS, MATRIX, Fault, chosen
from megascale_ops.chaos.outside import INJECTORS
from megascale_ops.schema.fault_classes import FAULTS

NEGATIVE = {
    "eval_declared",
    "eval_undeclared",
    "eval_one_undeclared",
    "first_step_minute",
    "recompilation",
    "checkpoint_slow",
    "slow_step_once",
    "idle_before_start",
    "end_apart",
    "debugger_attached",
    "steps_alternate",
    "lengths_uneven",
    "tile_late",
}
LISTED = {
    "fail_stop": "exception_one exception_all exception_startup exception_thread sigkill sigterm segfault abort "
    "out_of_memory tile_given_up exit_early exit_silent own_connection loader_killed node_killed",
    "hang": "sigstop stuck_loop gil_held sleep_syscall lock_twice pipe_unfed http_unanswered child_stopped loader_hung "
    "storage_hung kernel_endless collective_skipped collectives_swapped shapes_differ types_differ sizes_differ "
    "saves_alone group_not_created rendezvous_never gather_never_sent scatter_never_sent stopped_in_kernel",
    "fail_slow": "compute_5 compute_20 compute_100 cpu_starved gc_storm data_slow launch_late drift slow_one_in_fifty "
    "slow_link",
    "data": "loss_nan loss_spike",
    "checkpoint": "checkpoint_torn checkpoint_flipped checkpoint_missing checkpoint_stale disk_full",
    "control": "agent_killed controller_killed runner_killed partition_controller partition_ranks duplicate_rank",
}


def test_names_are_unique() -> None:
    """A name means one row."""
    assert len(BY_NAME) == len(MATRIX)


@pytest.mark.parametrize("kind", LISTED)
def test_every_fault_is_there(kind: str) -> None:
    """No fault of this kind is missing, and none has slipped into another kind."""
    assert {row.name for row in MATRIX if row.kind == kind} == set(LISTED[kind].split())


def test_every_negative_control_is_there() -> None:
    """Whatever is slow, idle or odd, but not broken, has a row after which nothing may happen."""
    rows = {row.name: row for row in MATRIX if row.kind == "negative"}

    assert rows.keys() >= NEGATIVE
    assert all(row.quiet and not row.acted and row.who == "nobody" for row in rows.values())


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.name)
def test_a_row_speaks_the_vocabulary(row: Fault) -> None:
    """Its classes are classes of verdicts, its kind is a kind, and there is a culprit where it has classes."""
    assert set(row.classes) <= FAULTS.keys()
    assert row.kind in KINDS
    assert (row.who == "nobody") is row.quiet


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.name)
def test_a_row_can_be_injected(row: Fault) -> None:
    """A fault from outside has its injector; one from inside has none, for the workload suffers it."""
    assert (row.name in INJECTORS) is not row.inside


@pytest.mark.parametrize("row", [row for row in MATRIX if row.quiet], ids=lambda row: row.name)
def test_a_quiet_row_ends_by_itself(row: Fault) -> None:
    """Where nothing may happen, the end of the job ends the trial."""
    assert row.steps < 1000


def test_the_truth_names_the_chosen_rank() -> None:
    """The culprits follow the rank that was chosen; a node's are its ranks; none is an answer too."""
    assert BY_NAME["gil_held"].culprits(2, 4) == (2,)
    assert BY_NAME["exception_all"].culprits(2, 4) == (0, 1, 2, 3)
    assert BY_NAME["node_killed"].culprits(2, 4) == (2, 3)
    assert BY_NAME["eval_declared"].culprits(2, 4) == ()
    assert BY_NAME["loss_nan"].culprits(2, 4) is None


def test_what_takes_minutes_is_run_only_when_asked_for() -> None:
    """Kinds select rows; long rows wait for --long."""
    assert "drift" not in {row.name for row in chosen((), long=False)}
    assert "drift" in {row.name for row in chosen(["fail_slow"], long=True)}
    assert {row.kind for row in chosen(["data"], long=False)} == {"data"}
