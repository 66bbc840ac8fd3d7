# SPDX-License-Identifier: Apache-2.0
"""The newest self-check of each node outlives the controller: on the page, in ``nodes``, in metrics; bounded."""

from pathlib import Path

import sqlalchemy as sa

from megascale_ops.cli.nodes.node_words import history_of, lines_of
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.live.feed import Feed, Sources
from megascale_ops.controller.metrics.job_samples import self_checks
from megascale_ops.controller.nodes.newest_checks import KEPT_S, NewestChecks
from megascale_ops.schema.health import (
    CheckAsk,
    CheckedFigure,
    CheckedFinding,
    NodeMoves,
    SelfCheck,
    SelfCheckView,
)
from megascale_ops.schema.live import CheckLine
from megascale_ops.schema.messages import SELF_CHECK, Evidence, EvidenceItem
from tests.fakes.controlled_job import World

SLOW = CheckedFinding("bad", "GPU 1", "GPU 1 is 52.0% slower than the other one", check="gemm")
RATE = CheckedFigure("gemm_bf16", "2 of them", 5e14, 3e14, 6e14, "bf16 matrix products, 2 of them: 500 TFLOP/s")
BAD = SelfCheck("b", "quick", "bad", seconds=9.0, made=3, findings=(SLOW,), figures=(RATE,))


def _view(node: str, asked_wall_s: float, check: SelfCheck | None = BAD) -> SelfCheckView:
    return SelfCheckView(node, "done" if check is not None else "none", "id", asked_wall_s, "by hand", check)


def _shown(world: World) -> tuple[CheckLine, ...]:
    """Return what a page shows of the job's nodes' checks."""
    loop, feed = world.loop, Feed("job")
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job, check_of=loop.self_checks.view)
    for _ in feed.gather(sources, now_s=world.now_s, wall_s=loop.wall(), lag_s=0.0):
        pass
    assert feed.frame is not None
    return feed.frame.checks or ()


async def test_the_next_controller_shows_what_the_one_before_was_told() -> None:
    """The page, the list of nodes, a node's history and the metrics are the same before and after."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    asked = world.loop.self_checks.begin("b", CheckAsk(preempt=True), "asked for by hand")
    item = EvidenceItem(SELF_CHECK, ok=True, check=BAD)
    world.loop.evidence(Evidence(node="b", job="", incident="", order=asked.id, items=(item,)))
    nodes = world.loop.nodes
    before = _shown(world), nodes.view().checks, self_checks(nodes.checks.all())

    world.restart_controller()
    nodes = world.loop.nodes

    assert [(one.node, one.status, one.worst, one.figures) for one in _shown(world)] == [
        ("b", "bad", SLOW.text, (RATE.text,))
    ]
    assert (_shown(world), nodes.view().checks, self_checks(nodes.checks.all())) == before
    assert world.loop.self_checks.view("b").check == BAD
    assert world.loop.self_checks.view("a").state == "none"


def test_people_read_it_beside_the_nodes_life() -> None:
    """A healthy node whose newest check is bad has its line; the history has the figures."""
    world = World()
    world.loop.nodes.keep_check(_view("b", world.loop.wall()))
    world.loop.nodes.keep_check(_view("good", world.loop.wall(), SelfCheck("good", "quick", "good")))

    listed = lines_of(world.loop.nodes.view())
    book, checks = world.loop.nodes.book, world.loop.nodes.checks
    history = history_of(NodeMoves(book.life("b"), (), checks.of("b")))

    assert listed[1] == "b  healthy"
    assert listed[2].endswith(f": bad: {SLOW.text}")
    assert not any(line.startswith("good") for line in listed)
    assert history[-2:] == ["       3 checks in 9.00 s (quick; by hand)", f"       - {RATE.text}"]


def test_the_oldest_goes_first_and_what_is_old_goes_by_itself() -> None:
    """Both are told to the journal, without a check; one that is measured again is the newest."""
    checks = NewestChecks(most=2)
    for number, node in enumerate("aba"):
        assert checks.keep(_view(node, float(number)))[1:] == ()

    dropped = checks.keep(_view("c", 3.0))[1:]
    none_yet = checks.forget(2.0 + KEPT_S - 1.0)
    old = checks.forget(2.0 + KEPT_S)

    assert dropped == (SelfCheckView("b", "none"),)
    assert none_yet == ()
    assert old == (SelfCheckView("a", "none"),)
    assert [one.node for one in checks.all()] == ["c"]


def test_time_that_passes_takes_old_results_out_of_the_journal() -> None:
    """A node that is gone is not told of for ever."""
    world = World()
    world.loop.nodes.keep_check(_view("b", world.loop.wall()))
    kept = dict(world.memory.checks)

    world.now_s += KEPT_S + 1.0
    world.loop.nodes.poll()

    assert set(kept) == {"b"}
    assert world.memory.checks == {}


def _kept(store: Store) -> dict[str, SelfCheckView]:
    found = {one.node: one for one in store.node_checks()}
    store.close()
    return found


def test_a_journal_has_the_newest_of_each_and_an_older_one_has_none(tmp_path: Path) -> None:
    """Written anew, dropped; a journal of a program that knew no such table is read, and takes them when written to."""
    url = f"sqlite:///{tmp_path}/ops.db"
    open_store(url).close()
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("DROP TABLE checks"))

    older = _kept(open_store(url, readonly=True))
    store = open_store(url)
    store.submit(Batch(checks=(_view("a", 1.0), _view("b", 1.0))))
    store.submit(Batch(checks=(_view("b", 2.0), _view("a", 0.0, None))))
    store.close()

    assert older == {}
    assert _kept(open_store(url)) == {"b": _view("b", 2.0)}


def test_a_damaged_row_is_put_aside_and_told(tmp_path: Path) -> None:
    """One flipped letter costs that node's result, and no other one's."""
    url = f"sqlite:///{tmp_path}/ops.db"
    store = open_store(url)
    store.submit(Batch(checks=(_view("a", 1.0), _view("b", 1.0))))
    store.close()
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("UPDATE checks SET body = replace(body, '52.0', '2.0') WHERE node = 'b'"))

    store = open_store(url)

    assert "the newest self-check of a node" in store.loss
    assert set(_kept(store)) == {"a"}
