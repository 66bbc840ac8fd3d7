# SPDX-License-Identifier: Apache-2.0
"""When a host that was lost is looked at again, to start its run there once more. Pure: the time is an argument.

A host is lost when ssh to it ends: the machine has died, the network was cut, or its run was killed. The job goes on
by its own rule for lost nodes meanwhile, and takes the node in again as any other that joins.
"""

# 5 s: a connection that was cut is there again soon. 60 s: a machine that boots takes minutes, and an attempt costs it
# a login.
FIRST_S, MOST_S = 5.0, 60.0
# 60 s: a run that has lived for so long had joined; what ends it then is something new.
STEADY_S = 60.0
# 30 s: a run that ends by itself so soon after it was started again found its own forerunner there, which has not
# noticed yet that its connection is gone, or a machine that is not ready yet.
EARLY_S = 30.0


class Comeback:
    """What is known of one host's absences.

    Attributes:
        lost_s: Since when the host is lost; None: it is not.
        is_again: Its run was started again at least once.
    """

    def __init__(self) -> None:
        self.lost_s: float | None = None
        self.is_again = False
        self._began_s = 0.0
        self._due_s = 0.0
        self._tries = 0

    def begin(self, now_s: float) -> None:
        """The host's run was started."""
        self.is_again = self.lost_s is not None
        self.lost_s = None
        self._began_s = now_s

    def lose(self, now_s: float) -> float:
        """The host is lost, or still is; return in how many seconds it is looked at."""
        if self.lost_s is None:
            if now_s - self._began_s >= STEADY_S:
                self._tries = 0
            self.lost_s = now_s
        pause_s = min(MOST_S, FIRST_S * 2.0 ** min(self._tries, 10))
        self._tries += 1
        self._due_s = now_s + pause_s
        return pause_s

    def is_due(self, now_s: float) -> bool:
        """Return whether to look at the host now."""
        return self.lost_s is not None and now_s >= self._due_s

    def is_early(self, now_s: float) -> bool:
        """Return whether its run was started again a moment ago."""
        return self.is_again and now_s - self._began_s < EARLY_S
