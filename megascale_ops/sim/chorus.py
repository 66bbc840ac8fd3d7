# SPDX-License-Identifier: Apache-2.0
"""Heartbeats that tell nothing but that ranks went on, or stand, are handed in together (``Embedded.go_on``)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.controller.embedded import Embedded, Signs, Steady, Told
from megascale_ops.sim.beats import Beats
from megascale_ops.sim.clock import Clock
from megascale_ops.sim.machine import JOB, Machine
from megascale_ops.sim.training import BEAT_AGO_S, Training
from megascale_ops.sim.wire import Wire

Numbers = npt.NDArray[np.intp]  # of machines


class Chorus(NamedTuple):
    """Whose agents speak together, and to whom, when and how."""

    beats: Beats
    machines: Sequence[Machine]
    controller: Embedded
    clock: Clock
    wire: Wire


def speak(chorus: Chorus, due: Numbers, training: Training | None, *, is_quiet: bool) -> Numbers:
    """Hand in together what can be; return those that must speak for themselves."""
    due = _speak_of_none(chorus, due)
    return due if training is None else _speak_of_ranks(chorus, due, training, is_quiet=is_quiet)


def _speak_of_none(chorus: Chorus, due: Numbers) -> Numbers:
    """Hand in together who has no rank and no news; return the others."""
    are_idle = _idle(chorus, due)
    idle = due[are_idle]
    alone = idle[chorus.wire.samples(len(idle), "")]
    idle = idle[~np.isin(idle, alone)] if len(alone) else idle
    if not len(idle):
        return due
    no_rank = np.zeros(0, np.intp)
    taken = chorus.controller.go_on(Steady("", 0, _signs(chorus, idle, ranks=0), None, no_rank, ()))
    is_refused = _note(chorus, idle, taken.refused)
    return due[~are_idle | np.isin(due, alone) | np.isin(due, idle[is_refused])]


def _idle(chorus: Chorus, due: Numbers) -> npt.NDArray[np.bool_]:
    """Return which machines have no rank, and nothing to tell but that they are there."""
    beats, now_s = chorus.beats, chorus.clock.passed_s
    found = beats.is_idle[due]
    for place in np.flatnonzero(~found & ~beats.has_ranks[due]).tolist():
        machine = chorus.machines[due[place]]
        if machine.is_idle(now_s):
            found[place] = True
            beats.is_idle[machine.number] = not machine.findings
    return found


def _speak_of_ranks(chorus: Chorus, due: Numbers, training: Training, *, is_quiet: bool) -> Numbers:
    beats = chorus.beats
    can = _only_go_on(chorus, due, training)
    goes_on = training.goes_on(beats.first[due], chorus.clock.passed_s)
    if training.absent is not None:
        can &= beats.stands[due] | goes_on
    which = np.flatnonzero(can)
    can[which[chorus.wire.samples(len(which))]] = False
    alone, standing, together = due[~can], due[can & ~goes_on], due[can & goes_on]
    refused: list[Numbers] = []
    if len(standing):
        refused.append(_stand(chorus, standing, training))
    if len(together):
        told = Told(*training.told_of_all(chorus.clock.passed_s))
        steps, first = np.unique(beats.told[together], return_index=True)
        for last in steps[np.argsort(first)].tolist():
            some = together[beats.told[together] == last]
            # In quiet times who has no step to tell of reports no rank.
            has_news = not is_quiet or last != training.step
            refused.append(_go_on(chorus, some, training, told if has_news else None, last))
    return np.concatenate([alone, *refused])


def _only_go_on(chorus: Chorus, due: Numbers, training: Training) -> npt.NDArray[np.bool_]:
    """Return of which machines all that is to be told is that their ranks go on in this round."""
    beats, now_s = chorus.beats, chorus.clock.passed_s
    found = beats.only_goes_on[due]
    for place in np.flatnonzero(~found).tolist():
        machine = chorus.machines[due[place]]
        crew = machine.life.crew
        if crew is not None and crew.training is training and machine.only_goes_on(now_s):
            found[place] = True
            # What was found is told for a while only.
            beats.only_goes_on[machine.number] = not machine.findings
    return found


def _go_on(chorus: Chorus, machines: Numbers, training: Training, told: Told | None, last: int) -> Numbers:
    """Hand in that the ranks of some went on, which have told of the same step last; return who was refused."""
    ranks = chorus.beats.ranks_of(machines)
    steps = training.columns(last, ranks) if told is not None else ()
    taken = chorus.controller.go_on(Steady(JOB, training.round, _signs(chorus, machines), told, ranks, steps))
    is_refused = _note(chorus, machines, taken.refused)
    heard = machines[~is_refused]
    chorus.beats.told[heard] = training.step
    _hasten(chorus, heard, taken.again_s)
    return machines[is_refused]


def _stand(chorus: Chorus, machines: Numbers, training: Training) -> Numbers:
    """Hand in that the ranks of some stand where they stood; return who was refused."""
    ranks = chorus.beats.ranks_of(machines)
    steady = Steady(JOB, training.round, _signs(chorus, machines), None, ranks, (), BEAT_AGO_S)
    taken = chorus.controller.go_on(steady)
    is_refused = _note(chorus, machines, taken.refused)
    _hasten(chorus, machines[~is_refused], taken.again_s)
    return machines[is_refused]


def _hasten(chorus: Chorus, machines: Numbers, again_s: float) -> None:
    """Let some speak again as soon as they were asked to, 0: as usual."""
    if again_s:
        at_s = round(chorus.clock.passed_s + again_s, 1)
        chorus.beats.speaks_s[machines] = np.minimum(chorus.beats.speaks_s[machines], at_s)


def _signs(chorus: Chorus, machines: Numbers, ranks: int | None = None) -> Signs:
    """Return the heartbeats of some machines, that tell of so many ranks each; None: of all of theirs."""
    beats, clock = chorus.beats, chorus.clock
    return Signs(
        beats.names[machines].tolist(),
        beats.agent_ids[machines],
        beats.seq[machines] + 1,
        clock.mono_s() + beats.offset_s[machines],
        np.full(len(machines), clock.wall_s()),
        np.full(len(machines), len(beats.locals) if ranks is None else ranks),
    )


def _note(chorus: Chorus, machines: Numbers, refused: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Note what was taken; return which was not."""
    names = set(refused)
    is_refused = np.zeros(len(machines), bool)
    if names:
        is_refused[:] = [name in names for name in chorus.beats.names[machines].tolist()]
    chorus.beats.seq[machines[~is_refused]] += 1
    return is_refused
