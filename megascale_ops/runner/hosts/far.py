# SPDX-License-Identifier: Apache-2.0
"""The runs of all hosts, each by the ssh that holds it: signals, hosts that are lost and come back, and the end."""

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

from megascale_ops.runner.hosts import ssh
from megascale_ops.runner.hosts.comeback import Comeback
from megascale_ops.runner.hosts.hostfile import Host

log = logging.getLogger(__name__)

_POLL_S = 0.1
# 20 s: the others of a job that has failed are told so by the controller, and stop their ranks first.
_FAREWELL_S = 20.0


class Ways(NamedTuple):
    """How a host is dealt with: ``start`` its run, begin a ``look`` at it, tell by its end ``why_not``."""

    start: Callable[[Host, ssh.There], "subprocess.Popen[bytes]"]
    look: Callable[[Host], "subprocess.Popen[str]"]
    why_not: Callable[[Host, int, str, str], str]
    look_s: float  # how long a look may take


class Far:
    """One host's run, started again when the host was lost and is reached again.

    Attributes:
        code: With which its run ended by itself; None: it lives, or the host is lost.
    """

    def __init__(self, host: Host, ways: Ways, there: ssh.There) -> None:
        self.host = host
        self.code: int | None = None
        self.comeback = Comeback()
        self._ways = ways
        self._ssh: subprocess.Popen[bytes] | None = None
        self._looking: subprocess.Popen[str] | None = None
        self._look_began_s = 0.0
        self._told = ""
        self._start(there, time.monotonic())

    @property
    def lives(self) -> bool:
        """Whether its run does, as far as ssh tells."""
        return self._ssh is not None

    def poll(self, now_s: float, is_over: Callable[[], bool]) -> None:
        """Look what has become of it; of a lost host begin a look, or start its run, if it is time.

        Args:
            now_s: Monotonic clock.
            is_over: Tells whether the job is, or is about to be: then nothing is started.
        """
        if self._ssh is not None:
            self._poll_run(self._ssh, now_s, is_over)
        elif self._looking is not None:
            self._poll_look(self._looking, now_s, is_over)
        elif self.comeback.is_due(now_s):
            if is_over():
                self.comeback.lose(now_s)
            else:
                self._looking, self._look_began_s = self._ways.look(self.host), now_s

    def write(self, data: bytes) -> None:
        """Write to its stdin."""
        if self._ssh is not None and self._ssh.stdin is not None and not self._ssh.stdin.closed:
            with suppress(OSError):
                self._ssh.stdin.write(data)
                self._ssh.stdin.flush()

    def hang_up(self) -> None:
        """Close its stdin, which ends its run in order; a look is given up."""
        self._close_look()
        if self._ssh is not None and self._ssh.stdin is not None and not self._ssh.stdin.closed:
            with suppress(OSError):
                self._ssh.stdin.close()

    def kill(self) -> None:
        """End the connection, and a look."""
        for process in (self._ssh, self._looking):
            if process is not None and process.poll() is None:
                process.terminate()

    def wait(self, deadline_s: float) -> None:
        """Wait for the end of both, at most until then."""
        for process in (self._ssh, self._looking):
            if process is not None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline_s - time.monotonic()))
        self._close_look()

    def _start(self, there: ssh.There, now_s: float) -> None:
        self._ssh = self._ways.start(self.host, there)
        self.comeback.begin(now_s)

    def _poll_run(self, run: "subprocess.Popen[bytes]", now_s: float, is_over: Callable[[], bool]) -> None:
        code = run.poll()
        if code is None:
            return
        if run.stdin is not None:
            with suppress(OSError):
                run.stdin.close()
        self._ssh = None
        by_itself = 0 <= code < ssh.BY_SSH
        if by_itself and not (code and self.comeback.is_early(now_s) and not is_over()):
            self.code = code
            return
        if not by_itself:
            log.warning(
                "the connection to %s has ended: it is lost to the job, which goes on by its rule for lost nodes; its "
                "run is started again when ssh reaches it",
                self.host.target,
            )
        self._told = ""
        self.comeback.lose(now_s)

    def _poll_look(self, look: "subprocess.Popen[str]", now_s: float, is_over: Callable[[], bool]) -> None:
        code = look.poll()
        if code is None and now_s - self._look_began_s < self._ways.look_s:
            return
        if code is None:
            look.kill()
            why, output = f"line {self.host.line}: {self.host.target}: no answer within {self._ways.look_s:g} s", ""
        else:
            output, errors = look.communicate()
            why = self._ways.why_not(self.host, code, output, errors)
        self._close_look()
        if why:
            pause_s = self.comeback.lose(now_s)
            if why != self._told:
                log.warning("%s; tried again in %g s, and ever more rarely", why, pause_s)
            self._told = why
        elif not is_over():
            log.warning("%s is reached again: its run is started again", self.host.target)
            self._start(ssh.read_look(output), now_s)

    def _close_look(self) -> None:
        look, self._looking = self._looking, None
        if look is not None:
            if look.poll() is None:
                look.kill()
            for stream in (look.stdout, look.stderr):
                if stream is not None:
                    stream.close()
            with suppress(subprocess.TimeoutExpired):
                look.wait(5.0)


class _Signals:
    """What came in by signals: those for ranks, and how often an end was asked for."""

    def __init__(self) -> None:
        self.for_ranks: list[int] = []
        self.ended_by = 0
        self.times = 0

    def take(self, number: int, _frame: FrameType | None) -> None:
        """Note one; a handler may not write."""
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self.for_ranks.append(number)
        else:
            self.ended_by = self.ended_by or number
            self.times += 1


@contextmanager
def _signals_noted() -> Iterator[_Signals]:
    noted = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, noted.take) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Over:
    """Whether the job is over: by the controller, which is asked when a run has ended or is to be started again.

    A controller that does not answer is asked again, and nothing is started meanwhile.
    """

    def __init__(self, ask: Callable[[], bool | None]) -> None:
        self._ask = ask
        self.is_known = False
        self.is_told = False  # as of the last answer, or none was given
        self.is_asked_to_end = False

    def __call__(self) -> bool:
        """Return whether it is, or the controller does not tell."""
        if self.is_asked_to_end or self.is_known:
            return True
        answer = self._ask()
        self.is_known, self.is_told = answer is True, answer is not False
        return self.is_told


def wait(far: Sequence[Far], ask_over: Callable[[], bool | None], patience_s: float) -> int:
    """Wait for all hosts; return 0 where the job has ended well, else the first code that says why.

    Args:
        far: Their runs.
        ask_over: Tells whether the job is over; None: that is not known now.
        patience_s: For so long a host is waited for while none is left.
    """
    over = _Over(ask_over)
    ended: set[Host] = set()
    with _signals_noted() as noted:
        while True:
            now_s = time.monotonic()
            _heed(noted, far, over)
            for one in far:
                one.poll(now_s, over)
            news = {one.host for one in far if one.code is not None} - ended
            ended |= news
            if news and over():  # one that has joined just now would begin the job anew
                hang_up([one for one in far if one.comeback.is_early(now_s)])
            lives = any(one.lives for one in far)
            if not lives and (noted.ended_by or not _is_hoped_for(far, over, now_s, patience_s)):
                break
            time.sleep(_POLL_S)
        if noted.ended_by:
            return 128 + noted.ended_by
    codes = [one.code for one in far if one.code is not None]
    if 0 in codes:  # the others of a job that has failed end with its code, too
        return 0
    return next(iter(codes), 1)


def _heed(noted: _Signals, far: Sequence[Far], over: _Over) -> None:
    """Do what signals ask for: hand them on, end all in order, end all now."""
    while noted.for_ranks:
        number = noted.for_ranks.pop(0)
        for one in far:
            one.write(f"{number}\n".encode())
    if noted.ended_by:
        over.is_asked_to_end = True
        hang_up(far)
    if noted.times > 1:
        kill(far)


def _is_hoped_for(far: Sequence[Far], over: _Over, now_s: float, patience_s: float) -> bool:
    """Return whether a host may come back while none is left."""
    lost = [one.comeback.lost_s for one in far if one.comeback.lost_s is not None]
    is_over = over.is_known or (over.is_told and any(one.code is not None for one in far))
    return bool(lost) and not is_over and now_s - max(lost) < patience_s


def hang_up(far: Sequence[Far]) -> None:
    """End the runs of hosts in order."""
    for one in far:
        one.hang_up()


def kill(far: Sequence[Far]) -> None:
    """End what holds them."""
    for one in far:
        one.kill()


def end(far: Sequence[Far]) -> None:
    """End what still runs, whatever has ended this launcher."""
    hang_up(far)
    deadline_s = time.monotonic() + _FAREWELL_S
    for one in far:
        one.wait(deadline_s)
    kill(far)
    for one in far:
        one.wait(time.monotonic() + 5.0)
