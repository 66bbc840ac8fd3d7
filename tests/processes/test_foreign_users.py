# SPDX-License-Identifier: Apache-2.0
"""A real agent that runs as root, and jobs of another user: he is served, and gets nothing that is not his."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from megascale_ops.schema.messages import EvidenceItem, Order
from tests.fakes.controller import FakeController
from tests.fakes.foreign_job import NODE, SLEEPS, ForeignJob, needs_root, open_folder, sleeper, ticks_of

pytestmark = [pytest.mark.processes, needs_root]

# A user of these tests alone: an agent of root's looks into the folders of all users in /dev/shm.
USER = 61_003
ROOT = Path(f"/dev/shm/megascale-ops-{USER}")
SECRET = "a line that only root may read"  # noqa: S105  no password


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach."""
    with open_folder() as folder:
        yield folder


class Node:
    """A root agent, a controller that only listens, and the jobs of another user."""

    def __init__(self, place: Path, controller: FakeController) -> None:
        self.place = place
        self.controller = controller
        self.jobs: list[ForeignJob] = []
        self.log = place / "agent.log"
        self.agent: subprocess.Popen[bytes] | None = None

    def job(self, name: str) -> ForeignJob:
        """Make a job."""
        if not ROOT.exists():
            ROOT.mkdir(mode=0o700)
            os.chown(ROOT, USER, USER)
        self.jobs.append(ForeignJob(self.place, name, USER, ROOT))
        return self.jobs[-1]

    async def start_agent(self) -> None:
        """Start it and wait for its first heartbeat."""
        command = (
            sys.executable, "-m", "megascale_ops.cli.main", "agent", "--controller", self.controller.url,
            "--node", NODE, "--metrics-listen", "",
        )  # fmt: skip
        env = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE_")}
        self.spawn(*command, env=env)
        await self.controller.until(lambda: any(one.jobs for one in self.controller.heartbeats), "a job to be seen")

    def spawn(self, *command: str, env: dict[str, str]) -> None:
        """Start the agent; its output goes to the log."""
        with self.log.open("ab") as out:
            self.agent = subprocess.Popen(command, stdout=out, stderr=out, env=env)

    async def obey(self, job: str, *kinds: str, deadline_s: float = 5.0) -> dict[tuple[str, int], EvidenceItem]:
        """Give orders for a job; what they brought, by kind and rank."""
        ids = {f"{job}-{kind}" for kind in kinds}
        for kind in kinds:
            order = Order(
                id=f"{job}-{kind}", job=job, node=NODE, kind=kind, round=1, incident="i-1", deadline_s=deadline_s
            )
            self.controller.orders.append(order)
        await self.controller.until(lambda: ids <= {one.order for one in self.controller.evidence}, f"{ids} obeyed")
        items = [item for one in self.controller.evidence if one.order in ids for item in one.items]
        return {(item.kind, item.rank): item for item in items}

    def close(self) -> None:
        """Leave nothing running."""
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
        for job in self.jobs:
            job.close()
        shutil.rmtree(ROOT, ignore_errors=True)


@pytest.fixture
async def node(place: Path) -> AsyncIterator[Node]:
    """A node without jobs, its agent not yet started."""
    controller = FakeController()
    await controller.start()
    made = Node(place, controller)
    yield made
    made.close()
    await controller.stop()


async def test_an_honest_user_is_served_by_an_agent_of_root(node: Node) -> None:
    """Evidence, stacks, the end of stderr and a kill on order; all files that are left are his."""
    job = node.job("honest")
    rank = job.start_rank()
    job.write_round(rank)
    job.make_box(rank.pid)
    await node.controller.until(lambda: job.stderr.stat().st_size, "the rank to be ready for its signal")
    await node.start_agent()

    found = await node.obey("honest", "dump_stacks", "dump_flight_recorder", "preserve", deadline_s=30.0)
    killed = (await node.obey("honest", "kill"))["signal", 0]

    # Asleep, just woken to write its stacks, or in the fork of its child.
    assert found["process", 0].text.startswith(("state S", "state R", "state D"))
    assert "inner" in found["stacks", 0].text
    assert found["collectives", 0].ok
    assert found["black_box", 0].ok
    assert found["stderr", 0].text == "Segmentation fault"
    kept = job.run_dir / "incidents" / "i-1" / NODE
    names = ["evidence.json", "rank-0.box", "rank-0.stacks.txt", "rank-0.stderr.txt"]
    assert sorted(path.name for path in kept.iterdir()) == names
    made = [path for path in job.run_dir.rglob("*") if path != job.stderr]
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in made} == {(USER, USER)}
    assert killed.ok
    assert job.started[-1].wait(90) == -signal.SIGKILL


async def test_a_user_gets_nothing_of_roots_by_an_agent_of_root(node: Node) -> None:
    """Not a signal to a process of root's, no line of its files, no folder; and nothing in the way stops the agent."""
    victim = sleeper()
    secret, roots = node.place / "secret", node.place / "roots"
    secret.write_text(f"{SECRET}\n" * 3)
    secret.chmod(0o600)
    roots.mkdir(mode=0o755)
    forged, reused, links, pipes, blocked = map(node.job, ("forged", "reused", "links", "pipes", "blocked"))
    forged.write_round(forged.names(victim.pid))
    forged.make_box(victim.pid)
    mine = reused.start_rank(SLEEPS)
    reused.write_round(reused.names(mine.pid, start_ticks=ticks_of(mine.pid) - 1))
    links.stderr.symlink_to(secret)
    (links.run_dir / "incidents").symlink_to(roots)
    links.write_round(links.names(links.runner.pid))
    links.make_box(links.runner.pid)
    os.mkfifo(pipes.stderr)
    os.mkfifo(pipes.folder / "0.box")
    (pipes.folder / "1.box").symlink_to("/dev/zero")
    (pipes.folder / "2.box").symlink_to(secret)
    pipes.write_round(pipes.names(pipes.runner.pid))
    os.mkfifo(blocked.folder / f"{NODE}.round.json")
    try:
        await node.start_agent()

        signals = [(await node.obey(job, "kill", "stop"))["signal", 0] for job in ("forged", "reused")]
        spied = await node.obey("forged", "dump_stacks", "dump_flight_recorder")
        linked = await node.obey("links", "dump_stacks", "preserve")
        piped = await node.obey("pipes", "preserve")

        assert "user 0's" in signals[0].text
        assert "is gone" in signals[1].text
        assert not spied["stacks", 0].ok
        assert not spied["process", 0].marks or spied["process", 0].marks == ("gone",)
        assert linked["stderr", 0].text != SECRET
        assert not linked["black_box", 0].ok
        assert not piped["black_box", 0].ok
        assert victim.poll() is None
        assert reused.started[-1].poll() is None
        assert not list(roots.iterdir())
        assert roots.stat().st_uid == 0
        assert SECRET not in repr(node.controller.evidence) + repr(node.controller.heartbeats)
        theirs = [path for job in node.jobs for path in job.run_dir.rglob("*") if path.is_file()]
        assert all(SECRET not in path.read_text(errors="replace") for path in theirs if path.resolve() != secret)
        assert node.agent is not None
        assert node.agent.poll() is None
    finally:
        victim.kill()
        victim.wait()
