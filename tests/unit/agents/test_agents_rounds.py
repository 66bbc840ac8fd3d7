# SPDX-License-Identifier: Apache-2.0
"""Rounds and boxes are found, followed when they are made anew, and kept for a while when they end."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from megascale_agents.collectors import process
from megascale_agents.ranks import rounds as rounds_module
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.schema.identity import RankProcess
from tests.fakes.node import FakeNode


@dataclasses.dataclass
class Errors:
    """Counts boxes that could not be read."""

    number: int = 0

    def add(self, number: int) -> None:
        """Count."""
        self.number += number


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """A node without ranks of its own."""
    made = FakeNode(tmp_path)
    yield made
    made.kill_all()


@pytest.fixture
def errors() -> Errors:
    """Nothing counted yet."""
    return Errors()


@pytest.fixture
def rounds(node: FakeNode, errors: Errors) -> Iterator[Rounds]:
    """What an agent of that node follows."""
    made = Rounds(str(node.root), node.node, errors.add)
    yield made
    made.close()


def test_a_round_is_found_with_all_its_ranks(node: FakeNode, rounds: Rounds) -> None:
    """Also the ranks that have no box (yet), and also when nothing was there at first."""
    assert not rounds.refresh(0.0)

    node.start_round(2, boxes=False)

    assert rounds.refresh(1.0)
    assert [rank.rank for _, rank in rounds.ranks()] == [0, 1]
    assert all(rank.box is None for _, rank in rounds.ranks())


def test_a_box_is_taken_when_it_appears(node: FakeNode, rounds: Rounds) -> None:
    """A recorder makes its box a second after the rank's start; that is no new round."""
    file = node.start_round(1, boxes=False)
    rounds.refresh(0.0)

    node.make_box(0, file.ranks[0].pid, file.ranks[0].start_ticks)
    node.step(0, 7)
    changed = rounds.refresh(1.0)
    (_, rank), *_ = rounds.ranks()
    rank.look_at_box()

    assert not changed
    assert rank.progress is not None
    assert rank.progress.step == 7


def test_the_round_before_stays_readable(node: FakeNode, rounds: Rounds) -> None:
    """A restart renames the old box and makes a new one; evidence of the old round must survive that."""
    node.start_round(1)
    node.step(0, 41)
    rounds.refresh(0.0)

    node.start_round(1)
    node.step(0, 3)
    assert rounds.refresh(1.0)

    before, now = rounds.find("job", 1), rounds.find("job", 2)
    assert before is not None
    assert now is not None
    assert before.ranks[0].box is not None
    assert before.ranks[0].box.progress().step == 41
    assert now.ranks[0].box is not None
    assert now.ranks[0].box.progress().step == 3


def test_a_box_of_the_next_round_may_come_before_its_round_file(node: FakeNode, rounds: Rounds) -> None:
    """A warm rank writes its box within milliseconds; it is not taken for one of the round before."""
    file = node.start_round(1)
    rounds.refresh(0.0)

    node.round += 1
    node.make_box(0, file.ranks[0].pid, file.ranks[0].start_ticks)
    rounds.refresh(1.0)
    here = rounds.find("job", 1)
    assert here is not None
    assert here.ranks[0].box is not None
    assert here.ranks[0].box.identity().round == 1
    node.write_round(msgspec.structs.replace(file, round=2))
    rounds.refresh(2.0)

    after = rounds.find("job", 2)
    assert after is not None
    assert after.ranks[0].box is not None
    assert after.ranks[0].box.identity().round == 2


def test_ended_rounds_are_forgotten_after_a_while(node: FakeNode, rounds: Rounds) -> None:
    """They are kept for a minute, and at most a handful of them, so that no file handles are used up."""
    for number in range(8):
        node.start_round(1, boxes=False)
        rounds.refresh(float(number))
    assert len(rounds.ended) == 5

    rounds.refresh(8.0 + rounds_module.KEPT_S)

    assert not rounds.ended
    assert rounds.find("job", 8) is not None


def test_a_job_that_ends_is_gone(node: FakeNode, rounds: Rounds) -> None:
    """No round file, no job."""
    node.start_round(1)
    rounds.refresh(0.0)

    node.end_job()

    assert rounds.refresh(1.0)
    assert not list(rounds.ranks())


def test_a_rank_of_a_launcher_is_found_by_its_box(node: FakeNode, rounds: Rounds) -> None:
    """Another launcher is one process to the runner; its ranks name themselves, and so does who trains."""
    file = node.start_round(1, boxes=False)
    node.make_box(3, file.ranks[0].pid, file.ranks[0].start_ticks, world_size=4)
    rounds.refresh(0.0)

    found = {rank.rank: rank for _, rank in rounds.ranks()}

    assert sorted(found) == [0, 3]
    assert found[3].started is None
    assert found[3].process.pid == file.ranks[0].pid
    assert found[3].report(1.0).world_size == 4


def test_a_rank_behind_a_shell_is_watched_where_it_trains(node: FakeNode, rounds: Rounds) -> None:
    """The box names the process that trains; when that is gone, the one the runner started is watched again."""
    script = "import subprocess, sys; subprocess.run(['sleep', '600'])"
    file = node.start_round(1, boxes=False, script=script)
    helper = FakeNode(node.root.parent / "other")
    other = helper.start_round(1, boxes=False)
    rounds.refresh(0.0)

    node.make_box(0, other.ranks[0].pid, other.ranks[0].start_ticks)
    rounds.refresh(1.0)
    (_, rank), *_ = rounds.ranks()
    seen = rank.process.pid
    helper.kill_all()
    rank.look_at_process(2.0)

    assert seen == other.ranks[0].pid
    assert rank.process.pid == file.ranks[0].pid


def test_what_is_no_box_is_counted_and_the_rest_read(node: FakeNode, rounds: Rounds, errors: Errors) -> None:
    """A file that only has the name of a box costs no other rank's."""
    node.start_round(1)
    (node.job_folder / "1.box").write_bytes(b"x" * 10_000)
    for name in ("abc", "²", "00", "٣"):
        (node.job_folder / f"{name}.box").write_bytes(b"")

    rounds.refresh(0.0)
    rounds.refresh(0.1)

    assert errors.number == 1
    assert [rank.box is not None for _, rank in rounds.ranks()] == [True]
    assert [rank.box is not None for _, rank in rounds.ranks()] == [True]


@pytest.mark.parametrize("junk", [b"", b"{}", b"\xff", b'{"version": 99}'])
def test_what_is_no_round_file_hides_no_other_job(node: FakeNode, rounds: Rounds, junk: bytes) -> None:
    """It is said once and the other jobs are watched."""
    node.start_round(1)
    broken = node.root / "broken"
    broken.mkdir()
    (broken / f"{node.node}.round.json").write_bytes(junk)

    rounds.refresh(0.0)

    assert list(rounds.current) == ["job"]


def test_another_nodes_round_is_not_ours(node: FakeNode, rounds: Rounds) -> None:
    """Several nodes may share one machine, in tests and demos."""
    node.start_round(1)
    theirs = Rounds(str(node.root), "node-b", lambda _: None)

    theirs.refresh(0.0)
    rounds.refresh(0.0)

    assert not theirs.current
    assert list(rounds.current) == ["job"]


def test_a_round_whose_runner_is_gone_is_given_up(node: FakeNode, rounds: Rounds) -> None:
    """Runner and ranks were killed: no process is left to report the job's end, and its series must not stay."""
    file = node.start_round(1)
    node.write_round(msgspec.structs.replace(file, runner_pid=2**22 + 1))
    rounds.refresh(0.0)
    node.children[0].kill()
    node.children[0].wait()
    for _, rank in rounds.ranks():
        rank.look_at_process(0.5)

    early = rounds.end_abandoned(1.0) or rounds.end_abandoned(20.0)
    late = rounds.end_abandoned(40.0)

    assert not early
    assert late
    assert not rounds.current
    assert not rounds.refresh(41.0)


def test_a_pid_that_means_another_process_is_gone(node: FakeNode, rounds: Rounds) -> None:
    """A round file that outlived a reboot names pids that belong to others now."""
    file = node.start_round(1, boxes=False)
    mine = file.ranks[0]
    wrong = RankProcess(rank=0, local_rank=0, pid=mine.pid, start_ticks=mine.start_ticks - 1)
    node.write_round(msgspec.structs.replace(file, ranks=(wrong,)))

    rounds.refresh(0.0)

    assert [rank.is_gone for _, rank in rounds.ranks()] == [True]


def test_a_second_living_process_with_a_box_of_the_rank_is_a_rival(node: FakeNode, rounds: Rounds) -> None:
    """Told as long as both live; a process that took over from a dead one is none."""
    file = node.start_round(1)
    rounds.refresh(0.0)
    (_, rank), *_ = rounds.ranks()
    alone = rank.report(1.0)

    node.make_box(0, os.getpid(), process.read_once(os.getpid()).start_ticks)
    rounds.refresh(2.0)
    both = rank.report(2.0)
    node.kill_all()
    after = rank.report(3.0)

    assert alone.rivals == ()
    assert (both.pid, both.rivals) == (os.getpid(), (file.ranks[0].pid,))
    assert after.rivals == ()


def test_the_box_roots_of_all_users_are_followed(tmp_path: Path, errors: Errors) -> None:
    """Also one that comes later; rounds of one that goes have ended."""
    nodes = {name: FakeNode(tmp_path / name, job=name) for name in ("first", "second")}
    nodes["first"].root.mkdir()
    roots = [str(nodes["first"].root)]
    rounds = Rounds(roots[0], nodes["first"].node, errors.add, lambda: roots)
    try:
        nodes["first"].start_round(1)
        nodes["second"].start_round(1)
        rounds.refresh(0.0)
        before = sorted(rounds.current)
        roots.append(str(nodes["second"].root))
        rounds.find_roots()
        rounds.refresh(1.0)
        both = sorted(rounds.current)
        roots.pop()
        rounds.find_roots()
        rounds.refresh(2.0)

        assert (before, both, sorted(rounds.current)) == (["first"], ["first", "second"], ["first"])
    finally:
        rounds.close()
        for node in nodes.values():
            node.kill_all()


def test_of_two_jobs_of_one_name_that_which_runs_is_followed(
    tmp_path: Path, errors: Errors, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty folder hides no job, and a second job of the name takes its place when the first is over."""
    squatter, honest = (FakeNode(tmp_path / name, job="llama") for name in ("squatter", "honest"))
    squatter.job_folder.mkdir(parents=True)
    honest.job_folder.mkdir(parents=True)
    roots = [str(squatter.root), str(honest.root)]
    rounds = Rounds(roots[0], honest.node, errors.add, lambda: roots)
    try:
        rounds.find_roots()
        rounds.refresh(0.0)
        honest.start_round(1)
        rounds.find_roots()
        rounds.refresh(1.0)
        followed = rounds.current["llama"].folder
        squatter.start_round(1)
        rounds.find_roots()
        rounds.refresh(2.0)
        still = rounds.current["llama"].folder
        (honest.job_folder / f"{honest.node}.round.json").unlink()
        rounds.refresh(3.0)
        rounds.find_roots()
        rounds.refresh(4.0)

        assert (followed, still) == (str(honest.job_folder), str(honest.job_folder))
        assert rounds.current["llama"].folder == str(squatter.job_folder)
        assert caplog.text.count(f"{squatter.job_folder}: a job of this name is in {honest.job_folder}") == 1
    finally:
        rounds.close()
        for node in (squatter, honest):
            node.kill_all()
