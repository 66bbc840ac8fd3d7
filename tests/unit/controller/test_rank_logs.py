# SPDX-License-Identifier: Apache-2.0
"""What ranks printed, as a run's own controller shows it: which lines, and whose files never."""

import os
import time
from pathlib import Path

import aiohttp
import pytest

from megascale_ops.controller.server import rank_logs
from megascale_ops.controller.server.rank_logs import MOST_AT_ONCE, RankLogs
from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.log_parts import TAIL_BYTES
from megascale_ops.schema.messages import Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.runs import MOST_LINE, LogPart, LogQuery
from tests.fakes.served_controller import serve_controller


def _write(folder: Path, text: str, place: str = "round-1/rank-0", stream: str = "stderr") -> Path:
    path = folder / "logs" / place / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


async def _read(folder: Path, query: LogQuery) -> LogPart:
    return await RankLogs(folder).read(query)


async def test_the_last_lines_of_the_newest_round_are_shown(tmp_path: Path) -> None:
    """Without more words the newest round's stderr, its last lines; older rounds are named and can be asked for."""
    _write(tmp_path, "old\n")
    _write(tmp_path, "".join(f"line {at}\n" for at in range(300)), "round-12/rank-0")

    newest = await _read(tmp_path, LogQuery(rank=0, lines=2))
    older = await _read(tmp_path, LogQuery(rank=0, round=1))

    assert (newest.round, newest.lines, newest.rounds, newest.is_cut) == (12, ("line 298", "line 299"), (12, 1), True)
    assert (older.round, older.lines, older.is_cut) == (1, ("old",), False)


async def test_a_tail_goes_on_where_it_ended(tmp_path: Path) -> None:
    """What came since is told alone, a line without an end when it has one, and a file begun anew from its start."""
    path = _write(tmp_path, "one\ntw")

    first = await _read(tmp_path, LogQuery())
    path.write_text("one\ntwo\nthree\n")
    second = await _read(tmp_path, LogQuery(after=first.end))
    nothing = await _read(tmp_path, LogQuery(after=second.end))
    path.write_text("new\n")
    anew = await _read(tmp_path, LogQuery(after=second.end))

    assert first.lines == ("one",)
    assert (second.lines, second.is_anew) == (("two", "three"), False)
    assert (nothing.lines, nothing.end) == ((), second.end)
    assert (anew.lines, anew.is_anew) == (("new",), True)


async def test_a_search_finds_what_the_tail_does_not_show(tmp_path: Path) -> None:
    """Lines that hold a text are found in far more than is shown, whatever their case; the text is no pattern."""
    _write(tmp_path, "CUDA error (a.*b)\n" + "x" * 80 * (TAIL_BYTES // 40) + "\nlast\n")

    tail = await _read(tmp_path, LogQuery())
    found = await _read(tmp_path, LogQuery(grep="cuda ERROR (a.*"))

    assert tail.lines == ("last",)
    assert tail.is_cut
    assert found.lines == ("CUDA error (a.*b)",)


async def test_no_file_costs_more_than_its_bound(tmp_path: Path) -> None:
    """A line of a megabyte is cut, and bytes that are no text are shown as such."""
    _write(tmp_path, "y" * 1_000_000)
    (tmp_path / "logs/round-1/rank-0/stdout.log").write_bytes(b"\xff\xfe\n")

    long, binary = await _read(tmp_path, LogQuery()), await _read(tmp_path, LogQuery(stream="stdout"))

    assert [len(line) for line in long.lines] == [MOST_LINE]
    assert binary.lines == ("\ufffd\ufffd",)


async def test_each_node_of_several_has_its_folder(tmp_path: Path) -> None:
    """Of a run of several nodes with one disk the rank is found where its node wrote."""
    _write(tmp_path, "a\n", "node-a/round-1/rank-0")
    _write(tmp_path, "b\n", "node-b/round-1/rank-8")

    assert (await _read(tmp_path, LogQuery(rank=8))).lines == ("b",)


@pytest.mark.parametrize("step", ["logs", "logs/node-a", "logs/node-a/round-1", "logs/node-a/round-1/rank-0"])
async def test_a_link_leads_nowhere(tmp_path: Path, step: str) -> None:
    """Whichever folder on the way is a link, also to a folder that looks like one of ours, nothing of it is read."""
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    secret = _write(foreign, "secret\n", "node-a/round-1/rank-0")
    (run / step).parent.mkdir(parents=True)
    (run / step).symlink_to(foreign / step)

    with pytest.raises(NotFoundError, match="rank 0 has left no stderr"):
        await _read(run, LogQuery())
    assert secret.exists()


async def test_what_is_no_ordinary_file_of_this_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link, a pipe and another user's file in the place of a log are left alone, and nothing waits for a writer."""
    path = _write(tmp_path, "mine\n")
    (tmp_path / "secret").write_text("secret\n")
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(NotFoundError):
        await _read(tmp_path, LogQuery())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotFoundError):
        await _read(tmp_path, LogQuery())
    path.unlink()
    path.write_text("theirs\n")
    monkeypatch.setattr(rank_logs.os, "geteuid", lambda: path.stat().st_uid + 1)

    with pytest.raises(NotFoundError):
        await _read(tmp_path, LogQuery())


async def test_a_shared_controller_reads_nothing(tmp_path: Path) -> None:
    """Without a run of its own, or with a second job, no file is its own to read."""
    assert RankLogs(tmp_path).may_read(1)
    assert not RankLogs(tmp_path).may_read(2)
    assert not RankLogs(None).may_read(1)
    with pytest.raises(RefusedError, match="reads no files"):
        await RankLogs(None).read(LogQuery())


async def test_a_disk_that_is_away_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that takes too long is given up with a sentence, and only so many of them wait at a time."""
    monkeypatch.setattr(rank_logs, "PATIENCE_S", 0.01)
    monkeypatch.setattr(rank_logs, "_in_thread", lambda _work, _done: rank_logs.asyncio.Future())
    logs = RankLogs(tmp_path)

    for _ in range(MOST_AT_ONCE):
        with pytest.raises(RefusedError, match="did not answer"):
            await logs.read(LogQuery())
    with pytest.raises(RefusedError, match="being read already"):
        await logs.read(LogQuery())


@pytest.mark.parametrize(
    "query", ["rank=-1", "rank=../../x", "stream=../secret", "round=x", "lines=9999", "rank=0&rank=1", "after=-1"]
)
async def test_no_part_of_a_path_comes_from_a_request(tmp_path: Path, query: str) -> None:
    """What is no number, or none of the two streams, is answered with a sentence before anything is opened."""
    async with serve_controller(tmp_path) as served, aiohttp.ClientSession() as session:
        policy = JobPolicy(node_lost_s=3600.0)
        join = Join("one", "a", "r", "j", 2, 1, 1, "127.0.0.1", 29500, time.monotonic(), policy=policy)
        await served.loop.joining.join(join, 5.0)
        async with session.get(f"{served.url}/v1/jobs/one/logs?{query}") as answer:
            assert answer.status == 400, await answer.text()
