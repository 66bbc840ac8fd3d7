# SPDX-License-Identifier: Apache-2.0
"""Send heartbeats at 1 Hz, at once on urgent events, spooled while the controller is unreachable.

Orders come only with replies. So while something is wrong on this node (for 10 s after a rank was stopped or wrote last
words, and while an order is being executed) a heartbeat goes out five times as often: an order then waits 0.1 s on
average, not 0.5 s. The controller may ask for the same (``again_s`` of its reply) while it judges. A restart is no such
trouble: it happens on all nodes at once, and they must not all send.

Nothing here ever delays a look: it runs beside the looks and waits with deadlines only. While the controller is away
the pauses between attempts grow to 2 s, with jitter, so that a thousand agents do not come back in one instant; what
is urgent meanwhile is kept in the spool as it was, what is not goes with the next heartbeat as it is then.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from megascale_agents.counters import Tally
from megascale_ops.errors import ControllerUnreachableError, RefusedError
from megascale_ops.link import Backoff, Link, Spool
from megascale_ops.schema.messages import Evidence, Heartbeat, Order

log = logging.getLogger(__name__)

# 20 heartbeats a second at most: a rank that flaps must not become a load.
_LEAST_S = 0.05
_ALERT_FACTOR = 5.0
_ALERT_S = 10.0
# An incident brings about five pieces of evidence of 20 KB; 64 outlast the longest absence worth keeping them for.
_MOST_EVIDENCE = 64
_LAST_WORD_S = 0.5


class Obeys(Protocol):
    """Takes the orders that come with replies."""

    @property
    def is_busy(self) -> bool:
        """Whether an order is being executed."""

    def ingest_orders(self, orders: Iterable[Order]) -> None:
        """Take new orders."""

    def reported(self, ids: Iterable[str]) -> None:
        """The controller has heard that these orders are done."""


class HeartbeatSender:
    """Sends heartbeats and evidence, hands the orders of the replies on.

    Args:
        link: To the controller.
        compose: Builds the next heartbeat; ``urgent`` is passed on.
        want_full: Asks the composer for a full one.
        tally: Counts.
        interval_s: Between two heartbeats when nothing is wrong.
    """

    def __init__(
        self, link: Link, compose: Callable[..., Heartbeat], want_full: Callable[[], None], tally: Tally,
        interval_s: float,
    ) -> None:  # fmt: skip
        self._link = link
        self._compose = compose
        self._want_full = want_full
        self._tally = tally
        self._interval_s = interval_s
        self._spool = Spool()
        self._backoff = Backoff()
        self._urgent = asyncio.Event()
        self._is_news_only = False
        self._alert_until_s = 0.0
        self._evidence: deque[Evidence] = deque(maxlen=_MOST_EVIDENCE)
        self._is_away = False
        self._again_s = 0.0
        self._mended = 0  # values that were brought into range, as of the last count
        self._obedience: Obeys | None = None
        self._early: list[Order] = []  # came before there was a receiver for them
        self.has_spoken = asyncio.Event()  # the first heartbeat was received, or could not be delivered
        self._delivering = asyncio.Lock()

    def obey_with(self, obedience: Obeys) -> None:
        """Hand orders to ``obedience``, also those that have come already."""
        self._obedience = obedience
        early, self._early = self._early, []
        obedience.ingest_orders(early)

    def urge(self, reason: str, *, trouble: bool = False) -> None:
        """Send a heartbeat at once; after ``trouble``, the next ones sooner as well."""
        log.debug("at once: %s", reason)
        if trouble:
            self._alert_until_s = time.monotonic() + _ALERT_S
        self._is_news_only = False
        self._urgent.set()

    def tell_news(self) -> None:
        """Send the next heartbeat now, as it would be sent in its turn; while the controller is away there is time."""
        if not self._is_away and not self._urgent.is_set():
            self._is_news_only = True
            self._urgent.set()

    async def report_evidence(self, evidence: Evidence) -> None:
        """Hand in evidence; when the controller is away it waits here for the controller's return."""
        self._evidence.append(evidence)
        await self._deliver_evidence()

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        # A random phase: nodes that were started by one command must not all send in the same millisecond.
        next_s = time.monotonic() + random.random() * self._interval_s  # noqa: S311  no secret
        urgent = True  # the first one registers the node
        while True:
            began_s = time.monotonic()
            is_heard = await self._speak(urgent)
            self.has_spoken.set()
            if is_heard:
                now_s = time.monotonic()
                while next_s <= now_s:
                    next_s += self._interval_s
                until_s = min(next_s, began_s + self._pause_s(now_s))
                urgent = await self._is_urged_before(until_s) and not self._is_news_only
                await asyncio.sleep(max(0.0, began_s + _LEAST_S - time.monotonic()))
            else:
                await self._keep_while_away(self._backoff.next_s())
                urgent = False

    async def say_goodbye(self) -> None:
        """Try once to deliver what is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._speak(urgent=True)

    def _pause_s(self, now_s: float) -> float:
        """Return how long to be quiet: less after trouble here, or when the controller judges and asks for news."""
        pause_s = self._interval_s / _ALERT_FACTOR if self._is_alert(now_s) else self._interval_s
        return min(pause_s, max(self._again_s, _LEAST_S)) if self._again_s else pause_s

    def _is_alert(self, now_s: float) -> bool:
        return now_s < self._alert_until_s or (self._obedience is not None and self._obedience.is_busy)

    async def _is_urged_before(self, until_s: float) -> bool:
        """Wait until a moment or until something is urgent, whichever is first."""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.0, until_s - time.monotonic())):
                await self._urgent.wait()
        except TimeoutError:
            return False
        return True

    async def _keep_while_away(self, pause_s: float) -> None:
        """Pause before the next attempt; what becomes urgent meanwhile is kept as it is now."""
        end_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311  no secret
        while await self._is_urged_before(end_s):
            self._urgent.clear()
            self._spool.put(self._compose(urgent=True))
            self._tally.add("megascale_agent_heartbeats_spooled_total")
            await asyncio.sleep(_LEAST_S)

    async def _speak(self, urgent: bool) -> bool:
        """Send one heartbeat and what waits; return whether the controller took it."""
        self._urgent.clear()
        self._is_news_only = False
        heartbeat = self._compose(urgent=urgent)
        try:
            reply = await self._spool.send(self._link, heartbeat)
        except ControllerUnreachableError as error:
            self._tally.add("megascale_agent_heartbeats_failed_total")
            self._tally.add("megascale_agent_heartbeats_spooled_total")
            self._note_away(str(error))
            return False
        except RefusedError as error:
            # Refused for its content or its sender: the next one sends everything again.
            self._tally.add("megascale_agent_heartbeats_failed_total")
            self._note_away(f"the controller refused a heartbeat: {error}")
            self._want_full()
            return False
        finally:
            if (mended := self._link.mended - self._mended) > 0:
                self._mended += mended
                self._tally.add("megascale_agent_values_mended_total", by=mended)
        self._backoff.reset()
        self._tally.add("megascale_agent_heartbeats_sent_total")
        self._tally.set("megascale_agent_last_heartbeat_timestamp_seconds", time.time())
        if self._is_away:
            self._is_away = False
            log.info("the controller at %s answers again", self._link.url)
        self._again_s = reply.again_s
        if self._obedience is not None:
            self._obedience.reported(heartbeat.done_orders)
            self._obedience.ingest_orders(reply.orders)
        else:
            self._early.extend(reply.orders)
        if reply.send_full:
            self._want_full()
            self._urgent.set()
        await self._deliver_evidence()
        return True

    def _note_away(self, text: str) -> None:
        """Log once for each absence that the controller is away."""
        if not self._is_away:
            self._is_away = True
            log.warning("%s; heartbeats are kept until it answers", text)

    async def _deliver_evidence(self) -> None:
        async with self._delivering:
            while self._evidence:
                first = self._evidence[0]
                try:
                    await self._link.evidence(first)
                except ControllerUnreachableError as error:
                    self._note_away(str(error))
                    return
                except RefusedError as error:
                    log.warning("the controller refused evidence for order %s: %s", first.order, error,
                                extra={"job": first.job, "incident": first.incident})  # fmt: skip
                if self._evidence and self._evidence[0] is first:
                    self._evidence.popleft()
