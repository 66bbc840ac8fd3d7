# SPDX-License-Identifier: Apache-2.0
"""One save in flight: where it is, and what may come next. Pure: the time is passed in.

    copying --copied--> writing --written--> waiting --sealed--> sealed
       |                   |                    |
       +-------------------+------ failed ------+--------------> failed
       +-------------------+------- left -------+--------------> left

``copying``: the GPU still copies (at once over on a CPU). ``writing``: the writer process writes this rank's files.
``waiting``: they are on disk; those of the other ranks, or the seal, are not. On one rank ``written`` and ``sealed``
follow each other at once. ``left``: of a save that was for the nodes alone, and failed there: left out, which costs
nothing but a warning. A save that has ended stays ended: a report that comes late is an illegal move, which
raises and changes nothing.
"""

from typing import Literal

State = Literal["copying", "writing", "waiting", "sealed", "failed", "left"]
Event = Literal["copied", "written", "sealed", "failed", "left"]

MOVES: dict[tuple[State, Event], State] = {
    ("copying", "copied"): "writing",
    ("writing", "written"): "waiting",
    ("waiting", "sealed"): "sealed",
    ("copying", "failed"): "failed",
    ("writing", "failed"): "failed",
    ("waiting", "failed"): "failed",
    ("copying", "left"): "left",
    ("writing", "left"): "left",
    ("waiting", "left"): "left",
}
ENDED: frozenset[State] = frozenset({"sealed", "failed", "left"})


class Flight:
    """A save since its copy began.

    Args:
        token: of the save, as its job carries it.
        step: that is saved.
        began_s: when the training process began to copy.
    """

    def __init__(self, token: str, step: int, began_s: float) -> None:
        self.token = token
        self.step = step
        self.state: State = "copying"
        self.reason = ""
        self.is_echo = False
        self._began_s = began_s
        self._copied_s = began_s
        self._moved_s = began_s
        self._ended_s: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is sealed, has failed or was left out."""
        return self.state in ENDED

    @property
    def share_is_over(self) -> bool:
        """Whether this rank's own files are on disk, or will never be."""
        return self.state not in {"copying", "writing"}

    def move(self, event: Event, now_s: float, reason: str = "", *, is_echo: bool = False) -> None:
        """Go on.

        Args:
            event: what happened.
            now_s: when.
            reason: of a failure, one sentence.
            is_echo: the failure is another rank's.

        Raises:
            ValueError: that cannot happen now; nothing is changed.
        """
        new = MOVES.get((self.state, event))
        if new is None:
            raise ValueError(f"the save of step {self.step} is {self.state}: it can't be {event}")
        self.state, self._moved_s = new, now_s
        if event == "copied":
            self._copied_s = now_s
        if new in ENDED:
            self._ended_s, self.reason, self.is_echo = now_s, reason, is_echo

    def age_s(self, now_s: float) -> float:
        """Seconds since it began, or until it ended."""
        return (now_s if self._ended_s is None else self._ended_s) - self._began_s

    def touch(self, now_s: float) -> None:
        """It goes on."""
        self._moved_s = now_s

    def quiet_s(self, now_s: float) -> float:
        """Seconds since it went on; 0 once it has ended."""
        return 0.0 if self.has_ended else now_s - self._moved_s

    def background_s(self, now_s: float) -> float:
        """Seconds since its copy was complete, or until it ended."""
        return (now_s if self._ended_s is None else self._ended_s) - self._copied_s

    def sentence(self, now_s: float) -> str:
        """Where it is, as a person would say it."""
        if self.state == "failed":
            return f"the save of step {self.step} failed: {self.reason}"
        doing = {
            "copying": "is still copied from the GPU",
            "writing": "is still written",
            "waiting": "waits for the files of other ranks and its seal",
            "sealed": "is sealed",
            "left": "was left out on the nodes",
        }
        return f"the save of step {self.step} {doing[self.state]} after {self.age_s(now_s):.1f} s"
