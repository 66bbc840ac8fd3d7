# SPDX-License-Identifier: Apache-2.0
"""Whatever a dying rank has printed, its round is judged, and the verdict comes back from the journal as it went in."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import CollectiveFact, RankExit
from megascale_ops.schema.progress import RankError
from tests.fakes.mutations import fuzzed, mutated

TEXTS = [
    text.encode()
    for text in (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound.cc:78] Timed out waiting 8000ms for recv operation",
        "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 8000 ms",
        "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
        "wait timeout after 8000ms, keys: /default_pg/0//k2",
        "CUDA error: device-side assert triggered",
        "Traceback (most recent call last):\n  File 'a', line 1\nValueError: 3",
        "",
    )
]
CALLS = tuple(CollectiveFact("0", seq, "all_reduce", bytes_moved=16, done=seq < 5) for seq in range(6))


@st.composite
def exits(draw: st.DrawFn, rank: int) -> Ended:
    """One rank's end, with texts that are nearly those that are known."""
    said = draw(mutated(TEXTS)).decode(errors="replace")[:4000]
    kind = draw(st.sampled_from(["RuntimeError", "DistBackendError", "KeyboardInterrupt", "", "\x1b[31m"]))
    error = RankError(kind, said, "train.py:5 f", draw(st.integers(-1, 2**40))) if draw(st.booleans()) else None
    code = draw(st.integers(-64, 255))
    words = tuple(draw(st.lists(st.sampled_from(["gloo_timeout", "nccl_error", "?", ""]), max_size=2)))
    exit_ = RankExit(
        rank, rank, 9, code, 100.0, by_us=draw(st.booleans()), stderr_tail=said, error=error, last_words=words,
        calls=draw(st.sampled_from([(), CALLS, CALLS[:3]])), step=draw(st.integers(-1, 2**40)),
    )  # fmt: skip
    return Ended(f"n{rank // 2}", exit_, draw(st.floats(0, 1e4)))


@fuzzed
@given(ended=st.tuples(*(exits(rank) for rank in range(3))))
def test_any_end_is_judged_and_kept(ended: tuple[Ended, ...]) -> None:
    """Culprits are ranks of the round, and the journal gives back what it was given."""
    verdict = judge_exits(list(ended), world_size=3, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)

    assert set(verdict.culprits) <= {0, 1, 2}
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_a_number_without_measure_is_no_time() -> None:
    """400 digits of milliseconds, which no float holds."""
    said = f"Timed out waiting {'9' * 400}ms for recv operation to complete"
    ended = [
        Ended("n", RankExit(rank, rank, 9, 1, 1.0, error=RankError("RuntimeError", said, "", 4), calls=CALLS), 0.1)
        for rank in range(2)
    ]

    verdict = judge_exits(ended, world_size=2, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)

    assert "999" not in verdict.reason.replace(said, "")
