# SPDX-License-Identifier: Apache-2.0
"""Who ordered what: every change that a person asks for is journaled, and read by those who may read everything."""

import json
from pathlib import Path

import aiohttp
import pytest

from megascale_ops.cli.main import main
from megascale_ops.errors import RefusedError
from megascale_ops.link import BlockingLink, Link
from megascale_ops.schema.events import AuditEntries, AuditEntry
from megascale_ops.schema.health import NodeAsk
from megascale_ops.schema.tokens import Grant, issue, new_token
from tests.fakes.served_controller import Served, serve_controller

OWN = new_token()
ALICE = issue(OWN, Grant("operate", name="alice"))
READS = issue(OWN, Grant("read"))


async def _ordered(served: Served) -> None:
    async with Link(served.url, ALICE) as link:
        await link.ask_node("node7", NodeAsk("quarantine", "fan is broken", "alice", 60.0))
        with pytest.raises(RefusedError, match="there is no job"):
            await link.set_policy("missing", {"frozen": "warn"})
        await link.status()
    async with Link(served.url, OWN) as link:
        await link.ask_node("node7", NodeAsk("release", "new fan"))
    served.store.flush()


async def test_each_change_is_told_with_who_where_and_what_came_of_it(tmp_path: Path) -> None:
    """Reading is not journaled, refusals are; no token is in it."""
    async with serve_controller(tmp_path, OWN) as served:
        await _ordered(served)
        async with Link(served.url, READS) as link:
            found = await link.audit()
            newest = await link.audit(limit=1)
            before = await link.audit(limit=1, before=newest.entries[0].number)
            of_job = await link.audit("missing")

    entries = found.entries
    assert [(one.what, one.status) for one in entries] == [
        ("POST /v1/nodes/node7", 200),
        ("POST /v1/jobs/missing/policy", 404),
        ("POST /v1/nodes/node7", 200),
    ]
    assert entries[0].who.startswith("alice (token ")
    assert entries[2].who.startswith("the controller's own token (token ")
    assert {one.place for one in entries} == {"127.0.0.1"}
    assert "fan is broken" in entries[0].asked
    assert entries[1].job == "missing"
    assert (newest.entries, newest.older) == (entries[2:], True)
    assert before.entries == entries[1:2]
    assert of_job.entries == entries[1:2]
    assert not {OWN, ALICE} & set(str(found).split())


async def test_a_restarted_controller_has_them_still(tmp_path: Path) -> None:
    """They are the journal's; no job of that name comes of it."""
    async with serve_controller(tmp_path, OWN) as served:
        await _ordered(served)
    async with serve_controller(tmp_path, OWN) as served, Link(served.url, READS) as link:
        found, jobs = await link.audit(), (await link.status()).jobs

    assert len(found.entries) == 3
    assert not jobs


def test_the_verb_lists_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for programs, and one sentence where there is nothing."""
    asked: list[tuple[str, int, int]] = []
    entry = AuditEntry(7, 1e9, "alice (token 1a) from 10.0.0.3: POST /v1/nodes/n: 200", who="alice (token 1a)")
    answers = [AuditEntries(), AuditEntries((entry,), older=True), AuditEntries((entry,))]

    def told(_link: BlockingLink, job: str, limit: int, before: int) -> AuditEntries:
        asked.append((job, limit, before))
        return answers.pop(0)

    monkeypatch.setattr(BlockingLink, "audit", told)
    codes = [
        main(["audit", *more, "--controller=http://127.0.0.1:9"])
        for more in ((), ("gpt", "--limit=1", "--before=9"), ("--json",))
    ]
    text = capsys.readouterr().out

    assert codes == [0, 0, 0]
    assert asked == [("", 50, 0), ("gpt", 1, 9), ("", 50, 0)]
    assert "nobody has ordered anything yet" in text
    assert "(older ones: --before 7)" in text
    assert "alice (token 1a) from 10.0.0.3: POST /v1/nodes/n: 200" in text
    assert json.loads(text[text.index("{") :])["entries"][0]["number"] == 7


async def test_a_token_for_one_job_may_not_read_them(tmp_path: Path) -> None:
    """It would see who works on others."""
    token = issue(OWN, Grant("operate", "job"))
    async with serve_controller(tmp_path, OWN) as served, Link(served.url, token) as link:
        with pytest.raises(RefusedError, match="this shows all jobs and nodes"):
            await link.audit()


async def test_a_query_that_can_not_be_is_refused(tmp_path: Path) -> None:
    """One sentence."""
    async with serve_controller(tmp_path, OWN) as served, aiohttp.ClientSession() as session:
        url, headers = f"{served.url}/v1/audit?limit=100000", {"Authorization": f"Bearer {OWN}"}
        async with session.get(url, headers=headers) as answer:
            status, body = answer.status, await answer.text()

    assert status == 400
    assert "limit '100000' can't be" in body
