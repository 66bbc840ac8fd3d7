# SPDX-License-Identifier: Apache-2.0
"""What a runner does when Slurm signals the end: who takes a SIGTERM, and how a run ends that was to be requeued."""

import signal
from typing import TYPE_CHECKING, cast

import pytest

from megascale_ops.engines.actuator import EngineError
from megascale_ops.runner.services import saving, time_up
from megascale_ops.runner.services.time_up import TimeUp
from megascale_ops.runner.slurm_step import Step
from megascale_ops.schema.messages import CheckpointView

if TYPE_CHECKING:
    from megascale_ops.link import BlockingLink

STEP = Step(4711, 0, 2, 0, "n1", 1, 0)
JOB = "JobState=RUNNING Reason=None Requeue=1 Restarts={restarts} EndTime=Unknown PreemptTime=None"


class Link:
    """A controller whose job has a checkpoint as soon as it is asked for one."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def ask_checkpoint(self, job: str) -> CheckpointView:
        """Ask."""
        return CheckpointView(job, 10.0, 0.0)

    def checkpoint(self, job: str) -> CheckpointView:
        """Look."""
        return CheckpointView(job, 10.0, 11.0, (0, 1))

    def stop(self, _job: str, reason: str) -> None:
        """End it."""
        self.stopped.append(reason)


class Slurm:
    """Answers scontrol, and writes down what it is told; ``refuses``: it does not requeue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, restarts: int = 0, codes: str = "(null)") -> None:
        self.given: list[tuple[str, ...]] = []
        self.refuses = False
        self.texts = {"config": f"RequeueExit = {codes}\n", "job": JOB.format(restarts=restarts)}
        monkeypatch.setattr(time_up, "ask", self)
        monkeypatch.setattr(saving, "_LOOK_S", 0.0)

    def __call__(self, *words: str) -> str:
        """Run one."""
        self.given.append(words)
        if words[1] == "requeue":
            if self.refuses:
                raise EngineError("scontrol: Requested operation is presently disabled")
            return ""
        return self.texts["config" if "config" in words else "job"]

    @property
    def requeued(self) -> list[str]:
        """The jobs that were to be requeued."""
        return [words[2] for words in self.given if words[1] == "requeue"]


def _leave(_outcome: str, _reason: str) -> None:
    """Report nothing: the whole job ends."""


def _signalled(step: Step = STEP, environ: dict[str, str] | None = None) -> tuple[TimeUp, Link]:
    """A runner that has heard SIGUSR1 and done what follows."""
    link = Link()
    runner = TimeUp(step, 3, environ or {})
    runner.watch("train-4711", cast("BlockingLink", link), _leave)
    runner.hear(signal.SIGUSR1)
    thread = runner._thread
    assert thread is not None
    thread.join(60.0)
    runner.outcome = "stopped"
    runner.close()
    return runner, link


def test_a_job_that_was_saved_is_requeued_last_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is asked of the controller, which tells every runner; of a heterogeneous job the whole is requeued."""
    slurm = Slurm(monkeypatch)

    runner, link = _signalled(environ={"SLURM_HET_JOB_ID": "4710"})
    before = slurm.requeued
    code = runner.end(0)

    assert before == []
    assert slurm.requeued == ["4710"]
    assert code == 128 + signal.SIGUSR1
    assert "back into the queue (requeue 1 of 3)" in link.stopped[0]


def test_only_the_first_node_asks_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand others would bring slurmctld down."""
    slurm = Slurm(monkeypatch)

    runner, link = _signalled(STEP._replace(node=1))

    assert runner.end(0) == 0
    assert slurm.given == []
    assert link.stopped == []


def test_a_spent_budget_ends_the_job_with_the_signals_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves all the same."""
    slurm = Slurm(monkeypatch, restarts=3)

    runner, link = _signalled()

    assert runner.end(0) == 128 + signal.SIGUSR1
    assert slurm.requeued == []
    assert "which is its budget" in link.stopped[0]


@pytest.mark.parametrize(("codes", "code"), [("75,80-82", 75), ("(null)", 128 + signal.SIGUSR1)])
def test_where_slurm_does_not_requeue_by_command_the_exit_code_may(
    monkeypatch: pytest.MonkeyPatch, codes: str, code: int
) -> None:
    """The first of RequeueExit, if slurm.conf names one."""
    slurm = Slurm(monkeypatch, codes=codes)
    slurm.refuses = True

    runner, _ = _signalled()

    assert runner.end(0) == code


def test_a_script_that_ends_well_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a signal came."""
    slurm = Slurm(monkeypatch)
    runner, _ = _signalled()
    runner.outcome = "succeeded"

    assert runner.end(0) == 0
    assert slurm.requeued == []


def test_a_second_sigterm_stops_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one may come twice, from srun and from slurmd; a later one means it."""
    now_s = [100.0]
    monkeypatch.setattr(time_up.time, "monotonic", lambda: now_s[0])
    runner = TimeUp(STEP, 3, {})
    before = runner.takes_sigterm()
    runner.watch("train-4711", cast("BlockingLink", Link()), _leave)

    taken = [runner.takes_sigterm()]
    for passed_s in (0.5, 2.5):
        now_s[0] = 100.0 + passed_s
        taken.append(runner.takes_sigterm())

    assert not before
    assert taken == [True, True, False]


def test_a_signal_before_any_rank_ran_is_seen_to_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm warns once: what came while the controller was coming up ends and requeues the job all the same."""
    slurm, link = Slurm(monkeypatch), Link()
    runner = TimeUp(STEP, 3, {})
    runner.hear(signal.SIGUSR1)
    before = runner._thread

    runner.watch("train-4711", cast("BlockingLink", link), _leave)
    thread = runner._thread
    assert thread is not None
    thread.join(60.0)
    runner.outcome = "stopped"
    runner.close()
    code = runner.end(0)

    assert before is None
    assert (code, slurm.requeued) == (128 + signal.SIGUSR1, ["4711"])


def test_without_a_signal_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a run that begins has heard nothing."""
    slurm, link = Slurm(monkeypatch), Link()
    runner = TimeUp(STEP, 3, {})

    runner.watch("train-4711", cast("BlockingLink", link), _leave)

    assert runner._thread is None
    assert (runner.end(0), slurm.given, link.stopped) == (0, [], [])
