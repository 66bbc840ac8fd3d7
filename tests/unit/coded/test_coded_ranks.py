# SPDX-License-Identifier: Apache-2.0
"""Master and workers over real sockets in one process, in turn: who is asked, whose answers count, what is told."""

import socket
import struct
import uuid
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from megascale_ops.coded import GradientCode, Master, Worker
from megascale_ops.coded.code import TooFewAnswersError
from megascale_ops.coded.messages import CodedError, Frame, Inbox, meeting_name, packed, parse_address
from megascale_ops.coded.ring import Ring
from megascale_ops.errors import UsageError

SIZE = 5
WORKERS = 4


class Job:
    """A master and its workers, all in this process."""

    def __init__(self, code: GradientCode, address: str = "") -> None:
        self.code = code
        self.name = f"test-{uuid.uuid4().hex}"
        self.master = Master(code, SIZE, name=self.name, address=address, deadline_s=30.0)
        where = self.master.address
        self.workers = [
            Worker(code, number, SIZE, address=where, name=self.name, deadline_s=30.0) for number in range(code.workers)
        ]
        self.master.meet()
        self.tasks = [worker.tasks() for worker in self.workers]
        self.gradients = np.random.default_rng(3).standard_normal((code.workers, SIZE))

    def work(self, number: int) -> int:
        """Let a worker take a task and answer; return the task's step."""
        task = next(self.tasks[number])
        self.workers[number].answer(task.step, lambda partition: self.gradients[partition] * task.vector[0])
        return task.step

    def close(self) -> None:
        """Let all go."""
        for worker in self.workers:
            worker.close()
        self.master.close(0.0)


@pytest.fixture
def job() -> Iterator[Job]:
    """Four workers of which one may be absent."""
    made = Job(GradientCode(WORKERS, 1, "cyclic"))
    yield made
    made.close()


def scaled(number: float) -> np.ndarray:
    """Return what a task carries here."""
    return np.full(SIZE, number)


def test_all_answer_and_none_is_late(job: Job) -> None:
    """The negative control: with everyone in time the sum is there, and no worker is named."""
    job.master.ask(0, scaled(2.0))
    assert [job.work(number) for number in range(WORKERS)] == [0] * WORKERS

    found = job.master.gather(deadline_s=30.0, grace_s=30.0)

    assert np.allclose(found.combined.vector, 2.0 * job.gradients.sum(axis=0))
    assert (found.late, found.owing, found.behind_s, found.combined.without) == ((), (), {}, ())


def test_a_step_closes_without_a_straggler_which_then_gets_the_newest_task(job: Job) -> None:
    """Three steps without worker 2; its late answer counts for none, and its next task is the newest, not the next."""
    for step in range(3):
        job.master.ask(step, scaled(step + 1.0))
        for number in (0, 1, 3):
            assert job.work(number) == step
        found = job.master.gather(deadline_s=30.0)
        assert np.allclose(found.combined.vector, (step + 1.0) * job.gradients.sum(axis=0))
        assert found.late == (2,)
        assert found.owing == ((2,) if step else ())

    assert job.work(2) == 0
    job.master.ask(3, scaled(4.0))
    for number in (0, 1, 3):
        job.work(number)
    found = job.master.gather(deadline_s=30.0)
    assert list(found.behind_s) == [2]
    assert job.work(2) == 3


def test_too_many_absent_fail_at_the_deadline_or_are_told(job: Job) -> None:
    """Two of four with s = 1: an error that names them; asked for, the nearest sum, and that it is not exact."""
    job.master.ask(0, scaled(1.0))
    job.work(0)
    job.work(1)

    with pytest.raises(TooFewAnswersError, match="without workers 2, 3"):
        job.master.gather(deadline_s=0.05)
    found = job.master.gather(deadline_s=0.05, approximate=True)
    assert not found.combined.is_exact
    assert found.combined.off > 0.1
    assert found.late == (2, 3)


def test_ranks_of_other_hosts_meet_over_tcp() -> None:
    """The address has the port that was given, for workers to be told."""
    job = Job(GradientCode(2, 1), address="tcp:127.0.0.1:0")
    with closing(job):
        job.master.ask(0, scaled(1.0))
        job.work(1)

        assert np.allclose(job.master.gather(deadline_s=30.0).combined.vector, job.gradients.sum(axis=0))
        assert job.master.address.startswith("tcp:127.0.0.1:")
        assert not job.master.address.endswith(":0")


def test_messages_count_as_they_come() -> None:
    """Multi: a worker that has sent half of its messages helps to close the step, and is late with the rest."""
    job = Job(GradientCode(4, 1, "multi"))
    with closing(job):
        job.master.ask(0, scaled(1.0))
        for number in (0, 1, 2):
            job.work(number)
        task = next(job.tasks[3])
        job.workers[3].send(task.step, {3: job.gradients[3]}, 0)

        found = job.master.gather(deadline_s=30.0)

        assert np.allclose(found.combined.vector, job.gradients.sum(axis=0))
        assert found.late == ()


def test_a_worker_leaves_the_rest_when_the_next_task_is_there() -> None:
    """Multi: the sum is there with everyone's first message, and no second one is computed for a step that is over."""
    job = Job(GradientCode(4, 1, "multi"))
    with closing(job):
        computed: list[int] = []

        def gradient_of(partition: int) -> np.ndarray:
            computed.append(partition)
            return job.gradients[partition]

        job.master.ask(0, scaled(1.0))
        tasks = [next(tasks) for tasks in job.tasks]
        for number in (0, 1, 2):
            job.workers[number].send(0, {number: job.gradients[number]}, 0)
        job.workers[3].send(0, {3: job.gradients[3]}, 0)
        assert job.master.gather(deadline_s=30.0).combined.is_exact
        job.master.ask(1, scaled(1.0))
        job.workers[0].answer(tasks[0].step, gradient_of)

        assert computed == [0]
        assert next(job.tasks[0]).step == 1


def test_the_end_reaches_a_worker_that_was_still_computing(job: Job) -> None:
    """Its answer finds the connection closed; the end that was sent before is what counts."""
    job.master.ask(0, scaled(1.0))
    for number in (0, 1, 3):
        job.work(number)
    job.master.gather(deadline_s=30.0)
    task = next(job.tasks[2])

    job.master.close(0.0)
    job.workers[2].answer(task.step, lambda partition: job.gradients[partition])

    assert list(job.tasks[2]) == []
    assert list(job.tasks[0]) == []


def test_a_worker_that_ends_is_told_as_such(job: Job) -> None:
    """A process that has ended is no straggler: the launcher restarts the job."""
    job.master.ask(0, scaled(1.0))
    job.workers[1].close()

    with pytest.raises(CodedError, match="worker 1 has closed its connection"):
        job.master.gather(deadline_s=30.0)


def test_a_master_that_ends_without_a_word_is_told(job: Job) -> None:
    """A worker that finds its connection closed says who it is."""
    for peer in job.master._peers.values():
        peer.connection.shutdown(socket.SHUT_RDWR)

    with pytest.raises(CodedError, match="worker 0 has lost its master"):
        next(job.tasks[0])


def test_another_code_is_noticed(job: Job) -> None:
    """A worker that was started with another size answers with what does not fit."""
    job.master.ask(0, scaled(1.0))
    next(job.tasks[0])
    job.workers[0]._connection.sendall(packed(Frame(2, 0, 0, 0, np.zeros(SIZE - 1))))

    with pytest.raises(CodedError, match=r"worker 0 answered with 4 numbers.*are its arguments the same"):
        job.master.gather(deadline_s=30.0)


def test_workers_that_do_not_come_are_named() -> None:
    """At the deadline, and strangers do not count: another job's worker, and what speaks another protocol."""
    name = f"test-{uuid.uuid4().hex}"
    master = Master(GradientCode(2, 1), SIZE, name=name, deadline_s=0.3)
    stranger = Worker(GradientCode(2, 1), 1, SIZE, address=master.address, name="another job")
    family, where = parse_address(master.address)
    with closing(stranger), socket.socket(family) as browser:
        browser.connect(where)
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 64)

        with pytest.raises(CodedError, match=r"workers 0, 1 of 2 have not connected.*within 0.3 s"):
            master.meet()
    master.close(0.0)


def test_a_worker_without_a_master_gives_up_at_its_deadline() -> None:
    """And says where it looked."""
    with pytest.raises(CodedError, match=r"master at local:nowhere-.* was not reached in 0.1 s"):
        Worker(GradientCode(2, 1), 0, SIZE, address=f"local:nowhere-{uuid.uuid4().hex}", deadline_s=0.1)


def test_bytes_may_come_in_any_pieces() -> None:
    """One at a time, or several messages at once; what is too long or no message is refused."""
    frames = [Frame(1, 2, 3, 0, np.arange(4.0)), Frame(3, -1, 2**40, 1, np.zeros(0))]
    whole = b"".join(packed(frame) for frame in frames)
    inbox, found = Inbox(4), []
    for one in range(len(whole)):
        found += inbox.take(whole[one : one + 1])

    for sent, got in zip(frames, found, strict=True):
        assert sent[:4] == got[:4]
        assert np.array_equal(sent.vector, got.vector)
    assert len(Inbox(4).take(whole)) == 2
    with pytest.raises(CodedError, match="no message"):
        Inbox(3).take(whole)
    with pytest.raises(CodedError, match="no message"):
        Inbox(4).take(struct.pack("<40s", b"HTTP/1.1 200 OK"))


@pytest.mark.parametrize(
    "address", ["", "tcp:host", "tcp::80", "tcp:host:70000", "local:", "local:" + "x" * 100, "a:b"]
)
def test_addresses_that_are_none_are_refused(address: str) -> None:
    """In a sentence that says how they look."""
    with pytest.raises(UsageError, match="give tcp:HOST:PORT, or local:NAME"):
        parse_address(address)


def test_jobs_and_rounds_meet_apart() -> None:
    """Names differ by job, round and part."""
    one = {"MASTER_PORT": "29500", "MEGASCALE_JOB": "a", "MEGASCALE_ROUND": "1"}

    names = {meeting_name(one), meeting_name(one | {"MEGASCALE_ROUND": "2"}), meeting_name(one, "agent-1")}
    names |= {meeting_name(one | {"MASTER_PORT": "29501"}), meeting_name(one | {"MEGASCALE_JOB": "b"})}
    assert len(names) == 5


def test_a_ring_of_one_keeps_its_token() -> None:
    """No neighbour is waited for."""
    ring = Ring(0, 1, 3)
    ring.send(1, np.zeros(3))
    ring.close()
    with pytest.raises(UsageError, match="1 addresses do not suffice for a ring of 2 agents"):
        Ring(0, 2, 3, addresses=("local:a",))
