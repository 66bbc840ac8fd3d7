# SPDX-License-Identifier: Apache-2.0
"""A user of a shared node against Slurm's prolog and epilog, which run as root: nothing of root's is reached."""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.runner.processes import start_ticks
from tests.processes.launch import PATIENCE_S, Launch, until
from tests.processes.other_user import NOBODY, only_root, start_as_nobody
from tests.processes.slurm_scripts import Slurm, is_gone

pytestmark = [pytest.mark.processes, only_root]
PROLOGS = 20  # the prolog that gave the folder to the user lost a file of root in 38 of 40 races
_ROOTS_OWN = "root's own\n"

# Puts links where the prolog writes, moves the folder away and puts a link in its place, as fast as it can.
_RACE = """
import contextlib, os, sys
folder, target = sys.argv[1:]
while True:
    for name in ("agent.log", "agent.pid", "token", "uid"):
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{name}")
        with contextlib.suppress(OSError):
            os.symlink(target, f"{folder}/{name}")
    with contextlib.suppress(OSError):
        os.rename(folder, f"{folder}.{os.urandom(4).hex()}")
    with contextlib.suppress(OSError):
        os.symlink(os.path.dirname(target), folder)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all users see, and a program that runs until it is ended."""
    folder = Path(f"/dev/shm/megascale-test-{uuid.uuid4().hex[:8]}")
    folder.mkdir(mode=0o755)
    program = folder / "program"
    program.write_text("#!/bin/bash\nexec sleep 100\n")
    program.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def slurm(launch: Launch, place: Path) -> Slurm:
    """A job of another user."""
    made = Slurm(launch, f"MEGASCALE_OPS_PROGRAM={place / 'program'}\n", uid=NOBODY)
    made.move(place)
    return made


def test_who_races_the_prolog_reaches_no_file_of_root(slurm: Slurm, place: Path) -> None:
    """Links and a moved folder, all the time: root's file stays as it is, and each job has its agent."""
    victim = place / "roots"
    victim.mkdir(mode=0o755)
    (victim / "file").write_text(_ROOTS_OWN)
    slurm.run.mkdir(mode=0o711)
    racer = start_as_nobody(sys.executable, "-c", _RACE, str(slurm.folder), str(victim / "file"))
    ended = []
    try:
        for _ in range(PROLOGS):
            slurm.script("prolog")
            pid = slurm.pid()
            owner = re.search(r"Uid:\t(\d+)", Path(f"/proc/{pid}/status").read_text())
            said = slurm.script("epilog").stderr
            ended.append((owner and owner[1], is_gone(pid), said))
    finally:
        racer.kill()
        racer.wait(PATIENCE_S)

    assert (victim / "file").read_text() == _ROOTS_OWN
    assert sorted(path.name for path in victim.iterdir()) == ["file"]
    assert ended == [(str(NOBODY), True, "")] * PROLOGS


def test_a_folder_of_a_user_takes_no_agent(slurm: Slurm, place: Path) -> None:
    """Where the folder of jobs is a user's, or a link, the prolog starts nothing and the epilog touches nothing."""
    slurm.run.mkdir()
    os.chown(slurm.run, NOBODY, NOBODY)
    planted = place / "planted"
    planted.mkdir()
    (planted / "file").write_text(_ROOTS_OWN)

    said = slurm.script("prolog").stderr
    slurm.folder.symlink_to(planted)
    after = slurm.script("epilog").stderr

    assert "belongs to somebody else" in said
    assert "left as it is" in after
    assert [path.name for path in planted.iterdir()] == ["file"]


@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_pid_that_is_not_the_agents_is_not_killed(slurm: Slurm, owner: int) -> None:
    """Not a process of root's, were it in the file with its right start time; the agent of the job is."""
    process = subprocess.Popen(["sleep", "100"], user=owner, group=owner, extra_groups=[])
    try:
        slurm.pretend_job()
        (slurm.folder / "agent.pid").write_text(f"{process.pid} {start_ticks(process.pid)}\n")

        slurm.script("epilog")

        assert (process.poll() is None) == (owner == 0)
        assert not slurm.folder.exists()
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_a_user_cannot_plant_a_pid(slurm: Slurm) -> None:
    """While the job runs its user tries to name a process of root for the epilog to end; the agent is ended instead."""
    slurm.script("prolog")
    pid = slurm.pid()
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        words = f"{bystander.pid} {start_ticks(bystander.pid)}"
        planting = f"echo {words} >{slurm.folder}/agent.pid || mv {slurm.folder}/agent.pid {slurm.folder}/other"
        refused = start_as_nobody("/bin/bash", "-c", planting).wait(PATIENCE_S)

        slurm.script("epilog")

        assert refused != 0
        assert bystander.poll() is None
        assert is_gone(pid)
    finally:
        bystander.kill()
        bystander.wait(PATIENCE_S)
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_epilog_removes_the_users_boxes_and_follows_no_link(slurm: Slurm, place: Path) -> None:
    """All folders of the user's go, also where the first name was another's; what they link to stays."""
    (place / "file").write_text(_ROOTS_OWN)
    squatted, second = slurm.box_root, Path(f"{slurm.box_root}-1a2b")
    squatted.mkdir(mode=0o700)
    second.mkdir(mode=0o700)
    (second / "link").symlink_to(place)
    os.chown(second, NOBODY, NOBODY)
    slurm.pretend_job()
    try:
        slurm.script("epilog")

        assert not second.exists()
        assert squatted.exists()  # of another user, here root: not the job's to remove
        assert (place / "file").read_text() == _ROOTS_OWN
    finally:
        squatted.rmdir()


def test_a_job_gets_its_own_token_and_no_other(slurm: Slurm, place: Path) -> None:
    """Where there is a folder of tokens by job, the cluster's is given to no job: a job without one has no agent."""
    tokens = place / "tokens"
    tokens.mkdir(mode=0o700)
    for name in ("17", "cluster"):
        (tokens / name).write_text(f"word of {name}\n")
    settings = Path(slurm.env["MEGASCALE_OPS_SETTINGS"])
    settings.write_text(
        f"{settings.read_text()}MEGASCALE_TOKEN_FILE={tokens}/cluster\nMEGASCALE_OPS_JOB_TOKENS={tokens}\n"
    )

    slurm.script("prolog")
    told = slurm.script("task_prolog").stdout
    handed = (slurm.folder / "token").read_text()
    slurm.script("epilog")
    (tokens / "17").unlink()
    said = slurm.script("prolog").stderr
    is_left = (slurm.folder / "token").exists()
    slurm.script("epilog")

    assert handed == "word of 17\n"
    assert f"export MEGASCALE_TOKEN_FILE={slurm.folder}/token" in told
    assert "export MEGASCALE_RUN_JOB=slurm-17" in told  # the name that such a token is issued for
    assert f"no agent: the token {tokens}/17 can't be read" in said
    assert not is_left


def test_the_races_can_be_lost(slurm: Slurm, place: Path) -> None:
    """The attack is one: against a prolog that gives the folder to the user it overwrites a file of root."""
    (place / "roots").mkdir()
    victim = place / "roots" / "file"
    victim.write_text(_ROOTS_OWN)
    slurm.folder.mkdir(parents=True)
    os.chown(slurm.folder, NOBODY, NOBODY)
    racer = start_as_nobody(sys.executable, "-c", _RACE, str(slurm.folder), str(victim))
    try:

        def is_lost() -> bool:
            subprocess.run(["/bin/bash", "-c", f"echo lost >{slurm.folder}/agent.pid"], check=False, timeout=PATIENCE_S)
            return victim.read_text() != _ROOTS_OWN

        until(is_lost, "a file of root to be overwritten")
    finally:
        racer.kill()
        racer.wait(PATIENCE_S)
