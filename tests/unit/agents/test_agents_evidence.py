# SPDX-License-Identifier: Apache-2.0
"""Evidence of a rank is gathered before its deadline, whatever the rank does, and no answer is evidence too."""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from megascale_agents.evidence import dumps, flight_recorder, py_spy
from megascale_agents.orders import executor
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch

from megascale_ops.blackbox.inquest import sentences
from megascale_ops.blackbox.last_moments import read
from megascale_ops.blackbox.layout import NCCL
from megascale_ops.blackbox.nccl_codes import FLAG_DONE
from megascale_ops.schema.gpu_queue import GpuOperation, GpuQueue
from megascale_ops.schema.kernels import SAMPLED_SUFFIX, KernelTime, RankKernels
from megascale_ops.schema.messages import MAX_BODY_BYTES, CollectiveFact, EvidenceItem, Order
from tests.fakes.boards import FakeBoard
from tests.fakes.obeying import REGISTERED, Obeying, of, serving, until_text


@pytest.fixture
def obeying(tmp_path: Path) -> Iterator[Obeying]:
    """A node to give orders to."""
    made = Obeying(tmp_path)
    yield made
    made.close()


async def test_a_stopped_process_gives_no_answer_and_that_is_evidence(obeying: Obeying) -> None:
    """It is not waited for until the deadline."""
    obeying.start()
    obeying.node.freeze(0)

    items = await obeying.obey(obeying.order("dump_stacks", id="1"), obeying.order("dump_flight_recorder", id="2"))

    by_kind = {item.kind: item for item in items}
    assert by_kind["stacks"].text.startswith("no answer: process is stopped")
    assert by_kind["flight_recorder"].text == "no answer: process is stopped"
    assert by_kind["flight_recorder"].took_s < 1.0


async def test_a_dead_rank_gives_no_answer(obeying: Obeying) -> None:
    """There is no process to query."""
    obeying.start()
    obeying.node.children[0].kill()
    obeying.node.children[0].wait()

    item = of(await obeying.obey(obeying.order("dump_stacks")), "stacks")

    assert item.text == "no answer: process is gone"


async def test_stacks_come_from_the_faulthandler(obeying: Obeying) -> None:
    """One signal, new text at the end of the file; what an earlier dump left there is not shown again."""
    obeying.node.job_folder.mkdir(parents=True)
    (obeying.node.job_folder / "0.stacks").write_text("stacks of long ago\n")
    obeying.start(script=REGISTERED)
    await until_text(obeying.node.stderr(0), "ready")

    item = of(await obeying.obey(obeying.order("dump_stacks")), "stacks")

    assert item.ok
    assert "in train" in item.text
    assert "long ago" not in item.text
    assert Path(item.path).read_text() == item.text  # noqa: ASYNC240  a small file of a test
    assert obeying.node.children[0].poll() is None


async def test_a_process_without_a_handler_survives_the_question(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stacks file that another process left proves nothing: SIGUSR1 would kill."""
    monkeypatch.setattr("megascale_agents.evidence.py_spy.program", lambda: "")
    obeying.start()
    (obeying.node.job_folder / "0.stacks").write_text("left over\n")

    item = of(await obeying.obey(obeying.order("dump_stacks")), "stacks")

    assert not item.ok
    assert "no faulthandler is registered" in item.text
    assert obeying.node.children[0].poll() is None


async def test_a_program_that_hangs_is_ended_at_the_deadline(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """py-spy may hang on a process in a strange state; the answer comes all the same."""
    hangs = tmp_path / "py-spy"
    hangs.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    hangs.chmod(0o755)
    monkeypatch.setattr("megascale_agents.evidence.py_spy.program", lambda: str(hangs))
    # What else is looked at may take a busy machine seconds; here the program's own deadline is meant.
    monkeypatch.setattr(executor, "_RANK_SLACK_S", 60.0)
    monkeypatch.setattr(executor, "_SLACK_S", 60.0)
    obeying.start()

    item = of(await obeying.obey(obeying.order("dump_stacks", deadline_s=0.3)), "stacks")

    assert not item.ok
    assert "py-spy took longer" in item.text


async def test_the_flight_recorder_is_asked_over_its_socket(obeying: Obeying) -> None:
    """The summary goes up, the whole dump into the incident's folder."""
    obeying.start()
    dump = b'{"pg_status": {"0": {"last_enqueued_collective": "6"}}, "entries": [{"collective_seq_id": 6}]}'

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=dump)

    async with serving(obeying.node.job_folder / "0.sock", answer):
        item = of(await obeying.obey(obeying.order("dump_flight_recorder")), "flight_recorder")

    assert item.ok
    assert item.text.splitlines() == [
        "1 collectives recorded",
        "group 0: entered 6",
        "not finished: ? 6 of group ?",
    ]
    assert Path(item.path).read_bytes() == dump  # noqa: ASYNC240  a small file of a test


@pytest.mark.parametrize(
    ("nccl", "others", "said"),
    [
        (b'{"entries": [{"profiling_name": "nccl:x", "collective_seq_id": 6}]}', b"{}", "not finished: nccl:x 6"),
        (b'{"entries": []}', b'{"entries": [{"collective_seq_id": 4}]}', "not finished: ? 4"),
        (None, b'{"entries": [{"collective_seq_id": 4}]}', "not finished: ? 4"),
        (b"{}", b"{}", "0 collectives recorded"),
    ],
    ids=["NCCL", "Gloo in a build with CUDA", "a build without CUDA", "before the first group"],
)
async def test_of_two_flight_recorders_the_one_that_says_something_is_read(
    obeying: Obeying, nccl: bytes | None, others: bytes, said: str
) -> None:
    """NCCL's and that of all other backends: each is empty where its backend is not used."""
    obeying.start()

    async def answer(request: web.Request) -> web.Response:
        body = {"dump_nccl_trace_json": nccl, "fr_trace_json": others}[request.path.rsplit("/", 1)[-1]]
        return web.Response(status=404) if body is None else web.Response(body=body)

    async with serving(obeying.node.job_folder / "0.sock", answer):
        item = of(await obeying.obey(obeying.order("dump_flight_recorder")), "flight_recorder")

    assert item.ok
    assert said in item.text


async def test_a_worker_server_that_is_silent_is_not_waited_for(obeying: Obeying) -> None:
    """The deadline of the order holds, and its passing names what was asked."""
    obeying.start()

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with serving(obeying.node.job_folder / "0.sock", hang):
        item = of(await obeying.obey(obeying.order("dump_flight_recorder", deadline_s=0.2)), "flight_recorder")

    assert item.text == "no answer: dump_nccl_trace_json did not answer in 0.2 s"
    assert item.marks == ("no_answer",)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{}", "ended 7 bytes early"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n" + b" " * 20_000_000, "is larger than 16777216 bytes"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no answer: worker server"),
        (b"", "no answer: worker server"),
    ],
    ids=["cut short", "without end", "another protocol", "nothing"],
)
async def test_what_is_no_answer_of_a_worker_server_is_said(obeying: Obeying, said: bytes, text: str) -> None:
    """Whatever listens on a rank's socket: a sentence, and the rank's other evidence comes all the same."""
    obeying.start()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(talk, obeying.node.job_folder / "0.sock"):
        item = of(await obeying.obey(obeying.order("dump_flight_recorder")), "flight_recorder")

    assert not item.ok
    assert text in item.text


async def test_silent_worker_servers_hold_no_heartbeat(tmp_path: Path) -> None:
    """The pool by which heartbeats go is free while all are asked; in the end no thread of theirs is left."""
    before = set(threading.enumerate())
    sockets = [tmp_path / f"{rank}.sock" for rank in range(40)]
    servers = [socket.socket(socket.AF_UNIX) for _ in sockets]
    for server, path in zip(servers, sockets, strict=True):
        server.bind(str(path))
        server.listen()  # a client waits to be accepted, as with a stopped process
    asked = [asyncio.create_task(flight_recorder.ask(path, "ping", 2.0)) for path in sockets]
    async with asyncio.timeout(20.0):
        while len(set(threading.enumerate()) - before) < len(sockets):  # noqa: ASYNC110  threads have no events
            await asyncio.sleep(0)

        answered = await asyncio.to_thread(lambda: sum(not one.done() for one in asked))

    assert answered == len(sockets)
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(end) for end in ends} == {flight_recorder.TooLateError}
    for server in servers:
        server.close()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("ask "):
            await asyncio.to_thread(thread.join, 10.0)
            assert not thread.is_alive()


async def test_a_socket_without_a_listener_is_no_answer(obeying: Obeying) -> None:
    """A killed rank leaves its socket behind."""
    obeying.start()
    (obeying.node.job_folder / "0.sock").write_bytes(b"")

    item = of(await obeying.obey(obeying.order("dump_flight_recorder")), "flight_recorder")

    assert not item.ok
    assert item.text.startswith("no answer: worker server")


async def test_an_order_that_breaks_does_not_stop_the_next(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in one dump costs that dump; it is answered, counted and in the log."""

    async def broken(*_: object) -> EvidenceItem:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("megascale_agents.evidence.dumps.stacks_of", broken)
    obeying.start()

    await obeying.obey(obeying.order("dump_stacks", id="1"), obeying.order("kill", id="2"))

    assert obeying.counted == {("dump_stacks", "failed"): 1, ("kill", "obeyed"): 1}
    assert "oops" in obeying.speaker.evidence[0].items[0].text
    assert "oops" in caplog.text


async def test_one_rank_that_breaks_costs_the_others_nothing(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank is answered for by name."""
    good = dumps.stacks_of

    async def broken_for_1(order: Order, watch: RoundWatch, rank: RankWatch) -> list[EvidenceItem]:
        if rank.rank == 1:
            raise ZeroDivisionError("oops")
        return await good(order, watch, rank)

    monkeypatch.setattr(dumps, "stacks_of", broken_for_1)
    obeying.start(2)

    items = await obeying.obey(obeying.order("dump_stacks"))

    assert "oops" in of(items, "stacks", 1).text
    assert of(items, "process", 0).ok
    assert "oops" in caplog.text


async def test_one_rank_that_hangs_costs_the_others_nothing(obeying: Obeying, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own answer says that it did not come in time."""

    async def hangs_for_1(_order: Order, _watch: RoundWatch, rank: RankWatch) -> list[EvidenceItem]:
        if rank.rank == 1:
            await asyncio.sleep(60)
        # At once: real stacks may take a busy machine 2 s.
        return [EvidenceItem(kind="process", ok=True, rank=rank.rank)]

    monkeypatch.setattr(dumps, "stacks_of", hangs_for_1)
    obeying.start(2)

    items = await obeying.obey(obeying.order("dump_stacks", deadline_s=0.1))

    assert of(items, "stacks", 1).marks == ("no_answer",)
    assert of(items, "process", 0).ok


async def test_an_order_that_hangs_names_every_rank(obeying: Obeying, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is evidence of a rank, not of a node."""

    async def hang(_order: Order) -> tuple[str, list[EvidenceItem]]:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(obeying.obedience, "_act", hang)
    monkeypatch.setattr(executor, "_SLACK_S", 0.1)
    obeying.start(2)

    items = await obeying.obey(obeying.order("dump_flight_recorder", deadline_s=0.1))

    assert [(item.rank, item.marks) for item in items] == [(0, ("no_answer",)), (1, ("no_answer",))]


async def test_a_run_folder_that_hangs_costs_files_not_answers(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It often lies on the very storage whose hang is the incident."""
    monkeypatch.setattr(dumps, "_KEEP_S", 0.1)
    over = threading.Event()
    monkeypatch.setattr("megascale_agents.evidence.incident_folder.IncidentFolder.write", lambda *_: over.wait(30.0))
    obeying.start(script=REGISTERED)
    await until_text(obeying.node.stderr(0), "ready")

    items = await obeying.obey(obeying.order("dump_stacks", id="1"), obeying.order("preserve", id="2", deadline_s=0.1))
    over.set()

    assert of(items, "stacks").ok
    assert "not kept" in of(items, "stacks").text
    assert "in train" in of(items, "stacks").text
    assert of(items, "black_box").marks == ("no_answer",)
    assert "running, step" in of(items, "black_box").text


async def test_the_black_box_is_read_whatever_the_process_does(obeying: Obeying) -> None:
    """A stopped rank's collectives are known; a rank without a box says that it has none."""
    obeying.start(2)
    box = obeying.node.boxes[0]
    box.begin_collective(b"0", b"all_reduce", 1, 64, 1, 1, 2)
    box.begin_collective(b"0", b"broadcast", 2, 8, 3, 3)
    obeying.node.freeze(0)
    watch = obeying.rounds.current["job"].ranks[1]
    watch.box = None

    items = await obeying.obey(obeying.order("dump_flight_recorder"))

    assert of(items, "collectives").ok
    assert of(items, "collectives").collectives == (
        CollectiveFact(group="0", seq=1, function="all_reduce", bytes_moved=64, done=True),
        CollectiveFact(group="0", seq=2, function="broadcast", bytes_moved=8),
    )
    assert of(items, "flight_recorder").marks == ("no_answer", "stopped")
    assert not of(items, "collectives", 1).ok


@pytest.mark.parametrize(("owns_gil", "held"), [(True, True), (False, False)])
async def test_a_server_that_knows_no_stacks_speaks_for_a_held_lock(
    obeying: Obeying, monkeypatch: pytest.MonkeyPatch, *, owns_gil: bool, held: bool
) -> None:
    """It answers a ping and not ``dump_traceback``; py-spy may still show that no thread holds the lock."""
    monkeypatch.setattr("megascale_agents.evidence.stacks._SERVER_S", 0.2)
    obeying.start(script=REGISTERED)
    await until_text(obeying.node.stderr(0), "ready")
    pid = obeying.node.children[0].pid
    stack = [{"os_thread_id": pid, "owns_gil": owns_gil, "frames": [{"name": "f", "filename": "/a.py", "line": 1}]}]

    async def spied(_pid: int, _deadline_s: float, *_options: str, **_as: object) -> py_spy.Spied:
        return py_spy.parse(json.dumps(stack).encode(), pid)

    async def answer(request: web.Request) -> web.Response:
        if request.match_info["name"] != "ping":
            await asyncio.sleep(60)
        return web.Response(body=b"pong")

    monkeypatch.setattr(py_spy, "ask", spied)
    async with serving(obeying.node.job_folder / "0.sock", answer):
        item = of(await obeying.obey(obeying.order("dump_stacks")), "stacks")

    assert item.ok
    assert item.frames == ("f (/a.py:1)",)
    assert item.marks == (("gil_held", "in_native") if held else ("in_syscall",))


def test_facts_and_frames_of_many_ranks_fit_into_one_message() -> None:
    """Texts shrink first; where each rank is stays to the last."""
    known = tuple(CollectiveFact("0", number, "all_reduce", "[[4096, 4096]]", "Float") for number in range(16))
    one = EvidenceItem("stacks", True, 0, "x" * 4000, frames=("f (" + "y" * 110 + ":1)",) * 24, collectives=known)  # noqa: FBT003

    few = executor._fit([one] * 8)
    many = executor._fit([one] * 128)

    assert len(msgspec.json.encode(few)) < MAX_BODY_BYTES
    assert few[0].frames == one.frames
    assert len(msgspec.json.encode(many)) < MAX_BODY_BYTES
    assert many[0].frames
    assert many[0].collectives
    assert executor._fit([one]) == (one,)


def test_lists_by_peer_and_queues_of_many_ranks_fit_into_one_message() -> None:
    """128 ranks in an all_to_all over 512, with sixteen operations before each GPU: what waits at all stays told."""
    call = CollectiveFact("0", 7, "all_to_all", "[[8]]", sends=(123_456,) * 512, receives=(123_456,) * 512)
    operations = tuple(GpuOperation("a" * 16, "AllReduce", seq, "dp") for seq in range(16))
    one = EvidenceItem("collectives", ok=True, rank=0, collectives=(call,), gpu=GpuQueue(operations))

    many = executor._fit([one] * 128)

    assert len(msgspec.json.encode(many)) < MAX_BODY_BYTES
    assert many[0].collectives[0].seq == 7
    assert many[0].gpu is not None
    assert many[0].gpu.operations[0].seq == 0
    assert executor._fit([one]) == (one,)


async def test_what_the_gpu_has_before_it_is_told_with_the_black_box(obeying: Obeying) -> None:
    """As NCCL's plugin wrote it, with the longest kernel of the rank's own sample; a rank without it tells nothing."""
    obeying.start(2)
    box = obeying.node.boxes[0]
    for number, (started, flags) in enumerate([(15, FLAG_DONE), (0, 0)]):
        at = NCCL.offset + number * NCCL.stride
        row = (2 * number + 2, number, 64, 1000 + number, 0, 0, 0, 7, 3, started, started, 5, 8, 2, 3, 4, -1, 0, flags)
        NCCL.codec.pack_into(box._map, at, *row)
    kernels = tuple(KernelTime(name, 1, 9.0, 9.0, 9.0) for name in ("ncclDevKernel_AllReduce", "my_attention"))
    sample = RankKernels(device="gpu", kernels=kernels)
    (obeying.node.job_folder / f"0{SAMPLED_SUFFIX}").write_bytes(msgspec.json.encode(sample))

    items = await obeying.obey(obeying.order("dump_flight_recorder"))

    found = of(items, "collectives").gpu
    assert found is not None
    assert [(one.function, one.seq, one.begun) for one in found.operations] == [("AllReduce", 1, False)]
    assert found.kernel == "my_attention"
    assert of(items, "collectives", 1).gpu is None


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


async def test_boards_of_overlapped_kernels_are_evidence(obeying: Obeying) -> None:
    """Whatever the process does: where its kernels are, for whom they wait; kept beside its box and readable there."""
    obeying.start(2)
    board = FakeBoard("gemm_rs", 9, rank=0, world_size=2, ctas=2)
    board.introduce(0xBEEF, (0, 1))
    board.tile(0, 4)
    board.wait(0, 4, peer=1, channel=2)
    obeying.node.put_board(0, board)
    obeying.node.put_board(1, board, name="left")
    left = obeying.node.job_folder / "1.left.board"
    left.write_bytes(left.read_bytes()[:4096])
    obeying.node.freeze(0)

    items = await obeying.obey(obeying.order("dump_flight_recorder", id="1"), obeying.order("preserve", id="2"))

    (fact,) = of(items, "collectives").tiles
    assert (fact.operator, fact.launch, fact.members) == ("gemm_rs", 9, (0, 1))
    assert [(wait.peer, wait.tile) for wait in fact.waits] == [(1, 4)]
    assert "1 thread block wait for rank 1 at tile 4" in of(items, "collectives").text
    assert of(items, "collectives", 1).tiles == ()
    kept = Path(of(items, "tiles").path)
    assert kept.name == "rank-0.0.board"
    moments = read(kept.with_name("rank-0.box"))
    assert [told.launch for told in moments.tiles] == [9]
    assert any("gave up on" in line or "wait for rank 1 at tile 4" in line for line in sentences(moments))


def test_a_quiet_rank_tells_for_whose_tile_it_waits(obeying: Obeying) -> None:
    """Once it has not moved for two seconds; not while it moves, nor when it is stopped, nor by a board of another."""
    obeying.start(2)
    board = FakeBoard("ag_gemm", 3, rank=0, world_size=2, ctas=1)
    board.introduce(0xBEEF, (0, 1))
    board.tile(0, 1)
    board.wait(0, 1, peer=1, channel=0)
    obeying.node.put_board(0, board)
    waits, other = (obeying.rounds.current["job"].ranks[rank] for rank in (0, 1))
    moved_s = time.monotonic()
    obeying.node.boxes[0].moved(moved_s)

    told = [waits.report(moved_s + age_s).tile_peer for age_s in (0.5, 2.5)]
    nobody = other.report(moved_s + 2.0).tile_peer
    obeying.node.freeze(0)
    waits.look_at_process(moved_s + 2.0)

    assert (told, nobody) == ([-1, 1], -1)
    assert waits.report(moved_s + 3.0).tile_peer == -1
