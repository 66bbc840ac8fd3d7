# SPDX-License-Identifier: Apache-2.0
"""Runs on a node that users share: who is first with a name in /dev/shm gains nothing, and each has its own boxes."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.blackbox.roots import roots_of, take_root
from megascale_ops.schema.events import JobStatus
from tests.processes.launch import ENDLESS, PATIENCE_S, PLAIN, Launch, all_have_made, until
from tests.processes.nodes import Clusters
from tests.processes.other_user import NOBODY, only_root, start_as_nobody

# One after the other: they share the folder of a user.
pytestmark = [pytest.mark.processes, only_root]
ATTACKER = 61001
SHARED = Path("/dev/shm")
PLAIN_ROOT = SHARED / f"megascale-ops-{NOBODY}"
_PRECIOUS = "what the user has written\n"
# What the DaemonSet leaves of root's rights.
CAPABILITIES = re.findall(
    r"^ +- ([A-Z_]+)  #",
    (Path(__file__).parents[2] / "agents" / "deploy" / "kubernetes" / "agent.yaml").read_text(),
    re.MULTILINE,
)

# Makes the user's folder, or a link to another one of the user's, again and again; moves and links what is in it.
_SQUAT = """
import contextlib, os, sys
root, kind, precious = sys.argv[1:]
while True:
    with contextlib.suppress(OSError):
        os.symlink(precious, root) if kind == "link" else os.mkdir(root)
    with contextlib.suppress(OSError):
        os.chmod(root, 0o777)
    names = [name for name in os.listdir("/dev/shm") if name.startswith(os.path.basename(root))]
    for root_ in (root, *(f"/dev/shm/{name}" for name in names)):
        with contextlib.suppress(OSError):
            os.mkdir(f"{root_}/toy", 0o777)
        for name in ("round.json", "n1.round.json", "n1.round.json.new", "0.box", "0.stacks"):
            with contextlib.suppress(OSError):
                os.symlink(f"{precious}/file", f"{root_}/toy/{name}")
        with contextlib.suppress(OSError):
            os.rename(f"{root_}/toy", f"{root_}/toy-{os.urandom(2).hex()}")
        with contextlib.suppress(OSError):
            if os.lstat(root_).st_uid != os.geteuid():  # its own place it never gives up
                os.rename(root_, f"{root_}-moved")
"""


class UsersLaunch(Launch):
    """Runs of another user, who names no place for black boxes."""

    def __init__(self, tmp_path: Path, uid: int = NOBODY) -> None:
        super().__init__(tmp_path)
        self.uid = uid
        os.chown(tmp_path, uid, uid)
        self.env |= {"HOME": str(tmp_path), "USER": "somebody", "TMPDIR": str(tmp_path)}
        del self.env["MEGASCALE_BOX_ROOT"]

    def spawn(self, *arguments: str, log: str = "run.log") -> "subprocess.Popen[bytes]":
        """Start ``megascale-ops`` as that user."""
        command = (sys.executable, "-m", "megascale_ops.cli.main", *arguments)
        proc = start_as_nobody(*command, env=self.env, log=self.tmp_path / log, uid=self.uid)
        self.procs.append(proc)
        return proc


@pytest.fixture
def users() -> Iterator[UsersLaunch]:
    """Runs of another user; what is that user's in shared memory goes with the test."""
    folder = Path(tempfile.mkdtemp(prefix="megascale-user-"))
    launched = UsersLaunch(folder)
    yield launched
    launched.close()
    for root in [PLAIN_ROOT, *SHARED.glob(f"{PLAIN_ROOT.name}-*")]:
        shutil.rmtree(root) if root.is_dir() and not root.is_symlink() else root.unlink(missing_ok=True)
    shutil.rmtree(folder)


# What may be in the way is told apart by tests/unit/blackbox/test_roots.py; by a link there would be most to gain.
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_who_is_first_with_a_users_folder_gains_nothing(users: UsersLaunch, kind: str) -> None:
    """The run has its black boxes elsewhere and says so in one sentence; no file of the user's is written over."""
    precious = users.tmp_path / "precious"
    (precious / "toy").mkdir(parents=True)
    for path in (precious / "file", precious / "toy" / "n1.round.json"):
        path.write_text(_PRECIOUS)
    for path in (precious, *precious.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    squatter = start_as_nobody(sys.executable, "-c", _SQUAT, str(PLAIN_ROOT), kind, str(precious), uid=ATTACKER)
    try:
        until(lambda: os.path.lexists(PLAIN_ROOT), "the attacker to be first")

        run = users.run(*ENDLESS, options=("--node=n1",), nproc=1, script=PLAIN)
        status = users.until_step(3)
        (own,) = roots_of(NOBODY)
        has_box = (own / "toy" / "0.box").exists()
        users.enough()
        code = users.finish(run)
    finally:
        squatter.kill()
        squatter.wait(PATIENCE_S)

    assert code == 0, users.output()
    assert has_box
    assert status.ranks[0].report.progress is not None
    assert f"so black boxes are in {own}" in users.output()
    assert "steps aside" not in users.output()
    assert [path.read_text() for path in (precious / "file", precious / "toy" / "n1.round.json")] == [_PRECIOUS] * 2
    assert sorted(path.name for path in precious.rglob("*")) == ["file", "n1.round.json", "toy"]


def test_runs_of_two_users_at_once_have_each_their_own(users: UsersLaunch, launch: Launch) -> None:
    """Root's and another user's, of one name: each agent sees its own user's rank, and nothing is warned of."""
    del launch.env["MEGASCALE_BOX_ROOT"]
    mine = take_root()

    runs = [one.run(*ENDLESS, nproc=1, script=PLAIN) for one in (users, launch)]
    seen = [one.until_step(3) for one in (users, launch)]
    boxes = [PLAIN_ROOT / "toy" / "0.box", mine.path / "toy" / "0.box"]
    owners = [path.stat().st_uid for path in boxes]
    told = [_owner(status) for status in seen]
    private = (PLAIN_ROOT, mine.path, users.run_dir(), launch.run_dir())
    modes = {path.stat().st_mode & 0o777 for path in private}
    for one in (users, launch):
        one.enough()
    codes = [one.finish(run) for one, run in zip((users, launch), runs, strict=True)]

    assert codes == [0, 0], users.output() + launch.output()
    assert owners == [NOBODY, 0]
    assert modes == {0o700}
    assert told == [NOBODY, 0]
    assert "black boxes are in" not in users.output() + launch.output()
    assert not (mine.path / "toy").exists()


def _owner(status: JobStatus) -> int:
    """Return whose process the agent has told of; -1 when it is gone."""
    (rank,) = status.ranks
    try:
        return Path(f"/proc/{rank.report.pid}").stat().st_uid
    except OSError:
        return -1


def test_an_agent_of_root_serves_the_runs_of_all_users(users: UsersLaunch, clusters: Clusters) -> None:
    """With the five rights of the DaemonSet, in place of all of root's: the run finds it and starts none of its own."""
    cluster = clusters(nnodes="1")
    cluster.controller.start()
    url = cluster.controller.url
    rights = ",".join(f"+{name.lower()}" for name in CAPABILITIES)
    env = {name: value for name, value in users.env.items() if name not in ("HOME", "TMPDIR")}
    log = users.tmp_path / "agent.log"
    with log.open("ab") as out:
        agent = subprocess.Popen(
            [
                *("setpriv", f"--bounding-set=-all,{rights}", "--inh-caps=-all", "--no-new-privs"),
                *(sys.executable, "-m", "megascale_ops.cli.main", "agent"),
                *(f"--controller={url}", "--node=n1", "--kernel-log="),
            ],
            env=env,
            stdout=out,
            stderr=out,
        )
    users.procs.append(agent)
    try:
        until((SHARED / "megascale-ops-agents" / "n1").exists, "the agent to tell of itself")

        run = users.run(*ENDLESS, options=(f"--controller={url}", "--node=n1"), job=cluster.job, nproc=1, script=PLAIN)

        def moved() -> JobStatus | None:
            status = cluster.status()
            return status if status is not None and status.ranks and all_have_made(3, status) else None

        status = until(moved, f"the rank's steps to be heard of:\n{users.output()}\n{log.read_text()}")
        owner = _owner(status)
        (path,) = (PLAIN_ROOT / cluster.job).glob("*.round.json")
        text = path.read_text()
        users.enough(cluster.job)
        code = users.finish(run)
    finally:
        agent.terminate()
        agent.wait(PATIENCE_S)

    assert len(CAPABILITIES) == 5
    assert code == 0
    assert owner == NOBODY
    assert '"agent_pid":0' in text
    assert not (SHARED / "megascale-ops-agents" / "n1").exists()
