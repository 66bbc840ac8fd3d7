# SPDX-License-Identifier: Apache-2.0
"""A wrapped launcher has failed: whose end came first, and whose was the launcher's doing."""

import signal

import msgspec
import pytest

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.runner.wrapped.child_watch import Death, has_failed, is_stranded
from megascale_ops.runner.wrapped.launcher_words import Said
from megascale_ops.runner.wrapped.rank_ends import rank_ends
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import Progress, RankError

LAUNCHER = RankExit(rank=0, local_rank=0, pid=10, code=1, seen_mono_s=100.0, stderr_tail="launcher's")
KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


def identity(rank: int, pid: int = 0, local_rank: int = -1) -> BoxIdentity:
    """Return whose box it is."""
    return BoxIdentity(
        job="j", node="n", rank=rank, local_rank=local_rank, world_size=4, pid=pid or 20 + rank, start_ticks=1, round=1
    )


def death(rank: int, code: int | None, seen_s: float, pid: int = 0) -> Death:
    """Return an end as the watch saw it."""
    return Death(identity(rank, pid), code, seen_s)


def no_box(end: RankExit) -> tuple[RankExit, str]:
    """Add nothing: there is no black box."""
    return end, "running"


def left_in_order(end: RankExit) -> tuple[RankExit, str]:
    """Say that the interpreter left by itself."""
    return end, "exited"


def told(ends: tuple[RankExit, ...]) -> list[tuple[int, int, bool, bool]]:
    """Return what tells the ends apart."""
    return [(end.rank, end.code, end.by_us, end.vanished) for end in ends]


KNOWN = {rank: identity(rank) for rank in range(3)}


@pytest.mark.parametrize(
    ("deaths", "said", "expected"),
    [
        # torchrun: the status is seen, the others get SIGTERM.
        ([death(1, KILL, 90.0), death(0, TERM, 90.2)], [], [(1, KILL, False, False), (0, TERM, True, False)]),
        # spawn has fetched the statuses before the runner could look, and prints the first one's.
        (
            [death(1, None, 90.0), death(0, None, 90.01)],
            [Said(KILL, local_rank=1)],
            [(1, KILL, False, False), (0, 1, True, True)],
        ),
        # No source has a status: the first to end is the cause.
        ([death(2, None, 90.0), death(0, None, 90.5)], [], [(2, 1, False, True), (0, 1, True, True)]),
        # The kernel kills two in one moment, and the launcher the third.
        (
            [death(1, KILL, 90.0), death(2, KILL, 90.02), death(0, KILL, 92.0)],
            [],
            [(1, KILL, False, False), (2, KILL, False, False), (0, KILL, True, False)],
        ),
        # A rank that died before it had a box is known by words alone.
        ([death(0, TERM, 90.2)], [Said(KILL, rank=3, pid=99)], [(3, KILL, False, False), (0, TERM, True, False)]),
        # A peer's exit code is its own, however late.
        ([death(1, 3, 90.0), death(0, 4, 91.0)], [], [(1, 3, False, False), (0, 4, False, False)]),
    ],
)
def test_the_first_end_is_the_cause_and_what_the_launcher_did_is_none(
    deaths: list[Death], said: list[Said], expected: list[tuple[int, int, bool, bool]]
) -> None:
    """By the order of the deaths, their statuses, and what the launcher printed."""
    assert told(rank_ends(LAUNCHER, deaths, KNOWN, said, no_box)) == expected


@pytest.mark.parametrize(
    ("launcher", "deaths"),
    [
        (LAUNCHER, []),
        (LAUNCHER, [death(0, 0, 90.0), death(1, 0, 91.0)]),
        (msgspec.structs.replace(LAUNCHER, code=0), [death(1, KILL, 90.0)]),
        (msgspec.structs.replace(LAUNCHER, by_us=True, code=TERM), [death(1, TERM, 100.0)]),
    ],
)
def test_the_launchers_own_end_stands_where_no_rank_explains_it(launcher: RankExit, deaths: list[Death]) -> None:
    """No rank failed; or the launcher has ended well, or was stopped by us."""
    assert rank_ends(launcher, deaths, KNOWN, [], no_box) == (launcher,)


def test_ranks_whose_interpreter_left_in_order_have_not_failed() -> None:
    """Their status was not seen, and their black boxes say that they left by themselves."""
    assert rank_ends(LAUNCHER, [death(1, None, 90.0)], KNOWN, [], left_in_order) == (LAUNCHER,)


def test_a_launcher_that_is_a_rank_itself_has_its_own_status() -> None:
    """Lightning's is rank 0: its runner knows how it ended."""
    ends = rank_ends(
        msgspec.structs.replace(LAUNCHER, code=KILL),
        [death(1, KILL, 90.0), death(0, None, 95.0, pid=10)],
        {0: identity(0, 10), 1: identity(1)},
        [],
        no_box,
    )

    assert told(ends) == [(1, KILL, False, False), (0, KILL, True, False)]


def test_a_rank_that_was_interrupted_by_its_launcher_is_no_cause() -> None:
    """A handler of its own turned the signal into an exception; an exception of another kind stays its own."""

    def look(end: RankExit) -> tuple[RankExit, str]:
        errors = {0: RankError("KeyboardInterrupt", "", step=4), 2: RankError("RuntimeError", "peer is gone", step=4)}
        return msgspec.structs.replace(end, error=errors.get(end.rank), step=4), "exited"

    ends = rank_ends(LAUNCHER, [death(1, KILL, 90.0), death(0, 1, 90.3), death(2, 1, 90.4)], KNOWN, [], look)

    assert told(ends) == [(1, KILL, False, False), (0, 1, True, False), (2, 1, False, False)]


def test_the_launchers_traceback_stands_in_for_a_missing_one() -> None:
    """``spawn`` catches its children's exceptions and prints them itself."""
    said = [Said(1, local_rank=1, error="KeyError: 'shard-17'", line="process 1 ...")]

    (end,) = rank_ends(LAUNCHER, [death(1, None, 90.0)], KNOWN, said, left_in_order)

    assert end.error is not None
    assert (end.error.type, end.error.message, end.code) == ("KeyError", "'shard-17'", 1)


def test_words_about_an_earlier_start_of_a_living_rank_are_old() -> None:
    """Torchrun has restarted it since: its process is another one."""
    ends = rank_ends(LAUNCHER, [death(0, 5, 90.0)], KNOWN, [Said(KILL, rank=1, pid=7)], no_box)

    assert told(ends) == [(0, 5, False, False)]


@pytest.mark.parametrize(
    ("code", "state", "failed"),
    [(0, "running", False), (3, "exited", True), (None, "exited", False), (None, "running", True)],
)
def test_a_status_says_whether_a_rank_failed_and_else_its_box(code: int | None, state: str, *, failed: bool) -> None:
    """An interpreter that leaves in order writes so."""
    assert has_failed(death(1, code, 1.0), Progress(state=state)) is failed


@pytest.mark.parametrize(
    ("moved_s", "now_s", "stranded"),
    [
        ([9.0], 46.0, True),
        ([9.0], 45.9, False),
        ([9.0, 12.0], 46.0, False),  # one goes on without the dead one
        ([], 1000.0, False),  # no rank lives: the launcher is at something of its own
    ],
)
def test_a_launcher_is_given_up_when_the_others_stand_still(
    moved_s: list[float], now_s: float, *, stranded: bool
) -> None:
    """A rank failed at 10 s; for 36 s since, or since the last of the others moved, nothing has happened."""
    assert is_stranded(10.0, moved_s, now_s, 36.0) is stranded
