# SPDX-License-Identifier: Apache-2.0
"""A rank that waits for a person says so, and only as long as it does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.ranks import SOON, Ranks

pytestmark = pytest.mark.processes

# What is typed comes when the test has seen the prompt.
SCRIPT = f"""
import os, pdb, sys, threading, time
import torch; {SOON}
from megascale_ops.recorder import recorder
ours, theirs = os.pipe()
os.dup2(ours, 0)
sys.stdin = open(0)
def type():
    for number in range(2):
        while not os.path.exists(f"typed{{number}}"): time.sleep(0.01)
        os.write(theirs, [b"ada\\n", b"p 6 * 7\\nc\\n"][number])
threading.Thread(target=type, daemon=True).start()
recorder.step()
print("hello", input("name: "))
recorder.step()
while not os.path.exists("on"): time.sleep(0.01)
breakpoint()
with recorder.phase("eval"):
    while not os.path.exists("over"): time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Ranks]:
    """Return a function that starts a rank."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


def test_a_prompt_is_declared_while_it_waits(start: Ranks, tmp_path: Path) -> None:
    """``input`` and ``breakpoint`` show phase "debugger" until they are answered; the script's output is as ever."""
    rank = start.forked(SCRIPT)

    rank.wait_until(lambda box: box.progress().phase == "debugger")
    (tmp_path / "typed0").touch()
    rank.wait_until(lambda box: box.progress().phase != "debugger")
    (tmp_path / "on").touch()
    rank.wait_until(lambda box: box.progress().phase == "debugger")
    (tmp_path / "typed1").touch()
    rank.wait_until(lambda box: box.progress().phase == "eval")
    (tmp_path / "over").touch()

    code, out, err = rank.end()
    assert code == 0, err
    assert out.startswith("name: hello ada\n")
    assert "(Pdb) 42\n" in out
    assert err == ""


def test_a_hook_that_fails_leaves_the_prompt_alone(start: Ranks) -> None:
    """The question is asked and answered; that it is not recorded is printed once."""
    rank = start.forked(
        f"""
        import os, sys
        import torch; {SOON}
        from megascale_ops.recorder.recording.recording import Recording
        ours, theirs = os.pipe()
        os.write(theirs, b"ada\\nbob\\n")
        os.dup2(ours, 0)
        sys.stdin = open(0)
        def broken(*_): raise RuntimeError("broken")
        Recording.phase_begin = broken
        print(input(), input())
        """
    )

    code, out, err = rank.end()

    assert (code, out) == (0, "ada bob\n")
    assert err == "megascale-ops recorder: the hook on debuggers and prompts steps aside: RuntimeError: broken\n"
