# SPDX-License-Identifier: Apache-2.0
"""Agents by the ten thousand out of one thread: requests put together from pieces, and sockets that epoll watches.

A heartbeat is the one that an agent sends: pieces of it are encoded by the schema's own types, those that all ranks
share once for all, and joined for each node. Putting one together and reading its answer takes some 20 us.
"""

import json
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from megascale_ops.schema.health import HostReading
from megascale_ops.schema.messages import Evidence, EvidenceItem, Heartbeat, HeartbeatReply, JobReport, Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport, StepWork

NPROC = 8
Answered = Callable[[int, bytes], None]
_encode = msgspec.json.encode
# 32 ways to have spent a step are drawn for all ranks that end it.
_VARIANTS = 32


class _Asked(NamedTuple):
    """A request whose answer is waited for."""

    sent_s: float
    answered: Answered | None
    data: bytes


class Line:
    """One kept-open connection; answers come in the order of the requests."""

    def __init__(self, address: tuple[str, int], source: str) -> None:
        self.sock = socket.create_connection(address, source_address=(source, 0))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.waiting: deque[_Asked] = deque()
        self.unread = b""


class Lines:
    """Connections to one controller, opened when they are first used.

    Attributes:
        waits_s: of each answer.
        refused: answers that were no success, by status.
        closed: connections that the controller ended.
    """

    def __init__(self, address: tuple[str, int], most: int) -> None:
        self._address, self._most = address, most
        self._lines: dict[int, Line] = {}
        self._by_fd: dict[int, tuple[int, Line]] = {}
        self._poll = select.epoll()
        self.waits_s: list[float] = []
        self.refused: dict[int, int] = {}
        self.closed = self.failed = self.asked = self.answered = self.again = 0

    def __len__(self) -> int:
        return len(self._lines)

    def ask(self, who: int, path: str, body: bytes, answered: Answered | None = None, method: str = "POST") -> None:
        """Send a request on the connection of ``who``; those of more agents than connections share them."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.asked += 1
        self._send(who % self._most, _Asked(time.perf_counter(), answered, data))

    def _send(self, place: int, asked: _Asked) -> None:
        line = self._lines.get(place)
        if line is None:
            # 4 source addresses: an address has 28,000 ports of its own.
            try:
                line = self._lines[place] = Line(self._address, f"127.0.0.{2 + place % 4}")
            except OSError:
                self.failed += 1
                self.asked -= 1
                return
            self._by_fd[line.sock.fileno()] = (place, line)
            self._poll.register(line.sock.fileno(), select.EPOLLIN)
        line.waiting.append(asked)
        try:
            line.sock.sendall(asked.data)
        except OSError:
            self._drop(place, line)

    @property
    def open_requests(self) -> int:
        """How many answers are waited for."""
        return sum(len(line.waiting) for line in self._lines.values())

    def look(self, timeout_s: float) -> int:
        """Take in answers; return of how many connections."""
        found = self._poll.poll(max(0.0, timeout_s), 512)
        for number, _what in found:
            place, line = self._by_fd[number]
            try:
                data = line.sock.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._drop(place, line)
                continue
            line.unread += data
            while self._read(line):
                pass
        return len(found)

    def _read(self, line: Line) -> bool:
        head, separator, rest = line.unread.partition(b"\r\n\r\n")
        if not separator:
            return False
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return False
        line.unread = rest[length:]
        status = int(head[9:12])
        sent_s, answered, _data = line.waiting.popleft()
        self.waits_s.append(time.perf_counter() - sent_s)
        self.answered += 1
        if status != 200:
            self.refused[status] = self.refused.get(status, 0) + 1
        if answered is not None:
            answered(status, rest[:length])
        return bool(line.unread)

    def _drop(self, place: int, line: Line) -> None:
        self.closed += 1
        self._poll.unregister(line.sock.fileno())
        del self._by_fd[line.sock.fileno()], self._lines[place]
        line.sock.close()
        for asked in line.waiting:  # as runners and agents do: what had no answer is said again
            self.again += 1
            self._send(place, asked)

    def until_answered(self, timeout_s: float) -> None:
        """Wait for all answers."""
        deadline_s = time.monotonic() + timeout_s
        while self.open_requests and time.monotonic() < deadline_s:
            self.look(0.5)
        assert not self.open_requests, f"{self.open_requests} answers did not come in {timeout_s:g} s"

    def hang_up(self) -> None:
        """Close all connections."""
        for line in self._lines.values():
            self._poll.unregister(line.sock.fileno())
            line.sock.close()
        self._lines, self._by_fd = {}, {}


class _Slot(NamedTuple):
    """What all heartbeats of a moment share."""

    middle: bytes
    ends: dict[tuple[int, int], list[bytes]]
    mono_s: float


class Fleet:
    """Nodes of ``NPROC`` ranks in equal jobs.

    Args:
        nodes: how many in all.
        jobs: how many jobs they make.
        step_s: a step of theirs.
        every_s: between two heartbeats of a node; the host comes along each 5 s, everything each 30 s, as in an agent.
    """

    def __init__(self, nodes: int, jobs: int, step_s: float, every_s: float) -> None:
        assert nodes % jobs == 0, "jobs are of equal size"
        self.nodes, self.jobs, self.step_s, self.every_s = nodes, jobs, step_s, every_s
        self.round = 1
        self.began_s = time.monotonic()
        self.hung_s: float | None = None  # since when nothing moves
        self.orders: dict[str, int] = {}
        self.evidence: list[tuple[int, bytes]] = []  # to be sent
        self._told = [0] * nodes
        self._seq = [0] * nodes
        self._full = [True] * nodes
        self._done: dict[int, list[str]] = {}
        self._size = nodes // jobs
        self._heads = [_between(_encode(self._beat(node, "X")), b"", b'"seq":') for node in range(nodes)]
        self._ranks = [
            [
                _between(_encode(self._report(self._rank(node, local), local, 0, 0, 0.0, 0)), b"", b'"progress":')
                for local in range(NPROC)
            ]
            for node in range(nodes)
        ]
        self._slots: dict[tuple[int, bool, bool], _Slot] = {}
        self._slot_s = 0.0
        self._check()

    def job(self, node: int) -> str:
        """Return the job of a node."""
        return f"load{node // self._size}"

    def _rank(self, node: int, local: int) -> int:
        return node % self._size * NPROC + local

    def join(self, node: int) -> tuple[str, bytes]:
        """Return address and body of a join."""
        join = Join(
            job=self.job(node), node=f"node-{node}", runner_id=f"r{node}", join_id=f"j{node}", nproc=NPROC,
            min_nodes=self._size, max_nodes=self._size, addr="127.0.0.1", store_port=29500, mono_s=time.monotonic(),
            # No runner polls for orders here: agents are measured.
            policy=JobPolicy(node_lost_s=3600.0, join_timeout_s=600.0),
        )  # fmt: skip
        return f"/v1/jobs/{self.job(node)}/join?wait_s=300", _encode(join)

    def step(self) -> int:
        """Return the last step that has ended."""
        now_s = self.hung_s or time.monotonic()
        return int((now_s - self.began_s) / self.step_s)

    def beat(self, node: int) -> bytes:
        """Return the next heartbeat of a node."""
        self._seq[node] += 1
        seq, job = self._seq[node], node // self._size
        full = self._full[node] or seq % max(1, round(30 / self.every_s)) == 0
        self._full[node] = False
        step, told = self.step(), self._told[node]
        told = max(told, step - 10)
        self._told[node] = step
        with_host = full or seq % max(1, round(5 / self.every_s)) == 0
        slot = self._slot(job, full=full, with_host=with_host)
        ends = slot.ends.get((told, step))
        if ends is None:
            ends = slot.ends[told, step] = [self._end(told, step, slot.mono_s) for _ in range(_VARIANTS)]
        first = (node * 7 + seq) % _VARIANTS
        parts = [begin + ends[(first + place) % _VARIANTS] for place, begin in enumerate(self._ranks[node])]
        if self.hung_s and self._rank(node, 0) == 0:  # who is absent, has not come to the collective of the others
            parts[0] = self._ranks[node][0] + self._end(told, step, slot.mono_s, behind=True)
        done = b""
        if node in self._done:
            done = b',"done_orders":' + _encode(self._done.pop(node))
        return b"%b%d%b%b]}]%b}" % (self._heads[node], seq, slot.middle, b",".join(parts), done)

    def take(self, node: int, reply: bytes) -> None:
        """Take in the answer to a heartbeat."""
        if reply.startswith((b"{}", b'{"epoch"')):
            return
        told = msgspec.json.decode(reply, type=HeartbeatReply)
        self._full[node] |= told.send_full
        for order in told.orders:
            self.orders[order.kind] = self.orders.get(order.kind, 0) + 1
            self._done.setdefault(node, []).append(order.id)
            if order.kind.startswith("dump_"):
                items = tuple(self._stack(self._rank(node, local)) for local in range(NPROC))
                evidence = Evidence(f"node-{node}", order.job, order.incident, order.id, items=items)
                self.evidence.append((node, _encode(evidence)))

    def reconnected(self) -> None:
        """Let every agent tell everything with its next heartbeat, as one whose heartbeat went wrong does."""
        self._full = [True] * self.nodes

    def _stack(self, rank: int) -> EvidenceItem:
        frames = tuple(f"step_{depth} (/srv/train/model.py:{100 + depth})" for depth in range(16))
        frames = (f"{'load' if rank == 0 else 'all_reduce'} (/srv/train/x.py:7)", *frames)
        return EvidenceItem(kind="stacks", ok=True, rank=rank, text="\n".join(frames), frames=frames, took_s=0.2)

    def _slot(self, job: int, *, full: bool, with_host: bool) -> _Slot:
        """Return what heartbeats share that are sent within the same 50 ms."""
        now_s = time.monotonic()
        if now_s - self._slot_s > 0.05:
            self._slots, self._slot_s = {}, now_s
        slot = self._slots.get((job, full, with_host))
        if slot is None:
            text = _encode(self._beat(job * self._size, "X", full=full, with_host=with_host, mono_s=self._slot_s))
            middle = _between(text, b'"seq":1', b'"ranks":[')
            slot = self._slots[job, full, with_host] = _Slot(middle, {}, self._slot_s)
        return slot

    def _beat(
        self, node: int, _run: str, *, full: bool = False, with_host: bool = False, mono_s: float = 0.0
    ) -> Heartbeat:
        host = HostReading(0.4, 0.5, 0.6, 1 << 39, 0.0, 1 << 38, 1 << 40, 128) if with_host else None
        report = self._report(0, 0, 0, 0, 0.0, 0)
        jobs = (JobReport(self.job(node), self.round, f"/srv/runs/{self.job(node)}", (report,)),)
        return Heartbeat(
            f"node-{node}", f"a{node}", 1, mono_s, time.time(), full=full, host=host, jobs=jobs, every_s=self.every_s
        )

    def _end(self, told: int, step: int, mono_s: float, *, behind: bool = False) -> bytes:
        return _after(_encode(self._report(0, 0, told, step, mono_s, -1 if behind else 0)), b'"progress":')

    def _report(self, rank: int, local: int, told: int, step: int, mono_s: float, shift: int) -> RankReport:
        moved_s = (self.hung_s or mono_s) - 0.05
        progress = Progress(
            state="running", step=step, steps_seen=step + 1, phase="backward", phase_since_mono_s=moved_s - 0.05,
            moved_mono_s=moved_s, beat_mono_s=mono_s - 0.01, step_p50_s=self.step_s, step_p99_s=self.step_s * 1.1,
        )  # fmt: skip
        place = step * 20 + 3 + shift
        completed = place - 1 if not shift else place
        return RankReport(
            rank=rank, local_rank=local, pid=1000 + local, round=self.round, progress=progress,
            process=ProcessReading(state="R", cpu_s=round(mono_s, 2), cpu_busy=0.98, rss_bytes=8 << 30, threads=64),
            collective=CollectivePosition(enqueued=place, completed=completed, name="all_reduce"),
            work=tuple(self._work(each) for each in range(told, step)),
        )  # fmt: skip

    def _work(self, step: int) -> StepWork:
        own_s = 0.8 * self.step_s * random.gauss(1.0, 0.01)
        shares = (self.step_s - own_s, 0.05 * own_s, 0.3 * own_s, 0.6 * own_s, 0.05 * own_s, 0.0, 0.0, own_s)
        return StepWork(step, self.step_s, *(round(share, 6) for share in shares), loss=2.0)

    def _check(self) -> None:
        """Make sure that what is put together is what the schema reads."""
        last = self.nodes - 1
        read = msgspec.json.decode(self.beat(last), type=Heartbeat)
        assert (read.node, read.seq, read.full) == (f"node-{last}", 1, True)
        assert [one.rank for one in read.jobs[0].ranks] == [self._rank(last, local) for local in range(NPROC)]
        assert json.loads(self.beat(0))["jobs"][0]["job"] == "load0"
        self._seq[last] = self._seq[0] = 0
        self._full[last] = self._full[0] = True


def _between(text: bytes, begin: bytes, end: bytes) -> bytes:
    """Return what stands from after ``begin`` to the end of ``end``."""
    start = text.index(begin) + len(begin)
    return text[start : text.index(end, start) + len(end)]


def _after(text: bytes, begin: bytes) -> bytes:
    return text[text.index(begin) + len(begin) :]
