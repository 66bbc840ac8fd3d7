# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes. Pure: told what happens when, it answers with finished steps.

The host's view of one step, from hooks that see begin and end of four things:

    data       a DataLoader's ``__next__``
    forward    from there to the begin of the backward pass (on a GPU: the launching of it)
    backward   ``torch.autograd.backward``
    optimizer  the optimizer's ``step``
    checkpoint ``torch.save``, distributed checkpoints, ours, or declared

What lies between (clipping, logging, printing) is "other". What any of them *waited* for other ranks is no work of
this one: it is taken out of the part and stands by itself ("waiting"), so that a slow rank and its victims can be told
apart. A script that declares a phase overrules the hooks until that phase ends; inside "eval" and "checkpoint" nothing
counts as a step, and "eval" is not part of any step's time.
"""

# The first nine fields of a StepRecord: numbers on their way into the box, for which no record is made.
StepTimes = tuple[int, float, float, float, float, float, float, float, float]

_PARTS = {"data": 0, "forward": 1, "backward": 2, "optimizer": 3, "checkpoint": 4, "eval": 5}
_OTHER = len(_PARTS)
_WHOLE = frozenset({_PARTS["checkpoint"], _PARTS["eval"]})
_NO_STEPS_IN = frozenset({"eval", "checkpoint"})


class Anatomy:
    """The state of the step under way; times are monotonic seconds."""

    __slots__ = (
        "_began_s",
        "_declared",
        "_parts_s",
        "_saw_data",
        "_since_s",
        "_span_waiting_s",
        "_under",
        "_waited_until_s",
        "_waiting_s",
        "phase",
    )

    def __init__(self) -> None:
        self.phase = "startup"
        self._declared: list[str] = []
        self._under = "startup"  # what the hooks say, while a declared phase hides it
        self._since_s = 0.0
        self._began_s = -1.0  # -1: no event yet; what came before the first is start-up, not a step
        self._parts_s = [0.0] * (_OTHER + 1)
        self._waiting_s = 0.0
        self._span_waiting_s = 0.0  # since the last event
        self._waited_until_s = 0.0
        self._saw_data = False

    @property
    def may_step(self) -> bool:
        """Whether an optimizer's step counts as a training step now."""
        return not self._declared or _NO_STEPS_IN.isdisjoint(self._declared)

    def observe(self, phase: str, now_s: float) -> bool:
        """Take what a hook saw; return whether the phase shown has changed."""
        self._under = phase
        if phase == "data":
            self._saw_data = True
        if self._declared:
            return False
        if self._span_waiting_s or self._began_s < 0:
            self._charge(now_s)
        else:  # what ``_charge`` does when nothing was waited for, without a call
            self._parts_s[_PARTS.get(self.phase, _OTHER)] += now_s - self._since_s
            self._since_s = now_s
        self.phase = phase
        return True

    def declare(self, phase: str, now_s: float) -> None:
        """Begin a phase that the script declares; they nest."""
        if self._began_s >= 0 or phase not in _NO_STEPS_IN:  # an evaluation or a load before all steps is start-up
            self._charge(now_s)
        self.phase = phase
        self._declared.append(phase)

    def undeclare(self, now_s: float) -> None:
        """End the innermost declared phase; the one around it (or the hooks) says what comes now."""
        if not self._declared:
            return
        if self._began_s >= 0:
            self._charge(now_s)
        self._declared.pop()
        if self._declared:
            self.phase = self._declared[-1]
        else:
            self.phase = "other" if self._under == "startup" else self._under

    def waited(self, seconds: float, now_s: float) -> None:
        """Add time spent waiting for other ranks, until now; where one wait lies inside another it counts once."""
        fresh_s = min(seconds, now_s - self._waited_until_s)
        self._waited_until_s = now_s
        if fresh_s > 0:
            self._span_waiting_s += fresh_s

    def finish(self, step: int, now_s: float) -> StepTimes:
        """End the step under way and begin the next."""
        parts_s = self._parts_s
        if self._span_waiting_s or self._began_s < 0:
            self._charge(now_s)
        else:  # as in ``observe``
            parts_s[_PARTS.get(self.phase, _OTHER)] += now_s - self._since_s
            self._since_s = now_s
        data_s, forward_s, backward_s, optimizer_s, checkpoint_s, eval_s, _ = parts_s
        wall_s = now_s - self._began_s - eval_s
        if wall_s < 0.0:  # noqa: PLR1730  calling ``max`` takes longer than all the rest of this line
            wall_s = 0.0
        waiting_s = self._waiting_s
        self._began_s = now_s
        self._parts_s = [0.0] * (_OTHER + 1)
        self._waiting_s = 0.0
        # Without a DataLoader nothing tells where the forward pass begins: right after the step.
        self._under = "other" if self._saw_data else "forward"
        if not self._declared:
            self.phase = self._under
        self._saw_data = False
        return (
            step, now_s, wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s,
            waiting_s,
        )  # fmt: skip

    def _charge(self, now_s: float) -> None:
        """Book the time since the last event to the phase that is shown."""
        if self._began_s < 0:
            self._began_s = self._since_s = now_s
        part = _PARTS.get(self.phase, _OTHER)
        span_s = now_s - self._since_s
        if self._span_waiting_s:
            # A save and an evaluation are treated as a whole: what they wait is not the step's waiting.
            if part not in _WHOLE:
                waiting_s = min(self._span_waiting_s, span_s)
                self._waiting_s += waiting_s
                span_s -= waiting_s
            self._span_waiting_s = 0.0
        self._parts_s[part] += span_s
        self._since_s = now_s
