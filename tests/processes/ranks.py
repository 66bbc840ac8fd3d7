# SPDX-License-Identifier: Apache-2.0
"""Start single ranks with the environment that a runner gives them, and look into their boxes."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megascale_ops
from megascale_ops.blackbox.reader import BoxReader
from tests.processes.warmed import start_script

BOOTSTRAP = Path(megascale_ops.__file__).parent / "recorder" / "bootstrap"
DEADLINE_S = 120.0  # an import of torch takes a second, on a busy machine ten

# Ten steps of the smallest training there is.
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (x,) in DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
# The same, sooner: half of such a script's CPU time goes into torch's compiler, of which it uses nothing.
SOON = "from megascale_ops.chaos import no_compiler; no_compiler.leave_out()"
TRAIN_SOON = TRAIN.replace("import torch\n", f"import torch; {SOON}\n")


class Rank:
    """One rank's process, started with the environment that a runner gives it."""

    def __init__(
        self,
        folder: Path,
        script: str,
        rank: int,
        *,
        extra: dict[str, str],
        flags: tuple[str, ...] = (),
        is_forked: bool = False,
    ) -> None:
        self.box_dir = folder / "box"
        path = folder / f"script{rank}.py"
        path.write_text(textwrap.dedent(script))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MEGASCALE", "PYTEST"))}
        environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "1", "MEGASCALE_JOB": "gpt",
            "MEGASCALE_NODE": "n1", "MEGASCALE_ROUND": "2", "MEGASCALE_BOX_DIR": str(self.box_dir),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(BOOTSTRAP), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1", **extra,
        }  # fmt: skip
        self.rank = rank
        self._said = (folder / f"out{rank}", folder / f"err{rank}") if is_forked else ()
        if is_forked:
            self.process: subprocess.Popen[Any] = start_script(path, environ, *self._said, cwd=folder)
            return
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(path)],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """Wait for it; return exit status, stdout and stderr."""
        if self._said:
            code = self.process.wait(DEADLINE_S)
            out, err = (path.read_text() for path in self._said)
            return code, out, err
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def box(self) -> BoxReader:
        """Return its box."""
        return BoxReader(self.box_dir / f"{self.rank}.box")

    def wait_until(self, seen: Callable[[BoxReader], bool]) -> BoxReader:
        """Return its box as soon as ``seen`` is true of it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if (self.box_dir / f"{self.rank}.box").exists() and seen(self.box()):
                return self.box()
            time.sleep(0.02)
        raise AssertionError(f"not seen: {self.process.poll()} {self.box().progress()}")


class Ranks:
    """The ranks of one test; what still runs at its end is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[Rank] = []

    def __call__(self, script: str, rank: int = 0, *, flags: tuple[str, ...] = (), **extra: str) -> Rank:
        """Start ``script`` as ``rank``, with ``extra`` in its environment and ``flags`` for Python."""
        self._ranks.append(Rank(self._folder, script, rank, extra=extra, flags=flags))
        return self._ranks[-1]

    def forked(self, script: str, rank: int = 0, **extra: str) -> Rank:
        """The same where torch has been imported already, as in a warm worker: its start is no part of the story."""
        self._ranks.append(Rank(self._folder, script, rank, extra=extra, is_forked=True))
        return self._ranks[-1]

    def close(self) -> None:
        """Leave no process behind."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.end()
