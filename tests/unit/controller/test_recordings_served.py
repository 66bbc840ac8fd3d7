# SPDX-License-Identifier: Apache-2.0
"""Recordings of a controller whose disk is elsewhere: its blocks over HTTP, for whom, and a file made of them."""

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from megascale_ops.cli.main import main
from megascale_ops.cli.recording import verb
from megascale_ops.errors import RefusedError
from megascale_ops.link import Link
from megascale_ops.link.token_files import write_token_file
from megascale_ops.schema.tokens import Grant, issue, new_token
from tests.fakes.recorded_cluster import record
from tests.fakes.served_controller import serve_controller

OWN = new_token()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings: rank 8 is killed."""
    made = tmp_path_factory.mktemp("run")
    record(made, ["killed@0.025"])
    return made / "recording"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@contextlib.contextmanager
def _beside(folder: Path, token: str, recorded: Path) -> Iterator[str]:
    """Serve in a thread of its own, since a verb wants the main one; yield the address."""
    urls: queue.Queue[str] = queue.Queue()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with serve_controller(folder, token, record=recorded) as served:
            urls.put(served.url)
            await over.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield urls.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)


@pytest.fixture
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave logging as it is; no run of this machine is looked at."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def test_blocks_come_as_they_are_and_it_is_journaled_who_asked(tmp_path: Path, folder: Path) -> None:
    """A token that sees the whole cluster reads them; the entry has its name."""
    reader = issue(OWN, Grant("read", name="alice"))
    async with serve_controller(tmp_path, OWN, record=folder) as served, Link(served.url, reader) as link:
        blocks = (await link.recordings()).blocks
        fetched = [await link.recorded_block(one.id) for one in blocks]
        await asyncio.to_thread(served.store.flush)
        entries = (await link.audit()).entries

    files = _files(folder)
    assert [one.id for one in blocks] == [path.name for path in files]
    assert fetched == [path.read_bytes() for path in files]
    assert [one.bytes for one in blocks] == [len(one) for one in fetched]
    assert [one.what for one in entries] == ["GET /v1/recordings"]
    assert entries[0].who.startswith("alice (token ")


@pytest.mark.parametrize("grant", [Grant("read", job="job"), Grant("operate", job="job"), Grant("operate", node="n")])
async def test_a_token_of_one_job_or_node_gets_none(tmp_path: Path, folder: Path, grant: Grant) -> None:
    """A block has what all jobs sent."""
    async with serve_controller(tmp_path, OWN, record=folder) as served, Link(served.url, issue(OWN, grant)) as link:
        with pytest.raises(RefusedError, match="this shows all jobs and nodes"):
            await link.recordings()
        with pytest.raises(RefusedError, match="this shows all jobs and nodes"):
            await link.recorded_block(_files(folder)[0].name)


async def test_a_name_leads_to_no_other_file(tmp_path: Path, folder: Path) -> None:
    """Whatever it is, also one of a file that is there."""
    (tmp_path / "other.jsonl.gz").write_text("hidden words")
    (folder / "note.txt").write_text("no block")
    names = ("note.txt", "..", "../ops.db", "%2e%2e%2fops.db", f"..%2F..%2F{tmp_path.name}%2Fother.jsonl.gz", "")
    async with serve_controller(tmp_path, "", record=folder) as served, aiohttp.ClientSession() as session:
        statuses = []
        for name in names:
            async with session.get(f"{served.url}/v1/recordings/{name}") as answer:
                statuses.append((answer.status, b"hidden words" in await answer.read()))
    (folder / "note.txt").unlink()

    assert statuses == [(404, False)] * len(names)


async def test_a_controller_that_records_nothing_says_why(tmp_path: Path) -> None:
    """In one sentence, and so does one that has nothing yet."""
    async with serve_controller(tmp_path) as served, Link(served.url) as link:
        with pytest.raises(RefusedError, match="nothing is recorded here: record_mb is 0"):
            await link.recordings()


@pytest.mark.usefixtures("_logs")
def test_an_incident_is_exported_from_the_address_alone(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file as from the folder; the token is read from its file."""
    token, here, there = tmp_path / "token", tmp_path / "here.recording", tmp_path / "there.recording"
    write_token_file(token, issue(OWN, Grant("read")))
    with _beside(tmp_path, OWN, folder) as url:
        line = ["recording", "export", "--controller", url, "--token-file", str(token), "--json"]
        code = main([*line, "--out", str(there)])
    told = json.loads(capsys.readouterr().out)
    assert main(["recording", "export", "--from", str(folder), "--out", str(here)]) == 0

    assert code == 0
    assert told["recorded"][0]["fault"] == "killed"
    assert there.read_bytes() == here.read_bytes()


@pytest.mark.usefixtures("_logs")
def test_too_much_and_nothing_are_said(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is fetched; with a folder besides it is not clear which is meant."""
    monkeypatch.setattr(verb, "_MOST_FETCHED_BYTES", 1000)
    (tmp_path / "empty").mkdir()
    said = []
    for recorded in (folder, tmp_path / "empty"):
        with _beside(tmp_path, "", recorded) as url:
            code = main(["recording", "export", "--controller", url])
        said.append((code != 0, capsys.readouterr().err))
    both = main(["recording", "export", "--controller", "http://127.0.0.1:9", "--from", str(folder)])

    assert [failed for failed, _ in said] == [True, True]
    assert "and no more than 0 are fetched: export them where its disk is, with --from DIR" in said[0][1]
    assert "has recorded nothing yet" in said[1][1]
    assert both != 0
    assert "give one of them" in capsys.readouterr().err
