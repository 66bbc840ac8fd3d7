# SPDX-License-Identifier: Apache-2.0
"""The rendezvous as torch's elastic engine sees it, without an engine."""

import pytest

from megascale_ops.errors import ControllerUnreachableError, RefusedError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.membership import Membership, Terms
from megascale_ops.runner.ranks.local_workers import LocalWorkers, Place
from megascale_ops.runner.rendezvous import MegascaleRendezvous
from megascale_ops.schema.messages import Leave
from megascale_ops.schema.policy import JobPolicy

PLACE = Place("j", "n", "id", 1, "/boxes", "/run", "/run/checkpoints", 5.0)
TERMS = Terms(1, 1, "127.0.0.1", JobPolicy())


def test_a_rendezvous_that_is_shut_down_closes_its_connections() -> None:
    """Used as a library, no other part closes its HTTP session: torch shuts the rendezvous down, and that is all."""
    link = BlockingLink("http://127.0.0.1:9")
    rendezvous = MegascaleRendezvous(link, LocalWorkers(PLACE), TERMS)

    assert rendezvous.shutdown()

    with pytest.raises(ControllerUnreachableError, match="is closed"):
        link.status()
    rendezvous.shutdown()  # torch may do so twice


@pytest.mark.parametrize(("port", "shared"), [(0, True), (29501, False)])
def test_ranks_share_the_store_of_the_round_unless_rank_0_has_a_port_of_its_own(port: int, *, shared: bool) -> None:
    """Torch makes every rank a client where the store is shared, also of an address at which no program serves."""
    link = BlockingLink("http://127.0.0.1:9")
    rendezvous = MegascaleRendezvous(link, LocalWorkers(PLACE), TERMS, master=("localhost", port))

    assert rendezvous.use_agent_store is shared

    rendezvous.shutdown()


def test_an_outcome_that_an_older_controller_refuses_is_told_as_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None that it knows would leave the job alive; another refusal is told as it is, the negative control."""
    link, sent = BlockingLink("http://127.0.0.1:9"), list[str]()
    refusals = ["outcome 'evicted' is none of succeeded, failed, cancelled", "no runner x of node n is known for job j"]

    def refuse(word: Leave) -> None:
        sent.append(word.outcome)
        raise RefusedError(refusals[len(sent) - 1])

    monkeypatch.setattr(link, "leave", refuse)
    said = []
    for _ in refusals:
        caplog.clear()
        part = Membership(link, LocalWorkers(PLACE), TERMS)
        part.round = 3
        part.leave("evicted", "its engine takes it away")
        part.leave("cancelled")  # as the runner does when its ranks have ended
        said.append(caplog.messages)
    link.close()

    assert sent == ["evicted", "evicted"]
    assert len(said[0]) == 1
    assert "older than this program and knows no node that leaves as evicted: it will take n for lost" in said[0][0]
    assert said[1] == ["the controller was not told that n is done: no runner x of node n is known for job j"]


def test_restarts_are_counted_from_the_first_round_of_this_runner() -> None:
    """By any cause; a job that begins a new life counts its rounds on, and its restarts anew."""
    local_workers = LocalWorkers(PLACE)

    counts = []
    for number in (4, 5, 7):
        local_workers.begin_round(number)
        told = local_workers.environment_of({"TORCHELASTIC_RESTART_COUNT": "0"}, "")
        counts.append(told["TORCHELASTIC_RESTART_COUNT"])

    assert counts == ["0", "1", "3"]


def test_ranks_are_told_which_job_of_its_name_they_are() -> None:
    """What stands in the environment is the round's own, not that of a job which started this one."""
    local_workers = LocalWorkers(PLACE)

    local_workers.begin_round(4, "abc")
    told = local_workers.environment_of({"MEGASCALE_JOB_ID": "of another"}, "")

    assert (told["MEGASCALE_JOB_ID"], told["MEGASCALE_ROUND"]) == ("abc", "4")
