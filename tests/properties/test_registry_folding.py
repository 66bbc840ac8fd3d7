# SPDX-License-Identifier: Apache-2.0
"""The registry against a model: any mix of late, doubled, lost and reordered heartbeats of restarting agents."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import ProcessReading, RankReport

RANKS = st.dictionaries(st.integers(0, 3), st.sampled_from("RSTZ"), max_size=4)
SENT = st.lists(st.tuples(RANKS, st.booleans(), st.integers(1, 2)), min_size=1, max_size=20)


def _heartbeat(seq: int, ranks: dict[int, str], round_: int, *, full: bool) -> Heartbeat:
    reports = tuple(
        RankReport(rank=rank, local_rank=rank, pid=1, round=round_, process=ProcessReading(state=state))
        for rank, state in ranks.items()
    )
    jobs = (JobReport("job", round_, ranks=reports),)
    return Heartbeat(node="n", agent_id="a", seq=seq, mono_s=float(seq), wall_s=0.0, full=full, jobs=jobs)


@given(SENT, st.data())
def test_the_view_is_what_the_accepted_heartbeats_add_up_to(
    sent: list[tuple[dict[int, str], bool, int]], data: st.DataObject
) -> None:
    """Only rising numbers are taken in; a full one replaces, a partial one updates, another round begins anew."""
    heartbeats = [_heartbeat(seq, *one[::2], full=one[1]) for seq, one in enumerate(sent, start=1)]
    order = data.draw(st.lists(st.sampled_from(range(len(heartbeats))), max_size=30))
    registry = Registry()
    newest, expected, expected_round = 0, {}, 0

    for place in order:
        heartbeat, (ranks, full, round_) = heartbeats[place], sent[place]
        folded = registry.fold(heartbeat, 0.0)

        assert folded.accepted == (heartbeat.seq > newest)
        if folded.accepted:
            newest = heartbeat.seq
            if full or round_ != expected_round:
                expected = {}
            expected.update(ranks)
            expected_round = round_
        seen = {one.report.rank: one.report.process.state for one in registry.ranks("job", expected_round, ["n"], 0.0)}
        assert seen == expected


@given(SENT)
def test_whoever_listens_to_send_full_knows_everything(sent: list[tuple[dict[int, str], bool, int]]) -> None:
    """After an answered send_full the view is what the agent sees, whatever was lost before."""
    registry = Registry()
    for seq, (ranks, full, round_) in enumerate(sent, start=1):
        if seq % 3 == 0:
            continue  # lost on the way
        registry.fold(_heartbeat(seq, ranks, round_, full=full), 0.0)

    last = len(sent) + 1
    answer = registry.fold(_heartbeat(last, {0: "R"}, 1, full=False), 0.0)
    if answer.send_full:
        answer = registry.fold(_heartbeat(last + 1, {0: "R", 1: "S"}, 1, full=True), 0.0)
        assert {one.report.rank for one in registry.ranks("job", 1, ["n"], 0.0)} == {0, 1}

    assert not answer.send_full
