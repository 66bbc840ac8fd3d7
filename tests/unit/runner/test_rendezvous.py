# SPDX-License-Identifier: Apache-2.0
"""The rendezvous as torch's elastic engine sees it, without an engine."""

import pytest

from megascale_ops.errors import ControllerUnreachableError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.membership import Terms
from megascale_ops.runner.ranks.local_workers import LocalWorkers, Place
from megascale_ops.runner.rendezvous import MegascaleRendezvous
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
