# SPDX-License-Identifier: Apache-2.0
"""Ranks of which only a count, a gap in the numbers or an earlier call speaks: named where it can be no other."""

from pathlib import Path

import pytest

from megascale_ops.postmortem.examine import examine
from megascale_ops.schema.health import Verdict

COUNTED = (
    "Traceback (most recent call last):\n"
    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. "
    "{joined}/{size} clients joined.\n"
)
CLOSED = "Traceback (most recent call last):\ntorch.distributed.DistNetworkError: Connection reset by peer\n"
UNREACHED = (
    "Traceback (most recent call last):\n"
    "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
    "(head, 29500).\n"
)
TRIED = (
    "[W socket.cpp:752] [c10d] The IPv6 network addresses of (head, 29500) cannot be retrieved (gai error: -3).\n"
    "[W socket.cpp:697] [c10d] The client socket has failed to connect to [head]:29500 "
    "(errno: 111 - Connection refused).\n"
)
TIMED_OUT = (
    "[E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 60000{rank} milliseconds before timing out.\n"
)
NO_WAY = (
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21.5\n"
    "Last error:\nsocketStartConnect: Connect to 10.0.0.4<51021> failed : No route to host\n"
)

NO_IMAGE = "9m  Warning  Failed  pod/gpt-worker-{}  Failed to pull image r/gpt:v7: 401 Unauthorized\n"


def judge(folder: Path, files: dict[str, str]) -> Verdict:
    """Judge the logs of a folder, by their names."""
    for name, text in files.items():
        (folder / name).write_text(text)
    return examine([folder]).verdicts[0]


def merged(numbers: dict[int, int]) -> dict[str, str]:
    """Return one log in which watchdogs tell what each rank gave up."""
    return {"job.log": "".join(TIMED_OUT.format(rank=rank, seq=seq) for rank, seq in numbers.items())}


@pytest.mark.parametrize(
    ("joined", "logs", "named"),
    [
        (3, {1: CLOSED, 2: "loading\n", 3: CLOSED}, (2,)),
        (3, {6: UNREACHED}, ()),  # rank 6 is none of four
        (7, {6: UNREACHED}, (6,)),
        (6, {6: UNREACHED, 7: UNREACHED}, (6, 7)),
        (7, {5: UNREACHED, 6: UNREACHED}, ()),  # one is missing, and two say that they are
        (2, {1: CLOSED, 2: "loading\n", 3: CLOSED}, ()),  # two are missing, and one is silent
        (7, {6: TRIED + CLOSED}, ()),  # warnings of attempts, and another one reached it
        (3, {1: CLOSED, 2: "loading\n"}, ()),  # nothing is left of rank 3
    ],
    ids=["silent", "of-nodes", "refused", "two-refused", "too-many", "too-few", "tried-again", "a-log-less"],
)
def test_a_store_that_counts_is_believed_where_the_rest_is_who_is_missing(
    tmp_path: Path, joined: int, logs: dict[int, str], named: tuple[int, ...]
) -> None:
    """By their own words, or by silence where all others had come; a count that does not fit names nobody."""
    size = 8 if max(logs) > 4 and joined > 3 else 4
    files = {f"rank_{rank}.log": text for rank, text in logs.items()}

    verdict = judge(tmp_path, {**files, "rank_0.log": COUNTED.format(joined=joined, size=size)})

    assert verdict.culprits == named, verdict.reason
    assert verdict.confidence <= 0.7


def test_the_only_number_that_a_merged_log_lacks_did_not_come(tmp_path: Path) -> None:
    """Ranks count from 0, so the rank that printed nothing of a time-out is there all the same."""
    verdict = judge(tmp_path, merged({1: 1, 2: 1, 3: 1}))

    assert (verdict.fault, verdict.culprits) == ("not_joined", (0,))
    assert verdict.confidence <= 0.5


@pytest.mark.parametrize("numbers", [{1: 1, 2: 1}, {2: 1, 3: 1, 4: 1}, {0: 1, 1: 1, 2: 1}], ids=["few", "two", "none"])
def test_a_number_that_need_not_be_missing_is_not_named(tmp_path: Path, numbers: dict[int, int]) -> None:
    """Of two ranks a third may be silent, too; two gaps are two ranks; without a gap nobody is missing."""
    assert judge(tmp_path, merged(numbers)).culprits == ()


@pytest.mark.parametrize("seqs", [{1: 1, 2: 1, 3: 1}, {0: 61, 1: 80, 2: 80, 3: 80}], ids=["gap", "earlier"])
def test_numbers_that_are_places_in_several_groups_name_nobody(tmp_path: Path, seqs: dict[int, int]) -> None:
    """Torch before 2.3 tells places: two processes with one number have given up after different times."""
    twice = TIMED_OUT.format(rank=min(seqs), seq=seqs[min(seqs)]).replace("ran for 60000", "ran for 60070")

    assert judge(tmp_path, {"job.log": merged(seqs)["job.log"] + twice}).culprits == ()


def test_a_log_that_was_not_kept_is_no_rank_that_did_not_come(tmp_path: Path) -> None:
    """A log a rank: what is missing may lie elsewhere."""
    files = {f"rank{rank}.log": TIMED_OUT.format(rank=rank, seq=1) for rank in (1, 2, 3)}

    assert judge(tmp_path, files).culprits == ()


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({0: 80, 1: 80, 2: 80, 3: 80, 4: 61}, (4,)),
        ({0: 80, 1: 80, 2: 80, 3: 80, 4: 99}, ()),  # it is ahead
        ({0: 80, 1: 80, 2: 80, 3: 61, 4: 61}, ()),  # two of five
        ({0: 80, 1: 80, 2: 61}, ()),
    ],
    ids=["behind", "ahead", "halves", "few"],
)
def test_few_that_gave_up_an_earlier_call_were_not_where_the_others_waited(
    tmp_path: Path, numbers: dict[int, int], named: tuple[int, ...]
) -> None:
    """Torch before 2.3 names no group: little is sure then."""
    verdict = judge(tmp_path, merged(numbers))

    assert verdict.culprits == named, verdict.reason
    assert verdict.confidence <= 0.5


def test_one_rank_without_a_way_to_a_peer_is_one_end_of_a_cut_link(tmp_path: Path) -> None:
    """Several of them may all mean a host that has gone."""
    one, more = tmp_path / "one", tmp_path / "more"
    one.mkdir()
    more.mkdir()

    alone = judge(one, {"rank2.log": NO_WAY, "rank1.log": CLOSED})
    several = judge(more, {"rank2.log": NO_WAY, "rank1.log": NO_WAY})

    assert (alone.fault, alone.culprits, alone.confidence) == ("link_cut", (2,), 0.5)
    assert several.culprits == ()


def test_a_bar_before_each_line_hides_no_report_of_a_launcher(tmp_path: Path) -> None:
    """As benchmarks quote what they ran."""
    report = (
        "Root Cause (first observed failure):\n[0]:\n  rank      : 5 (local_rank: 1)\n  exitcode  : -11 (pid: 43)\n"
    )

    verdict = judge(tmp_path, {"job.log": "".join(f"    | {line}\n" for line in report.splitlines())})

    assert (verdict.fault, verdict.culprits) == ("segfault", (5,))


AT_WORK = (
    "[PG ID 1 PG GUID 3 Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: 21937, "
    "last enqueued NCCL work: 21937, last completed NCCL work: 21936.\n"
)
DUMPS = (
    "[PG ID 1 PG GUID 3 Rank {rank}] Received a dump signal due to a collective timeout from rank 0 and we will try "
    "our best. Last enqueued NCCL work: {seq}, last completed NCCL work: {seq}.\n"
)


@pytest.mark.parametrize(("seq", "named"), [(21936, (1,)), (21937, ())], ids=["behind", "level"])
def test_logs_that_begin_behind_the_watchdogs_first_line_still_tell_who_is_behind(
    tmp_path: Path, seq: int, named: tuple[int, ...]
) -> None:
    """What the rank behind was told says that it was a time-out; a rank level with the others is not behind."""
    files = {f"rank{rank}.log": AT_WORK.format(rank=rank) for rank in (0, 2, 3)}

    assert judge(tmp_path, {**files, "rank1.log": DUMPS.format(rank=1, seq=seq)}).culprits == named


CAME = "INFO:distributed_c10d:Added key: store_based_barrier_key:{key} to store for rank: {rank}\n"
LATE = (
    "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: "
    "store_based_barrier_key:1 (world_size=4, worker_count={count}, timeout=0:30:00)\n"
)


@pytest.mark.parametrize(
    ("came", "count", "named"),
    [((0, 1, 3), 3, (2,)), ((0, 1), 2, (2, 3)), ((0, 1), 3, ()), ((0,), 3, ())],
    ids=["one", "two", "a-line-less", "one-ranks-log"],
)
def test_a_barrier_that_counts_is_believed_where_its_log_has_all_who_came(
    tmp_path: Path, came: tuple[int, ...], count: int, named: tuple[int, ...]
) -> None:
    """Where lines are missing, or all are of one rank, the rest need not be absent; another barrier's do not count."""
    log = "".join(CAME.format(key=1, rank=rank) for rank in came) + CAME.format(key=2, rank=2)
    log += "Traceback (most recent call last):\n" + LATE.format(count=count)

    assert judge(tmp_path, {"job.log": log}).culprits == named


@pytest.mark.parametrize(
    ("of_2", "named"),
    [
        ("1m  Normal  Scheduled  pod/gpt-worker-1  assigned\n", ()),
        (NO_IMAGE.format(1), (2,)),
        (
            NO_IMAGE.format(1) + "8m  Normal  Started  pod/gpt-worker-1  Started container pytorch\n",
            (),  # it came at the second try
        ),
    ],
)
def test_a_pod_whose_image_never_came(tmp_path: Path, of_2: str, named: tuple[int, ...]) -> None:
    """It has no log, and its name tells its rank; one that began after all is not named, nor one of another job."""
    others = "9m  Warning  Failed  pod/bert-worker-0  Failed to pull image r/bert:v1: 401 Unauthorized\n"
    logs = {"gpt-master-0.log": CLOSED, "gpt-worker-0.log": CLOSED}

    assert judge(tmp_path, {**logs, "events.txt": of_2 + others}).culprits == named


def test_a_pod_with_a_log_has_had_its_image(tmp_path: Path) -> None:
    """A first try that failed is not why its rank lost a peer."""
    verdict = judge(
        tmp_path, {"gpt-master-0.log": CLOSED, "gpt-worker-0.log": CLOSED, "events.txt": NO_IMAGE.format(0)}
    )

    assert (verdict.fault, verdict.culprits) == ("unknown", ())


AT_EXIT = (
    "Exception ignored in atexit callback: <function flush>\nTraceback (most recent call last):\n"
    '  File "/x.py", line 1, in flush\nBrokenPipeError: [Errno 32] Broken pipe\n'
)
GATED = "OSError: You are trying to access a gated repo.\n"


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        ([CLOSED, "step 1\n", GATED, GATED], (2, 3)),
        ([GATED, GATED, GATED, "step 1\n"], ()),  # most: these may be those who lost the one that says nothing
        ([CLOSED, "step 1\n", GATED + "step 2 loss 1.1\n", "step 1\n"], ()),  # something came after it
        ([CLOSED, "step 1\n", "retrying after OSError: x\n", "step 1\n"], ()),
        ([CLOSED, "step 1\n", AT_EXIT, "step 1\n"], ()),
        (["step 1\n", "step 1\n", GATED, "step 1\n"], ()),  # nobody has lost it
    ],
)
def test_a_line_that_raises_and_nothing_after_it(tmp_path: Path, texts: list[str], named: tuple[int, ...]) -> None:
    """Its traceback may be left out; with less confidence than one with it, and never where most say so."""
    verdict = judge(tmp_path, {f"rank_{rank}.log": text for rank, text in enumerate(texts)})

    assert verdict.culprits == named
    assert not named or verdict.confidence < 0.7


def test_a_job_that_stopped_for_its_loss_names_no_rank(tmp_path: Path) -> None:
    """The loss is the job's; a metric that did not improve is no fault."""
    bad = "[rank: 0] Monitored metric train_loss = nan is not finite. Signaling Trainer to stop."
    good = "[rank: 0] Monitored metric val_loss did not improve in the last 3 records. Best score: 0.300."

    verdict = judge(tmp_path, {"job.log": f"{bad}\n{bad.replace('0', '1', 1)}\n"})

    assert (verdict.fault, verdict.culprits) == ("loss_nan", ())
    assert judge(tmp_path, {"job.log": f"{good}\n{good.replace('0', '1', 1)}\n"}).fault == "unknown"
