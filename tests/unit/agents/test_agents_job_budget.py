# SPDX-License-Identifier: Apache-2.0
"""Heartbeats with more in them than a controller takes: each job is cut to its part, and none silences another."""

import string

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megascale_agents.uplink.job_budget import JOBS_BYTES, even_parts, fitted

from megascale_ops.schema import ranges
from megascale_ops.schema.health import HardwareFinding
from megascale_ops.schema.messages import MAX_BODY_BYTES, MOST_FINDINGS, Heartbeat, JobReport
from megascale_ops.schema.progress import (
    CollectivePosition,
    LastWords,
    ProcessReading,
    Progress,
    RankError,
    RankReport,
    StepWork,
)

TEXTS = st.text(st.sampled_from(string.ascii_letters + '"\\\n\x01\u00e9\u4e2d\U0001f917'), max_size=300)
WORDS = st.lists(st.builds(LastWords, pattern=st.just("oom"), fault=st.just("killed"), line=TEXTS), max_size=64)
ERRORS = st.builds(RankError, type=TEXTS, message=TEXTS, where=TEXTS, thread=TEXTS)


def size_of(reports: list[JobReport]) -> int:
    """Return what reports take in a message."""
    return len(msgspec.json.encode(reports))


def rank(number: int, **more: object) -> RankReport:
    """Return what a rank that trains looks like."""
    report = RankReport(
        number, number, 4_000_000 + number, 3, world_size=4096,
        progress=Progress(state="running", step=123_456, steps_seen=123_456, phase="backward", moved_mono_s=123456.7891,
                          phase_since_mono_s=123456.7891, step_p50_s=0.123456, step_p99_s=0.234567),
        collective=CollectivePosition(999_999, 999_998, "all_reduce"), process=ProcessReading(state="R", cpu_busy=0.98),
        gpu="GPU-12345678-1234-1234-1234-123456789012",
    )  # fmt: skip
    return msgspec.structs.replace(report, **more)


def job(name: str, ranks: int, **more: object) -> JobReport:
    """Return a job of so many ranks that all say the same."""
    return JobReport(name, 3, "/home/someone/runs", tuple(rank(number, **more) for number in range(ranks)))


LOUD = {
    "last_words": tuple(LastWords(f"pattern {number}", "killed", "x" * 300) for number in range(64)),
    "error": RankError("ValueError", "y" * 4000, "z" * 4000),
    "work": tuple(StepWork(step, 1.5, loss=0.25) for step in range(10)),
}


@st.composite
def nodes(draw: st.DrawFn) -> tuple[dict[str, JobReport], dict[str, int]]:
    """Draw what up to eight users have running on a node, some of it as loud as can be."""
    reports, owners = {}, {}
    for number in range(draw(st.integers(1, 12))):
        name = f"job-{number}"
        loud = {"last_words": tuple(draw(WORDS)), "error": draw(st.none() | ERRORS)}
        ranks = draw(st.sampled_from((0, 1, 2, 8, 64, 300, 1024)))
        many = tuple(rank(each, **loud) for each in range(ranks))
        reports[name] = JobReport(name, 3, draw(TEXTS) * draw(st.integers(1, 13)), many)
        owners[name] = draw(st.integers(1000, 1007))
    return reports, owners


@settings(max_examples=60)
@given(nodes())
def test_whatever_jobs_tell_a_heartbeat_of_all_is_taken(drawn: tuple[dict[str, JobReport], dict[str, int]]) -> None:
    """It is never too large, a receiver can read it, what is missing is said, and what fits a part is told whole."""
    reports, owners = drawn

    kept = {report.job: report for report in fitted(reports, owners)}
    raw, _changed = ranges.encode(Heartbeat("n", "a", 1, 1.0, 1.0, jobs=tuple(kept.values())))

    msgspec.json.decode(raw, type=Heartbeat)
    assert size_of(list(kept.values())) <= JOBS_BYTES + 2
    part = JOBS_BYTES // len(set(owners.values())) // max(list(owners.values()).count(one) for one in owners.values())
    for name, whole in reports.items():
        if len(msgspec.json.encode(whole)) < part:
            assert kept[name] is whole
        if name in kept and kept[name] is not whole:
            assert kept[name].cut == len(whole.ranks)


def test_a_loud_job_does_not_touch_a_quiet_one() -> None:
    """256 ranks with all kinds of last words, beside another user's eight: those eight are told to the last letter."""
    quiet = job("quiet", 8, **{**LOUD, "last_words": LOUD["last_words"][:4]})
    whole = {"loud": job("loud", 256, **LOUD), "quiet": quiet}

    kept = {one.job: one for one in fitted(whole, {"loud": 1000, "quiet": 1001})}

    assert size_of(list(whole.values())) > 20 * MAX_BODY_BYTES
    assert kept["quiet"] is quiet
    assert kept["loud"].cut == 256
    assert len(kept["loud"].ranks) > 100


def test_many_jobs_of_one_user_have_one_users_part() -> None:
    """Who writes a thousand round files has no more room than who writes one."""
    whole = {f"j{number}": job(f"j{number}", 1, **LOUD) for number in range(1000)} | {"other": job("other", 300)}
    owners = dict.fromkeys(whole, 1000) | {"other": 1001}

    kept = {one.job: one for one in fitted(whole, owners)}

    assert kept["other"] is not whole["other"]
    assert len(kept["other"].ranks) > 100
    assert size_of([kept["other"]]) > JOBS_BYTES * 0.45


def test_an_honest_job_of_256_ranks_is_told_with_all_of_them() -> None:
    """What a rank does and where it stands takes half a kilobyte: texts and steps go, and no rank does."""
    (kept,) = fitted({"job": job("job", 256, **LOUD)}, {"job": 1000})

    assert [one.rank for one in kept.ranks] == list(range(256))
    assert all(one.progress is not None and one.collective is not None for one in kept.ranks)


def test_what_fits_is_not_touched() -> None:
    """A node as most are: two jobs, eight ranks, ten steps each."""
    whole = {"a": job("a", 4, **LOUD), "b": job("b", 4)}

    assert fitted(whole, {"a": 1000, "b": 1000}) == list(whole.values())


def test_there_is_room_for_the_rest_of_a_heartbeat() -> None:
    """All findings that a node may have, with sentences as long as theirs are, fit beside the jobs."""
    finding = HardwareFinding("xid_79", "s" * 1000, "kernel_log", gpu="GPU-" + "1" * 36)
    rest = Heartbeat("n" * 100, "a" * 32, 1, 1.0, 1.0, findings=(finding,) * MOST_FINDINGS)

    assert len(msgspec.json.encode(rest)) + JOBS_BYTES < MAX_BODY_BYTES


@pytest.mark.parametrize(
    ("wanted", "room", "parts"),
    [
        ({"a": 10, "b": 10}, 100, {"a": 10, "b": 10}),
        ({"a": 90, "b": 90}, 100, {"a": 50, "b": 50}),
        ({"a": 10, "b": 500, "c": 500}, 100, {"a": 10, "b": 45, "c": 45}),
        ({}, 100, {}),
    ],
)
def test_what_one_leaves_is_the_others(wanted: dict[str, int], room: int, parts: dict[str, int]) -> None:
    """Evenly, and nothing stays unused while a job needs it."""
    assert even_parts(wanted, room) == parts
