# SPDX-License-Identifier: Apache-2.0
"""One controller among several: a thread that waits for the lock, and once it leads says so once a second.

It has a thread of its own, so that a leader whose loop is slow is not taken for one that is gone. A loop that has not
turned for ``HUNG_S`` is: then nothing is said any more, and a standby takes over.

What a leader may do while the database does not answer is decided here, too. Orders that are not journaled may leave
(training goes on) as long as no other controller can have become the leader: each standby that was known says that the
database does not answer it either, or there is none. Where that is not certain the controller answers no request until
it is (``is_suspended``): agents and runners go on as they do without a controller.
"""

import logging
import math
import threading
import time
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from megascale_ops.controller.journal.engine import sentence_of
from megascale_ops.controller.journal.fence import DeposedError, Fence, Leader, resign, take_epoch
from megascale_ops.controller.leadership.peers import Ask
from megascale_ops.controller.leadership.rule import BEAT_S, FREE_S, LOOK_S, SILENT_S, Seen, Step, Succession
from megascale_ops.controller.leadership.session import AwayError, Session, end_connections

log = logging.getLogger(__name__)

# 4 s without an answer to a word: from then on a standby may be about to take over (6 s), with 2 s for the way there.
SURE_S = SILENT_S - 2.0
# 5 s: what a standby has said of the database is believed for so long; it needs 6 s from then on to take over.
CONFIRMED_S = 5.0
# 30 s: garbage of 100,000 ranks stops a loop for seconds, never for so long.
HUNG_S = 30.0
# 60 s: a standby whose connection was cut is remembered as one for so long.
REMEMBERED_S = 60.0
# 2 s until the next try, where the database does not take a new leader: its disk is full, as a rule.
_AGAIN_S = 2.0
_CLOSE_S = 5.0


class Term:
    """What lives as long as one leadership of this process.

    Attributes:
        fence: what each write is checked by; None until the database has taken this leader.
        renewed_s: when the newest word was asked that the database has answered.
        pid: of the server's process behind the connection that had the lock last.
        peers: address of each standby, and when it was last there.
        confirmed: when a standby last said that the database does not answer it.
    """

    def __init__(self, pid: int, now_s: float) -> None:
        self.fence: Fence | None = None
        self.renewed_s = now_s
        self.pid = pid
        self.peers: dict[str, tuple[str, float]] = {}
        self.confirmed: dict[str, float] = {}


class Candidate:
    """One controller process.

    Args:
        session: its connection for the lock.
        me: who it is.
        ask: asks a standby at an address whether the database answers it.
        elected: called from the thread when this one has the lock; ``elect`` makes it the leader.
        deposed: called once from any thread, with a sentence, when it leads no more.

    Attributes:
        seen: the newest look; None while the database does not answer.
        away: why it does not; "" while it does.
        has_taken_part: it has led, or waited for its turn.
    """

    def __init__(
        self,
        session: Session,
        me: Leader,
        ask: Ask,
        *,
        elected: Callable[[], None],
        deposed: Callable[[str], None],
    ) -> None:
        self.me = me
        self.seen: Seen | None = None
        self.away = ""
        self.has_taken_part = False
        self._term: Term | None = None
        self._session = session
        self._ask = ask
        self._elected = elected
        self._deposed = deposed
        self._succession = Succession()
        self._highest = 0  # the highest epoch that was seen
        self._turned_s = time.monotonic()
        self._is_written = False  # as a standby
        self._refused = ""  # what was told already about an election that failed
        self._let_go = threading.Event()  # the lock is to be given back, by the thread that has it
        self._not_before_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    @property
    def is_leading(self) -> bool:
        """Whether it has the lock, or had it and was not replaced."""
        return self._term is not None

    @property
    def fence(self) -> Fence | None:
        """What this leader's writes are checked by; None where it is none, or not yet."""
        term = self._term
        return term.fence if term is not None else None

    def begin(self) -> None:
        """Look once in the caller's thread, then go on in one of its own."""
        self._turn()
        self._thread.start()

    def close(self) -> None:
        """End, and leave the lock to others; who leads resigns, so that they need not wait."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._is_written:
            self._say_standby(is_waiting=False)
        self._session.close()

    def turned(self) -> None:
        """Take note that the program's loop turns."""
        self._turned_s = time.monotonic()

    def elect(self, engine: sa.Engine) -> Fence:
        """Become the leader: write it, with a number above all before, and return what each write is checked by.

        Raises:
            DeposedError: the database takes no writes: another try comes with the next look.
        """
        leader = self.seen.leader if self.seen is not None else None
        try:
            if leader is not None and leader.id != self.me.id:
                _end_old(engine, leader)
            with engine.begin() as connection:
                connection.execute(sa.text("SET LOCAL lock_timeout = '3s'"))
                epoch = take_epoch(connection, self.me, self._highest)
        except SQLAlchemyError as error:
            why = f"the database does not take that it leads ({sentence_of(error)})"
            self.let_go(why)
            raise DeposedError(why) from error
        self._highest, self.has_taken_part = epoch, True
        # Each leadership has its own: what is left of one that has ended must not speak for the next.
        fence = Fence(
            epoch,
            lambda since_s: self.fence is fence and self.may_act_unwritten(since_s),
            lambda why: self.depose(why) if self.fence is fence else None,
        )
        term = self._term
        if term is None:
            raise DeposedError("the lock was lost meanwhile")
        term.fence = fence
        log.info("this controller leads from now on, as number %d", epoch)
        return fence

    def resign(self, engine: sa.Engine) -> None:
        """Write that this leader ends in order; told and left where that can't be written."""
        fence = self.fence
        if fence is None:
            return
        try:
            with engine.begin() as connection:
                connection.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
                resign(connection, fence, self.me)
        except (SQLAlchemyError, DeposedError) as error:
            log.warning("the journal does not take that this leader resigns: %s", error)

    def let_go(self, why: str) -> None:
        """Give the lock back, and wait for it again; ``why`` it could not be used."""
        self._tell_once(f"this controller can't lead: {why}")
        self._not_before_s = time.monotonic() + _AGAIN_S
        self._let_go.set()
        self._term = None

    def depose(self, why: str) -> None:
        """Take note that another controller leads, or the next one shall: the lock may be ours still, and goes back."""
        if self._term is not None:
            self._let_go.set()
            self._term = None
            log.error("this controller leads no more: %s", why)
            self._deposed(why)

    @property
    def is_suspended(self) -> bool:
        """Whether another controller may lead by now for all that is known: then no request is answered."""
        term = self._term
        if term is None:
            return True
        return time.monotonic() - term.renewed_s > SURE_S and not self.may_act_unwritten()

    def may_act_unwritten(self, failing_since_s: float = math.inf) -> bool:
        """Return whether no other controller can have become the leader while the journal is not written.

        Args:
            failing_since_s: since when. A database that has answered this leader after that, and a moment ago, is full:
                the lock is still ours, and a standby takes one that is lost no sooner than after ``FREE_S``.
        """
        now_s, term = time.monotonic(), self._term
        if term is not None and failing_since_s < term.renewed_s and now_s - term.renewed_s < FREE_S:
            return True
        return term is not None and all(
            now_s - term.confirmed.get(one, -CONFIRMED_S) < CONFIRMED_S for one in list(term.peers)
        )

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S if self.is_leading and not self.away else LOOK_S):
            try:
                self._turn()
            except Exception:
                log.exception("leadership met an error of its own")
                self.away = "an error of its own, which the log has"
                self._session.close()

    def _turn(self) -> None:
        if self._let_go.is_set():
            self._let_go.clear()
            self._session.close()
        if self.is_leading and time.monotonic() - self._turned_s > HUNG_S:
            return
        began_s, fence = time.monotonic(), self.fence
        try:
            self.seen, self.away = self._session.look(), ""
        except AwayError as error:
            if not self.away:
                log.warning("the database of the journal does not answer: %s", error)
            self.seen, self.away = None, str(error)
        if self.seen is not None:
            self._highest = max(self._highest, self.seen.epoch)
        term = self._term
        if term is not None:
            self._lead(term, began_s, fence.epoch if fence is not None else None)
        else:
            self._wait()

    def _wait(self) -> None:
        step = self._succession.look(self.seen, time.monotonic())
        seen = self.seen
        if seen is None or step is Step.WAIT or time.monotonic() < self._not_before_s:
            self.has_taken_part = True
            if seen is not None and not self._is_written:
                self._say_standby(is_waiting=True)
            return
        try:
            if step is Step.FORCE:
                who = seen.leader.url if seen.leader is not None else "of an unknown address"
                log.error("the leader %s has said nothing for %.0f s: its connections are ended", who, SILENT_S)
                self._session.end_connections(seen.holder, seen.leader)
                self._succession = Succession()
            has_it = self._locked(seen.holder)
        except AwayError as error:
            self._tell_once(f"the silent leader's connections can't be ended ({error})")
            return
        if has_it:
            self.turned()
            self._term = Term(self._session.pid, time.monotonic())
            if self._is_written:
                self._say_standby(is_waiting=False)
            self._elected()

    def _locked(self, ended: int) -> bool:
        """Take the lock; the server needs a moment to let go of one whose connection was ended."""
        for _ in range(10 if ended else 1):
            if self._session.try_lock():
                return True
            if self._ended.wait(0.05):
                break
        return False

    def _lead(self, term: Term, began_s: float, mine: int | None) -> None:
        """Make sure that the lock is ours, and take note of those that wait for it.

        Args:
            term: of this leadership.
            began_s: when the look at the database began.
            mine: the number that was ours then; None: we had none. What was seen before ours was written is not lost.
        """
        seen = self.seen
        if seen is None:
            self._ask_peers(term)
            return
        if mine is not None and seen.epoch != mine:
            lost = f"the database has lost what was written since number {seen.epoch}, and begins anew from there"
            who = seen.leader.url if seen.leader is not None else "another one"
            self.depose(f"{who} leads as number {seen.epoch}" if seen.epoch > mine else lost)
            return
        for one, url in seen.standbys.items():
            term.peers[one] = (url, began_s)
        term.peers = {one: at for one, at in term.peers.items() if began_s - at[1] < REMEMBERED_S}
        if seen.holder == self._session.pid or self._take_again(seen, term.pid):
            term.pid = self._session.pid
            term.renewed_s = began_s
        else:
            self._ask_peers(term)

    def _take_again(self, seen: Seen, former: int) -> bool:
        """Take the lock on a new connection; our own former one may still hold it."""
        try:
            if seen.holder and seen.holder == former:
                self._session.end_connections(seen.holder, None)
            if self._locked(seen.holder):
                log.warning("the lock of the leader was lost with its connection, and is ours again")
                return True
        except AwayError as error:
            self.seen, self.away = None, str(error)
        return False

    def _ask_peers(self, term: Term) -> None:
        for one, (url, _at) in list(term.peers.items()):
            began_s = time.monotonic()
            if self._ask(url):
                term.confirmed[one] = began_s
            if self._ended.is_set():
                return

    def _say_standby(self, *, is_waiting: bool) -> None:
        try:
            self._session.put_standby(is_waiting=is_waiting)
        except AwayError as error:
            if is_waiting:
                self._tell_once(f"the leader can't be told of this standby ({error})")
            return
        self._is_written = is_waiting

    def _tell_once(self, why: str) -> None:
        if why != self._refused:
            log.error("%s", why)
        self._refused = why


def _end_old(engine: sa.Engine, leader: Leader) -> None:
    """End connections that the leader before may have left, with a transaction that was never ended."""
    try:
        with engine.connect() as connection:
            end_connections(connection, 0, leader)
    except SQLAlchemyError as error:
        log.warning("connections of the leader before can't be ended (%s): it is fenced off", sentence_of(error))
