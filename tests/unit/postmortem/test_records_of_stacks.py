# SPDX-License-Identifier: Apache-2.0
"""Whose a record is that one stack alone writes so: Ascend, loguru, Orbax, JAX, kubelets, YARN; and whose not."""

from pathlib import Path

import pytest

from megascale_ops.postmortem.examine import examine
from megascale_ops.postmortem.exits import judge_logs
from megascale_ops.postmortem.kernel import of_ranks
from megascale_ops.postmortem.tags import by_rank
from megascale_ops.schema.health import Verdict

LOST = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"
HEAD = "[ERROR] 2024-05-21-11:57:54 (PID:92700{0}, Device:{0}, RankID:{0}) ERR02200 DIST call hccl api failed."
OWN = "EJ0001: 2024-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: one is running."
WAITED = "EI0006: 2024-05-21-11:59:55.100.200 Getting socket times out. Reason: the remote rank sent nothing"
KUBELET = (
    'May 05 14:13:15 h kubelet[9]: E0505 14:13:15.580809 9 pod_workers.go:951] "Error syncing pod, skipping" '
    'err="failed to \\"StartContainer\\" for \\"main\\" with RunContainerError" pod="train/{}" podUID=8f9\n'
)
PAGE_FAULT = "[Fri Apr 17 19:56:43 2026] amdgpu 0000:65:00.0: amdgpu:  Process python3 pid 7304 thread python3 pid 7304"


def judged(folder: Path, files: dict[str, str]) -> Verdict:
    """Judge a folder of files."""
    for name, text in files.items():
        (folder / name).write_text(text)
    return examine([folder]).verdicts[0]


def test_a_report_of_ascend_is_of_the_rank_in_its_head() -> None:
    """With what it raised above it and its codes below; what follows is of no rank, and of one rank it is no tag."""
    text = "\n".join(["RuntimeError: HCCL error", HEAD.format(3), OWN, "        TraceBack:", "bye", HEAD.format(1)])

    assert by_rank(text).lines == {
        3: ["RuntimeError: HCCL error", HEAD.format(3), OWN, "        TraceBack:"],
        -1: ["bye"],
        1: [HEAD.format(1)],
    }
    assert by_rank(f"{HEAD.format(3)}\n{OWN}").lines == {}


def test_a_code_of_canns_own_is_a_cause_and_one_of_a_wait_is_none() -> None:
    """EJ is of the process below HCCL, EI0006 of a rank that waited."""
    assert judge_logs({0: f"{HEAD.format(0)}\n{WAITED}", 3: f"{HEAD.format(3)}\n{OWN}"}).culprits == (3,)
    assert judge_logs({0: f"{HEAD.format(0)}\n{WAITED}", 3: f"{HEAD.format(3)}\n{WAITED}"}).culprits == ()


def test_a_traceback_that_loguru_drew_is_read_to_its_end() -> None:
    """It has blank lines and an arrow in it, and a chain of two ends with the second; what follows is of no rank."""
    record = "2026-03-01 10:00:01.311 | ERROR    | rank=7 | train:<module>:120 - caught"
    drawn = [
        "Traceback (most recent call last):", "", '> File "/w/t.py", line 1, in <module>', "    main()", "    └ <f>",
        "", "ValueError: first", "", "During handling of the above exception, another exception occurred:", "",
        "Traceback (most recent call last):", '  File "/w/t.py", line 2, in main', "    go()", "KeyError: 'second'",
    ]  # fmt: skip
    info = "2026-03-01 10:00:02.000 | INFO     | rank=0 | train:loop:80 - step 5"
    lines = by_rank("\n".join([info, record, *drawn, "said by nobody"])).lines

    assert lines[7][1:] == drawn
    assert lines[-1] == ["said by nobody"]
    verdict = judge_logs({0: LOST, 7: "\n".join(lines[7])})
    assert (verdict.fault, verdict.culprits) == ("exception", (7,))
    assert "second" in verdict.reason


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("I0821 09:36:00.1 14 manager.py:5] [process={0}][thread=MainThread] Restoring", {0, 3}),
        ("process_index={0} of a mesh", {0, 3}),
        ("Process {0} of 4 starts", {0, 3}),
        ("restored in {0} s", set()),
    ],
)
def test_processes_of_jax_say_which_they_are(tmp_path: Path, line: str, ranks: set[int]) -> None:
    """By a logger's field or a sentence of their own; else the file alone is named."""
    error = 'Traceback (most recent call last):\n  File "/w/t.py", line 1, in m\n    f()\nValueError: no manifest\n'
    lost = "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: restore::0.\n"
    verdict = judged(tmp_path, {"a.log": f"{line.format(0)}\n{lost}", "b.log": f"{line.format(3)}\n{error}"})

    assert set(verdict.culprits) == ranks - {0}
    assert verdict.fault == "exception"


@pytest.mark.parametrize(("words", "rank"), [("/opt/jax/_src/xla_bridge.py:184: Warning", 2), ("hello", None)])
def test_a_host_of_jax_is_its_process(tmp_path: Path, words: str, rank: int | None) -> None:
    """JAX runs one process on each; a host of other stacks has many ranks."""
    crash = "*** SIGSEGV (@(nil)), see gl_41#s15 received by PID 11743 (TID 12350) on cpu 17; stack trace: ***\n"
    verdict = judged(tmp_path, {"host-0.txt": f"{words}\n", "host-2.txt": f"{words}\n{crash}"})

    assert (verdict.fault, verdict.culprits) == ("segfault", () if rank is None else (rank,))


@pytest.mark.parametrize(("pod", "ranks"), [("gpt-worker-3", (4,)), ("db-worker-3", ())])
def test_a_kubelet_tells_which_pod_could_not_begin(tmp_path: Path, pod: str, ranks: tuple[int, ...]) -> None:
    """Of this job; its own name has an address, which is no rank."""
    store = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 4/5 clients joined.\n"
    verdict = judged(tmp_path, {"kubelet-ip-10-51-52-158.log": KUBELET.format(pod), "gpt-master-0.log": store})

    assert verdict.culprits == ranks


def test_a_page_fault_of_amds_is_of_the_rank_whose_process_it_names() -> None:
    """By a table of ranks and processes; a process that two ranks are said to be is nobody's."""
    table = "rank 5 pid 7303 device 5\nrank 6 pid 7304 device 6\n"

    assert of_ranks([PAGE_FAULT], {}, table, {}) == {6: [PAGE_FAULT]}
    assert of_ranks([PAGE_FAULT], {}, f"{table}rank 2 pid 7304\n", {}) == {-1: [PAGE_FAULT]}


@pytest.mark.parametrize(
    ("status", "fault", "ranks"),
    [("-104", "out_of_memory", (2,)), ("-100", "killed", (2,)), ("143", "killed", (0, 2))],
)
def test_statuses_of_yarn(status: str, fault: str, ranks: tuple[int, ...]) -> None:
    """-104 is its own limit of memory, the others below 0 are containers that it took away."""
    said = "Container c{0} for task worker:{0} finished with exitStatus: {1}.\n"
    verdict = judge_logs({}, said.format(2, status) + said.format(0, 143))

    assert (verdict.fault, verdict.culprits) == (fault, ranks)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("=>> PBS: job killed: mem 264241152kb exceeded limit 262144000kb", "out_of_memory"),
        ("=>> PBS: job killed: walltime 86432 exceeded limit 86400", "unknown"),
    ],
)
def test_what_pbs_ends_a_job_for(line: str, fault: str) -> None:
    """Its memory; a job that used up its time failed of nothing."""
    verdict = judge_logs({0: "step 1 loss 2.0", 1: "step 1 loss 2.0"}, line)

    assert (verdict.fault, verdict.culprits) == (fault, ())


def test_who_was_terminated_behind_ranks_that_left_is_no_cause() -> None:
    """A launcher says who exited before it ended the rest; where nobody did, those are all there is."""
    rest = "srun: error: n1: tasks 0-1: Terminated\n"
    stopped = {0: "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2025-03-26T10:00:00 ***", 2: "FATAL:   no image"}
    verdict = judge_logs(stopped, f"srun: error: n2: tasks 2-3: Exited with exit code 255\n{rest}")

    assert (verdict.fault, verdict.culprits) == ("exit_code", (2, 3))
    assert judge_logs({**stopped, 2: "loading"}, rest).fault == "killed"


@pytest.mark.parametrize(
    ("path", "ranks", "most"),
    [
        ("/nvme/zero_3/rank24/0_param.swp: buffer nbytes != file bytes 8 != 7", (24,), 0.6),
        ("/ckpt/mp_rank_03/model.pt: buffer nbytes != file bytes 8 != 7", (), 1.0),
        ("/a/rank1/x.swp: as /a/rank2/x.swp", (), 1.0),
    ],
)
def test_a_path_in_the_last_words_of_nobody_names_a_rank(path: str, ranks: tuple[int, ...], most: float) -> None:
    """With 60 %; a place in a parallel group is no rank, and two paths name nobody."""
    text = f"{path}\npython: aio.cpp:223: int pread(): Assertion `a == b' failed.\n"
    verdict = judge_logs({}, text)

    assert (verdict.fault, verdict.culprits) == ("aborted", ranks)
    assert verdict.confidence <= most


def test_labels_count_where_tags_behind_them_say_the_same() -> None:
    """Of srun and of PALS, whose label has a host; a label of agents is no rank, and a sentence is no label."""
    srun = ["4: OSError: x", "5: OSError: x", "0: [rank0]: waits", "1: [rank1]: waits"]
    pals = [
        "x1921c1s4b0n0.hsn 40: step=9",
        "x1921c1s4b0n0.hsn 41: step=9",
        "x1921c1s4b0n0.hsn: rank 41 died from signal 15",
    ]

    assert by_rank("\n".join(srun)).lines == {4: ["OSError: x"], 5: ["OSError: x"], 0: ["waits"], 1: ["waits"]}
    assert by_rank("0: [rank0]: a\n0: [rank1]: b\n1: [rank2]: c").lines.keys() == {0, 1, 2}
    assert sorted(by_rank("\n".join(pals)).lines) == [-1, 40, 41]
    assert by_rank("epoch 3: loss 2.0\nepoch 4: loss 1.9").lines == {}


def test_a_shells_line_behind_what_was_raised_is_none_of_its_message() -> None:
    """Nor is an observer's, a launcher's; the lines of a message of many are."""
    traceback = 'Traceback (most recent call last):\n  File "/w/t.py", line 1, in m\n    f()\n'
    behind = (
        "[rank: 1] Child process with PID 4151 terminated with code 1.\n/run.sh: line 12:  4100 Killed    python x\n"
    )
    verdict = judge_logs({1: f"{traceback}KeyError: 'val/f1'\n{behind}", 0: LOST})
    cuda = f"{traceback}RuntimeError: it failed\nwith No space left on device\n"

    assert (verdict.fault, verdict.culprits) == ("exception", (1,))
    assert judge_logs({1: cuda, 0: LOST}).fault == "disk_full"


def test_a_rank_that_made_two_steps_behind_a_traceback_has_survived_it() -> None:
    """One step may be another rank's line."""
    traceback = 'Traceback (most recent call last):\n  File "/w/t.py", line 1, in m\n    f()\nKeyError: 1\n'

    assert judge_logs({0: f"{traceback}step 1 loss 2\nstep 2 loss 2\n", 1: LOST}).culprits == ()
    assert judge_logs({0: f"{traceback}step 1 loss 2\n", 1: LOST}).culprits == (0,)


def test_what_came_before_a_restart_is_over() -> None:
    """Of torchrun's agent; without another attempt it is not."""
    failed = "E0301 10:00:00.1 9 api.py:874] failed (exitcode: 1) local_rank: 3 (pid: 933) of binary: python\n"
    again = (
        "I0301 10:00:00.2 9 api.py:879] [default] Worker group FAILED. {}/3 attempts left; will restart worker group\n"
    )

    assert judge_logs({}, failed).culprits == (3,)
    assert judge_logs({}, f"{failed}{again.format(3)}fine\n").culprits == ()
    assert judge_logs({}, f"{failed}{again.format(3)}{failed}").culprits == (3,)


@pytest.mark.parametrize(("kernels", "ranks"), [("w-3.kern.log", (3,)), ("gpu07.kern.log", ())])
def test_a_kernels_log_of_the_same_name_is_of_the_same_host(
    tmp_path: Path, kernels: str, ranks: tuple[int, ...]
) -> None:
    """What it has killed is the one rank that ran there; another host's kernel explains nobody's end by itself."""
    oom = "Mar  1 10:00:20 h kernel: [ 9011.2] Out of memory: Killed process 2711 (python3) total-vm:4kB\n"
    logs = {"w-0.log": f"rank: 0\n{LOST}", "w-1.log": f"rank: 1\n{LOST}", "w-3.log": "rank: 3\nstep 4 loss 2.0"}
    verdict = judged(tmp_path, {**{name: f"global_rank: {text[6:]}" for name, text in logs.items()}, kernels: oom})

    assert (verdict.fault, verdict.culprits) == ("out_of_memory", ranks)


def test_pods_as_yaml_are_of_the_logs_that_are_named_by_them(tmp_path: Path) -> None:
    """A pod that has no log is nobody's."""
    pod = (
        "- kind: Pod\n  metadata:\n    name: {}\n"
        "  status:\n    containerStatuses:\n    - lastState:\n        terminated:\n          {}\n"
    )
    logs = {"g-0.log": f"[rank0]: {LOST}", "g-1.log": f"[rank1]: {LOST}", "g-2.log": "[rank2]: step 1 loss 2.0"}
    both = "kind: List\nitems:\n" + pod.format("g-1", "reason: Error") + pod.format("g-2", "reason: OOMKilled")
    stranger = "kind: List\nitems:\n" + pod.format("db-7", "reason: OOMKilled")

    assert judged(tmp_path, {**logs, "pods.yaml": both}).culprits == (2,)
    assert judged(tmp_path, {**logs, "pods.yaml": stranger}).culprits == ()


@pytest.mark.parametrize(
    ("why", "fault", "ranks"),
    [("node", "node_lost", (2, 3)), ("worker process", "killed", (2,)), ("creator", "exception", ())],
)
def test_an_actor_that_died_with_its_node(why: str, fault: str, ranks: tuple[int, ...]) -> None:
    """All workers of the node's address have; of a process that was gone only its own rank."""
    started = "".join(
        f"(TorchTrainer pid=9) - (node_id=a, ip=10.0.0.{rank // 2}, pid={60 + rank}) world_rank={rank}, local_rank=0\n"
        for rank in range(4)
    )
    died = (
        'Traceback (most recent call last):\n  File "/r/x.py", line 6, in get\n    raise failure\n'
        "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.\n"
        f"\tclass_name: W\n\tpid: 62\n\tnamespace: c\n\tip: 10.0.0.1\nThe actor is dead because its {why} has died.\n"
    )
    lines = by_rank(started + died).lines
    verdict = judge_logs({rank: "\n".join(own) for rank, own in lines.items() if rank >= 0}, "\n".join(lines[-1]))

    assert (verdict.fault, verdict.culprits) == (fault, ranks)


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["workerpool0-0", "workerpool1-0", "workerpool1-1"], [0, 1, 2]),
        (["gpt-0", "gpt-1", "gpt-2"], [0, 1, 2]),
        (["workerpool0-0", "workerpool1-1", "workerpool1-2"], []),  # one is missing
        (["gpt-worker-0", "gpt-worker-1", "gpt-worker-2"], []),  # the master is
        (["gpt-1", "gpt-2", "gpt-3"], []),
        (["gpt-0", "db-0", "gpt-1"], []),
    ],
)
def test_tasks_in_fields_of_a_structured_log(names: list[str], ranks: list[int]) -> None:
    """They count where they are those of a whole job."""
    text = "\n".join(f'{{"severity":"INFO","pod_name":"{name}","message":"x"}}' for name in names)

    assert sorted(rank for rank in by_rank(text).lines if rank >= 0) == ranks


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("[default1]:[rank3]: lost", [2, 3]),
        ("  rank      : 3 (local_rank: 1)", [-1, 2, 3]),
        ("[default1]:lost", [0, 1]),  # nothing tells of which node
        ("[default1]:[rank3]: lost\n[default0]:[rank7]: lost", [-1, 3, 7]),  # of two nodes
    ],
)
def test_local_tags_are_the_ranks_that_others_lines_say(line: str, ranks: list[int]) -> None:
    """A line with both tags, or torchrun's report; lines of two nodes have no one distance."""
    assert sorted(by_rank(f"[default0]:step 1\n[default1]:step 1\n{line}").lines) == ranks


@pytest.mark.parametrize(("name", "fault"), [("java", "unknown"), ("python3", "out_of_memory")])
def test_what_a_node_has_killed_of_others_is_no_fault_of_the_job(name: str, fault: str) -> None:
    """An event of Kubernetes names the process."""
    event = f"5m  Warning  OOMKilling  node/n7  Memory cgroup out of memory: Killed process 90121 ({name}) total-vm:9kB"

    assert judge_logs({0: "step 1 loss 2.0", 1: "step 1 loss 2.0"}, event).fault == fault
