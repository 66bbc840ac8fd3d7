# SPDX-License-Identifier: Apache-2.0
"""The order to read a log: bounded, read-only, of the job's own files, and answered in any case."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from megascale_agents.orders import log_reading
from megascale_agents.orders.log_reading import LogReading
from megascale_agents.ownership import files
from megascale_agents.ownership.rights import Owner, myself
from megascale_agents.ranks.log_folders import LogFolder, LogFolders, folder_of
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.log_parts import SEARCH_BYTES
from megascale_ops.schema.identity import RankProcess, RoundFile
from megascale_ops.schema.messages import LOG, MAX_BODY_BYTES, READ_LOG, EvidenceItem, Order
from megascale_ops.schema.runs import LogQuery
from tests.fakes.foreign_job import NOBODY, NODE, ForeignJob, needs_root, open_folder
from tests.fakes.obeying import FakeSpeaker, Obeying


@pytest.fixture
def obeying(tmp_path: Path) -> Iterator[Obeying]:
    """A node to give orders to."""
    made = Obeying(tmp_path)
    yield made
    made.close()


def wanted(obeying: Obeying, order_id: str = "log-1", **more: object) -> Order:
    """Return an order as the controller gives it."""
    query = LogQuery(**{"rank": 0, **more})  # type: ignore[arg-type]  # fields
    return obeying.order(READ_LOG, id=order_id, incident="", round=0, ranks=(query.rank,), log=query)


async def read(obeying: Obeying, order: Order) -> EvidenceItem:
    """Have an order obeyed; what it brought."""
    before = len(obeying.speaker.evidence)
    obeying.obedience.ingest_orders([order])
    async with asyncio.timeout(20):
        while len(obeying.speaker.evidence) == before:  # noqa: ASYNC110  as the speaker looks at it
            await asyncio.sleep(0.005)
    evidence = obeying.speaker.evidence[-1]
    assert (evidence.order, evidence.incident, len(evidence.items)) == (order.id, "", 1)
    return evidence.items[0]


async def lines(obeying: Obeying, order: Order) -> tuple[str, ...]:
    """Return the lines that an order brought."""
    item = await read(obeying, order)
    assert item.log is not None, item.text
    return item.log.lines


async def test_the_end_of_a_log_what_came_since_and_what_holds_a_text(obeying: Obeying) -> None:
    """Of the rank that was asked for, with the node's name; once, however often the order comes."""
    obeying.start(2)
    obeying.node.stderr(1).write_text("".join(f"step {at}\n" for at in range(50)))

    end = await read(obeying, wanted(obeying, rank=1, lines=2))
    assert end.log is not None
    with obeying.node.stderr(1).open("a") as file:
        file.write("came later\n")
    since = await lines(obeying, wanted(obeying, "log-2", rank=1, after=end.log.end))
    found = await lines(obeying, wanted(obeying, "log-3", rank=1, grep="STEP 7"))
    obeying.obedience.ingest_orders([wanted(obeying, "log-3", rank=1)])
    await asyncio.sleep(0)

    assert (end.kind, end.ok, end.rank) == (LOG, True, 1)
    assert (end.log.lines, end.log.node, end.log.is_cut) == (("step 48", "step 49"), "node-a", True)
    assert since == ("came later",)
    assert found == ("step 7",)
    assert len(obeying.speaker.evidence) == 3
    assert obeying.counted == {(READ_LOG, "obeyed"): 3}
    assert obeying.obedience.done() == ()


async def test_rounds_before_and_jobs_that_are_over_can_be_read(obeying: Obeying) -> None:
    """As long as this agent lives: what a rank printed last is asked for when it has died."""
    obeying.start()
    obeying.node.stderr(0).write_text("first\n")
    obeying.start()
    obeying.node.stderr(0).write_text("second\n")
    before = await read(obeying, wanted(obeying, round=1))
    obeying.node.end_job()
    obeying.rounds.refresh(1000.0)
    obeying.rounds.refresh(2000.0)
    assert obeying.rounds.find("job", 2) is None

    after = await lines(obeying, wanted(obeying, "log-2"))

    assert before.log is not None
    assert (before.log.lines, before.log.rounds) == (("first",), (2, 1))
    assert after == ("second",)


async def test_what_is_not_there_is_said(obeying: Obeying) -> None:
    """A rank of another node, a round that is gone, a job that never ran here, and an order for another node."""
    obeying.start()
    stranger = msgspec.structs.replace(wanted(obeying, "log-3"), job="other")
    elsewhere = msgspec.structs.replace(wanted(obeying, "log-4"), node="node-b")

    rank = await read(obeying, wanted(obeying, rank=7))
    round_ = await read(obeying, wanted(obeying, "log-2", round=9))
    job, node = await read(obeying, stranger), await read(obeying, elsewhere)
    shutil.rmtree(obeying.node.run_dir)
    folder = await read(obeying, wanted(obeying, "log-5"))

    assert (rank.ok, rank.text) == (False, "rank 7 has left no stderr")
    assert round_.text == "rank 0 has left no stderr in round 9"
    assert rank.log is not None  # that it was looked for
    assert job.log is node.log is None
    assert job.text.startswith("job other does not run here, and has not since this agent began: `megascale-ops logs")
    assert node.text == "this is node node-a, and the order is for node-b"
    assert folder.text == f"{obeying.node.run_dir}/logs can't be read: No such file or directory"


async def test_an_answer_fits_into_a_message(obeying: Obeying) -> None:
    """Lines at their longest, each character six as JSON: the newest that fit come, and the rest is told as cut."""
    obeying.start()
    obeying.node.stderr(0).write_text("".join("\x01" * 1990 + f"{at}\n" for at in range(120)))

    item = await read(obeying, wanted(obeying, lines=1000))

    assert item.log is not None
    assert item.log.is_cut
    assert item.log.lines[-1].endswith("119")
    assert 10 < len(item.log.lines) < 20
    assert len(msgspec.json.encode(obeying.speaker.evidence[-1])) < MAX_BODY_BYTES


async def test_a_search_looks_at_four_megabytes(obeying: Obeying) -> None:
    """Whatever the size of the file; that there was more is told."""
    obeying.start()
    with obeying.node.stderr(0).open("w") as file:
        file.write("needle first\n" + "x" * 99 * 10 + "\n")
        file.truncate(SEARCH_BYTES + 100)  # a file with a hole: zeros
    with obeying.node.stderr(0).open("a") as file:
        file.write("\nneedle last\n")

    item = await read(obeying, wanted(obeying, grep="needle"))

    assert item.log is not None
    assert (item.log.lines, item.log.is_cut) == (("needle last",), True)


@pytest.mark.parametrize("step", ["", "round-1", "round-1/rank-0", "round-1/rank-0/stderr.log"])
async def test_a_link_below_the_folder_leads_nowhere(obeying: Obeying, tmp_path: Path, step: str) -> None:
    """But for the folder itself, which its user may lay where he likes, and whose files are looked at all the same."""
    obeying.start()
    here, there = obeying.node.run_dir / "logs", tmp_path / "elsewhere"
    obeying.node.stderr(0).write_text("secret\n")
    (here / step).rename(there)
    (here / step).symlink_to(there)

    item = await read(obeying, wanted(obeying))

    assert item.ok == (not step)


async def test_a_pipe_in_the_place_of_a_log_holds_nothing_up(obeying: Obeying) -> None:
    """It is no ordinary file, and is not opened."""
    obeying.start()
    path = obeying.node.stderr(0)
    path.unlink()
    os.mkfifo(path)

    item = await read(obeying, wanted(obeying))

    assert item.text == "rank 0 has left no stderr"


async def test_a_disk_that_is_away_is_told_within_the_deadline(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than four threads wait for it, while other orders are obeyed."""
    obeying.start()
    released = asyncio.Event()
    loop, begun = asyncio.get_running_loop(), []

    def hang(*_: object) -> None:
        begun.append(1)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(20)

    monkeypatch.setattr(log_reading, "read_part", hang)
    orders = [msgspec.structs.replace(wanted(obeying, f"log-{at}"), deadline_s=0.1) for at in range(6)]
    obeying.obedience.ingest_orders(orders)
    async with asyncio.timeout(20):
        while len(obeying.speaker.evidence) < len(orders):  # noqa: ASYNC110  as the speaker looks at it
            await asyncio.sleep(0.005)
    released.set()

    texts = {item.text for evidence in obeying.speaker.evidence for item in evidence.items}
    assert texts == {"the disk did not answer within 0.1 s"}
    assert len(begun) == 4
    assert obeying.counted == {(READ_LOG, "failed"): 6}


@needs_root
def test_files_of_another_are_not_read_for_a_user() -> None:
    """Of a root agent: a user's folder that leads into root's, or to /proc, opens nothing that he may not open."""
    them = Owner(NOBODY, NOBODY)
    with open_folder() as place:
        secret = place / "secret"
        secret.mkdir(mode=0o700)
        link = place / "link"
        link.symlink_to(secret)
        for path in (secret, link, Path(f"/proc/{os.getpid()}"), Path("/proc/self/cwd")):
            with (
                pytest.raises(OSError, match=r"Permission denied|no folder of a user|Too many"),
                files.folder(path, them),
            ):
                pass
        with files.folder(place, them) as handle:
            assert sorted(os.listdir(handle)) == ["link", "secret"]  # noqa: PTH208  by its handle


def test_the_folder_is_the_one_that_the_runner_lists() -> None:
    """Of `--log-dir` and of each node of several; where nothing is listed, the run folder's own."""
    rank = RankProcess(3, 1, 10, 20, stderr_path="/far/logs/node-b/round-4/rank-3/stderr.log")
    file = RoundFile(1, "job", "node-b", 4, 1, 1, "/run", (rank,))

    assert folder_of(file) == "/far/logs/node-b"
    assert folder_of(msgspec.structs.replace(file, ranks=())) == "/run/logs"
    strange = msgspec.structs.replace(rank, stderr_path="/etc/shadow")
    assert folder_of(msgspec.structs.replace(file, ranks=(strange,))) == "/run/logs"


def test_a_user_with_many_jobs_takes_no_place_of_anothers() -> None:
    """The oldest of his own goes."""
    known = LogFolders()
    known.note("mine", LogFolder("/mine", myself()))
    for at in range(100):
        known.note(f"job-{at}", LogFolder("/theirs", Owner(12345)))

    assert known.find("mine") is not None
    assert known.find("job-35") is None
    assert known.find("job-36") == LogFolder("/theirs", Owner(12345))


@needs_root
async def test_a_root_agent_reads_of_a_users_job_what_is_the_users() -> None:
    """His own log, and in its place no file of root's that all may read, and no folder of root's."""
    with open_folder() as place:
        job = ForeignJob(place, "job")
        rounds = Rounds(str(job.root), NODE, lambda _: None)
        speaker = FakeSpeaker()
        reading = LogReading(NODE, rounds, speaker, lambda _kind, _outcome: None)
        path = job.run_dir / "logs/round-1/rank-0/stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text("his own\n")
        for made in (path, *path.parents[:3]):
            job.give(made)
        secret = place / "secret"
        (secret / "round-1/rank-0").mkdir(parents=True)
        job.give(shutil.copy(path, secret / "round-1/rank-0/stderr.log"))
        secret.chmod(0o700)

        async def said(number: int, listed: Path) -> str:
            rank = msgspec.structs.replace(job.names(job.runner.pid), stderr_path=str(listed))
            job.write_round(rank)
            rounds.refresh(float(number))
            reading.ingest_order(Order(f"log-{number}", "job", NODE, READ_LOG, 0, (0,), log=LogQuery()))
            async with asyncio.timeout(20):
                while len(speaker.evidence) < number:  # noqa: ASYNC110  as the speaker looks at it
                    await asyncio.sleep(0.005)
            item = speaker.evidence[-1].items[0]
            return item.log.lines[0] if item.log is not None and item.ok else item.text

        try:
            first = await said(1, path)
            closed = await said(2, secret / "round-1/rank-0/stderr.log")
            os.chown(path, 0, 0)
            path.chmod(0o644)
            roots = await said(3, path)
        finally:
            rounds.close()
            job.close()

    assert first == "his own"
    assert closed == f"{secret} can't be read: Permission denied"
    assert roots == "rank 0 has left no stderr"
