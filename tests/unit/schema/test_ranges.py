# SPDX-License-Identifier: Apache-2.0
"""What numbers, texts and collections of messages may be: refused by name at the receiver, mended at the sender."""

import math

import msgspec
import pytest

from megascale_ops.schema.collectives import CollectiveSample, SampledLine
from megascale_ops.schema.messages import Evidence, EvidenceItem, Heartbeat, JobReport, Join, RankExit
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import MOST_WORK, Progress, RankError, RankReport, StepWork
from megascale_ops.schema.ranges import MOST_RANKS, encode


def beat(*ranks: RankReport, **more: object) -> Heartbeat:
    """Return a heartbeat of some ranks."""
    plain = Heartbeat("a", "x", 1, 5.0, 1.8e9, jobs=(JobReport("job", 1, ranks=ranks),))
    return msgspec.structs.replace(plain, **more)


def report(rank: int = 0, **more: object) -> RankReport:
    """Return what is told of one rank."""
    return msgspec.structs.replace(RankReport(rank, 0, 7, 1), **more)


def join(**more: object) -> Join:
    """Return a runner's join."""
    return msgspec.structs.replace(Join("job", "a", "r", "j", 1, 1, 1, "127.0.0.1", 4000, 1.0), **more)


BEYOND = {
    "negative step": (beat(report(work=(StepWork(1, -1.0),))), "jobs[0].ranks[0].work[0].wall_s"),
    "waited for ever": (beat(report(work=(StepWork(1, 1.0, 1e300),))), "jobs[0].ranks[0].work[0].waiting_s"),
    "rank": (beat(report(100_000_000)), "jobs[0].ranks[0].rank"),
    "step": (beat(report(progress=Progress(step=2**63))), "jobs[0].ranks[0].progress.step"),
    "clock": (beat(mono_s=-5.0), "mono_s"),
    "date": (beat(wall_s=1e12), "wall_s"),
    "loss": (beat(report(work=(StepWork(1, 1.0, loss=1e300),))), "jobs[0].ranks[0].work[0].loss"),
    "many steps": (beat(report(work=(StepWork(1, 1.0),) * (MOST_WORK + 1))), "jobs[0].ranks[0].work"),
    "text": (beat(report(error=RankError("x" * 1_000_000))), "jobs[0].ranks[0].error.type"),
    "bits": (
        beat(jobs=(JobReport("job", 1, collectives=(CollectiveSample(0, (SampledLine("0", "f", 0, 10**6),)),)),)),
        "jobs[0].collectives[0].lines[0]",
    ),
    "nproc": (join(nproc=30_000_000), "nproc"),
    "exit": (join(exits=(RankExit(-7, 0, 1, 1, 1.0),)), "exits[0].rank"),
    "patience": (join(policy=JobPolicy(silence_floor_s=-1.0)), "policy.silence_floor_s"),
    "evidence": (Evidence("a", "job", "i", "o", items=(EvidenceItem("x", ok=True, took_s=-1.0),)), "items[0].took_s"),
}


@pytest.mark.parametrize(("message", "where"), BEYOND.values(), ids=BEYOND)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(message: msgspec.Struct, where: str) -> None:
    """Before anything reckons with it, in one sentence."""
    raw = msgspec.json.encode(message)

    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(raw, type=type(message))

    assert f"$.{where}" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("message", "where"), BEYOND.values(), ids=BEYOND)
def test_a_sender_mends_what_cannot_be_and_says_what(message: msgspec.Struct, where: str) -> None:
    """The receiver takes it then, and one bad field costs no other."""
    raw, changed = encode(message)

    read = msgspec.json.decode(raw, type=type(message))

    assert any(one.startswith(where) for one in changed)
    assert len(changed) == 1
    assert encode(read) == (raw, ())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_becomes_one(value: float) -> None:
    """JSON has neither: they would travel as null and be refused."""
    message = beat(report(work=(StepWork(3, value, loss=value),), sending=value, progress=Progress(moved_mono_s=value)))

    raw, changed = encode(message)

    (told,) = msgspec.json.decode(raw, type=Heartbeat).jobs[0].ranks
    assert told.work[0].step == 3
    assert len(changed) == 4


def test_the_newest_of_too_many_steps_are_kept() -> None:
    """A judge wants what is now."""
    message = beat(report(work=tuple(StepWork(step, 0.1) for step in range(MOST_WORK + 5))))

    raw, _changed = encode(message)

    (told,) = msgspec.json.decode(raw, type=Heartbeat).jobs[0].ranks
    assert [work.step for work in told.work] == list(range(5, MOST_WORK + 5))


def test_honest_messages_are_sent_as_they_are() -> None:
    """The control: a large machine at its limits, a loss that goes astray, a rank that has not begun."""
    work = tuple(StepWork(step, 3000.0, 0.0, loss=3.4e38, loss_is_finite=False) for step in range(MOST_WORK))
    message = beat(
        report(MOST_RANKS - 1, work=work, progress=Progress(step=2**53, moved_mono_s=1e9), world_size=MOST_RANKS),
        report(1, sending=-1.0, error=RankError("E" * 1000, "m" * 4000)),
        wall_s=4e9,
    )

    raw, changed = encode(message)

    assert changed == ()
    assert raw == msgspec.json.encode(message)
    assert msgspec.json.decode(raw, type=Heartbeat) == message
