# SPDX-License-Identifier: Apache-2.0
"""Put together what goes up: everything in a full heartbeat, otherwise only what changed since the one before.

Told the time and what was seen; does nothing else. A full heartbeat is sent first, every 30 s, when a round began or
ended, and when the controller asks for it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megascale_agents.ranks import RankWatch
from megascale_agents.rounds import RoundWatch
from megascale_ops.schema.health import HostReading
from megascale_ops.schema.messages import Heartbeat, JobReport

if TYPE_CHECKING:
    from megascale_ops.schema.progress import RankReport

# 30 s: bounds how long a controller can be wrong about what it missed; one in thirty costs no bandwidth.
_FULL_EVERY_S = 30.0
# 5 s: memory and disks fill slowly; a heartbeat that is sent at once carries the host as well.
_HOST_EVERY_S = 5.0


class Composer:
    """Builds one heartbeat after the other and remembers what the last one said.

    Args:
        node: This node's name.
        agent_id: New at every start of an agent.
    """

    def __init__(self, node: str, agent_id: str) -> None:
        self._node = node
        self._agent_id = agent_id
        self._seq = 0
        self._want_full = True
        self._full_at_s = 0.0
        self._host_at_s = 0.0
        self._said: dict[tuple[str, int], RankReport] = {}

    def want_full(self) -> None:
        """The next heartbeat has everything in it."""
        self._want_full = True

    def compose(
        self,
        ranks: Iterable[tuple[RoundWatch, RankWatch]],
        host: HostReading | None,
        clocks_s: tuple[float, float],
        done_orders: tuple[str, ...] = (),
        *,
        urgent: bool = False,
    ) -> Heartbeat:
        """Build the next heartbeat.

        Args:
            ranks: All ranks of the rounds that run.
            host: The last look at the host.
            clocks_s: Monotonic clock and wall clock now.
            done_orders: Orders done and not yet reported.
            urgent: Sent out of turn; the host comes along.
        """
        now_s, wall_s = clocks_s
        full = self._want_full or now_s - self._full_at_s >= _FULL_EVERY_S
        with_host = full or urgent or now_s - self._host_at_s >= _HOST_EVERY_S
        before, self._said = self._said, {}
        jobs: dict[str, tuple[RoundWatch, list[RankReport]]] = {}
        for round_watch, rank_watch in ranks:
            report = rank_watch.report(now_s)
            key = (round_watch.job, rank_watch.rank)
            self._said[key] = report
            if full or before.get(key) != report:
                jobs.setdefault(round_watch.job, (round_watch, []))[1].append(report)
        self._seq += 1
        if full:
            self._want_full, self._full_at_s = False, now_s
        if with_host:
            self._host_at_s = now_s
        return Heartbeat(
            node=self._node,
            agent_id=self._agent_id,
            seq=self._seq,
            mono_s=now_s,
            wall_s=wall_s,
            full=full,
            host=host if with_host else None,
            jobs=tuple(
                JobReport(job=job, round=watch.round, run_dir=watch.file.run_dir, ranks=tuple(reports))
                for job, (watch, reports) in jobs.items()
            ),
            done_orders=done_orders,
        )
