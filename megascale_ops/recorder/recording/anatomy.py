# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes. Pure: takes events with their times, returns finished steps.

The host's view of one step, from hooks that see begin and end of four things:

    data       a DataLoader's ``__next__``
    forward    from there to the begin of the backward pass (on a GPU: the launching of it)
    backward   ``torch.autograd.backward``
    optimizer  the optimizer's ``step``
    checkpoint ``torch.save``, distributed checkpoints, ours, or declared

What lies between (clipping, logging, printing) is "other". What any of them *waited* for other ranks is no work of
this one: it is subtracted from the part and counted separately ("waiting"), so that a slow rank is distinguished from
its victims. A script that declares a phase overrules the hooks until that phase ends; inside "eval", "checkpoint" and
"debugger" nothing counts as a step, and "eval" and "debugger" are not part of any step's time.

**Evaluation that is not declared** shows in hindsight: batches were asked for, or forward passes made, from which
nothing was learned. So a *quiet* stretch is watched, and booked as "eval" when it is known to be one:

- A batch is asked for with gradients off, or while a model that has trained is in evaluation mode (``Module.eval``).
  From there on time is booked as usual, but the earlier totals are kept.
- Another batch is asked for, or the loader has none left, or the model goes back to training mode, and there was no
  backward pass and no optimizer in between: all since then moves to "eval". From the second batch on the phase shown
  is "eval", too.
- A backward pass or an optimizer's step in between: it was training (a loader that is read with gradients off, a frozen
  teacher that is put into evaluation mode at each step), and the totals stand.
"""

# The first nine fields of a StepRecord: numbers on their way into the box, for which no record is made.
StepTimes = tuple[int, float, float, float, float, float, float, float, float]

# Time at a debugger's prompt makes no step slower, like time in evaluation.
_PARTS = {"data": 0, "forward": 1, "backward": 2, "optimizer": 3, "checkpoint": 4, "eval": 5, "debugger": 5}
_OTHER = 6
_EVAL = _PARTS["eval"]
_WHOLE = frozenset({_PARTS["checkpoint"], _EVAL})
_NO_STEPS_IN = frozenset({"eval", "checkpoint", "debugger"})
_LEARNS = frozenset({"backward", "optimizer"})
# What of a quiet stretch moves to "eval": all but what was a checkpoint or an evaluation already.
_MOVES = tuple(part for part in range(_OTHER + 1) if part not in _WHOLE)


class Anatomy:
    """The state of the step under way; times are monotonic seconds."""

    __slots__ = (
        "_began_s",
        "_declared",
        "_parts_s",
        "_quiet",
        "_quiet_batches",
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
        self._under = "startup"  # the phase by the hooks, while a declared phase hides it
        self._since_s = 0.0
        self._began_s = -1.0  # -1: no event yet; what came before the first is start-up, not a step
        self._parts_s = [0.0] * (_OTHER + 1)
        self._waiting_s = 0.0
        self._span_waiting_s = 0.0  # since the last event
        self._waited_until_s = 0.0
        self._saw_data = False
        self._quiet: tuple[list[float], float] | None = None  # the books when a quiet stretch began: parts, waiting
        self._quiet_batches = 0

    @property
    def may_step(self) -> bool:
        """Whether an optimizer's step counts as a training step now."""
        return not self._declared or _NO_STEPS_IN.isdisjoint(self._declared)

    def observe(self, phase: str, now_s: float) -> bool:
        """Take what a hook saw; return whether the phase shown has changed."""
        if self._quiet is not None and not self._declared and self._is_quiet(phase, now_s):
            return False
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

    def observe_quietly(self, now_s: float) -> bool:
        """A batch is asked for, and nothing will be learned from it as it seems; return as ``observe`` does."""
        if self._declared:
            return self.observe("data", now_s)
        if self._quiet is None:
            changed = self.observe("data", now_s)
            self.quieten(now_s)
            self._quiet_batches = 1
            return changed
        self._quiet_batches += 1
        if self._quiet_batches == 1:  # the first since the model was put into evaluation mode
            self._charge(now_s)
            self.phase = self._under = "data"
            return True
        self._was_eval(now_s)
        was, self.phase = self.phase, "eval"
        self._under = "eval"
        return was != "eval"

    def quieten(self, now_s: float) -> None:
        """A quiet stretch begins."""
        if self._quiet is None and not self._declared and self._began_s >= 0:
            self._charge(now_s)
            self._quiet = list(self._parts_s), self._waiting_s
            self._quiet_batches = 0

    def learn_again(self, now_s: float) -> bool:
        """The model that was put into evaluation mode goes back; return whether the phase shown has changed."""
        if self._quiet is None or self._declared:
            return False
        self._was_eval(now_s)
        self._quiet = None
        self.phase = self._under = "other"
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether a quiet stretch goes on."""
        return self._quiet is not None

    def declare(self, phase: str, now_s: float) -> None:
        """Begin a phase that the script declares; they nest."""
        if self._began_s >= 0 or phase not in _NO_STEPS_IN:  # an evaluation or a load before all steps is start-up
            self._charge(now_s)
        if phase not in _NO_STEPS_IN:
            self._quiet = None  # the script's declaration takes precedence
        self.phase = phase
        self._declared.append(phase)

    def undeclare(self, now_s: float) -> None:
        """End the innermost declared phase; the enclosing one, else the hooks, gives the phase from now on."""
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
        fresh_s = now_s - self._waited_until_s
        self._waited_until_s = now_s
        if seconds < fresh_s:  # noqa: PLR1730  as in ``finish``: once a collective
            fresh_s = seconds
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
        self._quiet = None
        # Without a DataLoader the forward pass is taken to begin right after the step.
        self._under = "other" if self._saw_data else "forward"
        if not self._declared:
            self.phase = self._under
        self._saw_data = False
        return (
            step, now_s, wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s,
            waiting_s,
        )  # fmt: skip

    def _is_quiet(self, phase: str, now_s: float) -> bool:
        """Hold what a hook saw against the quiet stretch; return whether it changes nothing that is shown."""
        if phase in _LEARNS:
            self._quiet = None
            return False
        if phase == "data":  # with gradients on, and no model in evaluation mode: training goes on
            if self.phase != "other":
                self._was_eval(now_s)
            self._quiet = None
            return False
        if phase == "other" and self._quiet_batches > 0:
            self._was_eval(now_s)  # the loader has no batch left
            return False
        return self.phase == "eval"

    def _was_eval(self, now_s: float) -> None:
        """Book all since the quiet stretch began as evaluation, and begin another stretch."""
        assert self._quiet is not None
        self._charge(now_s)
        kept_s, waiting_s = self._quiet
        parts_s = self._parts_s
        for part in _MOVES:
            parts_s[_EVAL] += parts_s[part] - kept_s[part]
            parts_s[part] = kept_s[part]
        parts_s[_EVAL] += self._waiting_s - waiting_s
        self._waiting_s = waiting_s
        self._quiet = list(parts_s), waiting_s

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
