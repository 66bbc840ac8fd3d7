# SPDX-License-Identifier: Apache-2.0
"""``run --hosts FILE``: two machines by ssh alone, the real sshd on two addresses of the loopback."""

import os
import signal
import stat
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.fakes.sshd import Sshd
from tests.processes.launch import ENDLESS, LOCKSTEP, Launch, until
from tests.processes.warmed import stand_in

pytestmark = pytest.mark.processes


@pytest.fixture
def sshd(launch: Launch) -> Iterator[Sshd]:
    """Two machines that let this user in, and some that do not."""
    with Sshd(launch.tmp_path / "ssh", launch.state) as daemon:
        yield daemon


def hostfile(launch: Launch, *lines: str) -> str:
    """Write the file; return its path."""
    path = launch.tmp_path / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def options(launch: Launch, sshd: Sshd, *lines: str) -> tuple[str, ...]:
    """Return the begin of the line of a run on these hosts."""
    return "run", "--job=toy", f"--hosts={hostfile(launch, *lines)}", f"--ssh={sshd.ssh}"


def warm_there(launch: Launch) -> str:
    """Return the option that has the run on each host forked; as programs they start in `test_two_machines`."""
    python = launch.tmp_path / "python"
    ours = f'[ "$1 $2" = "-m megascale_ops.cli.main" ] && shift 2 && exec {stand_in()} "$@"'
    python.write_text(f'#!/bin/sh\n{ours}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return f"--remote-python={python}"


def test_two_machines_train_as_one_job_and_a_killed_rank_is_named(launch: Launch, sshd: Sshd) -> None:
    """Nothing is done by hand on either; the ranks are those of the slots, and what `status` needs lies here."""
    run = launch.spawn(
        *options(launch, sshd, "node-a slots=1", "node-b slots=2"), warm_there(launch), "--", str(LOCKSTEP),
        "--fault=sigkill", "--rank=2",
    )  # fmt: skip

    assert launch.finish(run) == 0, launch.output()

    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (2,))
    assert incident.state == "recovered"
    assert "a host whose connection ends is lost to the job until ssh reaches it again" in launch.output()
    assert sorted(path.name for path in (launch.run_dir() / "logs").iterdir()) == ["node-a", "node-b"]
    assert "token" not in launch.output()
    launch.assert_nothing_left()


def test_what_ends_the_launcher_ends_all(launch: Launch, sshd: Sshd) -> None:
    """A SIGKILL, of which it can tell nobody: the hosts see their stdin end, and leave nothing behind."""
    run = launch.spawn(*options(launch, sshd, "node-a", "node-b"), warm_there(launch), "--", str(LOCKSTEP), *ENDLESS)
    launch.until_step(5)

    os.kill(run.pid, signal.SIGKILL)
    run.wait(30)

    until(lambda: "the connection to it has ended" in launch.output(), f"the hosts to see it:\n{launch.output()}")
    launch.assert_nothing_left()


def test_a_lost_host_is_gone_without_and_comes_back_when_it_is_reached(launch: Launch, sshd: Sshd) -> None:
    """Its machine is away: the other goes on; then sshd answers again, and the run there is started once more."""
    run = launch.spawn(
        *options(launch, sshd, "node-a", "node-b"),
        warm_there(launch),
        "--nnodes=1:2",
        "--policy=node_lost_s=10",
        "--policy=last_call_s=2",
        "--",
        str(LOCKSTEP),
        *ENDLESS,
    )
    launch.until_step(5)

    sshd.let_in("node-b", is_open=False)
    next(one for one in psutil.Process(run.pid).children() if "node-b" in one.cmdline()).kill()
    until(lambda: (status := launch.status()) and status.round >= 2 and status.world_size == 1, "a round without it")
    until(lambda: "line 2: node-b: no sshd listens there" in launch.output(), f"a look at it:\n{launch.output()}")
    sshd.let_in("node-b", is_open=True)
    until(lambda: "node-b is reached again: its run is started again" in launch.output(), launch.output())
    back = until(lambda: (status := launch.status()) and status.world_size == 2 and status, "a round with it")
    launch.until_more_steps(5)
    launch.enough()

    assert launch.finish(run) == 0, launch.output()
    assert back.round >= 3
    assert "the connection to node-b has ended: it is lost to the job, which goes on by its rule" in launch.output()
    assert launch.output().count("no sshd listens there") == 1
    assert launch.incidents()[0].verdict is not None
    launch.assert_nothing_left()


def test_a_job_that_ends_waits_for_no_lost_host(launch: Launch, sshd: Sshd) -> None:
    """The negative control: what is lost when the job is over stays away, and the exit code is the job's."""
    run = launch.spawn(
        *options(launch, sshd, "node-a", "node-b"), warm_there(launch), "--nnodes=1:2", "--policy=node_lost_s=10", "--",
        str(LOCKSTEP), *ENDLESS,
    )  # fmt: skip
    launch.until_step(5)

    sshd.let_in("node-b", is_open=False)
    next(one for one in psutil.Process(run.pid).children() if "node-b" in one.cmdline()).kill()
    until(lambda: (status := launch.status()) and status.round >= 2 and status.step > 5, "a round without it")
    launch.enough()

    assert launch.finish(run) == 0, launch.output()
    assert "its run is started again\n" not in launch.output()
    launch.assert_nothing_left()


def test_a_host_that_cannot_take_part_is_one_sentence(launch: Launch, sshd: Sshd) -> None:
    """Each with its line and what to do; the one that could take part starts nothing either."""
    lines = ("node-a", "closed", "stranger", "changed", "nowhere.invalid")

    done = launch.command(*options(launch, sshd, *lines), "--", str(LOCKSTEP))

    assert done.returncode == 2
    told = done.stderr.replace("nothing was started: ", "").removeprefix("megascale-ops: ").splitlines()
    for line, sentence in (
        ("line 2: closed: ", "no sshd listens there"),
        ("line 3: stranger: ", "it takes none of this user's keys: `ssh stranger true` has to work without a question"),
        ("line 4: changed: ", "its host key is not the one that this machine knows"),
        ("line 5: nowhere.invalid: ", "there is no host of that name"),
    ):
        assert any(line + sentence in one for one in told), done.stderr
    assert "node-a" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not launch.run_dir().exists()


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("/nowhere/python", "there is no /nowhere/python that can be run; name the interpreter there with"),
        ("#!/bin/sh\necho ours 0.0.9\n", "megascale-ops is 0.0.9 there and "),
        ("#!/bin/sh\necho ours none\n", " has no megascale-ops; install "),
        ("#!/bin/sh\necho lib missing >&2; exit 1\n", " does not run there: lib missing"),
    ],
    ids=["no python", "another version", "not installed", "broken"],
)
def test_a_host_without_our_program_is_one_sentence(launch: Launch, sshd: Sshd, python: str, sentence: str) -> None:
    """By Python's path there: none, one with another version of ours, one without, one that does not run."""
    if python.startswith("#!"):
        path = launch.tmp_path / "python"
        path.write_text(python)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        python = str(path)

    done = launch.command(*options(launch, sshd, "node-b"), f"--remote-python={python}", "--", str(LOCKSTEP))

    assert done.returncode == 2
    assert "line 1: node-b: " in done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
