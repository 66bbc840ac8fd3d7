# SPDX-License-Identifier: Apache-2.0
"""People and nodes: over HTTP and the command line, kept by the journal, and how many spares a cluster needs."""

import asyncio
import math
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from megascale_ops.cli.nodes.node_words import life_lines, spares_lines
from megascale_ops.cli.nodes.verb import nodes
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.nodes.book import NodeBook
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.controller.nodes.life import Happening, NodeEvent
from megascale_ops.diagnosis.statistics.spares import rate_of, spares_for
from megascale_ops.schema.health import NodeLife
from megascale_ops.schema.messages import Heartbeat
from tests.fakes.served_controller import serve_controller

T0 = 1_795_288_699.0


async def _typed(url: str, *words: str) -> Result:
    """Return what a person gets who types this."""
    return await asyncio.to_thread(CliRunner().invoke, nodes, [*words, "--controller", url], catch_exceptions=True)


async def test_a_person_sees_moves_and_takes_back(tmp_path: Path) -> None:
    """List, quarantine, history, undo, release: each says where the node stands; the journal has every move."""
    async with serve_controller(tmp_path) as served:
        for name in "abc":
            served.loop.heartbeat(Heartbeat(name, f"agent-{name}", 1, 1.0, T0, full=True))
        served.loop.nodes.accuse(
            Accusation("a", "xid_79", served.loop.wall(), "killed: GPU 0: Xid 79", ("GPU 0: Xid 79",), "job")
        )
        shown = await _typed(served.url, "list")
        out = await _typed(served.url, "quarantine", "b", "--reason", "a fan is loud", "--for", "2")
        unheard = await _typed(served.url, "quarantine", "bb", "--reason", "a fan is loud")
        moves = await _typed(served.url, "history", "a")
        undone = await _typed(served.url, "undo", "b")
        await _typed(served.url, "undo", "bb")
        released = await _typed(served.url, "release", "a", "--reason", "the GPU is new")
        empty = await _typed(served.url, "list")
        as_json = await _typed(served.url, "list", "--json")
        kept = list(served.loop.nodes.book.moves.values())
    store = open_store(f"sqlite:///{tmp_path}/ops.db", readonly=True)
    journaled = store.node_moves()
    store.close()

    assert "a  suspect until" in shown.output
    assert "3 nodes are known; 0 of at most 1 a day went by themselves" in shown.output
    assert "b  quarantined until" in out.output
    assert "a fan is loud" in out.output
    assert "is heard" not in out.output
    assert "bb  quarantined until it is released" in unheard.output
    assert "no agent and no runner of a node bb is heard: look whether that is its name" in unheard.output
    assert "healthy -> suspect: accused, by controller (job job)" in moves.output
    assert "       - GPU 0: Xid 79" in moves.output
    assert "b  healthy" in undone.output
    assert "a  healthy" in released.output
    assert empty.output.startswith("every node is healthy")
    assert '"known": 3' in as_json.output
    assert list(journaled) == kept
    assert NodeBook(journaled).life("a").state == "healthy"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("release", "a"), "node a is healthy: there is nothing to release it from"),
        (("undo", "a"), "node a has made no move that could be taken back"),
        (("history", "z"), "nothing is known of a node 'z'"),
        (("quarantine", "../etc"), "node"),
    ],
)
async def test_what_can_not_be_done_is_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    """No traceback, an exit code that is not 0, and nothing was changed."""
    async with serve_controller(tmp_path) as served:
        served.loop.heartbeat(Heartbeat("a", "agent-a", 1, 1.0, T0, full=True))
        told = await _typed(served.url, *words)
        moves = dict(served.loop.nodes.book.moves)

    assert told.exit_code != 0
    assert sentence in str(told.exception) + told.output
    assert moves == {}


def test_the_journal_keeps_moves_and_drops_what_is_dropped(tmp_path: Path) -> None:
    """The newest word on each number; a journal of an older program has none and takes them."""
    url = f"sqlite:///{tmp_path}/ops.db"
    open_store(url).close()
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("DROP TABLE nodes"))
    older = open_store(url, readonly=True)
    before = older.node_moves()
    older.close()
    book = NodeBook(most=3)
    events = (NodeEvent.ACCUSED, NodeEvent.RELEASED, NodeEvent.ACCUSED, NodeEvent.QUARANTINED_BY_HAND)
    store = open_store(url)
    for number, event in enumerate(events):
        store.submit(Batch(nodes=book.move("a", Happening(event.value, T0 + number))))
    store.close()
    again = open_store(url)
    kept = again.node_moves()
    again.close()

    assert before == ()
    assert [move.number for move in kept] == [3, 4]
    assert NodeBook(kept).lives() == book.lives()


def test_spares_are_the_binomials_p99() -> None:
    """Against sums made the long way; and more nodes, more failures, longer repairs never need fewer."""
    answer = spares_for(256, 0.004, 12 * 3600.0)
    p = 1.0 - math.exp(-0.002)
    exact = [
        sum(math.comb(256, k) * p**k * (1 - p) ** (256 - k) for k in range(most + 1))
        for most in range(answer.spares + 1)
    ]

    assert answer.spares == 3
    assert answer.shares == pytest.approx(exact)
    assert exact[-2] < 0.99 <= exact[-1]
    assert spares_for(256, 0.0, 3600.0).spares == 0
    assert spares_for(1, 1e9, 1e9).spares == 1
    assert spares_for(100_000, 0.01, 86_400.0).spares > 1000
    assert [spares_for(n, 0.01, 86_400.0).spares for n in (8, 64, 512)] == sorted(
        spares_for(n, 0.01, 86_400.0).spares for n in (8, 64, 512)
    )


def test_no_failure_yet_is_a_bound_and_no_rate() -> None:
    """Three over the node-days; and where nothing was watched there is nothing to say."""
    assert rate_of(0, 300.0) == (0.01, True)
    assert rate_of(6, 300.0) == (0.02, False)
    with pytest.raises(ValueError, match="no node was watched yet"):
        rate_of(0, 0.0)


def test_the_answer_comes_with_its_inputs() -> None:
    """Nodes, rate and where it comes from, time out, and what it leaves out."""
    lines = spares_lines(spares_for(256, 0.004, 43_200.0), "given by --rate", is_repair_given=True)

    assert lines[0].startswith("3 spare nodes for 256: all places are filled 99.81% of the time; 2 would be")
    assert "0.004 a node and day (given by --rate)" in lines[1]
    assert "12 h 0 min each time (given by --repair)" in lines[2]
    assert "binomial (n = 256)" in lines[3]


@pytest.mark.parametrize(("reason", "end"), [("fan is loud", "by ada: fan is loud"), ("", "by ada")])
def test_a_reason_is_told_where_one_was_given(reason: str, end: str) -> None:
    """--reason may be left out; then nothing stands in its place."""
    lines = list(life_lines(NodeLife("a", "draining", since_wall_s=1e9, by="ada", reason=reason)))

    assert lines[1].endswith(end)
