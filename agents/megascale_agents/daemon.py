# SPDX-License-Identifier: Apache-2.0
"""The node daemon: collect, say, obey.

Ten times a second it looks at every rank of this node (process, black box, end of stderr), once a second at the host.
What it sees goes to the controller (``speaker.py``), what the controller wants is done (``orders.py``), and all of it
can be scraped (``metrics.py``). Each source is looked at on its own: one that fails is counted, logged once and tried
again; the others never notice.
"""

import asyncio
import gc
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megascale_agents import config as configuration
from megascale_agents.collectors import host
from megascale_agents.config import AgentConfig
from megascale_agents.heartbeat import Composer
from megascale_agents.node_lock import node_lock
from megascale_agents.orders import Obedience
from megascale_agents.ranks import RankWatch
from megascale_agents.rounds import Rounds
from megascale_agents.speaker import Speaker
from megascale_agents.tally import Tally
from megascale_ops.link import Link
from megascale_ops.schema.messages import Heartbeat

if TYPE_CHECKING:
    from aiohttp import web

    from megascale_ops.schema.health import HostReading

T = TypeVar("T")

log = logging.getLogger(__name__)

_SLOW_EVERY_S = 1.0  # host, log rotation, abandoned rounds


def run_agent(config: AgentConfig) -> int:
    """Be the agent of this node until SIGTERM, SIGINT or the end of the parent; return the exit status.

    Raises:
        UsageError: a setting that can't work.
        MegascaleError: this node has an agent already.
    """
    configuration.check(config)
    configuration.metrics_address(config)
    token = configuration.read_token(config.token_file)
    node = configuration.effective_node(config)
    with node_lock(config.box_root, node, config.exit_with_parent, config.controller):
        # What start-up left behind lives as long as we do: no later collection needs to walk it.
        gc.collect()
        gc.freeze()
        asyncio.run(Daemon(config, node, token).run())
    return 0


class Daemon:
    """All parts of one agent, wired together."""

    def __init__(self, config: AgentConfig, node: str, token: str | None) -> None:
        self._config = config
        self._node = node
        self._token = token
        self._tally = Tally(node)
        self._rounds = Rounds(config.box_root, node, self._count_box_errors)
        self._composer = Composer(node, uuid.uuid4().hex)
        self._link = Link(config.controller, token)
        self._speaker = Speaker(
            self._link, self._compose, self._composer.want_full, self._tally, config.heartbeat_interval_s
        )
        self._obedience = Obedience(node, self._rounds, self._speaker, self._count_order)
        self._speaker.obey_with(self._obedience)
        self._host_sample: host.HostSample | None = None
        self._host: HostReading | None = None
        self._slow_at_s = 0.0
        self._sick: set[str] = set()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Work until told to stop, then leave in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        parent = self._watch_parent(loop)
        server = await self._serve_metrics()
        log.info("agent of node %s, process %d, reports to %s", self._node, os.getpid(), self._config.controller,
                 extra={"node": self._node})  # fmt: skip
        self._look()
        tasks = [
            asyncio.create_task(self._look_on(), name="look"),
            asyncio.create_task(self._speaker.run(), name="speak"),
            asyncio.create_task(self._stop.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a part that ended by itself did so with an error: let it be seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._obedience.close()
            await self._speaker.say_goodbye()
            await self._link.close()
            if server is not None:
                await server.cleanup()
            if parent >= 0:
                loop.remove_reader(parent)
                os.close(parent)
            self._rounds.close()
        log.info("agent of node %s ends", self._node, extra={"node": self._node})

    async def _look_on(self) -> None:
        """Look again and again, at a steady pace, also when one look took long."""
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + self._config.look_interval_s, time.monotonic())
            await asyncio.sleep(max(0.01, next_s - time.monotonic()))
            self._look()

    def _look(self) -> None:
        """Look at everything once."""
        began_s = time.monotonic()
        if self._safely("blackboxes", lambda: self._rounds.refresh(began_s)):
            self._composer.want_full()
            self._speaker.urge("a round began or ended")
        is_slow_turn = began_s - self._slow_at_s >= _SLOW_EVERY_S
        if is_slow_turn:
            self._slow_at_s = began_s
            self._safely("host", self._look_at_host)
            if self._safely("blackboxes", lambda: self._rounds.end_abandoned(began_s)):
                self._composer.want_full()
        for _, rank in self._rounds.ranks():
            self._look_at_rank(rank, began_s, is_slow_turn)
        self._tally.add("megascale_agent_scans_total")
        self._tally.add("megascale_agent_scan_seconds_total", by=time.monotonic() - began_s)

    def _look_at_rank(self, rank: RankWatch, now_s: float, is_slow_turn: bool) -> None:
        reason = self._safely("process", lambda: rank.look_at_process(now_s))
        trouble = bool(reason) and rank.is_stopped
        reason = self._safely("blackbox", rank.look_at_box) or reason
        if is_slow_turn:
            self._safely("log", rank.log.follow)
        look = self._safely("log", rank.log.look)
        if look is not None:
            for name in look.matched:
                self._tally.add("megascale_agent_log_matches_total", name)
            if look.skipped_bytes:
                self._tally.add("megascale_agent_log_skipped_bytes_total", by=look.skipped_bytes)
            if look.new_cause:
                reason, trouble = "last words", True
        if reason:
            self._speaker.urge(f"rank {rank.rank}: {reason}", trouble=trouble)

    def _look_at_host(self) -> None:
        run_dir = next((watch.file.run_dir for watch in self._rounds.current.values()), "")
        sample = host.read(self._config.box_root, run_dir)
        self._host = host.parse(sample, self._host_sample)
        self._host_sample = sample

    def _safely(self, collector: str, look: Callable[[], T]) -> T | None:
        """Let one collector look; None when it failed."""
        try:
            return look()
        except Exception:  # a sick collector must not silence the others; it is counted, and logged once
            self._tally.add("megascale_agent_collector_errors_total", collector)
            if collector not in self._sick:
                self._sick.add(collector)
                log.exception("collector %s failed; the others go on", collector, extra={"node": self._node})
            return None

    def _compose(self, *, urgent: bool) -> Heartbeat:
        return self._composer.compose(
            self._rounds.ranks(),
            self._host,
            (time.monotonic(), time.time()),
            self._obedience.done(),
            urgent=urgent,
        )

    def _count_box_errors(self, number: int) -> None:
        if number:
            self._tally.add("megascale_agent_box_read_errors_total", by=number)

    def _count_order(self, kind: str, outcome: str) -> None:
        self._tally.add("megascale_agent_orders_total", kind, outcome)

    async def _serve_metrics(self) -> "web.AppRunner | None":
        address = configuration.metrics_address(self._config)
        if address is None:
            return None
        from megascale_agents import metrics  # an agent without metrics does not load the Prometheus client

        collector = metrics.AgentCollector(self._node, self._rounds.ranks, lambda: self._host, self._tally)
        server, url = await metrics.serve(collector, address, None if address.is_loopback else self._token)
        log.info("metrics at %s", url, extra={"node": self._node})
        return server

    def _watch_parent(self, loop: asyncio.AbstractEventLoop) -> int:
        """End when a given process ends; return the handle on that process, -1 for none."""
        pid = self._config.exit_with_parent
        if not pid:
            return -1
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._stop.set()
            return -1
        loop.add_reader(handle, self._stop.set)
        return handle
