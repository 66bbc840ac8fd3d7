# SPDX-License-Identifier: Apache-2.0
"""Whose a line of a merged log is: by tags of any launcher and logger, and by no sentence that mentions a rank."""

import pytest

from megascale_ops.postmortem.tags import by_rank


@pytest.mark.parametrize(
    "before",
    [
        "[rank3]: ", "[rank: 3] ", "[RANK 3] ", "[rank 3] ", "[default1]:[rank3]: ",
        "worker-1: [rank3]: ", "i.pretrain/0 [rank3]: ",
        "2026-04-03T12:16:00.5Z 4-task-1-0/0 [default1]:[rank3]: ",
        "\x1b[36m(Worker pid=7, ip=10.0.0.1)\x1b[0m [rank3]: ",
        "(VllmWorker rank=3 pid=229) ", "(PolicyWorker[rank=3] pid=17) ", "[1,mpirank:3,algo-1]<stderr>:",
        "[1,3]<stderr>:", "[3]<stderr>:",
        "Mon Jul 24 14:13:20 2017[1,3]<stderr>:", "[2026-05-09T22:47:56Z] 1d2e3f || [rank=3] ",
        "x: rank3[20][MainThread]: ",
        "2026-05-01 10:11:12 10.164.0.7 [3] ", '2026-05-01T10:00:01Z {pod="llm-1"} [rank3]: ',
    ],
)  # fmt: skip
def test_a_tag_gives_its_line_to_a_rank(before: str) -> None:
    """The rest of the line is what the rank printed, and lines without a tag are of no rank."""
    found = by_rank(f"{before}KeyError: 'x'\nlauncher: stopping").lines

    assert [line.strip() for line in found[3]] == ["KeyError: 'x'"]
    assert found[-1] == ["launcher: stopping"]


@pytest.mark.parametrize(
    "line",
    [
        "see the log of [rank3]: it has failed", "rank 3 failed", "[rank: 3] Child process with PID 7 terminated",
        "[Rank 3] Watchdog caught", "3 of 4 done", "array[rank3]",
    ],
)  # fmt: skip
def test_what_mentions_a_rank_is_not_its_line(line: str) -> None:
    """A sentence about a rank is a launcher's or an observer's."""
    assert 3 not in by_rank(f"{line}\nstep 1 of 9").lines


def test_numbers_and_fields_count_where_nearly_all_lines_have_them() -> None:
    """``srun --label`` and ``mpirun -l`` mark every line, and so do structured logs."""
    assert sorted(by_rank("0: a\n1: b\n0: c").lines) == [0, 1]
    assert sorted(by_rank("[0] a\n[1] b").lines) == [0, 1]
    assert by_rank("0: a\nb\nc").lines == {}
    assert sorted(by_rank('{"rank": 0, "msg": "a"}\n{"msg": "b", "rank": 4}').lines) == [0, 4]
    assert sorted(by_rank('level=info rank=2 msg="a"\nlevel=info rank=5 msg="b"').lines) == [2, 5]


def test_rays_actors_are_the_ranks_that_ray_has_told() -> None:
    """A process at one address; the same number at another one is another process."""
    told = "(T pid=9) - (node_id=ab, ip=10.0.0.1, pid=77) world_rank=2, local_rank=0, node_rank=1"
    found = by_rank(f"{told}\n(W pid=77, ip=10.0.0.1) ValueError: x\n(W pid=77, ip=10.0.0.2) step").lines

    assert found[2] == ["ValueError: x"]


def test_a_process_that_rays_monitor_ended_is_the_rank_that_ray_had_told() -> None:
    """By its host and number; another host's process with that number is not it."""
    start = "".join(
        f"(T pid=9) - (node_id=a, ip=10.0.0.{rank}, pid=513) world_rank={rank}, local_rank=0\n" for rank in (3, 4)
    )
    ended = "Memory on the node (IP: 10.0.0.4, ID: c) where the task (actor ID: 1, pid=513, memory used=61.00GB) was"

    assert by_rank(f"{start}{ended} running\n").lines[4] == [f"{ended} running"]
    assert 4 not in by_rank(f"{start}{ended.replace('0.4', '0.9')} running\n").lines


def test_an_engines_tensor_parallel_place_is_a_rank() -> None:
    """Only the first line of a record has the mark; the traceback behind it is of the same process."""
    mark = "[2026-05-10 10:04:12{}] "
    text = (
        f"{mark.format(' DP1 TP2 EP2')}ready\n{mark.format(' DP1 TP3 EP3')}failed: Traceback (most recent call last):\n"
        '  File "/s.py", line 1, in run\nRuntimeError: x\nReceived sigquit from a child process.'
    )
    found = by_rank(text).lines

    assert found[3][-1] == "RuntimeError: x"
    assert found[-1] == ["Received sigquit from a child process."]
    assert sorted(by_rank("(Worker_DP0_TP1_EP1 pid=7) ValueError: x\n(Worker_DP0_TP0_EP0 pid=6) y").lines) == [0, 1]


@pytest.mark.parametrize("others", [("DP0 TP1", "DP1 TP1"), ("PP0 TP1", "PP1 TP0"), ("EP1", "EP2")])
def test_a_place_of_several_processes_is_no_rank(others: tuple[str, str]) -> None:
    """Replicas of an engine count anew, stages of a pipeline too, and experts are no processes."""
    text = "\n".join(f"[2026-05-10 10:04:12 {place}] RuntimeError: x" for place in others)

    assert by_rank(text).lines == {}


def test_tags_of_ranks_count_before_places_in_an_engine() -> None:
    """An engine that serves a training job numbers its own processes; the job's ranks are those with tags."""
    text = "[2026-05-10 10:04:12 TP1] ready\n[rank3]: KeyError: 'x'\n[2026-05-10 10:04:13 TP3] ready"

    assert [rank for rank in by_rank(text).lines if rank >= 0] == [3]


def test_a_device_that_raised_owns_the_traceback_behind_it() -> None:
    """And what comes after the line that raises is of nobody; a sentence that mentions a device gives nothing away."""
    text = (
        "Exception in device=TPU:3: too many\nTraceback (most recent call last):\n"
        '  File "/x.py", line 1, in f\nRuntimeError: too many\nSIGTERM received by PID 7'
    )
    found = by_rank(text).lines

    assert found[3][-1] == "RuntimeError: too many"
    assert found[-1] == ["SIGTERM received by PID 7"]
    assert by_rank("see Exception in device=TPU:3: of the others").lines.get(3) is None


def test_pods_of_a_job_with_a_master_are_its_ranks() -> None:
    """The master is rank 0 and worker N is rank N + 1, whatever time follows; workers alone may count from 0."""
    text = "[pod/llama-{}/pytorch] 2026-05-10T10:04:12.5Z KeyError: 'x'"

    assert by_rank(f"{text.format('master-0')}\n{text.format('worker-2')}\n").lines[3] == ["KeyError: 'x'"]
    assert by_rank(f"{text.format('worker-0')}\n{text.format('worker-2')}\n").lines == {}
    two_jobs = f"{text.format('master-0')}\n[pod/bert-worker-2/pytorch] KeyError: 'x'\n"
    assert by_rank(two_jobs).lines == {}


@pytest.mark.parametrize(("at", "owner"), [("pid=41, ip=10.0.3.7", 2), ("pid=42, ip=10.0.3.7", -1)])
def test_what_ray_carries_is_of_the_worker_that_it_names(at: str, owner: int) -> None:
    """Up to the line that raises; a process that is no worker of the job's is of no rank."""
    text = (
        "- (node_id=3f, ip=10.0.3.4, pid=9) world_rank=0, local_rank=0\n"
        "- (node_id=77, ip=10.0.3.7, pid=41) world_rank=2, local_rank=0\n"
        f"ray.exceptions.RayTaskError(ValueError): ray::_RayTrainWorker__execute.get_next() ({at}, actor_id=5b)\n"
        '  File "/x.py", line 1, in f\nValueError: too short\nTraining errored after 1 iterations'
    )
    found = by_rank(text).lines

    assert found[owner][-2 if owner < 0 else -1 :][0] == "ValueError: too short"
    assert found[-1][-1] == "Training errored after 1 iterations"
