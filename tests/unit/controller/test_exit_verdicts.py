# SPDX-License-Identifier: Apache-2.0
"""Which rank a round died of: exit statuses, exceptions and last words, causes before consequences."""

import signal

import msgspec
import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import HostReading, Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import LastWords, RankError, RankReport

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"


def _ended(
    rank: int,
    code: int,
    error: tuple[str, str] | None = None,
    *,
    ago_s: float = 0.1,
    by_us: bool = False,
    words: tuple[str, ...] = (),
    node: str = "n0",
    step: int = 10,
) -> Ended:
    problem = RankError(type=error[0], message=error[1], where="train.py:5 f", step=step) if error else None
    exit_ = RankExit(
        rank, rank, 100 + rank, code, 0.0, by_us=by_us, step=step, phase="backward", error=problem, last_words=words
    )
    return Ended(node, exit_, ago_s)


def _judge(
    *ended: Ended,
    missing: tuple[str, ...] = (),
    reports: dict[int, RankReport] | None = None,
    hosts: dict[str, HostReading] | None = None,
) -> Verdict:
    return judge_exits(
        ended,
        world_size=max(2, len(ended)),
        missing=missing,
        reports=reports or {},
        hosts=hosts or {},
        round_=3,
        wall_s=1e6,
    )


def test_a_rank_that_vanished_below_its_launcher_is_the_cause() -> None:
    """Its status was not seen; those that the launcher stopped after it, and those that lost it, are none."""
    gone = _ended(1, 1, ago_s=0.5)
    gone = gone._replace(exit=msgspec.structs.replace(gone.exit, vanished=True))

    verdict = _judge(gone, _ended(0, 1, ("RuntimeError", GLOO), ago_s=0.3), _ended(2, -signal.SIGTERM, by_us=True))

    assert (verdict.fault, verdict.culprits) == ("killed", (1,))
    assert "its launcher did not say how" in verdict.reason


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (_ended(1, -signal.SIGKILL), "killed"),
        (_ended(1, -signal.SIGTERM), "killed"),
        (_ended(1, -signal.SIGSEGV), "segfault"),
        (_ended(1, -signal.SIGBUS), "segfault"),
        (_ended(1, -signal.SIGABRT), "aborted"),
        (_ended(1, 1, ("ValueError", "x")), "exception"),
        (_ended(1, 1, ("MemoryError", "")), "out_of_memory"),
        (_ended(1, 1, ("RuntimeError", "CUDA out of memory. Tried to allocate 2 GiB")), "out_of_memory"),
        (_ended(1, 1, ("OSError", "[Errno 28] No space left on device")), "disk_full"),
        (_ended(1, 1, ("RuntimeError", "CUDA error: device-side assert triggered")), "cuda_error"),
        (_ended(1, 1, ("RuntimeError", "NCCL error in: x.cpp:1, unhandled system error")), "nccl_error"),
        (_ended(1, 3), "exit_code"),
        (_ended(1, 1, words=("disk_full", "exception")), "disk_full"),
        (_ended(1, -signal.SIGKILL, words=("host_out_of_memory",)), "out_of_memory"),
        (_ended(1, -signal.SIGABRT, words=("aborted",)), "aborted"),
    ],
)
def test_what_each_end_speaks_for(ended: Ended, fault: str) -> None:
    """The culprit is the rank that ended by itself; the one that its runner stopped is not."""
    verdict = _judge(ended, _ended(0, -15, by_us=True, ago_s=0.0))

    assert verdict.fault == fault
    assert verdict.fault in FAULTS
    assert verdict.culprits == (1,)
    assert verdict.nodes == ("n0",)
    assert verdict.since_wall_s == pytest.approx(1e6 - 0.1)


def test_survivors_of_a_kill_are_victims() -> None:
    """Gloo's error of the others never makes them culprits, even if they were seen to end first."""
    victims = [_ended(rank, 1, ("RuntimeError", GLOO), ago_s=0.5) for rank in (0, 2, 3)]

    verdict = _judge(*victims, _ended(1, -signal.SIGKILL, ago_s=0.1))

    assert (verdict.fault, verdict.culprits) == ("killed", (1,))
    assert "3 others only reported a lost peer" in verdict.reason
    assert verdict.confidence > 0.9


def test_an_unknown_consequence_does_not_outrank_a_kill() -> None:
    """An unknown exception may be a consequence: a signal comes first."""
    verdict = _judge(_ended(0, 1, ("WeirdLibError", "lost rank"), ago_s=0.9), _ended(1, -signal.SIGKILL, ago_s=0.6))

    assert verdict.culprits == (1,)


@pytest.mark.parametrize(("later_s", "culprit"), [(0.3, 1), (25.0, 1), (40.0, 0)])
def test_a_killed_rank_may_be_seen_to_end_after_its_victims(later_s: float, culprit: int) -> None:
    """The kernel frees 64 ms of memory a GB; what was killed long after an exception has another reason."""
    raised = _ended(0, 1, ("WeirdLibError", "lost rank"), ago_s=later_s + 0.1)

    assert _judge(raised, _ended(1, -signal.SIGKILL, ago_s=0.1)).culprits == (culprit,)


@pytest.mark.parametrize(
    ("first", "second", "sure"),
    [
        (_ended(1, 1, ago_s=3.0), _ended(0, 1, ("RuntimeError", "NCCL error in: x.cpp:1"), ago_s=0.5), True),
        (_ended(1, 1, ago_s=0.9), _ended(0, 1, ("RuntimeError", "NCCL error in: x.cpp:1"), ago_s=0.5), False),
        (_ended(1, 1, ("ValueError", "x"), ago_s=0.5), _ended(0, 3, ago_s=4.0), False),
        (_ended(1, 1, ("ValueError", "x"), ago_s=4.0), _ended(0, -signal.SIGTERM, ago_s=0.5), True),
    ],
    ids=["well-before", "at-once", "silent-before-an-exception", "asked-to-go-after"],
)
def test_who_was_first_is_certain_only_where_time_or_class_tells(first: Ended, second: Ended, *, sure: bool) -> None:
    """Rank 1 is named in all of them, and with 0.6 at most where rank 0 could as well have been first."""
    verdict = _judge(first, second)

    assert verdict.culprits == (1,)
    assert (verdict.confidence > 0.6) == sure


def test_what_a_checkpoint_carried_to_all_ranks_is_its_own_where_it_was_met() -> None:
    """A black box cuts the carried traceback away; the script's words about it still tell the class."""
    text = (
        "saving failed on rank 1: No space left on device (from torch.distributed.checkpoint.api.CheckpointException: "
        "CheckpointException ranks:dict_keys([1])\nTraceback (most recent call last): (RANK 1)\n  File x"
    )
    met = _ended(1, -signal.SIGTERM, ("app.SaveError", text), by_us=True)

    verdict = _judge(met, _ended(0, 1, ("app.SaveError", text)))

    assert (verdict.fault, verdict.culprits) == ("disk_full", (1,))
    assert "1 others only reported a lost peer" in verdict.reason


def test_an_nccl_error_of_several_ranks_is_hardly_theirs() -> None:
    """One of them, or an unknown rank: all are named, with a low confidence."""
    error = ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:1, unhandled system error")

    alone, together = _judge(_ended(1, 1, error)), _judge(_ended(0, 1, error), _ended(1, 1, error))

    assert (alone.culprits, alone.confidence) == ((1,), 0.7)
    assert (together.culprits, together.confidence) == ((0, 1), 0.4)


def test_the_same_exception_everywhere() -> None:
    """When all ranks fail in the same way, none stands out."""
    verdict = _judge(*[_ended(rank, 1, ("ValueError", f"bad row {rank}")) for rank in range(4)])

    assert (verdict.fault, verdict.culprits) == ("exception_everywhere", (0, 1, 2, 3))


def test_of_two_exceptions_the_earlier_counts() -> None:
    """Different exceptions: the first to end is blamed, the verdict is less sure and names the rival."""
    verdict = _judge(_ended(0, 1, ("KeyError", "a"), ago_s=0.2), _ended(1, 1, ("ValueError", "b"), ago_s=0.9))

    assert verdict.culprits == (1,)
    assert verdict.confidence < 0.9
    assert "KeyError" in verdict.otherwise


def test_two_kills_at_once_are_two_culprits() -> None:
    """Several culprits are allowed."""
    assert _judge(_ended(0, -9), _ended(1, -9), _ended(2, 1, ("RuntimeError", GLOO))).culprits == (0, 1)


def test_an_exit_zero_that_cost_the_others_their_peer() -> None:
    """Exit 0 is no failure by itself; the others' lost peer makes it one."""
    verdict = _judge(_ended(0, 0, ago_s=1.0), _ended(1, 1, ("RuntimeError", GLOO)))

    assert (verdict.fault, verdict.culprits) == ("exited_early", (0,))


def test_last_words_of_a_lost_peer_make_a_victim_without_a_recorder() -> None:
    """A rank without black box whose stderr speaks of a lost peer is a victim, also when it aborts."""
    victim = _ended(0, -signal.SIGABRT, words=("nccl_timeout", "aborted"))

    assert _judge(victim, _ended(1, -9)).culprits == (1,)


def test_last_words_that_only_the_agent_saw_count() -> None:
    """What a heartbeat reported of stderr is evidence too."""
    words = (LastWords("disk_full", "disk_full", "OSError: [Errno 28] No space left on device"),)
    report = RankReport(rank=1, local_rank=1, pid=101, round=3, last_words=words)

    assert _judge(_ended(1, 1), reports={1: report}).fault == "disk_full"


def test_a_kill_on_a_host_without_memory_is_out_of_memory() -> None:
    """The kernel's killer leaves only a SIGKILL; the host's memory gives it away."""
    assert _judge(_ended(1, -9), hosts={"n0": HostReading(memory_used=0.99)}).fault == "out_of_memory"


def test_a_bus_error_on_a_host_without_shared_memory_is_its_lack() -> None:
    """A page of shared memory without room raises what broken memory raises; no node is to blame twice for it."""
    full, roomy = HostReading(shm_free_bytes=4096), HostReading(shm_free_bytes=1 << 30)
    unknown = HostReading(has_shm=False)

    verdict = _judge(_ended(1, -signal.SIGBUS), hosts={"n0": full})

    assert verdict.fault == "out_of_memory"
    assert "shared memory of its host (/dev/shm) is full: 4 KiB are free" in verdict.reason
    assert _judge(_ended(1, -signal.SIGBUS), hosts={"n0": roomy}).fault == "segfault"
    assert _judge(_ended(1, -signal.SIGBUS), hosts={"n0": unknown}).fault == "segfault"
    assert _judge(_ended(1, -signal.SIGSEGV), hosts={"n0": full}).fault == "segfault"


def test_who_is_sent_too_much_is_a_victim() -> None:
    """Gloo aborts the receiver; the fault is named, and no rank, for its end does not tell who called otherwise."""
    died = _ended(0, -signal.SIGABRT, words=("aborted", "gloo_mismatch"))
    lost = _ended(2, 1, ("RuntimeError", GLOO), ago_s=0.05)

    verdict = _judge(died, lost, _ended(1, -15, by_us=True, ago_s=0.0))

    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("collective_mismatch", (), ())
    assert "rank 0 was sent data of another size" in verdict.reason
    assert verdict.since_step == 10


def test_the_end_of_stderr_tells_a_mismatch_before_the_agent_has_read_it() -> None:
    """A verdict is given within milliseconds of an abort, the agent looks ten times a second."""
    said = "[enforce fail at pair.cc:462] op.preamble.length <= op.nbytes. 512 vs 4"
    plain = _ended(0, -signal.SIGABRT)
    died = plain._replace(exit=msgspec.structs.replace(plain.exit, stderr_tail=said))

    assert _judge(died, _ended(1, -15, by_us=True, ago_s=0.0)).fault == "collective_mismatch"
    assert _judge(plain, _ended(1, -15, by_us=True, ago_s=0.0)).fault == "aborted"


GATHER = """[rank1]:   File "train.py", line 87, in gather
[rank1]:   File "/x/torch/distributed/distributed_c10d.py", line 3315, in all_gather_object
[rank1]:     input_tensor.resize_(max_object_size)"""


@pytest.mark.parametrize(
    ("error", "said", "fault"),
    [
        (("OutOfMemoryError", "CUDA out of memory. Tried to allocate more than 1EB memory."), GATHER, "mismatch"),
        (("UnpicklingError", "invalid load key, '\\x00'."), "  File x, line 1, in _tensor_to_object", "mismatch"),
        (("OutOfMemoryError", "CUDA out of memory. Tried to allocate more than 1EB memory."), "in forward", "memory"),
        (("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."), GATHER, "memory"),
        (("UnpicklingError", "invalid load key, 'v'."), "  File x, line 1, in load", "exception"),
    ],
)
def test_a_size_that_is_garbage_is_another_ranks_numbers(error: tuple[str, str], said: str, fault: str) -> None:
    """Over NCCL nothing checks that ranks call the same: one that gathers objects alone reads numbers as sizes."""
    plain = _ended(1, 1, error)
    died = plain._replace(exit=msgspec.structs.replace(plain.exit, stderr_tail=said))
    named = {"mismatch": "collective_mismatch", "memory": "out_of_memory"}

    assert _judge(died, _ended(0, -15, by_us=True, ago_s=0.0)).fault == named.get(fault, fault)


def test_only_victims_and_a_silent_node() -> None:
    """When a node does not answer and all others lost a peer, the node is blamed, with less confidence."""
    reports = {rank: RankReport(rank=rank, local_rank=0, pid=1, round=3) for rank in (0, 1)}

    verdict = _judge(_ended(0, 1, ("RuntimeError", GLOO)), missing=("n1",), reports=reports)

    assert (verdict.fault, verdict.nodes, verdict.culprits) == ("node_lost", ("n1",), (1,))
    assert verdict.confidence < 0.9


def test_only_victims_name_nobody() -> None:
    """Without a cause the verdict says so and names no rank."""
    verdict = _judge(_ended(0, 1, ("RuntimeError", GLOO)), _ended(1, 1, ("RuntimeError", GLOO)))

    assert (verdict.fault, verdict.culprits) == ("unknown", ())
    assert verdict.confidence <= 0.3


def test_a_rank_stopped_by_its_runner_is_no_culprit_for_obeying() -> None:
    """KeyboardInterrupt on the way down is how it obeys; another exception of its own is a cause."""
    obeying = _ended(0, 1, ("KeyboardInterrupt", ""), by_us=True)
    failing = _ended(0, 1, ("ValueError", "x"), by_us=True)

    assert _judge(obeying, _ended(1, -9)).culprits == (1,)
    assert _judge(failing, _ended(1, -15, by_us=True)).culprits == (0,)


def test_evidence_has_a_finding_for_each_end() -> None:
    """Every rank's end is told, causes first."""
    verdict = _judge(_ended(0, 1, ("RuntimeError", GLOO)), _ended(1, -9), missing=("n7",))

    assert [finding.rank for finding in verdict.evidence] == [1, 0, -1]
    assert "SIGKILL" in verdict.evidence[0].text
    assert verdict.evidence[2].node == "n7"


@pytest.mark.parametrize(("victims_s", "fault", "culprits"), [(5.0, "unknown", ()), (0.5, "killed", (1, 2))])
def test_those_asked_to_go_after_others_had_lost_a_peer_are_no_cause(
    victims_s: float, fault: str, culprits: tuple[int, ...]
) -> None:
    """A batch system that takes ranks away ends them before their peers lose them; a launcher that tidies up, after."""
    asked = [_ended(rank, -signal.SIGTERM, ago_s=0.2) for rank in (1, 2)]

    verdict = _judge(_ended(0, 1, ("RuntimeError", GLOO), ago_s=victims_s), *asked)

    assert (verdict.fault, verdict.culprits) == (fault, culprits), verdict.reason


CLOSED = ("torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "")


@pytest.mark.parametrize(
    ("ago_s", "node", "fault", "culprits"),
    [
        (1.0, "n0", "exception", (1,)),
        (1.0, "n1", "killed", (0, 2)),
        (5.0, "n1", "exception", (1,)),
        (0.2, "n0", "killed", (0, 2)),
        (0.0, "n0", "killed", (0, 2)),
    ],
    ids=["before", "clocks-apart", "long-before-on-another-node", "at-once", "after"],
)
def test_those_asked_to_go_after_one_found_its_rendezvous_closed_did_not_close_it(
    ago_s: float, node: str, fault: str, culprits: tuple[int, ...]
) -> None:
    """A signal closes none. A worker that was asked to go makes its agent close it, which others find afterwards."""
    asked = [_ended(rank, -signal.SIGTERM, ago_s=0.2) for rank in (0, 2)]

    verdict = _judge(_ended(1, 1, CLOSED, ago_s=ago_s, node=node), *asked)

    assert (verdict.fault, verdict.culprits) == (fault, culprits), verdict.reason
    assert verdict.confidence <= (0.5 if fault == "exception" else 1.0)


def test_a_rendezvous_found_closed_excuses_no_cause_of_another_kind_and_names_nobody_beside_other_victims() -> None:
    """A rank that was killed, or raised, is to blame as ever; where others lost a peer, who closed it is not known."""
    closed, asked = _ended(1, 1, CLOSED, ago_s=1.0), _ended(0, -signal.SIGTERM, ago_s=0.2)

    killed = _judge(closed, asked, _ended(2, -signal.SIGKILL, ago_s=0.2))
    lost = _judge(closed, asked, _ended(2, 1, ("RuntimeError", GLOO), ago_s=0.9))

    assert (killed.fault, killed.culprits) == ("killed", (2,)), killed.reason
    assert (lost.fault, lost.culprits) == ("unknown", ()), lost.reason


def test_an_exception_that_points_elsewhere_is_not_the_cause_that_stands_above_it() -> None:
    """An engine raises over a worker of its own and sends its reader to the words of that one, if there are any."""
    above = "(Worker pid=7) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB.\n"
    raised = "initialization failed due to an exception in a background process. See stack trace for root cause."

    def fault_of(tail: str, message: str) -> str:
        one = _ended(0, 1, ("Exception", message))
        return _judge(one._replace(exit=msgspec.structs.replace(one.exit, stderr_tail=tail))).fault

    assert fault_of(above, raised) == "out_of_memory"
    assert fault_of("", raised) == "exception"
    assert fault_of(above, "the list of prompts is empty") == "exception"


def test_slurms_end_after_a_nodes_failure_is_that_nodes() -> None:
    """It cancels what is left of the step; with no node missing it is the end of whom it cancelled."""
    words = "slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-11-18T13:05:36 DUE TO NODE FAILURE ***\n"
    left = _ended(0, -signal.SIGTERM)
    left = left._replace(exit=msgspec.structs.replace(left.exit, stderr_tail=words))

    assert _judge(left, missing=("n1",)).fault == "node_lost"
    assert _judge(left).fault == "killed"
