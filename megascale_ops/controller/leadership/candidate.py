# SPDX-License-Identifier: Apache-2.0
"""One controller among several: a thread that waits for the lock, and once it leads says so once a second.

It has a thread of its own, so that a leader whose loop is slow is not taken for one that is gone. A loop that has not
turned for ``HUNG_S`` is: then nothing is said any more, and a standby takes over.

What a leader may do while the database does not answer is decided here, too. Orders that are not journaled may leave
(training goes on) as long as no other controller can have become the leader: each standby that was known says that the
database does not answer it either, or there is none. Where that is not certain the controller answers no request until
it is (``is_suspended``): agents and runners go on as they do without a controller.

A leader that no agent reaches gives way to a standby that they reach (``hearing``): it answers no request from
then on, what it has to write is written, it resigns in favour of that one, and waits for its turn like all others.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from megascale_ops.controller.journal.engine import sentence_of
from megascale_ops.controller.journal.fence import DeposedError, Fence, Leader, resign, take_epoch
from megascale_ops.controller.leadership.hearing import (
    STEADY_S,
    UNHEARD_S,
    Hearing,
    Heir,
    heir_of,
    may_give_way,
)
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
# 5 s: a loop that has not turned for so long was away, and whom it has not heard was not silent.
_AWAY_S = 5.0
# 10 s: the journal's thread writes what it has in 5 at most; then the lock is free, whatever is written.
_GIVE_S = 10.0
# 20 s until who gave way may lead again: its heir has had five, and all others the rest.
_AFTERWARDS_S = 20.0
# 2 s between two petitions, and 0.5 ms for each node in it: 12,500 nodes are 250 kB each six seconds. 10 s at most.
_PETITION_S, _PETITION_EACH_NODE_S, _PETITION_MOST_S = 2.0, 0.0005, 10.0


class Term:
    """What lives as long as one leadership of this process.

    Attributes:
        fence: what each write is checked by; None until the database has taken this leader.
        renewed_s: when the newest word was asked that the database has answered.
        pid: of the server's process behind the connection that had the lock last.
        peers: address of each standby, and when it was last there.
        confirmed: when a standby last said that the database does not answer it.
        hearing: who was answered.
        expected: nodes of its jobs; None until it answers.
        heir: to whom it gives way; None: it leads.
        gives_s: since when it does.
        is_held_back: it was told that this leader would give way, were it not for others that have.
    """

    def __init__(self, pid: int, now_s: float) -> None:
        self.fence: Fence | None = None
        self.renewed_s = now_s
        self.pid = pid
        self.peers: dict[str, tuple[str, float]] = {}
        self.confirmed: dict[str, float] = {}
        self.hearing = Hearing(now_s)
        self.expected: frozenset[str] | None = None
        self.heir: Heir | None = None
        self.gives_s = 0.0
        self.is_held_back = False


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
        refused: by whom it is asked as a standby.
        gave_way: how often it has given way to one that agents reach.
        why: the leader before gave way to this one; "" where it did not.
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
        self.refused = Hearing(time.monotonic())
        self.gave_way = 0
        self.why = ""
        self._petition_s = -math.inf
        self._is_petition_written = False
        self._term: Term | None = None
        self._session = session
        self._ask = ask
        self._elected = elected
        self._deposed = deposed
        self._succession = Succession(me.id)
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
        self._end_petition()
        self._session.close()

    def turned(self) -> None:
        """Take note that the program's loop turns."""
        now_s, term = time.monotonic(), self._term
        if now_s - self._turned_s > _AWAY_S:
            self.refused.begin_anew(now_s)
            if term is not None:
                term.hearing.begin_anew(now_s)
        self._turned_s = now_s

    def expect(self, nodes: Collection[str]) -> None:
        """Take note of whose requests this leader should answer: the nodes of its jobs; at first when it can."""
        term = self._term
        if term is None:
            return
        if term.expected is None:
            term.hearing.begin_anew(time.monotonic())
        term.expected = frozenset(nodes)

    def heard(self, node: str, *, is_own_machine: bool) -> None:
        """Take note of a node that this leader has answered."""
        term = self._term
        if term is not None:
            term.hearing.note(node, time.monotonic(), is_own_machine=is_own_machine)

    @property
    def unheard_s(self) -> float:
        """For how long this leader has answered no agent or runner; 0 of one that is none."""
        term = self._term
        return term.hearing.unheard_s(time.monotonic()) if term is not None and term.expected is not None else 0.0

    @property
    def gives_way(self) -> bool:
        """Whether it leads no more in favour of a standby, and has not let go yet."""
        term = self._term
        return term is not None and term.heir is not None

    def elect(self, engine: sa.Engine) -> Fence:
        """Become the leader: write it, with a number above all before, and return what each write is checked by.

        Raises:
            DeposedError: the database takes no writes: another try comes with the next look.
        """
        leader = self.seen.leader if self.seen is not None else None
        is_another = leader is not None and leader.id != self.me.id
        self.why = leader.why if leader is not None and leader.resigned and is_another else ""
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
        if leader is not None and self.why:
            log.warning("the leader %s gave way: %s", leader.url, self.why)
        return fence

    def resign(self, engine: sa.Engine) -> None:
        """Write that this leader ends in order; told and left where that can't be written."""
        term = self._term
        if term is None or term.fence is None:
            return
        heir = term.heir
        me = msgspec.structs.replace(self.me, heir=heir.id, why=heir.reason) if heir is not None else self.me
        try:
            with engine.begin() as connection:
                connection.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
                now_wall_s = float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
                resign(connection, term.fence, me, now_wall_s=now_wall_s)
        except (SQLAlchemyError, DeposedError) as error:
            log.warning("the journal does not take that this leader resigns: %s", error)

    def let_go(self, why: str) -> None:
        """Give the lock back, and wait for it again; ``why`` it could not be used."""
        self._tell_once(f"this controller can't lead: {why}")
        self._release(_AGAIN_S)

    def give_up(self) -> None:
        """Leave the lock to the heir, now that all is written."""
        if self.gives_way:
            self._release(_AFTERWARDS_S)

    def _release(self, pause_s: float) -> None:
        self._not_before_s = time.monotonic() + pause_s
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
        if term is None or term.heir is not None:
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
            if seen is not None and seen.holder:
                self._put_petition(time.monotonic())
            return
        try:
            if step is Step.FORCE:
                who = seen.leader.url if seen.leader is not None else "of an unknown address"
                log.error("the leader %s has said nothing for %.0f s: its connections are ended", who, SILENT_S)
                self._session.end_connections(seen.holder, seen.leader)
                self._succession = Succession(self.me.id)
            has_it = self._locked(seen.holder)
        except AwayError as error:
            self._tell_once(f"the silent leader's connections can't be ended ({error})")
            return
        if has_it:
            self.turned()
            self._term = Term(self._session.pid, time.monotonic())
            if self._is_written:
                self._say_standby(is_waiting=False)
            self._end_petition()
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
            if began_s - term.renewed_s > SURE_S:
                term.hearing.begin_anew(began_s)  # it answered no request while it was not sure of its place
            term.renewed_s = began_s
            self._look_for_heir(term, seen, began_s)
        else:
            self._ask_peers(term)

    def _look_for_heir(self, term: Term, seen: Seen, now_s: float) -> None:
        """Give way where no agent reaches this leader and most of them a standby; see ``hearing``."""
        if term.heir is not None:
            if now_s - term.gives_s > _GIVE_S:
                log.error("what this leader has to write is not written in %.0f s: its place is free", _GIVE_S)
                self.give_up()
            return
        unheard_s = term.hearing.unheard_elsewhere_s(now_s)
        if term.expected is None or term.fence is None or unheard_s < UNHEARD_S or not seen.standbys:
            return
        if now_s - self._turned_s > _AWAY_S:
            return  # it is this loop that stands still
        try:
            heir = heir_of(unheard_s, term.hearing.nodes(now_s), term.expected, self._session.petitions(seen.standbys))
            may = heir is None or may_give_way(self._session.given_way_ages_s())
        except AwayError as error:
            self.seen, self.away = None, str(error)
            return
        if heir is None:
            return
        if not may:
            if not term.is_held_back:
                log.error("this controller leads on, as too many have given way within an hour: %s", heir.reason)
            term.is_held_back = True
            return
        log.error("this controller gives way: %s", heir.reason)
        term.gives_s, term.heir = now_s, heir
        self.gave_way += 1
        self._deposed(heir.reason)

    def _put_petition(self, now_s: float) -> None:
        """Write which nodes ask this standby for a while already, so that the leader can give way to it."""
        if now_s < self._petition_s:
            return
        nodes = self.refused.nodes(now_s, STEADY_S)
        if not nodes and not self._is_petition_written:
            return
        try:
            self._session.put_petition(nodes)
        except AwayError as error:
            self._tell_once(f"the leader can't be told whom this standby hears ({error})")
            return
        self._is_petition_written = bool(nodes)
        self._petition_s = now_s + min(_PETITION_MOST_S, _PETITION_S + len(nodes) * _PETITION_EACH_NODE_S)

    def _end_petition(self) -> None:
        self.refused = Hearing(time.monotonic())
        if self._is_petition_written:
            with contextlib.suppress(AwayError):
                self._session.put_petition(())
        self._is_petition_written = False

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
