# SPDX-License-Identifier: Apache-2.0
"""A person debugs one rank of a run: the prompt is seen, what is typed arrives, and no rank is restarted in between."""

import time

import pytest

from tests.processes.launch import Launch, acted_upon
from tests.processes.terminal import Terminal

pytestmark = pytest.mark.processes

SCRIPT = """
import torch
from megascale_ops.chaos import no_compiler
no_compiler.leave_out()
from torch import distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train():
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
train()
dist.breakpoint(0)
train()
print("trained on", flush=True)
dist.destroy_process_group()
"""


def test_a_debugger_session_lives(launch: Launch) -> None:
    """Five times the patience that silence is given in this run passes at the prompt of rank 0."""
    script = launch.tmp_path / "debugged.py"
    script.write_text(SCRIPT)
    policy = ("--policy=silence_floor_s=4", "--policy=silence_factor=2")
    terminal = Terminal(launch.env, "run", "--job=toy", "--nproc-per-node=2", *policy, "--", str(script))
    try:
        terminal.until(lambda screen: "[0] (Pdb) " in screen, "the prompt", 120.0)
        time.sleep(20.0)
        terminal.type("p 6 * 7\n")
        terminal.until(lambda screen: "42\r\n" in screen or "42\n" in screen, "the answer")
        terminal.type("c\n")

        assert terminal.wait(120.0) == 0, terminal.screen()
        assert terminal.screen().count("trained on") == 2
        # On a busy machine the beat that says so may come later than the patience: a suspicion that came to nothing.
        found = acted_upon(launch.incidents())
        assert found == [], [one.verdict and one.verdict.reason for one in found]
        assert "in round 2" not in terminal.screen()
    finally:
        terminal.close()
