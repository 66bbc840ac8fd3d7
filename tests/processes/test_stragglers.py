# SPDX-License-Identifier: Apache-2.0
"""Real runs of four ranks, one of them slow: it is named with its cause, and a victim never is.

Work is sleeping, so that four ranks on two cores do not slow each other down. DDP waits in C++ inside the backward
pass; the script has no line of ours.
"""

import re
from pathlib import Path

import pytest

from megascale_ops.chaos.outside import starve
from megascale_ops.schema.events import Incident
from tests.processes.launch import Launch, until

pytestmark = pytest.mark.processes
# What one rank does 20 % slower than its equals must not drown in what many others do on these cores.
calm = pytest.mark.calm

PACED = Path(__file__).parents[1] / "fixtures" / "scripts" / "paced.py"
SLOW_FROM = 60


def run(launch: Launch, *options: str) -> list[Incident]:
    """Run the paced script to its end, and return the warnings about stragglers."""
    started = launch.spawn("run", "--nproc-per-node=4", "--job=toy", "--", str(PACED), *options)
    assert launch.finish(started) == 0, launch.output()
    return [
        incident
        for incident in launch.incidents()
        if incident.verdict is not None and incident.verdict.fault in ("straggler", "loss_nan", "loss_spike")
    ]


@pytest.mark.alone  # where others want these cores, a slow rank may be told as starved
@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("forward", "host"),
        pytest.param("backward", "host", marks=pytest.mark.matrix),
        pytest.param("data", "input", marks=pytest.mark.matrix),
        pytest.param("other", "launch", marks=pytest.mark.matrix),
        pytest.param("gc", "gc", marks=pytest.mark.matrix),
        pytest.param("spin", "compute", marks=pytest.mark.matrix),
    ],
)
def test_a_rank_that_is_20_percent_slower_is_named(launch: Launch, part: str, cause: str) -> None:
    """In whatever part: rank 2 and no other, within 20 steps, with the cause and a cost near to a sixth of a step."""
    found = run(launch, f"--slow={part}", f"--at={SLOW_FROM}", "--steps=160")

    assert found, launch.output()
    assert {incident.verdict.culprits for incident in found if incident.verdict} == {(2,)}
    first = found[0]
    assert first.verdict is not None
    assert first.verdict.cause == cause, first.verdict
    assert first.step_before - SLOW_FROM <= 20, first
    # A collection of the garbage of torch takes longer than the 20 % that were requested.
    assert 0.05 < first.verdict.cost < (0.9 if part == "gc" else 0.35)
    assert first.state == "over"  # the job's end ends it


@calm
def test_a_clean_run_names_nobody(launch: Launch) -> None:
    """250 steps of four equal ranks: ten times as many as a slow one is named after."""
    assert run(launch, "--steps=250") == []


@pytest.mark.alone  # one of equals starves for what the test itself does on its core
def test_a_rank_whose_core_others_use_is_told_as_starved_with_the_load_of_its_node(launch: Launch) -> None:
    """Never as a straggler of its own making, which a rank that is slow by itself is (the rows above).

    The kernel's count comes once a second, up to three after the steps: till then it is "starved of it, or asleep".
    """
    run_on = ("--burn=0.1", "--steps=1000000")
    started = launch.spawn("run", "--nproc-per-node=4", "--job=toy", "--", str(PACED), *run_on)
    launch.until_step(SLOW_FROM)
    seen: dict[tuple[int, ...], set[str]] = {}

    def starved() -> str:
        told = [one.verdict for one in warned(launch) if one.verdict is not None]
        for verdict in told:
            seen.setdefault(verdict.culprits, set()).add(verdict.cause)
        return next((verdict.reason for verdict in told if verdict.cause == "starved"), "")

    stop = starve(launch.pid(2), launch.env)
    try:
        reason = until(starved, f"rank 2 to be told as starved; so far: {seen}\n{launch.output()}")
    finally:
        stop()

    assert seen.keys() == {(2,)}
    assert seen[2,] <= {"host", "starved"}
    assert re.search(r"starved by other processes \(.+ has a load of [\d.]+ on \d+ cores\)", reason), reason
    assert started.poll() is None


@pytest.mark.matrix
def test_a_loss_that_is_no_number_is_told_and_stops_nothing(launch: Launch) -> None:
    """Without a line of ours in the script; the run goes on to its end."""
    (found,) = run(launch, "--steps=120", "--nan-at=60")

    assert found.verdict is not None
    assert (found.verdict.fault, found.verdict.since_step) == ("loss_nan", 60)


def warned(launch: Launch) -> list[Incident]:
    """Return the warnings about stragglers so far, as the run's own controller knows them."""
    with launch.link() as link:
        whole = [link.incident(one.id) for one in link.incidents("toy").incidents]
    return [one for one in whole if one.verdict is not None and one.verdict.fault == "straggler"]


def set_share(launch: Launch, share: float) -> None:
    """Change from which excess on a slow rank is worth a name, as a user does while the job trains."""
    done = launch.command("policy", "set", "toy", f"straggler_share={share}", f"--run-dir={launch.run_dir()}")
    assert done.returncode == 0, done.stderr


@calm
def test_what_a_slow_rank_is_worth_can_be_changed_while_the_run_lives(launch: Launch) -> None:
    """10 % slow for good: nobody is named at 20 %, it is at 2 %, its name ends at 40 %; nothing is ever stopped."""
    slow = ("--slow=forward", "--share=0.1", f"--at={SLOW_FROM}", "--steps=1000000")
    started = launch.spawn(
        *("run", "--nproc-per-node=4", "--job=toy", "--policy=straggler_share=0.2", "--", str(PACED)), *slow
    )

    # The negative control: 140 slow steps, where at 2 % a hundred suffice for half of that slowness.
    launch.until_step(SLOW_FROM + 140)
    at_20 = warned(launch)
    set_share(launch, 0.02)
    (named,) = until(lambda: warned(launch), f"rank 2 to be named at 2 %; so far:\n{launch.output()}")
    set_share(launch, 0.4)
    (well,) = until(
        lambda: [one for one in warned(launch) if one.state == "over"], "its name to be taken back at 40 %, still slow"
    )
    launch.until_more_steps(60)
    at_40 = warned(launch)
    status = launch.status()

    assert at_20 == []
    assert named.verdict is not None
    assert (named.state, named.verdict.culprits) == ("watching", (2,))
    assert well.id == named.id
    assert [one.id for one in at_40] == [named.id]
    assert status is not None
    assert (status.state, status.round) == ("running", 1)
    assert started.poll() is None
