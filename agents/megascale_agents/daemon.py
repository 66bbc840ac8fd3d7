# SPDX-License-Identifier: Apache-2.0
"""The node agent's loop: collect, report, execute orders.

Ten times a second it samples every rank of this node (process, black box, end of stderr), once a second the host.
Reports go to the controller (``uplink/sender.py``), its orders are executed (``orders/executor.py``), and all of it
can be scraped (``metrics/page.py``). Each source is read on its own: one that fails is counted, logged once and tried
again; the others are not affected.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from megascale_agents import config as configuration
from megascale_agents.collectors import host
from megascale_agents.collectors.sockets import SendQueues
from megascale_agents.config import AgentConfig
from megascale_agents.counters import Tally
from megascale_agents.ownership.rights import myself, taken
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import Rounds
from megascale_agents.ranks.stderr_scanner import NOTHING_NEW
from megascale_agents.startup import deferred_imports, memory
from megascale_agents.startup.node_lock import announced, node_lock
from megascale_agents.uplink import urgency
from megascale_agents.uplink.heartbeat import Composer
from megascale_agents.uplink.http_link import LightLink
from megascale_agents.uplink.sender import HeartbeatSender
from megascale_ops.blackbox import roots
from megascale_ops.link.token_files import find_token
from megascale_ops.schema.messages import Heartbeat

if TYPE_CHECKING:
    import socket

    from megascale_agents.hardware.hardware import Hardware
    from megascale_agents.metrics.server import MetricsServer
    from megascale_agents.orders.executor import OrderExecutor
    from megascale_ops.schema.health import HostReading

T = TypeVar("T")

log = logging.getLogger(__name__)

# 1 s: hardware, orders and /metrics come when the first heartbeat is out; of a controller that is away there is none.
_REST_AFTER_S = 1.0
_SETTLED_S = 10.0  # by then each check has run once, the driver is open, and memory of start-up can be freed
_LEAST_REST_S = 0.01  # between two looks, for everything else
_SLOW_EVERY_S = 1.0  # host, log rotation, abandoned rounds
_MOST_HANDLES = 65536  # for sixteen users, each with as many ranks as are watched for one
# 0.4 s: with steps of 5 ms there are ten new ones at every look.
_STEPS_EVERY_S = 0.4


def run_agent(config: AgentConfig) -> int:
    """Be the agent of this node until SIGTERM, SIGINT or the end of the parent; return the exit status.

    Raises:
        UsageError: a setting that can't work.
        MegascaleError: this node has an agent already.
    """
    configuration.check(config)
    configuration.check_roots(config)
    configuration.metrics_address(config)
    token = find_token(config.token_file, {})
    metrics_token = find_token(config.metrics_token_file, {}) or token
    node = configuration.effective_node(config)
    root = roots.take_root(config.box_root)
    if root.said:
        log.warning("%s", root.said, extra={"node": node})
    _take_handles()
    watches_all = not config.box_root
    config = msgspec.structs.replace(config, box_root=str(root.path))
    is_for_all = watches_all and not config.exit_with_parent and os.geteuid() == 0
    with (
        node_lock(config.box_root, node, config.exit_with_parent, config.controller),
        announced(node, config.controller) if is_for_all else contextlib.nullcontext(),
    ):
        asyncio.run(Daemon(config, node, token, metrics_token, watches_all=watches_all).run())
    return 0


def watched_here() -> list[str]:
    """Return the box roots that concern our user."""
    return [str(path) for path in roots.watched_roots(os.geteuid())]


def whom_we_serve(box_root: str) -> str:
    """Return the id of what this agent serves, its user and box root; it is the same after a restart.

    A user's agents that read the same folder see the same jobs: the last one reports for them all.
    """
    return f"{os.geteuid()}-{zlib.crc32(os.fsencode(box_root)):08x}"


def _take_handles() -> None:
    """Have room for the files of many ranks: the usual 1,024 are 250 of them, which one user could use up for all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _MOST_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _ignore_what_is_meant_for_ranks() -> None:
    """Slurm's ``--signal=USR1@60`` reaches every process of a step; an agent would die of it."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class Daemon:
    """All parts of one agent, wired together.

    Args:
        config: With the box root that was taken.
        node: Our name.
        token: What the controller asks for.
        metrics_token: The token required of scrapes from beyond loopback; None: none.
        watches_all: Look into all box roots that concern our user (``watched_roots``), not into that one alone.
    """

    def __init__(
        self,
        config: AgentConfig,
        node: str,
        token: str | None,
        metrics_token: str | None = None,
        *,
        watches_all: bool = False,
    ) -> None:
        self._config = config
        self._node = node
        self._metrics_token = metrics_token
        self._tally = Tally(node)
        self._rounds = Rounds(config.box_root, node, self._count_box_errors, watched_here if watches_all else None)
        self._composer = Composer(
            node, os.urandom(16).hex(), whom_we_serve(config.box_root), config.heartbeat_interval_s
        )
        self._link = LightLink(config.controller, token)
        self._speaker = HeartbeatSender(
            self._link, self._compose, self._composer.want_full, self._tally, config.heartbeat_interval_s
        )
        self._obedience: OrderExecutor | None = None
        self._host_sample: host.HostSample | None = None
        self._host: HostReading | None = None
        self._queues = SendQueues()
        self._hardware: Hardware | None = None
        self._server: MetricsServer | None = None
        self._slow_at_s = 0.0
        self._composed_at_s = 0.0
        self._sick: set[str] = set()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT, then leave in order."""
        loop = asyncio.get_running_loop()
        _ignore_what_is_meant_for_ranks()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        parent = deferred_imports.end_with(self._config.exit_with_parent, loop, self._stop)
        listening = self._listen()
        log.info("agent of node %s, process %d, reports to %s", self._node, os.getpid(), self._config.controller,
                 extra={"node": self._node})  # fmt: skip
        self._slow_at_s = time.monotonic()  # the host is no part of the first heartbeat
        self._look()
        rest = asyncio.create_task(self._start_rest(listening), name="rest")
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._look_on(), name="look"),
            asyncio.create_task(self._speaker.run(), name="speak"),
            asyncio.create_task(self._stop.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait([rest, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if done == {rest}:
                rest.result()
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a part that ended by itself did so with an error: raise it
        finally:
            tasks.append(rest)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._obedience is not None:
                await self._obedience.close()
            await self._speaker.say_goodbye()
            await self._link.close()
            if self._server is not None:
                await self._server.close()
            if listening is not None:
                listening.close()
            if parent >= 0:
                loop.remove_reader(parent)
                os.close(parent)
            self._rounds.close()
            self._queues.close()
            if self._hardware is not None:
                self._hardware.close()
        log.info("agent of node %s ends", self._node, extra={"node": self._node})

    async def _look_on(self) -> None:
        """Look again and again, at a steady pace, also when one look took long.

        By a timer: a task that sleeps takes the loop a second turn, and a future, for each look.
        """
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        timer: asyncio.TimerHandle

        def look(due_s: float) -> None:
            nonlocal timer
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  raised in the thread that waits
                failed.set_exception(error)
                return
            next_s = max(due_s + self._config.look_interval_s, loop.time() + _LEAST_REST_S)
            timer = loop.call_at(next_s, look, next_s)

        first_s = loop.time() + self._config.look_interval_s
        timer = loop.call_at(first_s, look, first_s)
        try:
            await failed
        finally:
            timer.cancel()

    def _look(self) -> None:
        """Look at everything once."""
        began_s = time.monotonic()
        if self._safely("blackboxes", self._rounds.refresh, began_s):
            self._composer.want_full()
            self._speaker.urge("a round began or ended")
        is_slow_turn = began_s - self._slow_at_s >= _SLOW_EVERY_S
        if is_slow_turn:
            self._safely("blackboxes", self._rounds.find_roots)
            self._slow_at_s = began_s
            self._safely("host", self._look_at_host)
            self._safely("sockets", self._look_at_sockets, began_s)
            if self._safely("blackboxes", self._rounds.end_abandoned, began_s):
                self._composer.want_full()
        for _, rank in self._rounds.ranks():
            self._look_at_rank(rank, began_s, is_slow_turn)
        if news := self._safely("hardware", self._look_at_hardware, began_s):
            self._speaker.urge(f"hardware: {news}")
        if began_s - self._composed_at_s >= _STEPS_EVERY_S and self._safely("blackbox", self._has_step_news):
            self._speaker.tell_news()
        self._tally.add("megascale_agent_scans_total")
        self._tally.add("megascale_agent_scan_seconds_total", by=time.monotonic() - began_s)

    def _look_at_rank(self, rank: RankWatch, now_s: float, is_slow_turn: bool) -> None:
        reason = self._safely("process", rank.look_at_process, now_s)
        trouble = bool(reason) and rank.is_stopped
        reason = self._safely("blackbox", rank.look_at_box) or reason
        if is_slow_turn:
            self._safely("log", rank.log.follow)
        look = self._safely("log", rank.log.poll_stderr)
        if look is not None and look is not NOTHING_NEW:
            for name in look.matched:
                self._tally.add("megascale_agent_log_matches_total", name)
            if look.skipped_bytes:
                self._tally.add("megascale_agent_log_skipped_bytes_total", by=look.skipped_bytes)
            if look.new_cause:
                reason, trouble = "last words", True
        if reason:
            self._speaker.urge(f"rank {rank.rank}: {reason}", trouble=trouble)

    def _has_step_news(self) -> bool:
        return any(urgency.cannot_wait(list(watch.ranks.values())) for watch in self._rounds.current.values())

    def _look_at_host(self) -> None:
        first = next(iter(self._rounds.current.values()), None)
        run_dir, owner = (first.file.run_dir, first.bounds.owner) if first is not None else ("", myself())
        if self._hardware is not None:
            self._hardware.look_at_job(run_dir, owner)
            for _, rank in self._rounds.ranks():
                rank.gpu = self._hardware.gpu.of(rank.process.pid) or rank.gpu
        with taken(owner):  # a run folder must not reveal to its user what the user may not read
            sample = host.read(self._config.box_root, run_dir)
        self._host = host.parse(sample, self._host_sample)
        self._host_sample = sample

    def _look_at_hardware(self, now_s: float) -> str:
        """Look at GPUs, adapters and the kernel's log; return what is new and bad."""
        return self._hardware.poll_checks(now_s) if self._hardware is not None else ""

    def _look_at_sockets(self, now_s: float) -> None:
        ranks = [rank for _, rank in self._rounds.ranks()]
        self._queues.poll_sockets([rank.process.pid for rank in ranks if rank.may_be_read], now_s)
        for rank in ranks:
            rank.sending = self._queues.share(rank.process.pid)
            rank.sending_to = self._queues.to(rank.process.pid)

    def _safely(self, collector: str, look: Callable[..., T], *given: float) -> T | None:
        """Let one collector look; None when it failed."""
        try:
            return look(*given)
        except Exception as error:  # noqa: BLE001  one failing collector must not stop the rest; counted, logged once
            self._count_sick(collector, error)
            return None

    def _count_sick(self, collector: str, error: Exception) -> None:
        self._tally.add("megascale_agent_collector_errors_total", collector)
        if collector not in self._sick:
            self._sick.add(collector)
            log.error("collector %s failed; the others go on", collector, exc_info=error, extra={"node": self._node})

    def _compose(self, *, urgent: bool) -> Heartbeat:
        self._composed_at_s = time.monotonic()
        return self._composer.compose(
            self._rounds.ranks(),
            self._host,
            (time.monotonic(), time.time()),
            self._obedience.done() if self._obedience is not None else (),
            urgent=urgent,
            hardware=(self._hardware.findings, self._hardware.uuids()) if self._hardware is not None else ((), ()),
            serials=self._hardware.serials() if self._hardware is not None else (),
        )

    def _count_box_errors(self, number: int) -> None:
        if number:
            self._tally.add("megascale_agent_box_read_errors_total", by=number)

    def _count_order(self, kind: str, outcome: str) -> None:
        self._tally.add("megascale_agent_orders_total", kind, outcome)

    def _listen(self) -> "socket.socket | None":
        """Take the port for metrics and log its URL."""
        address = configuration.metrics_address(self._config)
        if address is None:
            return None
        listening, url = deferred_imports.listen(address)
        self._composer.metrics = configuration.reachable(url, self._config.controller)
        log.info("metrics at %s", url, extra={"node": self._node})
        return listening

    async def _start_rest(self, listening: "socket.socket | None") -> None:
        """Start what the first heartbeat does not need."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REST_AFTER_S):
                await self._speaker.has_spoken.wait()
        await deferred_imports.load(with_metrics=listening is not None)
        from megascale_agents.hardware.hardware import Hardware
        from megascale_agents.orders.executor import OrderExecutor

        # What start-up left behind lives as long as the agent: no later collection needs to walk it.
        gc.collect()
        gc.freeze()
        asyncio.get_running_loop().call_later(_SETTLED_S, memory.give_back)
        self._obedience = OrderExecutor(
            self._node, self._rounds, self._speaker, self._count_order, self._config.kernel_log
        )
        self._speaker.obey_with(self._obedience)
        self._hardware = Hardware(self._config, self._node, self._count_sick)
        if listening is None:
            return
        from megascale_agents.metrics.page import AgentCollector  # an agent without metrics loads neither
        from megascale_agents.metrics.server import MetricsServer

        collector = AgentCollector(
            self._node, self._rounds.ranks, lambda: self._host, self._tally, self._composer.collective_sums,
            lambda: self._hardware,
        )  # fmt: skip
        address = configuration.metrics_address(self._config)
        is_open = address is not None and address.is_loopback
        self._server = MetricsServer(collector, listening, None if is_open else self._metrics_token)
