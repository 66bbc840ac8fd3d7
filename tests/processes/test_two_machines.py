# SPDX-License-Identifier: Apache-2.0
"""The guide of two machines, typed as it stands: by ssh from one of them, and by hand on both.

The machines are addresses of a network of the test's own, so that the ports which the guide's lines lead to are free.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.sshd import Sshd
from tests.processes.guides import blocks, commands
from tests.processes.launch import PLAIN, Launch
from tests.processes.slurm_jobs import PROGRAM

pytestmark = pytest.mark.processes

# Whose commands are read out of the page and run here, all of them (`tests/architecture/test_readme.py` takes note).
GUIDES = ("docs/how-to/two-machines.md",)
_NETWORK = """
set -e
mount --bind "$1" /etc/hosts
ip link set lo up
ip addr add 10.99.0.1/32 dev lo
ip addr add 10.99.0.2/32 dev lo
echo ready
exec sleep 600
"""
_SSH = '#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n'


@contextmanager
def network(folder: Path) -> Iterator[tuple[str, ...]]:
    """Make a network in which both machines have names; yield what a program is started in it by."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2 for a network with names of its own")
    hosts = folder / "etc-hosts"
    hosts.write_text("127.0.0.1 localhost\n10.99.0.1 node-a\n10.99.0.2 node-b\n")
    line = ["unshare", "-m", "-n", "sh", "-c", _NETWORK, "sh", str(hosts)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != "ready\n":
                pytest.skip(f"needs network namespaces: {holder.stderr.read().strip()}")
            yield "nsenter", f"--target={holder.pid}", "--mount", "--net", f"--wd={folder}"
        finally:
            holder.kill()


@pytest.fixture
def machines(launch: Launch) -> Iterator[tuple[str, ...]]:
    """Both machines, with the folder that they share: the script, and the file of hosts as the guide has it."""
    (launch.tmp_path / "train.py").write_text(PLAIN.read_text())
    (launch.tmp_path / "hosts").write_text(blocks(GUIDES[0], "text")[0])
    folder = launch.tmp_path / "bin"
    folder.mkdir()
    launch.env["PATH"] = f"{folder}:{PROGRAM.parent}:{os.environ['PATH']}"
    with network(launch.tmp_path) as within, Sshd(launch.tmp_path / "ssh", launch.state, within):
        (folder / "ssh").write_text(_SSH.format(config=launch.tmp_path / "ssh" / "config"))
        (folder / "ssh").chmod(0o755)
        yield within


def test_every_line_of_the_guide_does_what_it_says(machines: tuple[str, ...], launch: Launch) -> None:
    """In the guide's order; the lines of the two machines side by side, the others one after the other."""

    def begin(line: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*machines, "env", f"PATH={launch.env['PATH']}", *shlex.split(line)],
            env=launch.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    printed, running = {}, []
    for line, following in zip(lines := commands(GUIDES[0]), [*lines[1:], ""], strict=True):
        running.append((line, begin(line)))
        if "--node-rank" in line and "--node-rank" in following:
            continue
        for waited, run in running:
            printed[waited] = run.communicate(timeout=300)[0]
            assert run.returncode == 0, f"{waited}:\n{printed[waited]}"
        running.clear()

    assert list(printed) == lines
    everything = "\n".join(printed.values())
    assert [job for job in ("by-ssh", "by-hand") if f"job {job}: every rank ended normally" not in everything] == []
    assert everything.count("rank 3 done") >= 3  # both runs, and what `logs --rank 3` shows
    launch.assert_nothing_left()
