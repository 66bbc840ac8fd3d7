# SPDX-License-Identifier: Apache-2.0
"""A verdict that names thousands of ranks: where they are is found node by node, in the order that it names them."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job import diagnose
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.job_record import JobRecord, Member
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import Progress, RankReport

NODES, EACH = 4, 3


def told(p50_s: dict[int, float], silent: set[int]) -> tuple[Registry, Job]:
    """A job of four nodes; of some ranks the typical step is known, and some nodes are not heard."""
    registry = Registry()
    members = tuple(Member(f"n{number}", f"r{number}", f"j{number}", EACH, "", 0) for number in range(NODES))
    for number in set(range(NODES)) - silent:
        ranks = tuple(
            RankReport(
                rank, 0, 1, 1, NODES * EACH, progress=Progress(step_p50_s=p50_s[rank]) if rank in p50_s else None
            )
            for rank in range(number * EACH, (number + 1) * EACH)
        )
        registry.fold(
            Heartbeat(f"n{number}", f"a{number}", 1, 1.0, 1.0, full=True, jobs=(JobReport("job", 1, "", ranks),)), 1.0
        )
    return registry, Job(JobRecord(job="job", round=1, members=members), 1.0)


@given(
    st.lists(st.integers(0, NODES * EACH + 1), unique=True),
    st.dictionaries(st.integers(0, NODES * EACH - 1), st.sampled_from([0.0, 0.5, 6.34])),
    st.sets(st.integers(0, NODES - 1)),
)
def test_nodes_and_the_typical_step_of_those_that_a_verdict_names(
    culprits: list[int], p50_s: dict[int, float], silent: set[int]
) -> None:
    """Whoever is named in whatever order, known or not: as if each node were asked for each of them."""
    registry, job = told(p50_s, silent)
    verdict = Verdict("loss_nan", "all have lost their loss", 0.9, culprits=tuple(culprits))

    placed, step_s = diagnose.place(registry, job, verdict)

    here = [
        (f"n{number}", rank)
        for number in sorted(set(range(NODES)) - silent)
        for rank in culprits
        if rank // EACH == number
    ]
    assert placed.nodes == tuple(dict.fromkeys(node for node, _ in here))
    assert step_s == next((p50_s[rank] for _, rank in here if p50_s.get(rank)), 0.0)
