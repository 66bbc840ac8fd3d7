# SPDX-License-Identifier: Apache-2.0
"""Jobs of ours in a real Slurm, looked at by what they print and by Slurm's record of them."""

import os
import re
import signal
import sys
from pathlib import Path

from tests.fakes import servers
from tests.fakes.slurm import PATIENCE_S, OneNode
from tests.processes.launch import Launch, until

PROGRAM = Path(sys.executable).parent / "megascale-ops"
TRAINS = """
import os, pathlib, time
from megascale_ops.recorder import recorder
me = f"rank {os.environ['RANK']} on {os.environ['SLURMD_NODENAME']}"
print(f"{me} has pid {os.getpid()} in round {os.environ['MEGASCALE_ROUND']}", flush=True)
enough = pathlib.Path(os.environ["MEGASCALE_CHECKPOINT_DIR"], "enough")
saved = enough.with_name("step")
first = int(saved.read_text() or 0) if saved.exists() else 0
for step in range(first, 10**6):
    time.sleep(0.02)
    recorder.step(step)
    if step == first + 20:
        print(f"{me} trains from step {first} in round {os.environ['MEGASCALE_ROUND']}", flush=True)
    if os.environ["RANK"] == "0" and step % 10 == 0:
        enough.with_name("step").write_text(str(step))
    if enough.exists():
        break
"""


class Job:
    """A job of ours in this cluster, looked at by what it prints and by Slurm's record.

    ``program``: another one than ``megascale-ops``, such as `stand_in` where no process of a step is looked at.
    """

    def __init__(
        self,
        slurm: OneNode,
        launch: Launch,
        name: str,
        run: str,
        batch: str,
        path: str = "",
        srun: str = "",
        program: str = str(PROGRAM),
    ) -> None:
        script = launch.tmp_path / "trains.py"
        script.write_text(TRAINS)
        env = {key: value for key, value in launch.env.items() if not key.startswith("SLURM_")}
        env["MEGASCALE_CONTROLLER_NODE_STATES_S"] = "1"
        env["PATH"] = f"{path}:{env['PATH']}" if path else env["PATH"]
        line = f"srun --ntasks-per-node=1 {srun} {program} run {run} -- {script}"
        self.slurm, self.launch, self.file = slurm, launch, f"{name}.out"
        self.id = slurm.submit(f"#!/bin/bash\n#SBATCH {batch}\nexec {line}\n", env, self.file)

    @property
    def printed(self) -> str:
        """All that it has printed."""
        return self.slurm.output(self.file)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed this."""
        return until(lambda: re.search(pattern, self.printed), f"{pattern!r}; so far:\n{self.printed}")

    def log(self) -> str:
        """What its controller has logged."""
        path = self.launch.run_dir(f"trains-{self.id}") / "controller.log"
        return path.read_text() if path.exists() else ""

    def until_logged(self, pattern: str) -> None:
        """Wait until its controller has logged this."""
        until(lambda: re.search(pattern, self.log()), f"{pattern!r}; so far:\n{self.log()}")

    def kill_rank(self, node: str, round_: int) -> None:
        """SIGKILL to the rank of a node."""
        os.kill(int(self.until(rf"on {node} has pid (\d+) in round {round_}")[1]), signal.SIGKILL)

    def end(self) -> None:
        """Let the script end."""
        folder = self.launch.run_dir(f"trains-{self.id}") / "checkpoints"
        (folder / "enough").touch()
        ended = ("COMPLETED", "FAILED")
        servers.until(
            lambda: self.slurm.job(self.id)["JobState"] in ended,
            f"the job is {ended}",
            PATIENCE_S,
            why=lambda: f"{self.printed}\n{self.log()}",
        )
