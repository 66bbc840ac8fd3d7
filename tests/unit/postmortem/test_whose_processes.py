# SPDX-License-Identifier: Apache-2.0
"""A line is a rank's, too, by the process, container or pod that it names, where something tells that one's rank."""

import gzip
from pathlib import Path

import pytest

from megascale_ops.postmortem import launched
from megascale_ops.postmortem.examine import examine
from megascale_ops.postmortem.exits import judge_logs
from megascale_ops.postmortem.kernel import of_ranks
from megascale_ops.postmortem.tags import by_rank
from megascale_ops.schema.health import Verdict

ACTOR = "(WorkerDict pid={}) "
NCCL = "n7:{0}:5{0} [0] NCCL INFO comm 0x1 rank {1} nranks {2} cudaDev 0 busId 1000 commId 0x9 - Init START"
LOST = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"


def judged(folder: Path, files: dict[str, str]) -> Verdict:
    """Judge a folder of files."""
    for name, text in files.items():
        raw = text.encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return examine([folder]).verdicts[0]


def test_an_actor_is_the_rank_that_another_of_its_lines_has() -> None:
    """Of which a crash handler writes no tag; an actor that shows two ranks, and two that show one, tell nothing."""
    one = [
        f"{ACTOR.format(7)}[rank3] ready",
        f"{ACTOR.format(8)}[rank1] ready",
        f"{ACTOR.format(7)}Fatal Python error: x",
    ]
    two = [*one, f"{ACTOR.format(7)}[rank2] said"]
    shared = [*one, f"{ACTOR.format(9)}[rank3] ready"]

    assert "Fatal Python error: x" in by_rank("\n".join(one)).lines[3]
    assert one[2] in by_rank("\n".join(two)).lines[-1]
    assert one[2] in by_rank("\n".join(shared)).lines[-1]


def test_nccls_process_is_the_rank_that_nccl_has_told() -> None:
    """Where groups of several sizes number it differently, it is none."""
    warns = "n7:41:541 [0] NCCL WARN Cuda failure 2 'out of memory'"
    text = f"[rank0]: a\n[rank5]: b\n{NCCL.format(41, 5, 8)}\n{warns}"

    assert warns in by_rank(text).lines[5]
    assert warns in by_rank(f"{text}\n{NCCL.format(41, 1, 2)}").lines[-1]


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        (["w-0  | a", "w-1  | b", "w-0  | a", "w-1  | c", "w-1 exited with code 1"], [0, 1]),
        (["trainer_0 | a", "trainer_3 | b", "trainer_3 | c", "trainer_1 | a"] * 2, [0, 1, 3]),
        (["w-1  | a", "w-2  | b"], []),  # counted from 1, or the first has no line: nothing tells which
        (["w-0  | a", "db-1  | b"], []),
        (["w-0  | a", "b", "c"], []),
        (["loss 0 | 1.2", "loss 1 | 1.1"], []),
    ],
)
def test_containers_of_one_name_are_ranks_by_their_numbers(lines: list[str], ranks: list[int]) -> None:
    """All lines have a name, a number and a bar, and the numbers count from 0."""
    assert sorted(rank for rank in by_rank("\n".join(lines)).lines if rank >= 0) == ranks


@pytest.mark.parametrize(
    ("before", "is_global"),
    [
        ("2026-01-01 10:00:00,100 - rank {} - INFO - ", True), ("(rank {}) ", True), ("<rank {}> ", True),
        ("rank_{}: ", True), ("Rank {} | ", True), ("Rank[{}] ", True), ("[Rank-{}] ", True), ("n1 rank{}: ", True),
        ("[RANK: {}/4] ", True), ("[2026-01-01 10:00:00] [rank-{}] ", True), ("[mpirank {}] ", True),
        ("R{} | ", True), ("worker{}> ", True), ("[{}]: ", True), ("{}| ", True), ("[trainer-{}/python] ", True),
        ("GPU{}: ", False), ("[cuda:{}] ", False), ("[default-{}] ", False),
    ],
)  # fmt: skip
def test_a_mark_of_any_shape_before_all_lines_is_a_tag(before: str, is_global: bool) -> None:
    """A GPU's number is a place on its node."""
    tagged = by_rank(
        "\n".join(before.format(number) + text for number in range(3) for text in ("step 1", "KeyError: 'x'"))
    )

    assert {rank: [line.rpartition("- ")[2] for line in lines] for rank, lines in tagged.lines.items()} == {
        number: ["step 1", "KeyError: 'x'"] for number in range(3)
    }
    assert tagged.is_global is is_global


@pytest.mark.parametrize(
    "before",
    [
        "epoch {}: ", "[step {}] ", "layer.{}: ", "attempt {}: ", "node{}: ", "[host-{}] ", "pid {}: ", "loss {} | ",
        "the copy of rank {}: ", "12:00:0{} ", "{} of 3: ",
        "[E316 07:39:53.792630246 ProcessGroupNCCL.cpp:616] [Rank {}] ",  # a place in a group
        "n1:77:80 [{}] NCCL INFO ", "n1:77:80 [{}] misc/socket.cc:88 NCCL WARN ",  # a device of a node
    ],
)  # fmt: skip
def test_what_counts_something_else_is_no_tag(before: str) -> None:
    """Steps, tries, layers, machines, processes' numbers, times, a sentence about a rank, a watchdog's group."""
    lines = [before.format(number) + text for number in range(3) for text in ("begun", "KeyError: 'x'")]

    assert {rank for rank in by_rank("\n".join(lines)).lines if rank >= 0} == set()


def test_numbers_of_a_shape_count_from_0_and_are_few() -> None:
    """Unless a word says that they are ranks."""
    assert by_rank("w3> a\nw4> b\nw5> c").lines == {}
    assert by_rank("w0> a\nw9> b\nw70> c\n" * 2).lines == {}
    assert by_rank("w0> a\nw1> b\nw2> c").lines == {}  # a list: each comes once
    assert by_rank("frame #0: a\nframe #1: b\n" * 2).lines == {}
    assert sorted(by_rank("w0> a\nw1> b\nw2> c\n" * 2).lines) == [0, 1, 2]
    assert sorted(by_rank("(rank 8) a\n(rank 9) b\n(rank 15) c").lines) == [8, 9, 15]


def test_a_traceback_below_a_record_of_an_error_is_its_ranks() -> None:
    """Where only a logger's records have a mark; below another record, or none, it is nobody's."""
    begins = "Traceback (most recent call last):"
    raised = [begins, '  File "t.py", line 3, in f', "KeyError: 'x'"]
    record = "2026-01-01 10:00:00,100 - rank {} - {} - x"
    steps = [record.format(rank, "INFO") for rank in (0, 1, 2, 0)]

    assert by_rank("\n".join([*steps, record.format(2, "ERROR"), *raised])).lines[2][-1] == "KeyError: 'x'"
    assert begins in by_rank("\n".join([*steps, record.format(2, "INFO"), *raised])).lines[-1]
    assert begins in by_rank("\n".join([*steps, record.format(2, "ERROR"), "down", *raised])).lines[-1]


def test_a_traceback_without_a_tag_below_a_tagged_error_is_its_ranks() -> None:
    """As a logger with a field of the rank prints it; below a tagged line of something else it is nobody's."""
    record = "[2026-07-25 10:00:01][oumi][rank{}][pid:1][{}] x"
    raised = ["Traceback (most recent call last):", '  File "t.py", line 3, in f', "KeyError: 'x'"]

    assert by_rank("\n".join([record.format(0, "INFO"), record.format(3, "ERROR"), *raised])).lines[3][1:] == raised
    assert by_rank("\n".join([record.format(0, "INFO"), record.format(3, "INFO"), *raised])).lines[-1] == raised


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ("initializing ddp: GLOBAL_RANK: {}, MEMBER: 2/2", (4, 9)),
        ("| distributed init (rank {}): env://", (4, 9)),
        ("initialized host 5b1a as rank {}", (4, 9)),
        ("Rank of current process: {}. World size: 16", (4, 9)),
        ("export SLURM_PROCID={}", (4, 9)), ("RANK={}", (4, 9)), ("rank {} of 16 on n1", (4, 9)),
        ("LOCAL_RANK={}", ()), ("NODE_RANK={}", ()), ("the peer is rank {}", ()), ("local rank {} of 8", ()),
    ],
)  # fmt: skip
def test_a_log_that_says_which_rank_it_is_of(said: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    """In a framework's or a launcher's words for ranks of the whole job, once in each file, each another one."""
    raised = 'Traceback (most recent call last):\n  File "/w/p.py", line 98, in f\nKeyError: 1\n'
    files = {"a.log": f"{said.format(4)}\n{LOST}\n", "b.log": f"{said.format(9)}\n{raised}"}

    assert judged(tmp_path, files).culprits == ranks[1:]


@pytest.mark.parametrize(
    ("line", "first"),
    [
        (
            "2210.0s: flux-shell[1]: FATAL: task-exit: t.sh: task rank 5 on host c294 failed and exit-on-error is set",
            (5,),
        ),
        ('1660.9 exception type="exec" note="task 1 (host c294): start failed: python: No such file"', (1,)),
        ("ERROR [ray_executor_v2.py:410] RayWorkerProc rank=[6] died unexpectedly, shutting down executor.", (6,)),
        ("flux-shell[0]: FATAL: doom: sh: rank 3 on host f10490 exited and exit-timeout=30s has expired", (3,)),
        ("rank 3 on host f10490 failed, attempt 2 of 5", ()),
        ("rank 3 on host f10490 is slow", ()),
        ("task 1 (host c294): started", ()),
    ],
)
def test_more_ways_to_say_which_rank_has_ended(line: str, first: tuple[int, ...]) -> None:
    """Flux's and vLLM's; not what is tried again, nor what has not ended."""
    assert launched.told_in(line).first == first


@pytest.mark.parametrize(
    ("name", "culprits"),
    [
        ("train-{}-of-4.log", (2,)), ("1234.{}.out", (2,)), ("job_7_n2_t{}.log", (2,)), ("train_0000{}.log", (2,)),
        ("node{}.log", ()), ("attempt-{}.log", ()), ("restart_{}_of_4.log", ()),
    ],
)  # fmt: skip
def test_the_number_by_which_names_differ_is_the_rank(name: str, culprits: tuple[int, ...], tmp_path: Path) -> None:
    """And one that all of them share is none; nodes and attempts are none either."""
    raised = 'Traceback (most recent call last):\n  File "/w/p.py", line 98, in f\nKeyError: 1\n'
    files = {name.format(number): f"{LOST}\n" for number in (0, 1, 3)}

    verdict = judged(tmp_path, {**files, name.format(2): raised})

    assert verdict.culprits == culprits, verdict.reason
    assert verdict.fault == "exception"


def test_a_launchers_own_lines_do_not_count_among_those_that_it_labels() -> None:
    """The number of a task stands before what tasks print; srun puts nothing before its own words."""
    labelled = [f" {task}: step" for task in range(4)]
    own = [
        "srun: error: n1: task 2: Exited with exit code 1",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED ***",
        "",
    ]

    assert sorted(by_rank("\n".join([*labelled, *own])).lines) == [-1, 0, 1, 2, 3]
    assert by_rank("\n".join([*labelled, "step", "step"])).lines == {}


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("2026-07-19 01:00:02 INFO rank=5 host=c12 pid=9", 5),
        ("[2026-07-19 01:00:02,100] [INFO] rank=5: ready", 5),
        ("rank=5 step 7", 5),
        ("2026-07-19 01:00:02 ERROR rank=5 did not answer", None),
        ("2026-07-19 01:00:02 INFO peer of rank=5 is up", None),
    ],
)
def test_a_field_behind_a_time_and_a_level_is_a_tag(line: str, rank: int | None) -> None:
    """A sentence about a rank is none."""
    assert {found for found in by_rank(line).lines if found >= 0} == ({rank} - {None})


def test_rays_dead_node_takes_its_workers_with_it() -> None:
    """By the address of each, which Ray tells at the start."""
    told = "".join(
        f"(T pid=9) - (node_id=ab, ip=10.0.0.{node}, pid=7{rank}) world_rank={rank}, local_rank=0, node_rank={node}\n"
        for rank, node in enumerate((1, 1, 2, 2))
    )
    dead = (
        "WARNING worker.py:2058 -- The node with node id: bb07 and address: 10.0.0.2 and node name: 10.0.0.2 has been "
        "marked dead because the detector has missed too many heartbeats from it."
    )

    lines = by_rank(f"{told}{dead}\n").lines

    assert dead in lines[2]
    assert dead in lines[3]
    assert dead not in lines.get(0, ())
    elsewhere = dead.replace("10.0.0.2", "10.0.0.9")
    assert elsewhere in by_rank(f"{told}{elsewhere}\n").lines[-1]


def test_ranks_in_lines_of_progress_tell_whose_a_file_is(tmp_path: Path) -> None:
    """Each file another one, and always the same; lines of other ranks tell nothing."""
    step = "2026/03/21 15:17:15 DEBUG TRAIN Batch 1/200 loss 86.5 rank {}\n"
    raised = (
        'Traceback (most recent call last):\n  File "/w/p.py", line 98, in tar\ntarfile.ReadError: unexpected end\n'
    )

    verdict = judged(
        tmp_path, {"worker-0.log.gz": step.format(4) + f"{LOST}\n", "worker-1.log.gz": step.format(5) + raised}
    )

    assert (verdict.fault, verdict.culprits) == ("exception", (5,))


def test_a_file_with_steps_of_several_ranks_is_of_none(tmp_path: Path) -> None:
    """It is one log of them all."""
    step = "TRAIN Batch 1/200 loss 86.5 rank {}\n"
    raised = (
        'Traceback (most recent call last):\n  File "/w/p.py", line 98, in tar\ntarfile.ReadError: unexpected end\n'
    )

    verdict = judged(tmp_path, {"a.log": step.format(4) + step.format(5) + raised, "b.log": step.format(6)})

    assert verdict.culprits == ()


DESCRIBED = (
    "Name:             {0}\nNamespace:  train\nContainers:\n  pytorch:\n    State:  Running\n"
    "    Last State:     Terminated\n      Reason:       {1}\n      Exit Code:    {2}\n"
)


@pytest.mark.parametrize(("reason", "code", "culprits"), [("OOMKilled", 137, (3,)), ("Completed", 0, ())])
def test_what_kubectl_describes_is_of_the_pods_rank(
    reason: str, code: int, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    """Worker 2 of a job with a master is rank 3; a container that ended in order is no end."""
    text = DESCRIBED.format("gpt-master-0", "Completed", 0) + DESCRIBED.format("gpt-worker-2", reason, code)

    verdict = judged(tmp_path, {"describe.txt": text, "gpt-master-0.log": f"step 3 loss 2\n{LOST}\n"})

    assert verdict.culprits == culprits, verdict.reason


def test_a_page_that_broke_ends_the_rank_whose_process_had_it() -> None:
    """By the number that a rank's own log has; of which two have one, none."""
    killed = "Sending SIGBUS to python3:90117 due to hardware memory corruption"
    line = f"Jul 19 02:44:10 n3 kernel: Memory failure: 0x18: {killed}"
    logs = {5: "host n3 pid=90116", 6: "host n3 pid=90117"}

    assert judge_logs(logs, faults=[line]).culprits == (6,)
    assert judge_logs(logs, faults=[line]).fault == "segfault"
    assert list(of_ranks([line], {**logs, 7: "parent pid=90117"}, "", {})) == [-1]


def test_a_node_that_mpis_launcher_lost_is_told() -> None:
    """With a rank of it where the launcher names one, and else by the node alone."""
    lost = (
        "PRTE has lost communication with a remote daemon.\n\n  HNP daemon   : [p@0,0] on node n1\n"
        "  Remote daemon: [p@0,1] on node n2\n"
    )
    named = (
        "prterun has exited due to process rank 2 with PID 17 on node n2 exiting\nimproperly. There are three reasons\n"
    )

    assert launched.told_in(named).first == (2,)
    assert judge_logs({0: LOST}, lost + named).culprits == (2,)
    alone = judge_logs({0: LOST}, lost)
    assert (alone.fault, alone.nodes, alone.culprits) == ("node_lost", ("n2",), ())


def test_lsfs_table_of_tasks_tells_ends() -> None:
    """By its first column; a row without the table's head is none."""
    rows = "00000 h1 python Exit (1) 03/04\n00002 h2 python Signaled (SIGSEGV) 03/04\n00003 h2 python Exit (0) 03/04\n"

    assert launched.told_in(f"TID   HOST_NAME  COMMAND_LINE STATUS\n{rows}").codes == {0: 1, 2: -11}
    assert launched.told_in(rows).codes == {}


KILLED = "May 05 10:02:11 n4 kernel: Out of memory: Killed process {} ({}) total-vm:9kB, anon-rss:8kB\n"
UNITS = "May 05 10:00:01 n4 CRON[9912]: (root) CMD (x)\nMay 05 10:02:12 n4 systemd[1]: x.service: Failed.\n"


@pytest.mark.parametrize(
    ("pid", "name", "of_1", "fault"),
    [
        (40110, "java", "pid 7002 step 2 loss 2.8\n", "unknown"),
        (40110, "python3", "pid 7002 step 2 loss 2.8\n", "out_of_memory"),  # it may be a child of a rank
        (7002, "java", "pid 7002 step 2 loss 2.8\n", "out_of_memory"),
        (40110, "java", "step 2 loss 2.8\n", "out_of_memory"),  # rank 1 does not tell its own process
    ],
)
def test_a_killed_process_that_is_no_part_of_the_job_is_no_reason(
    pid: int, name: str, of_1: str, fault: str, tmp_path: Path
) -> None:
    """Known where each rank tells its own; in a journal of all units as well."""
    files = {
        "node.journal": UNITS + KILLED.format(pid, name),
        "rank0.log": "pid 7001 step 2 loss 2.8\n",
        "rank1.log": of_1,
    }

    assert judged(tmp_path, files).fault == fault
