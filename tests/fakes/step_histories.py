# SPDX-License-Identifier: Apache-2.0
"""Histories of jobs that never ran: steps of equal ranks, one of which may be slow for a while."""

from collections.abc import Collection, Sequence

from megascale_ops.controller.history.step_history import StepHistory
from megascale_ops.schema.history import Facts, History, Turn
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import StepWork

ORIGIN_S = 1_790_000_000.0


def history_of(
    ranks: int,
    steps: int,
    *,
    slow: Collection[int] = (),
    slow_steps: range = range(0),
    meshes: Sequence[Mesh] = (),
    step_s: float = 1.0,
    ranks_a_node: int = 8,
    checkpoint_every: int = 0,
) -> History:
    """Return a job whose slow ranks work a quarter longer in ``slow_steps``; all wait for them."""
    kept = StepHistory(ORIGIN_S)
    for step in range(steps):
        is_slow = bool(slow) and step in slow_steps
        saved_s = 0.5 * step_s if checkpoint_every and step % checkpoint_every == 0 else 0.0
        wall_s = step_s * (1.2 if is_slow else 1.0) + saved_s
        for rank in range(ranks):
            own_s = step_s * (1.1 if is_slow and rank in slow else 0.88)
            mesh = meshes[rank] if meshes else Mesh()
            work = StepWork(step, wall_s, waiting_s=wall_s - own_s - saved_s, checkpoint_s=saved_s)
            kept.ingest_steps(rank, f"node-{rank // ranks_a_node}", mesh, (work,), ORIGIN_S + 4 + (step + 1) * step_s)
    until_s = ORIGIN_S + 4 + steps * step_s
    turns = (Turn(ORIGIN_S, "restarting", 1), Turn(ORIGIN_S + 2, "catching_up", 1), Turn(ORIGIN_S + 4, "running", 1))
    facts = Facts(
        job="gpt",
        round=1,
        world_size=ranks,
        began_wall_s=ORIGIN_S,
        until_wall_s=until_s,
        turns=turns,
        places=kept.places(),
    )
    return History(facts, kept.buckets())
