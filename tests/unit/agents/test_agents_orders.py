# SPDX-License-Identifier: Apache-2.0
"""Orders are obeyed once, in order, for the right round, and always answered."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from megascale_agents.orders import Obedience
from megascale_agents.preserve import Index
from megascale_agents.rounds import Rounds

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.schema.messages import MAX_BODY_BYTES, Evidence, EvidenceItem, Order
from tests.fakes.node import FakeNode

# What a recorder prepares: faulthandler on SIGUSR1, writing into <box dir>/<rank>.stacks.
REGISTERED = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=open(f"{sys.argv[1]}/{sys.argv[2]}.stacks", "a"), all_threads=True)
print("ready", file=sys.stderr, flush=True)
def train():
    time.sleep(600)
train()
"""


class FakeSpeaker:
    """Keeps evidence and what was urgent."""

    def __init__(self) -> None:
        self.evidence: list[Evidence] = []
        self.urged: list[str] = []

    async def tell(self, evidence: Evidence) -> None:
        """Keep evidence."""
        self.evidence.append(evidence)

    def urge(self, reason: str) -> None:
        """Keep a reason."""
        self.urged.append(reason)


class Obeying:
    """Obedience over a real node."""

    def __init__(self, folder: Path) -> None:
        self.node = FakeNode(folder)
        self.rounds = Rounds(str(self.node.root), self.node.node, lambda _: None)
        self.speaker = FakeSpeaker()
        self.counted: Counter[tuple[str, str]] = Counter()
        self.obedience = Obedience(
            self.node.node, self.rounds, self.speaker, lambda kind, outcome: self.counted.update([(kind, outcome)])
        )

    def start(self, ranks: int = 1, **more: object) -> None:
        """Start a round and look."""
        self.node.start_round(ranks, **more)  # type: ignore[arg-type]  passed on as given
        self.rounds.refresh(float(self.node.round))

    def order(self, kind: str, **more: object) -> Order:
        """Build an order for the round that runs."""
        fields: dict[str, object] = {
            "id": f"{kind}-{len(self.speaker.evidence)}",
            "job": "job",
            "node": "node-a",
            "round": self.node.round,
            "incident": "job-1",
            "deadline_s": 5.0,
            **more,
        }
        return Order(kind=kind, **fields)  # type: ignore[arg-type]  a test's shorthand

    async def obey(self, *orders: Order) -> list[EvidenceItem]:
        """Have orders obeyed; what they brought."""
        self.obedience.take(orders)
        async with asyncio.timeout(20):
            while self.obedience.is_busy:  # noqa: ASYNC110  as the speaker looks at it
                await asyncio.sleep(0.005)
        return [item for evidence in self.speaker.evidence for item in evidence.items]

    def close(self) -> None:
        """Leave nothing behind."""
        self.rounds.close()
        self.node.kill_all()


@pytest.fixture
def obeying(tmp_path: Path) -> Iterator[Obeying]:
    """A node to give orders to."""
    made = Obeying(tmp_path)
    yield made
    made.close()


def group_lives(group: int) -> bool:
    """Tell whether a process group still has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def until_text(path: Path, text: str) -> None:
    """Wait until a file has some text in it."""
    async with asyncio.timeout(20):
        while text not in path.read_text():  # noqa: ASYNC110, ASYNC240  a small file of another process
            await asyncio.sleep(0.01)


async def test_kill_reaches_the_whole_group(obeying: Obeying) -> None:
    """Also the children of the rank."""
    obeying.start(script="import subprocess; subprocess.run(['sleep', '600'])")

    items = await obeying.obey(obeying.order("kill"))

    child = obeying.node.children[0]
    assert child.wait(5) == -signal.SIGKILL
    assert items == [EvidenceItem(kind="signal", ok=True, rank=0, text=f"SIGKILL sent to process group {child.pid}")]
    async with asyncio.timeout(5):
        while group_lives(child.pid):  # noqa: ASYNC110  the kernel sends no events
            await asyncio.sleep(0.01)


async def test_stop_is_a_request(obeying: Obeying) -> None:
    """SIGTERM, only to the ranks that are named."""
    obeying.start(2)

    await obeying.obey(obeying.order("stop", ranks=(1,)))

    assert obeying.node.children[1].wait(5) == -signal.SIGTERM
    assert obeying.node.children[0].poll() is None


async def test_a_pid_that_belongs_to_somebody_else_is_never_signalled(obeying: Obeying) -> None:
    """The pid was given to another process since the round file was written."""
    file = obeying.node.start_round(1, boxes=False)
    stale = msgspec.structs.replace(file.ranks[0], start_ticks=file.ranks[0].start_ticks - 1)
    obeying.node.write_round(msgspec.structs.replace(file, ranks=(stale,)))
    obeying.rounds.refresh(1.0)

    items = await obeying.obey(obeying.order("kill"))

    assert "not needed" in items[0].text
    assert obeying.node.children[0].poll() is None


async def test_a_rank_the_runner_did_not_start_is_never_signalled(obeying: Obeying) -> None:
    """A black box alone gives no right to kill."""
    file = obeying.node.start_round(1, boxes=False)
    obeying.node.make_box(5, file.ranks[0].pid, file.ranks[0].start_ticks)
    obeying.rounds.refresh(1.0)

    items = await obeying.obey(obeying.order("kill", ranks=(5,)))

    assert not items[0].ok
    assert "did not start" in items[0].text
    assert obeying.node.children[0].poll() is None


async def test_an_order_is_obeyed_once_and_reported_until_heard(obeying: Obeying) -> None:
    """The controller repeats what it did not hear to be done."""
    obeying.start()
    order = obeying.order("dump_flight_recorder")

    await obeying.obey(order)
    await obeying.obey(order)
    assert len(obeying.speaker.evidence) == 1
    assert obeying.obedience.done() == (order.id,)

    obeying.obedience.reported([order.id])
    assert obeying.obedience.done() == ()
    await obeying.obey(order)
    assert obeying.obedience.done() == (order.id,)
    assert len(obeying.speaker.evidence) == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"round": 7}, "round 7"),
        ({"node": "node-b"}, "node-b"),
        ({"job": "other"}, "does not run here"),
        ({"kind": "restart"}, "no order for an agent"),
    ],
)
async def test_orders_for_somebody_else_are_refused(obeying: Obeying, change: dict[str, object], word: str) -> None:
    """Another round's ranks, another node, another job, a runner's order: nothing is done, and that is said."""
    obeying.start()

    items = await obeying.obey(obeying.order(str(change.pop("kind", "kill")), **change))

    assert not items[0].ok
    assert word in items[0].text
    assert obeying.node.children[0].poll() is None
    assert [outcome for _, outcome in obeying.counted] == ["refused"]


async def test_evidence_is_kept_before_its_owner_is_killed(obeying: Obeying) -> None:
    """Orders of one job are obeyed in the order in which they came, and each is answered and done."""
    obeying.start()
    orders = [
        obeying.order("dump_stacks", id="1"),
        obeying.order("preserve", id="2"),
        obeying.order("kill", id="3"),
    ]

    await obeying.obey(*orders)

    assert [evidence.order for evidence in obeying.speaker.evidence] == ["1", "2", "3"]
    assert obeying.obedience.done() == ("1", "2", "3")
    assert len(obeying.speaker.urged) == 3


async def test_everything_known_is_preserved(obeying: Obeying) -> None:
    """Boxes, stderr, dumps and an index; whole files only."""
    obeying.start(2)
    obeying.node.step(0, 12)
    obeying.node.stderr(1).write_text("".join(f"line {n}\n" for n in range(300)))

    items = await obeying.obey(obeying.order("dump_stacks", id="1"), obeying.order("preserve", id="2"))

    folder = obeying.node.run_dir / "incidents" / "job-1" / "node-a"
    index = msgspec.json.decode((folder / "evidence.json").read_bytes(), type=Index)
    assert not list(folder.glob(".*"))
    with BoxReader(folder / "rank-0.box") as box:
        assert box.progress().step == 12
    assert (folder / "rank-1.stderr.txt").read_text().splitlines() == [f"line {n}" for n in range(100, 300)]
    assert [rank.rank for rank in index.ranks] == [0, 1]
    assert {item.kind for item in index.items} == {"stacks", "black_box", "stderr"}
    assert {item.path for item in items if item.path} <= {str(path) for path in folder.iterdir()}


async def test_the_round_before_can_be_preserved(obeying: Obeying) -> None:
    """The order may come when the ranks run again already."""
    obeying.start()
    obeying.node.step(0, 41)
    obeying.start()

    items = await obeying.obey(obeying.order("preserve", round=1))

    with BoxReader(Path(items[0].path)) as box:
        assert box.identity().round == 1
        assert box.progress().step == 41
    index = msgspec.json.decode(Path(items[0].path).with_name("evidence.json").read_bytes(), type=Index)
    assert index.ranks[0].process.state == ""


async def test_a_run_folder_that_cannot_be_written_costs_files_not_answers(obeying: Obeying) -> None:
    """The summary still reaches the controller."""
    obeying.start()
    (obeying.node.run_dir / "incidents").write_text("a file where a folder should be")

    items = await obeying.obey(obeying.order("preserve"))

    assert items
    assert not any(item.ok for item in items)
    assert "could not be written" in items[0].text
    assert obeying.counted["preserve", "failed"] == 1


async def test_an_incident_cannot_leave_its_folder(obeying: Obeying) -> None:
    """An incident's name is data from the network."""
    obeying.start()

    items = await obeying.obey(obeying.order("preserve", incident="../../../x"))

    assert not items[0].ok
    assert "can't be used" in items[0].text


async def test_a_stopped_process_gives_no_answer_and_that_is_evidence(obeying: Obeying) -> None:
    """Nobody waits for it until the deadline."""
    obeying.start()
    obeying.node.freeze(0)

    items = await obeying.obey(obeying.order("dump_stacks", id="1"), obeying.order("dump_flight_recorder", id="2"))

    by_kind = {item.kind: item for item in items}
    assert by_kind["stacks"].text.startswith("no answer: process is stopped")
    assert by_kind["flight_recorder"].text == "no answer: process is stopped"
    assert by_kind["flight_recorder"].took_s < 1.0


async def test_a_dead_rank_gives_no_answer(obeying: Obeying) -> None:
    """There is nobody to ask."""
    obeying.start()
    obeying.node.children[0].kill()
    obeying.node.children[0].wait()

    items = await obeying.obey(obeying.order("dump_stacks"))

    assert items[0].text == "no answer: process is gone"


async def test_stacks_come_from_the_faulthandler(obeying: Obeying) -> None:
    """One signal, new text at the end of the file; what an earlier dump left there is not shown again."""
    obeying.node.job_folder.mkdir(parents=True)
    (obeying.node.job_folder / "0.stacks").write_text("stacks of long ago\n")
    obeying.start(script=REGISTERED)
    await until_text(obeying.node.stderr(0), "ready")

    items = await obeying.obey(obeying.order("dump_stacks"))

    assert items[0].ok
    assert "in train" in items[0].text
    assert "long ago" not in items[0].text
    assert Path(items[0].path).read_text() == items[0].text  # noqa: ASYNC240  a small file of a test
    assert obeying.node.children[0].poll() is None


async def test_a_process_without_a_handler_survives_the_question(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stacks file that another process left proves nothing: SIGUSR1 would kill."""
    monkeypatch.setattr("megascale_agents.stacks.py_spy_program", lambda: "")
    obeying.start()
    (obeying.node.job_folder / "0.stacks").write_text("left over\n")

    items = await obeying.obey(obeying.order("dump_stacks"))

    assert not items[0].ok
    assert "no faulthandler is registered" in items[0].text
    assert obeying.node.children[0].poll() is None


async def test_a_program_that_hangs_is_ended_at_the_deadline(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """py-spy may hang on a process in a strange state; the answer comes all the same."""
    hangs = tmp_path / "py-spy"
    hangs.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    hangs.chmod(0o755)
    monkeypatch.setattr("megascale_agents.stacks.py_spy_program", lambda: str(hangs))
    obeying.start()

    items = await obeying.obey(obeying.order("dump_stacks", deadline_s=0.3))

    assert not items[0].ok
    assert "py-spy took longer" in items[0].text


async def test_the_flight_recorder_is_asked_over_its_socket(obeying: Obeying) -> None:
    """The summary goes up, the whole dump into the incident's folder."""
    obeying.start()
    dump = b'{"pg_status": {"0": {"last_enqueued_collective": "6"}}, "entries": [{"collective_seq_id": 6}]}'

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=dump)

    async with serving(obeying.node.job_folder / "0.sock", answer):
        items = await obeying.obey(obeying.order("dump_flight_recorder"))

    assert items[0].ok
    assert items[0].text.splitlines() == [
        "1 collectives recorded",
        "group 0: entered 6",
        "not finished: ? 6 of group ?",
    ]
    assert Path(items[0].path).read_bytes() == dump  # noqa: ASYNC240  a small file of a test


async def test_a_worker_server_that_is_silent_is_not_waited_for(obeying: Obeying) -> None:
    """The deadline of the order holds, and its passing names what was asked."""
    obeying.start()

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with serving(obeying.node.job_folder / "0.sock", hang):
        items = await obeying.obey(obeying.order("dump_flight_recorder", deadline_s=0.2))

    assert items[0].text == "no answer: fr_trace_json did not answer in 0.2 s"


async def test_a_socket_without_a_listener_is_no_answer(obeying: Obeying) -> None:
    """A killed rank leaves its socket behind."""
    obeying.start()
    (obeying.node.job_folder / "0.sock").write_bytes(b"")

    items = await obeying.obey(obeying.order("dump_flight_recorder"))

    assert not items[0].ok
    assert items[0].text.startswith("no answer: worker server")


async def test_an_order_that_breaks_does_not_stop_the_next(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in one dump costs that dump; it is answered, counted and in the log."""

    async def broken(*_: object) -> EvidenceItem:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("megascale_agents.dumps.stacks_of", broken)
    obeying.start()

    await obeying.obey(obeying.order("dump_stacks", id="1"), obeying.order("kill", id="2"))

    assert obeying.counted == {("dump_stacks", "failed"): 1, ("kill", "obeyed"): 1}
    assert "oops" in obeying.speaker.evidence[0].items[0].text
    assert "oops" in caplog.text


async def test_evidence_of_many_ranks_fits_into_one_message(obeying: Obeying) -> None:
    """Texts are shortened, files are whole."""
    file = obeying.node.start_round(1, boxes=False)
    log = obeying.node.run_dir / "long.log"
    log.write_text(("\u00fc" * 990 + "\n") * 20)
    ranks = tuple(msgspec.structs.replace(file.ranks[0], rank=n, stderr_path=str(log)) for n in range(64))
    obeying.node.write_round(msgspec.structs.replace(file, ranks=ranks))
    obeying.rounds.refresh(1.0)

    items = await obeying.obey(obeying.order("preserve"))

    assert len(items) == 128
    assert len(msgspec.json.encode(obeying.speaker.evidence[0])) < MAX_BODY_BYTES


class serving:  # noqa: N801  reads as a verb where it is used
    """A worker server on a unix socket."""

    def __init__(self, path: Path, handler: object) -> None:
        app = web.Application()
        app.router.add_post("/handler/{name}", handler)  # type: ignore[arg-type]  aiohttp's handlers are loosely typed
        self._path = path
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> None:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
