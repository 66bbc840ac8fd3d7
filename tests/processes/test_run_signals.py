# SPDX-License-Identifier: Apache-2.0
"""What reaches the ranks of a run from outside, and what they may leave behind."""

import signal
import time

import pytest

from megascale_ops.runner.processes import handles
from tests.processes.launch import Launch, until

pytestmark = pytest.mark.processes


# Rank 0 has handlers, rank 1 has none: of a SIGUSR2 it would die.
HANDLERS = """
import os, signal, sys, time
def note(number, _): print("got", signal.Signals(number).name, flush=True)
def save(*_):
    for _ in range(60): time.sleep(0.1)
    print("saved", flush=True)
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGUSR2, note)
    signal.signal(signal.SIGTERM, save)
open("ready" + os.environ["RANK"], "w").close()
while True: time.sleep(0.1)
"""
STAYS = """
import signal, time
def stay(*_):
    print("asked to end", flush=True)
    time.sleep(100)
signal.signal(signal.SIGTERM, stay)
signal.signal(signal.SIGINT, stay)
print("stays", flush=True)
while True: time.sleep(0.1)
"""
# The first round leaves a process and fails; the second leaves one that still has something to do, and succeeds. That
# one is done once the runner has told of it, however soon that is.
LEAVES = """
import os, subprocess, sys
first = os.environ["MEGASCALE_ROUND"] == "1"
command = "sleep 1000" if first else "until [ -e told ]; do sleep 0.1; done; echo uploaded > uploaded"
subprocess.Popen(["sh", "-c", command], start_new_session=True)
sys.exit(3 if first else 0)
"""


def test_signals_reach_the_ranks_and_sigterm_leaves_them_time(launch: Launch) -> None:
    """SIGUSR1 and SIGUSR2 go to ranks with a handler and kill none; a handler of SIGTERM may take 6 s."""
    launch.is_cold = True
    script = launch.tmp_path / "handlers.py"
    script.write_text(HANDLERS.replace('"ready"', f'"{launch.tmp_path}/ready"'))
    run = launch.spawn("run", "--job=toy", "--nproc-per-node=2", "--", str(script))
    until(lambda: all((launch.tmp_path / f"ready{rank}").exists() for rank in (0, 1)), "the handlers")

    run.send_signal(signal.SIGUSR1)
    until(lambda: "[0] got SIGUSR1" in launch.output(), "SIGUSR1 at rank 0")
    run.send_signal(signal.SIGUSR2)
    until(lambda: "[0] got SIGUSR2" in launch.output(), "SIGUSR2 at rank 0")
    until(lambda: "SIGUSR2 was not handed on to rank 1" in launch.output(), "the reason why rank 1 got none")
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGTERM)  # a shell and the kernel may each send the same

    assert launch.finish(run) == 128 + signal.SIGTERM, launch.output()
    assert "[0] saved" in launch.output()
    assert "killed" not in launch.output()
    launch.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_wait(launch: Launch, number: signal.Signals) -> None:
    """Who presses Ctrl-C again does not wait for a handler that takes 100 s; nothing is left behind all the same."""
    launch.is_cold = number == signal.SIGINT  # what a user's shell starts takes Ctrl-C before anything is imported
    script = launch.tmp_path / "stays.py"
    script.write_text(STAYS)
    run = launch.spawn("run", "--job=toy", "--stop-grace=100", "--", str(script))
    until(lambda: "stays" in launch.output(), "the handler")

    run.send_signal(number)
    until(lambda: "asked to end" in launch.output(), "the rank to be asked")
    while run.poll() is None:  # a later one than a shell's and the kernel's for the same key
        time.sleep(2.5)
        run.send_signal(number)

    assert launch.finish(run) == 128 + number, launch.output()
    assert f"had not ended after {number.name} when a second signal came, and was killed" in launch.output()
    assert "had not ended 100 s after" not in launch.output()
    launch.assert_nothing_left()


def test_a_signal_before_any_rank_runs_ends_nothing(launch: Launch) -> None:
    """SIGUSR1 comes while the run starts: a message reports that it reached no rank, and the run goes on."""
    launch.is_cold = True  # its start is the story
    script = launch.tmp_path / "short.py"
    script.write_text("print('ran')\n")
    run = launch.spawn("run", "--job=toy", "--", str(script))
    until(lambda: handles(run.pid, signal.SIGUSR1), "the first moment at which it does not die of it")

    run.send_signal(signal.SIGUSR1)

    assert launch.finish(run) == 0, launch.output()
    assert "SIGUSR1" in launch.output()
    assert "ran" in launch.output()
    launch.assert_nothing_left()


def test_what_a_script_leaves_running_may_finish_after_success_and_is_named(launch: Launch) -> None:
    """An upload that outlives a script that ended well is waited for, what a failed round left is not: both told."""
    script = launch.tmp_path / "leaves.py"
    script.write_text(LEAVES.replace('"sh", "-c", command]', f'"sh", "-c", command], cwd={str(launch.tmp_path)!r}'))
    run = launch.spawn("run", "--job=toy", "--", str(script))
    until(lambda: "what they started and left running is given 30 s" in launch.output(), "it to be told of")
    (launch.tmp_path / "told").touch()

    assert launch.finish(run) == 0, launch.output()
    assert (launch.tmp_path / "uploaded").exists()
    assert "(sleep 1000)" in launch.output() or "(sh -c sleep 1000)" in launch.output()
    assert "(sh -c until [ -e told ]; do sleep" in launch.output()
    launch.assert_nothing_left()
