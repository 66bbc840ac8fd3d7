# SPDX-License-Identifier: Apache-2.0
"""A GPU that has not begun the collective in which the GPUs of others wait is named, and only such a one.

All jobs train in steps of 50 ms; patience for a step is 5 s. By the hosts' side all ranks are in the same collective.
"""

import msgspec
import pytest

from megascale_ops.diagnosis.hangs.verdict import Judgement
from megascale_ops.diagnosis.watchdog import judge
from megascale_ops.schema.gpu_queue import GpuOperation, GpuQueue
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.hung_job import POLICY, judge_job, made_calls, rank_view, said_of, stack_of

DP, TP = "00000000000000aa", "00000000000000bb"
WAITING = made_calls("all_reduce", "all_gather", "all_reduce")
PATIENT = JobPolicy()
HOST = ("step (train.py:230)", "main (train.py:300)")


def operation(*, begun: bool, communicator: str = DP, seq: int = 41, **more: object) -> GpuOperation:
    """An all_reduce that was given to the GPU 12 s ago."""
    return GpuOperation(communicator, "AllReduce", seq, name="dp", waited_s=12.0, begun=begun, **more)  # type: ignore[arg-type]  # fields


BEGUN = GpuQueue((operation(begun=True),), state=7)
NOT_BEGUN = GpuQueue((operation(begun=False),), state=5)
EMPTY = GpuQueue()


def judge_gpus(
    *queues: GpuQueue | None, looks: int = 3, moving: frozenset[int] = frozenset(), silent_s: float = 3.0,
    steps: int = 100, policy: JobPolicy = POLICY,
) -> Judgement:  # fmt: skip
    """Judge ranks with these queues (None: no plugin), seen so often; of ``moving`` ranks the GPU goes on."""
    evidence: list[EvidenceItem] = []
    for rank, queue in enumerate(queues):
        for look in range(looks):
            seen = queue
            if queue is not None and rank in moving:
                seen = msgspec.structs.replace(queue, state=queue.state + look)
            ring = EvidenceItem("collectives", ok=True, gpu=seen)
            evidence += said_of(rank, WAITING, ring, stack_of("in_native", frames=HOST))
    views = [rank_view(rank, busy=1.0, silent_s=silent_s, seen=steps) for rank in range(len(queues))]
    return judge_job(views, evidence, policy=policy)


@pytest.mark.parametrize(("silent_s", "steps"), [(15.0, 0), (15.0, 4), (950.0, 4)])
def test_before_steps_flow_a_gpu_that_has_not_begun_is_granted_an_absentee_s_time(silent_s: float, steps: int) -> None:
    """Not half an hour, and not twice that, as what a start may take; a minute once steps flow."""
    found = judge_gpus(BEGUN, NOT_BEGUN, silent_s=silent_s, steps=steps, policy=PATIENT)

    assert (found.verdict.fault, found.verdict.culprits) == ("gpu_stuck", (1,))
    assert found.patience_s == PATIENT.absent_patience_s == 540.0


@pytest.mark.parametrize("queues", [(BEGUN, EMPTY), (BEGUN, None), (NOT_BEGUN, NOT_BEGUN)])
@pytest.mark.parametrize("silent_s", [15.0, 950.0])
def test_all_else_may_take_as_long_as_a_start_may(queues: tuple[GpuQueue | None, ...], silent_s: float) -> None:
    """A rank that compiles has given its GPU nothing: nobody's GPU waits for what another's has before it."""
    found = judge_gpus(*queues, silent_s=silent_s, steps=4, policy=PATIENT)

    assert found.patience_s >= PATIENT.startup_patience_s == 1800.0


def test_the_gpu_that_others_wait_for_is_named() -> None:
    """Three wait inside the collective, the fourth's kernel for it has not begun: its GPU, and where its script is."""
    found = judge_gpus(BEGUN, BEGUN, NOT_BEGUN, BEGUN).verdict

    assert (found.fault, found.culprits) == ("gpu_stuck", (2,))
    assert found.confidence == 0.9
    assert "the GPU of rank 2 has not begun AllReduce #41 of dp, which it was given 12.0 s before" in found.reason
    assert "those of 3 others wait in it" in found.reason
    assert "the script is in step (train.py:230)" in found.reason
    assert "gpu_not_begun" in [one.name for one in found.evidence]


@pytest.mark.parametrize(("looks", "confidence", "patience_s"), [(1, 0.7, 60.0), (2, 0.8, 60.0), (3, 0.9, 10.0)])
def test_each_look_in_which_the_gpu_ends_nothing_makes_it_surer(
    looks: int, confidence: float, patience_s: float
) -> None:
    """More than the 60 % of a busy host from the first; acted upon early only when three looks agree."""
    found = judge_gpus(BEGUN, NOT_BEGUN, looks=looks)

    assert (found.verdict.fault, found.verdict.culprits) == ("gpu_stuck", (1,))
    assert (found.verdict.confidence, found.patience_s) == (confidence, patience_s)


def test_the_longest_kernel_of_its_last_profile_is_told() -> None:
    """A kernel that does not end is in no profile; what was seen before is a hint, and said as one."""
    queue = msgspec.structs.replace(NOT_BEGUN, kernel="void my_attention<float>")

    found = judge_gpus(BEGUN, queue).verdict

    (text,) = [one.text for one in found.evidence if one.name == "gpu_not_begun"]
    assert text == (
        "the GPU of rank 1 has begun none of the 1 that NCCL has before it; it began and ended nothing in 3 looks; "
        "the longest kernel of its last profile is void my_attention<float>"
    )


def test_a_gpu_that_goes_on_is_late_and_no_more() -> None:
    """Its queue moves between looks: slow, and left alone for as long as a rank that is seen to work."""
    found = judge_gpus(BEGUN, NOT_BEGUN, BEGUN, moving=frozenset({1}))

    assert (found.verdict.fault, found.verdict.culprits) == ("slow", (1,))
    assert "goes on between two looks: it is late, not stuck" in found.verdict.reason
    assert found.patience_s == 1800.0


@pytest.mark.parametrize(
    "queues",
    [
        (BEGUN, None, BEGUN, BEGUN),
        (None, None, None, None),
        (NOT_BEGUN, NOT_BEGUN, NOT_BEGUN, NOT_BEGUN),
        (BEGUN, msgspec.structs.replace(NOT_BEGUN, is_partial=True), BEGUN, BEGUN),
        (BEGUN, EMPTY, BEGUN, BEGUN),
        (BEGUN, NOT_BEGUN, NOT_BEGUN, NOT_BEGUN),
        (BEGUN, BEGUN, BEGUN, BEGUN),
    ],
    ids=[
        "a rank without the plugin",
        "the plugin off everywhere",
        "nobody has begun: a barrier behind a slow loader",
        "thinned timing",
        "nothing is before it as far as is known",
        "one was early",
        "all have begun: the network",
    ],
)
def test_what_does_not_show_one_gpu_accuses_none(queues: tuple[GpuQueue | None, ...]) -> None:
    """Nothing follows from what was not seen, nor from what all share."""
    found = judge_gpus(*queues).verdict

    assert (found.fault, found.culprits) == ("silent", ())


def test_a_gpu_that_waits_inside_another_communicator_is_a_victim() -> None:
    """Its stream comes to the one collective when the other ends, in which it waits for a peer."""
    inside = operation(begun=True, communicator=TP, seq=9)
    victim = GpuQueue((inside, operation(begun=False)), state=5)
    peer = GpuQueue((operation(begun=False, communicator=TP, seq=9), operation(begun=False)), state=6)

    alone = judge_gpus(BEGUN, victim, BEGUN).verdict
    found = judge_gpus(BEGUN, victim, BEGUN, peer).verdict

    assert (alone.fault, alone.culprits) == ("silent", ())
    assert (found.fault, found.culprits) == ("gpu_stuck", (3,))


def test_a_send_that_runs_is_waiting_too() -> None:
    """Its other end has another number of it, so it is compared with no rank, and says that the GPU is in a call."""
    sends = GpuQueue((operation(begun=True, communicator=TP, seq=3, peer=1), operation(begun=False)), state=5)

    found = judge_gpus(BEGUN, sends, BEGUN).verdict

    assert (found.fault, found.culprits) == ("silent", ())


def test_who_is_missing_on_the_hosts_side_comes_first() -> None:
    """A rank that loads data has not given the collective to its GPU: whose GPU has not begun is late by that."""
    evidence: list[EvidenceItem] = []
    for rank, queue in enumerate((BEGUN, NOT_BEGUN, None, BEGUN)):
        ring = EvidenceItem("collectives", ok=True, gpu=queue)
        calls = WAITING if rank != 2 else made_calls("all_reduce", "all_gather", last=40, done=True)
        evidence += said_of(rank, calls, ring, stack_of("in_data_loader" if rank == 2 else "in_native", frames=HOST))

    found = judge_job([rank_view(rank, waits=rank != 2) for rank in range(4)], evidence).verdict

    assert (found.fault, found.culprits) == ("data_stall", (2,))


def recorded(*, begun: bool | None, busy_sends: bool = False) -> EvidenceItem:
    """A flight recorder's word, where timing is on."""
    facts = [
        CollectiveFact("0", 40, "all_reduce", "[[8]]", done=True, begun=None if begun is None else True),
        CollectiveFact("0", 41, "all_reduce", "[[8]]", begun=begun),
    ]
    if busy_sends:
        facts.append(CollectiveFact("1", -1, "send", "[[8]]", begun=False, peer=0))
    return EvidenceItem("flight_recorder", ok=True, collectives=tuple(facts))


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (recorded(begun=False), (1,)),
        (recorded(begun=None), ()),
        (recorded(begun=True), ()),
        (recorded(begun=False, busy_sends=True), ()),
    ],
    ids=["not begun", "timing is off there", "begun", "it may be inside a send"],
)
def test_a_flight_recorder_that_times_tells_the_same(odd: EvidenceItem, named: tuple[int, ...]) -> None:
    """Without the plugin: torch's own events say which collectives the GPU has begun (TORCH_NCCL_ENABLE_TIMING)."""
    evidence = [
        item
        for rank in range(3)
        for _ in range(3)
        for item in said_of(rank, odd if rank == 1 else recorded(begun=True), stack_of("in_native", frames=HOST))
    ]

    found = judge_job([rank_view(rank) for rank in range(3)], evidence).verdict

    assert (found.fault, found.culprits) == ("gpu_stuck" if named else "silent", named)


@pytest.mark.parametrize(
    "frame",
    [
        "synchronize (torch/cuda/__init__.py:1100)",
        "synchronize (torch/cuda/streams.py:230)",
        "cuStreamSynchronize (libcuda.so.1:0)",
        "cudaMemcpyAsync (libcudart.so.13:0)",
    ],
)
def test_a_host_that_waits_for_its_gpu_is_told_as_such(frame: str) -> None:
    """It has not come to the collective because what it launched before does not end."""
    stack = stack_of("in_native", frames=(frame, *HOST))
    absent = made_calls("all_reduce", "all_gather", last=40, done=True)
    evidence = [item for rank in (0, 2) for item in said_of(rank, WAITING, stack_of("in_collective"))]
    evidence += said_of(1, absent, stack, stack, stack)

    found = judge_job([rank_view(rank, waits=rank != 1, busy=1.0) for rank in range(3)], evidence).verdict

    assert (found.fault, found.culprits, found.confidence) == ("gpu_stuck", (1,), 0.8)
    assert "it waits for its GPU in" in found.reason


@pytest.mark.parametrize("ages_s", [(899.8, 899.9), (899.8, 900.2), (900.2, 900.3)])
def test_ranks_that_stand_stay_suspected_past_half_of_what_a_start_may_take(ages_s: tuple[float, float]) -> None:
    """Half an hour is looked at in another way from its half on, which ranks reach one after the other."""
    views = [rank_view(rank, silent_s=age_s, seen=4) for rank, age_s in enumerate(ages_s)]

    assert judge(views, PATIENT, 1e6) is not None


def test_ranks_that_began_to_wait_just_now_are_not_suspected() -> None:
    """The same ranks after five seconds."""
    assert judge([rank_view(rank, silent_s=5.0, seen=4) for rank in range(2)], PATIENT, 1e6) is None
