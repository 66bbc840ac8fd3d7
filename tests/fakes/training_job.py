# SPDX-License-Identifier: Apache-2.0
"""A job whose ranks tell their steps to the real loop, one a second, and whose account is asked for."""

from megascale_ops.account import Account
from megascale_ops.controller.loop import Loop
from megascale_ops.ledger import ROWS
from megascale_ops.schema.progress import StepWork
from tests.fakes.controlled_job import World


def adds_up(found: Account | None) -> Account:
    """Return an account whose rows add up to its time, to the microsecond."""
    assert found is not None
    assert list(found.rows) == list(found.hour) == list(ROWS)
    assert round(sum(found.rows.values()), 6) == round(found.wall_s, 6)
    assert round(sum(found.hour.values()), 6) == round(found.hour_s, 6)
    assert found.hour_s <= 3600.0 + 1e-6
    assert min(*found.rows.values(), *found.hour.values()) >= 0.0
    return found


class Training(World):
    """A job whose ranks tell their steps, one a second."""

    step = -1
    stepped_s = 0.0

    def new_loop(self) -> Loop:
        """Return a controller whose wall clock can be stepped."""
        return Loop(
            self.journal, clock=lambda: self.now_s, wall=lambda: self.now_s + 1e6 + self.stepped_s, post=self.post
        )

    def second(self) -> None:
        """Make one step, and let a second pass."""
        self.now_s += 1.0
        self.step += 1
        self.train(self.step)
        for node in self.ranks:
            self.tell(node)
        self.loop.tick()

    def tell(self, node: str) -> None:
        """Send a heartbeat with the newest step of every rank."""
        for rank in self.ranks[node]:
            report = rank.report(self.rounds[node])
            work = StepWork(self.step, 1.0, waiting_s=0.1)
            sent_s = self.loop.wall()
            job = self.loop.jobs["job"]
            self.loop.histories.of(job).ingest_steps(report.rank, node, report.mesh, (work,), sent_s)
        self.beat(node)

    def account(self) -> Account:
        """Return the account as of now."""
        self.loop.accounts.forget_time()
        return adds_up(self.loop.goodput("job"))

    async def crash(self) -> None:
        """Let a rank die, and the job come back two seconds later, two steps before."""
        job = self.loop.jobs["job"]
        exits = (self.exit(0, -9),)
        reply = self.ask(self.new_join(cause="failure", exits=exits, previous_round=job.record.round))
        await self.settle()
        await self.wait(2.0, beating=False)
        assert reply.done()
        self.step = max(-1, self.step - 2)
        await self.run_round(self.step)
