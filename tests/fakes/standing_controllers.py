# SPDX-License-Identifier: Apache-2.0
"""Controllers as their leadership and journal alone: real threads, a real database, and no HTTP."""

import threading
from contextlib import suppress

from megascale_ops.controller.journal.fence import DeposedError, Leader
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.leadership.candidate import Candidate
from megascale_ops.controller.leadership.session import Session, application_of
from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Event

JOB = "job"


class Cluster:
    """Those that can ask each other."""

    def __init__(self) -> None:
        self.members: dict[str, Standing] = {}

    def is_away_for(self, url: str) -> bool:
        """Answer as ``peers.asks`` does."""
        one = self.members.get(url)
        return one is not None and not one.candidate.is_leading and bool(one.candidate.away)

    def close(self) -> None:
        """End all."""
        for one in self.members.values():
            one.close()


class Standing:
    """One controller: it waits for its turn, and opens the journal when that has come.

    Attributes:
        handed_out: orders that have left.
        deposed: why it leads no more, each time.
    """

    def __init__(self, name: str, store: str, cluster: Cluster) -> None:
        self.name, self._url = name, store
        self.me = Leader(name, f"http://{name}:1")
        self.handed_out: list[str] = []
        self.deposed: list[str] = []
        self.store: Store | None = None
        self._wake = threading.Event()
        self._is_over = False
        cluster.members[self.me.url] = self
        self.candidate = Candidate(
            Session(store, self.me), self.me, cluster.is_away_for, elected=self._wake.set, deposed=self._note_deposed
        )
        self.candidate.begin()
        self._thread = threading.Thread(target=self._serve, name=f"controller {name}", daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        """Whether it leads, has read the journal, and answers."""
        return self.store is not None and self.candidate.fence is not None and not self.candidate.is_suspended

    @property
    def epoch(self) -> int:
        """The number it leads as, 0 where it does not."""
        fence = self.candidate.fence
        return fence.epoch if fence is not None else 0

    def order(self, name: str) -> threading.Event:
        """Journal an order, and hand it out when it is safe; return what is set then."""
        assert self.store is not None
        gone = threading.Event()

        def hand_out() -> None:
            self.handed_out.append(name)
            gone.set()

        self.store.submit(
            Batch(job=JOB, record=b'{"order":"%b"}' % name.encode(), events=(Event(1.0, JOB, name),)), hand_out
        )
        return gone

    def close(self) -> None:
        """End it, as one that is told to end."""
        self._is_over = True
        self._wake.set()
        self._thread.join(60)
        self.candidate.close()
        if self.store is not None:
            self.store.close()

    def _note_deposed(self, why: str) -> None:
        self.deposed.append(why)
        self._wake.set()

    def _serve(self) -> None:
        while not self._is_over:
            self._wake.wait(0.1)
            self._wake.clear()
            self.candidate.turned()
            if self.candidate.is_leading and self.store is None:
                with suppress(DeposedError, UsageError):
                    self.store = open_store(
                        self._url, elect=self.candidate.elect, application=application_of(self.me.id)
                    )
            elif not self.candidate.is_leading and self.store is not None:
                before, self.store = self.store, None
                before.close()
