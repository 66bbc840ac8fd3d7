# SPDX-License-Identifier: Apache-2.0
"""Who may write into a folder on which another name stands: judged from a record, a life and a time."""

import msgspec
import pytest

from megascale_ops.checkpoint import writers
from megascale_ops.checkpoint.writers import LEASE_S, Process, Seen, Writer

HERE = Process("node-a", "boot-1", "pid:[1]", 100, 7)
THERE = Process("node-b", "boot-2", "pid:[1]", 100, 7)


def writer(process: Process = THERE, **more: object) -> Writer:
    """A writer of job "demo" under a controller, in round 2."""
    plain = Writer(process, "token", process.host, 0, 1_764_061_200.0, job="demo", job_id="abc", round=2)
    return msgspec.structs.replace(plain, **more)


ME = writer(HERE, token="mine", round=3)  # noqa: S106  no secret
STRANGER = {"job_id": "xyz", "job": "other"}


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Seen(writer(released=True), "alive"), "given back"),
        (Seen(writer(HERE, **STRANGER), "alive"), "by this process"),
        (Seen(writer(), "unknown", changed=True), "was replaced by round 3"),
        (Seen(writer(**STRANGER), "dead"), "is dead"),
    ],
    ids=["released", "this process", "an earlier round", "dead"],
)
def test_what_is_known_is_not_waited_for(seen: Seen, reason: str) -> None:
    """A recovery is never held up by the lease of a holder that is known to write no more."""
    answer = writers.judge(seen, ME)

    assert answer.verb == "take"
    assert answer.certain
    assert reason in answer.reason


def test_a_living_writer_of_another_job_is_named() -> None:
    """Job, round, rank, process, node, since when, and what to do."""
    answer = writers.judge(Seen(writer(**STRANGER), "alive", unchanged_s=10 * LEASE_S), ME)

    assert answer.verb == "refuse"
    assert answer.reason == (
        "job other (round 2, rank 0, pid 100 on node-b, since 2025-11-25 09:00:00 UTC) writes there: "
        "give this job a folder of its own, or end that one"
    )


def test_of_a_stranger_on_another_node_only_its_lease_tells() -> None:
    """Watched while nothing moves, refused at the first renewal, taken when the lease has run out."""
    stranger = writer(**STRANGER)

    early = writers.judge(Seen(stranger, "unknown", LEASE_S - 1), ME)
    renewed = writers.judge(Seen(stranger, "unknown", 0.0, changed=True), ME)
    late = writers.judge(Seen(stranger, "unknown", LEASE_S), ME)

    assert [answer.verb for answer in (early, renewed, late)] == ["watch", "refuse", "take"]
    assert not late.certain
    assert "did not renew its lease for 60 s" in late.reason


def test_a_job_of_the_same_name_and_a_later_round_is_still_another_job() -> None:
    """Started twice by mistake, each with a controller of its own: the names agree, the ids do not."""
    twin = writer(job_id="xyz", round=1)

    assert writers.judge(Seen(twin, "alive"), ME).verb == "refuse"
    assert writers.judge(Seen(twin, "unknown"), ME).verb == "watch"
    assert writers.judge(Seen(writer(job_id=""), "unknown"), msgspec.structs.replace(ME, job_id="")).verb == "watch"


def test_a_rank_of_a_round_that_was_replaced_does_not_come_back() -> None:
    """It was cut off with its node, and does not know that its job goes on without it."""
    newer = writer(round=4)

    answer = writers.judge(Seen(newer, "dead", unchanged_s=10 * LEASE_S), ME)

    assert answer.verb == "refuse"
    assert "has replaced round 3" in answer.reason


def test_ranks_that_save_together_share_the_folder() -> None:
    """The lead of a group may change while all of them live; a rank that saves alone shares nothing."""
    peer = writer(round=3, incarnation="abc/3")

    assert writers.judge(Seen(peer, "alive"), msgspec.structs.replace(ME, incarnation="abc/3")).verb == "take"
    assert writers.judge(Seen(peer, "alive"), ME).verb == "refuse"


@pytest.mark.parametrize(("promised_s", "granted_s"), [(5.0, 5.0), (1e300, 600.0), (-4.0, 0.1)])
def test_a_record_cannot_promise_itself_any_lease(promised_s: float, granted_s: float) -> None:
    """Another version's lease is respected, one of nonsense is bounded."""
    holder = writer(**STRANGER, lease_s=promised_s)

    assert writers.judge(Seen(holder, "unknown", granted_s * 0.9), ME).verb == "watch"
    assert writers.judge(Seen(holder, "unknown", granted_s), ME).verb == "take"


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b'{"pid": 3}', b"\xff\xfe", b"[" * 100_000])
def test_a_lock_that_makes_no_sense_holds_for_one_lease(raw: bytes) -> None:
    """It may be half written, so it is not ignored; but it is no lock for ever."""
    seen = writers.decode(raw)

    assert seen is None
    assert writers.judge(Seen(seen, unchanged_s=LEASE_S - 1), ME).verb == "watch"
    assert writers.judge(Seen(seen, unchanged_s=LEASE_S), ME).verb == "take"


def test_a_record_comes_back_as_it_was_written() -> None:
    """Also with a clock that is far off, which is only ever shown."""
    mad = writer(since_wall_s=-5e18)

    assert writers.decode(msgspec.json.encode(mad)) == mad
    assert "since 1970-01-01" in mad.who()
