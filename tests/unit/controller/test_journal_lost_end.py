# SPDX-License-Identifier: Apache-2.0
"""A journal that has lost its last commits (a power cut, a restored backup): no name comes twice, no rank is unseen."""

import asyncio
import copy
from pathlib import Path

import msgspec
import pytest

from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.journal.witnesses import highest_numbers
from megascale_ops.controller.rendezvous.poll import Poll
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import OrdersReply
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World


class Lost(World):
    """A world whose controller comes back with the journal as it was some time before."""

    def remember(self) -> None:
        """Make a backup of the journal."""
        memory = self.memory
        self.backup = copy.deepcopy((memory.cores, memory.parts, memory.incidents))

    def restore_backup(self) -> None:
        """Kill the controller and start another on the backup."""
        self.memory.cores, self.memory.parts, self.memory.incidents = self.backup
        self.restart_controller()

    async def ask_for_orders(self, node: str, round_: int, incidents: int = 0) -> OrdersReply:
        """Poll as the runner of a node does, for the round that it runs."""
        poll = Poll("job", node, f"runner-{node}", round_, incidents=incidents)
        asked = asyncio.ensure_future(self.loop.orders(poll, 0.0))
        await self.settle()
        return asked.result()

    async def lose_rank(self, step: int) -> None:
        """Let rank 1 die, and the job come up again."""
        dead = self.exit(1, -9)
        joins = [self.new_join(node, cause="failure", exits=(dead,) * (node == "a"), previous_round=self.round)
                 for node in list(self.ranks)]  # fmt: skip
        self.joined = {join.node: join for join in joins}
        self.ranks.clear()
        replies = [self.ask(join) for join in joins]
        await self.wait(0.4)
        assert all(reply.result().status == "go" for reply in replies)
        await self.run_round(step)


async def _two_rounds_ahead(world: Lost, *nodes: str) -> set[str]:
    """Back the journal up in round 1 and go on to round 3; return the names of all orders that were given."""
    await world.up(*nodes)
    world.remember()
    given = set()
    for step in (30, 40):
        await world.lose_rank(step)
        given |= {order.id for order in world.loop.jobs["job"].orders.values()}
    assert world.round == 3
    world.restore_backup()
    assert world.round == 1
    return given


async def test_a_stopped_rank_is_seen_though_the_journal_knows_an_earlier_round() -> None:
    """The runner says which round it runs, it is taken over at once, and a frozen rank in it is named and restarted."""
    world = Lost()
    before = await _two_rounds_ahead(world, "a")
    told_before = {"job-1", "job-2"}

    poll = await world.ask_for_orders("a", 3, incidents=2)
    resumed = msgspec.structs.replace(world.joined["a"], cause="resume", previous_round=3, node_rank=0, nodes=1)
    reply = await world.ask(msgspec.structs.replace(resumed, incidents=2))
    state, round_ = world.state, world.round
    await world.wait(1.0)
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(3.0)
    orders = {order.id for order in world.loop.jobs["job"].orders.values()}

    assert not poll.known
    assert (reply.status, state, round_) == ("go", "restarting", 3)
    (incident,) = [one for one in world.memory.incidents.values() if one.verdict and one.verdict.fault == "frozen"]
    assert incident.verdict is not None
    assert incident.verdict.culprits == (1,)
    assert incident.id not in told_before
    assert incident.round == 3
    assert orders
    assert not orders & before
    assert any(event.kind == "adopted" and "ends with round 1" in event.text for event in world.memory.events)


async def test_what_the_journal_still_knows_of_a_job_is_kept() -> None:
    """Habits, spent restarts and changes by hand of the rounds before are there after the round was taken over."""
    world = Lost()
    await world.up("a")
    await world.lose_rank(30)
    world.loop.policy("job", {"silence_floor_s": "7"})
    job = world.loop.jobs["job"]
    job.change(habits={"upload": 60.0})
    world.loop.transitions.save(job)
    world.remember()
    await world.lose_rank(40)
    world.restore_backup()

    resumed = msgspec.structs.replace(world.joined["a"], cause="resume", previous_round=3, node_rank=0, nodes=1)
    await world.ask(resumed)
    record = world.loop.jobs["job"].record
    world.restart_controller()

    assert (record.round, record.habits, record.restarts_in_all) == (3, {"upload": 60.0}, 1)
    assert record.policy.silence_floor_s == 7.0
    assert world.loop.jobs["job"].record.habits == {"upload": 60.0}


async def test_a_node_that_never_describes_the_round_is_lost() -> None:
    """Those that have are restarted without it, instead of staying unwatched."""
    world = Lost(nproc=1, min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    world.remember()
    await world.lose_rank(30)
    world.restore_backup()
    resumed = msgspec.structs.replace(world.joined["a"], cause="resume", previous_round=2, node_rank=0, nodes=2)

    first = await world.ask(resumed)
    world.ranks.pop("b")
    world.rounds["a"] = 2
    for _ in range(20):
        await world.wait(1.0)
        await world.ask_for_orders("a", 2)
        last = await world.ask(resumed)
    poll = await world.ask_for_orders("a", 2)

    assert first.status == "wait"
    assert last.status == "go"
    assert [order.kind for order in poll.orders] == ["restart"]
    assert any(
        one.verdict and one.verdict.fault == "node_lost" and one.verdict.nodes == ("b",)
        for one in world.memory.incidents.values()
    )


async def test_a_round_that_is_alive_is_believed_against_any_description() -> None:
    """The negative control: while its runner polls for the round that the journal knows, nothing is taken over."""
    world = Lost()
    await world.up("a")
    await world.ask_for_orders("a", 1)
    before = world.loop.jobs["job"].record
    stranger = world.new_join("z", cause="resume", previous_round=9)

    reply = await world.ask(msgspec.structs.replace(stranger, node_rank=0, nodes=1))

    assert reply.status == "wait"
    assert world.loop.jobs["job"].record == before


@pytest.mark.parametrize("witness", ["agent", "join"])
async def test_no_round_is_formed_twice(witness: str) -> None:
    """All runners ask for the next round: it is above the latest that agents or runners tell of."""
    world = Lost()
    await _two_rounds_ahead(world, "a")
    if witness == "agent":
        world.beat("a")
    world.ranks.clear()

    previous = 3 if witness == "join" else 0
    reply = world.ask(world.new_join("a", cause="failure", previous_round=previous))
    await world.wait(15.0)

    assert (reply.result().status, reply.result().round) == ("go", 4)


@pytest.mark.parametrize(("told", "number"), [(0, 3), (2, 3), (3, 101), (100, 201), (10**12, 3)])
async def test_numbers_of_incidents_go_on_above_all_that_was_told(told: int, number: int) -> None:
    """One after the other as long as nothing is missing; from the next hundred on where the journal has lost some."""
    world = World(policy=JobPolicy())
    await world.up("a")
    job = world.loop.jobs["job"]
    job.change(incidents=2)

    world.loop.transitions.witness(job, incidents=told)
    first = world.loop.transitions.warn(job, "x", Verdict("straggler", "it is slow", 0.9))
    second = world.loop.transitions.warn(job, "y", Verdict("straggler", "it is slow", 0.9))

    assert (first.id, second.id) == (f"job-{number}", f"job-{number + 1}")


async def test_runners_are_told_the_number_that_they_shall_remember() -> None:
    """With every answer: to a join, and to a poll."""
    world = Lost()
    await world.up("a")
    await world.lose_rank(30)

    poll = await world.ask_for_orders("a", 2)
    again = await world.ask(world.joined["a"])

    assert (poll.incidents, again.incidents) == (1, 1)


def test_folders_and_rows_are_witnesses(tmp_path: Path) -> None:
    """Of jobs that are known; a folder of something else is none."""
    for name in ("demo-7", "demo-12", "other-3", "notes", "demo-x"):
        (tmp_path / "incidents" / name).mkdir(parents=True)
    records = {"demo": msgspec.json.encode({"job": "demo", "run_dir": str(tmp_path)}), "bad": b"\xff"}

    found = highest_numbers(records, {"demo": 3, "lost": 5}, None)
    without = highest_numbers({"demo": b'{"run_dir":"/no/such/folder"}'}, {}, tmp_path / "missing")

    assert found == {"demo": 12, "lost": 5}
    assert without == {}


def test_the_journal_tells_its_highest_numbers(tmp_path: Path) -> None:
    """Also of a job whose record is gone."""
    store = open_store(f"sqlite:///{tmp_path}/ops.db")
    store.submit(Batch(incidents=tuple(Incident(f"job-{n}", "job", n) for n in (1, 12, 5))))
    store.flush()

    highest = store.highest_incidents()
    store.close()

    assert highest == {"job": 12}


async def test_orders_and_names_are_bound_to_last() -> None:
    """What orders or names follow from is written so that a power cut does not take it; progress is not."""
    world = World()
    batches: list[Batch] = []
    memory = world.memory

    class Watched:
        def submit(self, batch: Batch, done: object) -> None:
            batches.append(batch)
            memory.submit(batch, done)  # type: ignore[arg-type]  # passed on

    world.journal = Watched()
    world.loop = world.new_loop()
    await world.up("a")
    seen = len(batches)
    job = world.loop.jobs["job"]
    job.change(furthest=77)
    world.loop.transitions.save(job)
    world.loop.transitions.warn(job, "x", Verdict("straggler", "it is slow", 0.9))
    world.loop.transitions.save(job)

    assert any(batch.binding for batch in batches[:seen])
    assert [batch.binding for batch in batches[seen:]] == [False, True]
