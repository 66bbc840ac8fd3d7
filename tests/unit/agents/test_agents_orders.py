# SPDX-License-Identifier: Apache-2.0
"""Orders are obeyed once, in order, for the right round, and always answered."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from megascale_agents.orders import signals
from megascale_agents.orders.preserve import Index
from megascale_agents.ownership.processes import bounds_of
from megascale_agents.ownership.rights import myself

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.runner.processes import start_ticks
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.messages import EvidenceItem
from tests.fakes.obeying import Obeying, group_lives


@pytest.fixture
def obeying(tmp_path: Path) -> Iterator[Obeying]:
    """A node to give orders to."""
    made = Obeying(tmp_path)
    yield made
    made.close()


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
    assert not [path for path in (folder, folder.parent, *folder.iterdir()) if path.stat().st_mode & 0o077]
    with BoxReader(folder / "rank-0.box") as box:
        assert box.progress().step == 12
    assert (folder / "rank-1.stderr.txt").read_text().splitlines() == [f"line {n}" for n in range(100, 300)]
    assert [rank.rank for rank in index.ranks] == [0, 1]
    assert {item.kind for item in index.items} == {"process", "stacks", "black_box", "stderr"}
    assert {item.path for item in items if item.path} <= {str(path) for path in folder.iterdir()}


async def test_a_death_since_the_last_look_leaves_its_traces(obeying: Obeying) -> None:
    """The runner sees an end at once, so the order may come before the agent has looked at the process again."""
    obeying.start(2)
    obeying.node.children[1].kill()
    obeying.node.children[1].wait(5)

    items = await obeying.obey(obeying.order("preserve"))

    assert [item.rank for item in items if item.kind == "kernel"] == [1]


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


@pytest.mark.parametrize(
    ("script", "said", "ok"),
    [
        ("", "the script has no handler for it", False),
        ("signal.signal(signal.SIGUSR1, lambda *_: print('saved', flush=True))", "SIGUSR1 sent to process", True),
        ("faulthandler.register(signal.SIGUSR1, file=open('0.stacks', 'w'))", "has no handler for it", False),
    ],
)
def test_a_checkpoint_is_asked_of_scripts_that_take_the_signal(
    tmp_path: Path, script: str, said: str, ok: bool
) -> None:
    """The others would die of it; and the recorder's own handler, which writes stacks, is none of the script's."""
    code = f"import faulthandler, signal, time\n{script}\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, text=True) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            bounds = bounds_of(myself(), os.getpid(), start_ticks(os.getpid()))
            listed = RankProcess(0, 0, child.pid, start_ticks(child.pid))

            item = signals.send("checkpoint", 0, listed, bounds)

            assert said in item.text
            assert item.ok is ok
            assert child.stdout.readline() == "saved\n" if ok else child.poll() is None
        finally:
            child.kill()
