# SPDX-License-Identifier: Apache-2.0
"""A journal in PostgreSQL whose server is frozen, or away: training is looked after, and the truth is told."""

import os
import signal
import threading

import pytest

from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Event
from tests.fakes.postgres import PostgresServer
from tests.fakes.servers import opener
from tests.processes.launch import ENDLESS, PATIENCE_S, PLAIN, Launch, acted_upon, until

pytestmark = pytest.mark.processes


def _submit(store: Store, kind: str) -> threading.Event:
    done = threading.Event()
    store.submit(Batch(job="job", record=b'{"last":"%s"}' % kind.encode(), events=(Event(1.0, "job", kind),)), done.set)
    return done


def test_a_frozen_server_is_told_and_waited_for_by_nobody(postgres: PostgresServer) -> None:
    """What is submitted meanwhile is kept and acted upon; once the server goes on, all of it is there, once."""
    store = open_store(postgres.url)
    assert _submit(store, "before").wait(30)

    postgres.freeze()
    first = _submit(store, "first").wait(30)
    told = store.failing
    later = [_submit(store, f"later {number}").wait(30) for number in range(5)]
    kept = store.kept
    postgres.thaw()
    until(lambda: not store.failing, "the journal to be written again")
    events, jobs = store.events("job"), store.jobs()
    store.close()

    assert first
    assert "has not answered" in told
    assert all(later)
    assert kept > 0
    assert [event.kind for event in events] == ["before", "first", *(f"later {number}" for number in range(5))]
    assert jobs == {"job": b'{"last":"later 4"}'}


def test_a_server_that_freezes_while_nothing_happens_is_told(postgres: PostgresServer) -> None:
    """Without writes an outage is noticed within seconds; so is its end."""
    store = open_store(postgres.url)

    postgres.freeze()
    told = until(lambda: store.failing, "the silence to be told")
    postgres.thaw()
    until(lambda: not store.failing, "the answer to be told")
    store.close()

    assert "has not answered" in told


def test_a_server_that_is_away_at_the_start_is_waited_for(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One sentence, and it goes on as soon as the server is there; one that stays away, or frozen, ends the wait."""
    postgres.stop()
    with pytest.raises(UsageError, match=r"does not answer within 1 s"):
        open_store(postgres.url, wait_s=1.0)
    starting = threading.Timer(2.0, postgres.start)
    starting.start()

    store = open_store(postgres.url, wait_s=60.0)
    starting.join()
    store.close()
    postgres.freeze()
    with pytest.raises(UsageError, match=r"does not answer within 1 s"):
        open_store(postgres.url, wait_s=1.0)

    assert "it is waited for, at most 60 s" in caplog.text


def test_a_killed_rank_is_restarted_while_the_server_is_frozen(launch: Launch, postgres: PostgresServer) -> None:
    """The restart goes on in memory, /healthz says so, and afterwards the journal has the incident."""
    port_file = launch.tmp_path / "port"
    serve = ("--listen=127.0.0.1:0", f"--store={postgres.url}", f"--port-file={port_file}")
    launch.spawn("controller", *serve, log="controller.log")
    until(port_file.exists, "the controller to serve")
    url = f"http://127.0.0.1:{port_file.read_text().strip()}"

    def health() -> str:
        with opener.open(f"{url}/healthz", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())

    before = health()
    run = launch.run(*ENDLESS, script=PLAIN, options=(f"--controller={url}",))
    where = f"--controller={url}"
    first = until(launch.round_file, "the ranks to start")
    until(lambda: '"state":"running"' in launch.command("status", "--json", where).stdout.replace(" ", ""), "training")

    postgres.freeze()
    os.kill(first.ranks[1].pid, signal.SIGKILL)
    until(lambda: (found := launch.round_file()) is not None and found.round > first.round, "the next round")
    frozen = until(lambda: told if '"degraded"' in (told := health()) else "", "the silence to be told")
    listed = launch.command("incidents", "--json", where)
    postgres.thaw()
    until(lambda: '"degraded"' not in health(), "the journal to be written again")
    launch.enough()
    code = launch.finish(run)
    store = open_store(postgres.url, readonly=True)
    stored, events = store.incidents("toy"), store.events("toy")
    store.close()

    assert '"ok"' in before
    assert '"degraded"' in frozen
    assert "has not answered" in frozen
    assert '"killed"' in listed.stdout
    assert code == 0
    assert [one.verdict and one.verdict.fault for one in acted_upon(stored)] == ["killed"]
    assert len({(event.wall_s, event.kind, event.text) for event in events}) == len(events)
