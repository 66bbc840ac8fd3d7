# SPDX-License-Identifier: Apache-2.0
"""The database of two controllers fails over to a real replica, and fills up for real."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from megascale_ops.controller.journal.store import open_store
from tests.fakes.postgres import PostgresServer, running
from tests.fakes.standing_controllers import JOB, Cluster, Standing
from tests.processes.launch import until

pytestmark = [pytest.mark.processes, pytest.mark.matrix]


@pytest.fixture
def primary() -> Iterator[PostgresServer]:
    """A server that runs."""
    with running() as made:
        yield made


@pytest.fixture
def replica(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Another one, which follows it."""
    with running(replica_of=primary) as made:
        yield made


@contextmanager
def _two(url: str) -> Iterator[tuple[Standing, Standing]]:
    cluster = Cluster()
    try:
        first = Standing("first", url, cluster)
        until(lambda: first.is_serving, "the first to lead")
        second = Standing("second", url, cluster)
        until(lambda: first.candidate.seen and first.candidate.seen.standbys, "the standby to be known")
        yield first, second
    finally:
        cluster.close()


def _has_followed(primary: PostgresServer) -> bool:
    engine = sa.create_engine(primary.url)
    with engine.connect() as connection:
        found = connection.scalar(
            sa.text("SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()")
        )
    engine.dispose()
    return bool(found)


def _journaled(url: str) -> list[str]:
    store = open_store(url, readonly=True)
    kinds = [event.kind for event in store.events(JOB)]
    store.close()
    return kinds


def _both(primary: PostgresServer, replica: PostgresServer) -> str:
    return f"postgresql+psycopg://ops@/postgres?host={primary.folder}&host={replica.folder}"


def _one_leads(*controllers: Standing) -> Standing | None:
    return next((one for one in controllers if one.is_serving and not one.candidate.away), None)


def test_the_leader_goes_on_with_the_promoted_replica(primary: PostgresServer, replica: PostgresServer) -> None:
    """All commits were there: the same leader, the same number, nothing lost and nothing written twice."""
    with _two(_both(primary, replica)) as (first, second):
        assert first.order("before").wait(30)
        until(lambda: _has_followed(primary), "the replica to follow")
        primary.stop()
        until(lambda: first.candidate.away and second.candidate.away, "both to notice")
        between = first.order("between").wait(60)
        replica.promote()
        leader = until(lambda: _one_leads(first, second), "a leader that reaches the new server")
        assert leader.order("after").wait(60)
        until(lambda: "between" in _journaled(replica.url), "what was kept to be written")
        epochs = (first.epoch, second.epoch)
    kinds = _journaled(replica.url)

    assert between
    assert (leader, epochs) == (first, (1, 0))
    assert kinds == ["before", "between", "after"]


def test_a_replica_that_lacks_commits_begins_a_leadership_above_all_that_were_heard(
    primary: PostgresServer, replica: PostgresServer
) -> None:
    """It knows number 1 only: the leader, who was number 2, finds that, gives up, and is elected again as 3 or more."""
    with _two(_both(primary, replica)) as (first, second):
        assert first.order("known to both").wait(30)
        until(lambda: _has_followed(primary), "the replica to follow")
        replica.stop()
        first.close()
        until(lambda: second.is_serving, "the second to lead as number 2")
        assert second.order("lost").wait(30)
        primary.stop()
        replica.start()
        replica.promote()
        until(lambda: second.deposed, "the leader to find that commits are lost")
        leader = until(lambda: _one_leads(second), "a leader")
        epoch = leader.epoch
        assert leader.order("after").wait(60)
    kinds = _journaled(replica.url)

    assert "has lost what was written" in second.deposed[0]
    assert epoch >= 3
    assert kinds == ["known to both", "after"]


@contextmanager
def _disk(megabytes: int) -> Iterator[Path]:
    # The server's user must reach it, so it is none of pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="megascale-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"a file system of {megabytes} MB can't be mounted here ({done.stderr.strip()}): root is needed")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)
        folder.rmdir()


def test_a_disk_that_is_really_full_deposes_nobody_and_loses_nothing() -> None:
    """A file system of 96 MB to its last byte: the leader stays, orders leave unwritten, and are written afterwards.

    PostgreSQL may end where it can't write its log; whoever makes room starts it again.
    """
    with _disk(96) as folder:
        server = PostgresServer(folder=folder)
        filler = folder / "filler"
        try:
            server.start()
            with _two(server.url) as (first, second):
                assert first.order("before").wait(30)
                with pytest.raises(OSError, match="No space left"):
                    filler.write_bytes(bytes(96 << 20))
                names = [f"full {number}" for number in range(40)]
                left = [first.order(name + " " * 200_000).wait(60) for name in names]
                failing = until(lambda: first.store is not None and first.store.failing, "the full disk to be told")
                during = (first.epoch, second.epoch)
                filler.unlink()
                server.stop()
                server.start()
                until(lambda: first.store is not None and not first.store.failing, "the journal to be written")
                assert first.order("after").wait(60)
                until(lambda: "after" in _journaled(server.url), "the last to be written")
                after = (first.epoch, second.epoch, first.deposed)
            kinds = _journaled(server.url)
        finally:
            filler.unlink(missing_ok=True)
            server.close()

    assert all(left)
    assert failing
    assert during == (1, 0)
    assert after == (1, 0, [])
    assert [kind.strip() for kind in kinds] == ["before", *names, "after"]
