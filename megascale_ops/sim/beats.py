# SPDX-License-Identifier: Apache-2.0
"""What agents' heartbeats need, of all machines, as columns by the machine's number: thousands speak at once."""

import numpy as np
import numpy.typing as npt

TICK_S = 0.1


class Beats:
    """The columns. Owned by the world.

    ``only_goes_on``: it was looked at since anything changed of what the agent has to tell, and nothing but that its
    ranks go on is to be told. ``is_idle``: the same of one without ranks, nothing but that it is there. ``has_ranks``:
    it has a part in a round. ``stands``: it has told where all its ranks wait, or hang. ``told``: the last step that it
    told of; ``first``: its first rank. ``speaks_s``: when it speaks next.
    """

    def __init__(self, machines: int, ranks: int) -> None:
        self.locals = np.arange(ranks)
        self.names = np.full(machines, "", object)
        self.agent_ids = np.full(machines, "", object)
        self.seq, self.told, self.first = (np.zeros(machines, np.int64) for _ in range(3))
        self.offset_s = np.zeros(machines)
        self.speaks_s = np.arange(machines) % 10 * TICK_S
        self.is_on, self.has_ranks, self.stands = (np.zeros(machines, bool) for _ in range(3))
        self.only_goes_on, self.is_idle = (np.zeros(machines, bool) for _ in range(2))

    def add(self, number: int, name: str, agent_id: str, offset_s: float) -> None:
        """Begin a machine's life, with an agent that has said nothing."""
        self.names[number], self.agent_ids[number], self.offset_s[number] = name, agent_id, offset_s
        self.seq[number] = 0
        self.is_on[number], self.has_ranks[number] = True, False
        self.touch(number)

    def begin(self, number: int, first: int, told: int) -> None:
        """Begin a machine's part in a round."""
        self.first[number], self.told[number] = first, told
        self.has_ranks[number], self.stands[number] = True, False
        self.touch(number)

    def end(self, number: int) -> None:
        """End a machine's part in a round."""
        self.has_ranks[number] = False
        self.touch(number)

    def touch(self, number: int) -> None:
        """Something changes of what an agent has to tell: it is looked at again."""
        self.only_goes_on[number] = self.is_idle[number] = False

    def next(self, number: int) -> int:
        """Return the number of an agent's next heartbeat, which it sends now."""
        self.seq[number] += 1
        return self.seq.item(number)

    def hasten(self, number: int, at_s: float) -> None:
        """Let an agent speak by then at the latest."""
        self.speaks_s[number] = min(self.speaks_s.item(number), at_s)

    def due(self, now_s: float, usual_s: float) -> npt.NDArray[np.intp]:
        """Return the machines whose agents speak now; the next time they do so after ``usual_s``."""
        is_due = (self.speaks_s <= now_s + 1e-6) | (self.speaks_s > now_s + usual_s)
        due = np.flatnonzero(is_due & self.is_on)
        self.speaks_s[due] = round(now_s + usual_s, 1)
        return due

    def ranks_of(self, machines: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the ranks of some machines, in their order."""
        return (self.first[machines, None] + self.locals).ravel()
