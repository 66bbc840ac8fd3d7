# SPDX-License-Identifier: Apache-2.0
"""What a run says when it begins and when it ends: how, how far it came, and where to read on."""

from types import SimpleNamespace
from typing import Any

import pytest

from megascale_ops.runner.main import say_where
from megascale_ops.runner.summary import say_summary, summary
from megascale_ops.schema.events import JobStatus


def ended(state: str, reason: str, **more: object) -> JobStatus:
    """Return what a controller tells of a job that is over."""
    facts = {"step": -1, "step_p50_s": 0.0, "restarts": 0, "since_wall_s": 0.0, "nodes": (), "ranks": (), **more}
    return JobStatus(job="gpt", state=state, round=1, world_size=2, reason=reason, **facts)  # type: ignore[arg-type]


def test_a_good_end_is_told_with_its_numbers() -> None:
    """Steps, wall time, the share of training, and the command for the rest."""
    known = ended("finished", "every rank ended normally", step=2374, restarts=1, incidents=2, goodput=0.874)

    said = summary(known, "gpt", 3725.0, "/runs/gpt", "--job gpt")

    assert said == (
        "job gpt: every rank ended normally; step 2,374, 1 h 2 min, 87.4 % of it training, "
        "1 restart, 2 incidents; run folder /runs/gpt; `megascale-ops why --job gpt` explains the last incident, "
        "`megascale-ops report --job gpt` shows where the time went"
    )


@pytest.mark.parametrize(("numbered", "restarts", "told"), [(True, 1, False), (False, 0, False), (False, 1, True)])
def test_steps_that_are_counted_anew_in_each_round_are_told_as_such(numbered: bool, restarts: int, told: bool) -> None:
    """A script that numbers its steps, or that ran once, has one count."""
    known = ended("finished", "every rank ended normally", step=34, restarts=restarts, is_numbered=numbered)

    said = summary(known, "gpt", 8.0, "/runs/gpt", "--job gpt")

    assert ("step 34 (counted from 0 in each round), " in said) == told
    assert ("step 34, " in said) != told


def test_an_end_by_hand_is_no_success() -> None:
    """Ctrl-C at a step is told as that."""
    said = summary(ended("stopped", "stopped by hand on vm", step=-1), "gpt", 8.0, "/runs/gpt", "--job gpt")

    assert said.startswith("job gpt: stopped by hand on vm; no step, ")
    assert "why" not in said


def test_a_failure_says_so_and_foreign_words_stay_harmless() -> None:
    """A rank's last words may carry a terminal's escape codes."""
    said = summary(ended("failed", "rank 1: \x1b[2Jboom", incidents=1), "gpt", 8.0, "/runs/gpt", "--job gpt")

    assert said.startswith("job gpt: failed: rank 1: ")
    assert "\x1b" not in said


def test_a_runner_whose_job_goes_on_without_it_tells_its_own_reason() -> None:
    """The job's is about the others."""
    said = summary(ended("running", ""), "gpt", 8.0, "/runs/gpt", "--job gpt", "node a is served by another runner now")

    assert said.startswith("job gpt: failed: node a is served by another runner now; ")


def test_a_controller_that_is_away_keeps_no_run_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    """What the runner knows by itself is said all the same."""
    caplog.set_level("INFO")

    say_summary("http://127.0.0.1:9", None, "gpt", 8.0, "/runs/gpt", "--job gpt")

    assert "job gpt: ended; 8" in caplog.text
    assert "/runs/gpt" in caplog.text


@pytest.mark.parametrize(("failure", "level"), [("rank 1 was killed", "ERROR"), ("", "INFO")])
def test_a_failure_is_one_line_and_an_error(failure: str, level: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its reason is told there where the controller is away, too; any other end is no error."""
    caplog.set_level("INFO")

    say_summary("http://127.0.0.1:9", None, "gpt", 8.0, "/runs/gpt", "--job gpt", failure)

    assert [one.levelname for one in caplog.records] == [level]
    assert caplog.records[0].getMessage().startswith(f"job gpt: {f'failed: {failure}' if failure else 'ended'}; 8")


def test_the_reason_of_a_failure_is_told_once() -> None:
    """Where the controller tells it, what this runner heard of it is not told beside that."""
    known = ended("failed", "rank 1 was killed")

    assert summary(known, "gpt", 8.0, "/runs/gpt", "--job gpt", "rank 1 was killed").count("was killed") == 1


def test_the_first_line_tells_the_options_once(caplog: pytest.LogCaptureFixture) -> None:
    """A name that was made of script and time is long."""
    caplog.set_level("INFO")
    config: Any = SimpleNamespace(wrap=False, hosts="", run_dir="", token_file="")
    plan: Any = SimpleNamespace(nproc=2, job="gpt", node="vm", run_dir="/runs/gpt", program="train.py")

    say_where(config, plan, "http://vm:9", is_own=True)

    looks = "`megascale-ops status --job gpt` shows it, as do `top` and `page`"
    assert caplog.messages == [f"job gpt: 2 ranks on node vm, run folder /runs/gpt; {looks}"]
