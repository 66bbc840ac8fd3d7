# SPDX-License-Identifier: Apache-2.0
"""What an exit status says."""

import pytest

from megascale_ops.runner.exits import decode_wait_status, early_code, handles, is_exiting, place_of, read_stat

STAT = (
    "4242 (py (x) y) S 1 4242 4242 0 -1 4194560 5125 0 3 0 93 12 0 0 20 0 9 0 88123 1234567 3456 "
    "18446744073709551615 1 1 0 0 0 0 0 16781312 134235650 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 9\n"
)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (256, 1), (9, -9), (139, -11), (15, -15), (0x7F00, 127)])
def test_wait_statuses_become_return_codes(status: int, code: int) -> None:
    """Signals are negative, exits positive; the core-dump bit (0x80) does not count."""
    assert decode_wait_status(status) == code


def test_a_stat_line_is_read_behind_its_last_parenthesis() -> None:
    """A process may call itself ``py (x) y``; the fields behind the name still count right."""
    state, flags, ticks, status = read_stat(STAT)

    assert (state, flags, ticks, status) == ("S", 4194560, 88123, 9)


def test_a_dying_process_is_known_by_its_flag() -> None:
    """PF_EXITING is bit 2."""
    assert not is_exiting(4194560)
    assert is_exiting(4194560 | 4)


def test_a_torn_stat_line_is_refused() -> None:
    """Half a line is a ValueError, not a wrong answer."""
    with pytest.raises(ValueError, match="substring not found"):
        read_stat("4242 no name")


@pytest.mark.parametrize(
    ("flags", "status", "code"),
    [(4194560, 0, None), (4194560, 9, None), (4194564, 9, -9), (4194564, 3 << 8, 3), (4194564, 0, None)],
)
def test_success_is_never_read_early(flags: int, status: int, code: int | None) -> None:
    """The flag comes before the code, so a status of 0 may yet become a failure."""
    assert early_code(flags, status) == code


@pytest.mark.parametrize(
    ("status", "number", "expected"),
    [
        ("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000202\n", 10, True),
        ("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000202\n", 13, True),
        ("SigIgn:\t0000000000001000\nSigCgt:\t0000000000000202\n", 15, False),
        ("", 10, False),
    ],
)
def test_who_catches_or_ignores_a_signal_does_not_die_of_it(status: str, number: int, expected: bool) -> None:
    """Bit N-1 of either mask."""
    assert handles(status, number) is expected


def test_where_a_thread_is_blocked_is_a_call_and_two_pointers() -> None:
    """The arguments may change (a time-out that runs); a running thread is nowhere."""
    call = "202 0x7f00 0x80 0x0 0x{}  0x0 0x0 0x7ffc10 0x7f22\n"

    assert place_of(call.format(1)) == place_of(call.format(2)) == ("202", "0x7ffc10", "0x7f22")
    assert place_of("-1 0x7ffc10 0x7f22\n") == ("-1", "0x7ffc10", "0x7f22")
    assert place_of("running\n") is None
    assert place_of("") is None
