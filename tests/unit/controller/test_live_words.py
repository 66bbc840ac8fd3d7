# SPDX-License-Identifier: Apache-2.0
"""The sentences of the page."""

import pytest

from megascale_ops.controller.live.words import incident_line, undoing, what
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy_settings import read_settings


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_class_of_fault_has_a_sentence(fault: str) -> None:
    """No class is told by its program's word, of one rank or of two, and the verb agrees."""
    one = what(Verdict(fault, "", 0.9, culprits=(3,), nodes=("a",)))
    two = what(Verdict(fault, "", 0.9, culprits=(3, 5), nodes=("a", "b")))

    assert fault == "unknown" or "has a fault" not in one
    assert " was " not in two or "Node" not in two
    assert "_" not in one
    assert one[0].isupper()


@pytest.mark.parametrize(
    ("fault", "holds", "over"),
    [
        ("busy", "Ranks 3,5 work on something of its own", "Ranks 3,5 worked on something of its own"),
        ("waits", "Ranks 3,5 wait for nobody that waits", "Ranks 3,5 waited for nobody that waits"),
        ("disk_full", "Ranks 3,5 could not write: the disk is full", "Ranks 3,5 could not write: the disk was full"),
        ("gpu_stuck", "Ranks 3,5 have a GPU that does not come to its collective",
         "Ranks 3,5 had a GPU that did not come to its collective"),
        ("straggler", "Ranks 3,5 are slow and make all others wait", "Ranks 3,5 were slow and made all others wait"),
    ],
)  # fmt: skip
def test_of_many_the_verbs_of_the_ranks_alone_agree(
    fault: str, holds: str, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of a disk stays; a regular verb of a new class needs no line in any list."""
    monkeypatch.setitem(FAULTS, "waits", FAULTS["busy"]._replace(name="waits", says="waits for nobody that waits"))
    verdict = Verdict(fault, "", 0.9, culprits=(3, 5))

    assert (what(verdict), what(verdict, past=True)) == (holds, over)


def test_many_culprits_are_ranges() -> None:
    """A thousand ranks are one range, not a thousand numbers."""
    verdict = Verdict("killed", "", 0.9, culprits=tuple(range(1000)))

    assert what(verdict) == "Ranks 0-999 were killed"


def test_lost_nodes_are_named_up_to_four() -> None:
    """Of many nodes the first four are named and the rest is counted."""
    nodes = tuple(f"n{number}" for number in range(9))

    assert what(Verdict("node_lost", "", 0.9, nodes=nodes)) == "Nodes n0, n1, n2, n3 and 5 more do not answer"
    assert what(Verdict("node_lost", "", 0.9, nodes=("n0",))) == "Node n0 does not answer"


def test_what_is_over_is_told_as_past() -> None:
    """An incident that has ended does not read as if it went on."""
    verdict = Verdict("straggler", "", 0.9, culprits=(1, 2))

    holds = incident_line(Incident("job-1", "job", 1, "watching", verdict=verdict))
    over = incident_line(Incident("job-1", "job", 1, "over", verdict=verdict))

    assert holds.what == "Ranks 1-2 are slow and make all others wait"
    assert over.what == "Ranks 1-2 were slow and made all others wait"


def test_an_incident_is_a_line() -> None:
    """How long it took and what was lost follow from its marks and steps."""
    incident = Incident(
        "job-1", "job", 1, "recovered", Marks(began=100.0, detected=101.0, stepped=104.5),
        Verdict("killed", "signal 9", 0.9, (1,), ("a",), action="restart"), "restarted", 50, 40,
    )  # fmt: skip

    line = incident_line(incident)

    assert (line.what, line.recovered_s, line.steps_lost) == ("Rank 1 was killed", 4.5, 10)
    assert (line.began_wall_s, line.state, line.done) == (100.0, "recovered", "restarted")


def test_one_that_is_suspected_alone_is_told_from_one_that_is_acted_upon() -> None:
    """A page says that it is being mended only where something was ordered."""
    suspected = Incident("job-1", "job", 1, "open", Marks(began=100.0, detected=101.0, named=102.0))
    acted_upon = Incident("job-1", "job", 1, "open", Marks(began=100.0, detected=101.0, named=102.0, ordered=103.0))

    assert [incident_line(one).is_ordered for one in (suspected, acted_upon)] == [False, True]


@pytest.mark.parametrize("action", ["restart", "evict", "stop", "none", "warn", "wait", "ignore"])
def test_the_command_that_undoes_is_one_that_is_taken(action: str) -> None:
    """Whatever was done about whatever, the command that the page shows is a setting that `policy set` takes."""
    for fault in FAULTS:
        verdict = Verdict(fault, "", 0.9, action=action)

        text, command = undoing(Incident("job-1", "job", 1, "watching", verdict=verdict))

        assert text
        prefix, _, setting = command.rpartition(" ")
        assert prefix == "megascale-ops policy set job"
        assert read_settings([setting])
