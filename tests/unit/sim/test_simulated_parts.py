# SPDX-License-Identifier: Apache-2.0
"""Parts of the simulator: virtual time, laws and their sources, the mesh, what can't be simulated, the picture."""

import asyncio
import xml.etree.ElementTree as ET

import msgspec
import pytest

from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import Verdict
from megascale_ops.sim.clock import START_WALL_S, Clock, VirtualTime
from megascale_ops.sim.faults import Fault, Truth, read_faults
from megascale_ops.sim.kinds import KINDS
from megascale_ops.sim.laws import LAWS
from megascale_ops.sim.mesh import Layout
from megascale_ops.sim.plot import LETTER, LETTERS, MOST_BELOW, draw
from megascale_ops.sim.report import Answer, Report, sentences
from megascale_ops.sim.score import score
from megascale_ops.sim.settings import Settings, checked


def test_timers_follow_the_virtual_clock_and_can_be_left_behind() -> None:
    """A timer of twenty seconds takes no time; without timers it fires when they are led again."""
    clock = Clock()
    fired: list[float] = []

    async def turns() -> None:
        asyncio.get_running_loop().call_later(20.0, lambda: fired.append(clock.passed_s))
        for passed_s, with_timers in ((19.0, True), (100.0, False), (100.1, True)):
            clock.advance(passed_s, with_timers=with_timers)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: VirtualTime(clock)) as runner:
        runner.run(turns())

    assert fired == [100.1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"faults": ("lama3",)}, "there is no law of faults 'lama3': take byterobust, fail-slow, llama3, meta-rsc1"),
        ({"ranks": 12}, "12 ranks can't be spread over nodes of 8: take a multiple of 8"),
        ({"hours": -1.0}, "hours -1 can't be simulated: take 0.01 to"),
        ({"hours": float("nan")}, "hours nan can't be simulated"),
        ({"ranks": 0}, "ranks 0 can't be simulated: take 1 to"),
        ({"ranks": 1 << 20}, "ranks 1.04858e+06 can't be simulated"),
        ({"seed": -1}, "seed -1 can't be simulated"),
        ({"tp": 7}, "can't be divided into tensor parallel groups of 7"),
        ({"pp": 5}, "which 5 stages don't divide"),
        ({"noise": 2.0}, "noise 2 can't be simulated: take 0 to 0.5"),
        ({"spares": 100_000}, "spares 100000 can't be simulated"),
    ],
)
def test_what_cannot_be_simulated_gets_one_sentence(changes: dict[str, object], said: str) -> None:
    """An unknown law, ranks that nodes don't divide, numbers that no cluster has."""
    with pytest.raises(UsageError) as caught:
        checked(msgspec.structs.replace(Settings(), **changes))

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["hang", "hang@", "hang@x", "hang@-1", "hang@1:1.5", "frozen@1", "@1", "hang@nan"])
def test_a_fault_that_cannot_be_read_gets_one_sentence(text: str) -> None:
    """A kind that there is not, no time, a place beyond the ranks."""
    with pytest.raises(UsageError, match=r"can't be read|there is no kind of fault"):
        read_faults([text])


def test_the_law_of_llama_3_is_the_published_table() -> None:
    """419 interruptions in 54 days on 16,384 GPUs, 5.8 a day on 12,288; each law names its source."""
    law = LAWS["llama3"]

    assert sum(cause.weight for cause in law.causes) == 419
    assert law.events_a_day(12_288, 8) == pytest.approx(419 / 54 * 12_288 / 16_384)
    for one in LAWS.values():
        assert one.source
        for cause in one.causes:
            assert sum(weight for _, weight in cause.shows) == pytest.approx(1.0)
            assert {kind for kind, _ in cause.shows} <= KINDS.keys()


def test_kinds_name_classes_that_verdicts_may_carry() -> None:
    """Every class that counts as right is one of the schema's."""
    assert set().union(*(kind.classes for kind in KINDS.values())) <= FAULTS.keys()


def test_all_wait_for_the_one_that_does_not_come() -> None:
    """Its tensor parallel group in an all_reduce, its pipeline in a receive, the others at the end of the step."""
    layout = Layout(checked(Settings(ranks=64, ranks_per_node=4, tp=4, pp=4, faults=())))
    absent = layout.rank(1, 2, 2)

    waits = {rank: layout.wait_of(rank, absent) for rank in range(64)}

    assert [rank for rank, wait in waits.items() if wait is None] == [absent]
    functions = [wait.function for wait in waits.values() if wait is not None]
    assert {name: functions.count(name) for name in functions} == {"all_reduce": 3, "recv": 12, "reduce_scatter": 48}
    for rank, wait in waits.items():
        if wait is not None and wait.peer >= 0:
            here, peer = layout.meshes[rank], layout.meshes[wait.peer]
            assert (here.tp, here.dp) == (peer.tp, peer.dp)
            assert abs(here.pp - peer.pp) == 1
            assert abs(peer.pp - 2) < abs(here.pp - 2)
    assert len({layout.rank(mesh.tp, mesh.dp, mesh.pp) for mesh in layout.meshes}) == 64


def _incident(at_s: float, fault: str, rank: int, state: str = "recovered", round_: int = 1) -> Incident:
    verdict = Verdict(fault, "because", 0.9, culprits=(rank,), nodes=(f"node-{rank // 8:05d}",))
    return Incident(f"i-{at_s:.0f}", "simulated", round_, state, Marks(detected=START_WALL_S + at_s), verdict)


def _truth(at_s: float, kind: str, rank: int, lasts_s: float = 0.0) -> Truth:
    fault = Fault(at_s, kind, lasts_s=lasts_s)
    return Truth(fault, at_s, rank, f"node-{rank // 8:05d}", 1, 1)


def test_a_wrong_name_costs_precision_and_recall() -> None:
    """Another rank, another class, an incident about nothing and a fault that nobody noticed: each counts."""
    truths = [_truth(100, "segfault", 3), _truth(5000, "segfault", 9), _truth(9000, "hang", 4)]
    incidents = [
        _incident(101, "segfault", 3),
        _incident(5001, "segfault", 8),
        _incident(20_000, "straggler", 1, "over"),
    ]

    found = score(truths, incidents, {"i-101": 12.0}, 86_400.0)

    assert found.precision == found.recall == pytest.approx(1 / 3, abs=1e-4)
    assert [one.about for one in found.incidents] == [0, 1, -1]
    assert [one.is_right for one in found.faults] == [True, False, False]
    assert found.incidents[0].cost_s == 12.0


@pytest.mark.parametrize("fault", ["sleeping", "data_stall", "storage_stall"])
def test_a_rank_that_hangs_while_it_loads_or_saves_is_named_rightly_by_what_it_does(fault: str) -> None:
    """The class follows from where it stands still; an end is none."""
    found = score([_truth(100, "hang", 3)], [_incident(160, fault, 3)], {}, 86_400.0)
    ended = score([_truth(100, "hang", 3)], [_incident(160, "segfault", 3)], {}, 86_400.0)

    assert (found.faults[0].is_right, ended.faults[0].is_right) == (True, False)


def test_a_verdict_about_a_slow_rank_is_about_that_rank_while_it_is_slow() -> None:
    """A crash meanwhile is about the crash; a warning an hour later still about the slow rank."""
    truths = [_truth(100, "slow", 3, lasts_s=7200.0), _truth(3000, "segfault", 9)]

    found = score(truths, [_incident(3001, "segfault", 9), _incident(6000, "straggler", 3, "over")], {}, 86_400.0)

    assert [one.about for one in found.incidents] == [1, 0]
    assert found.precision == found.recall == 1.0


def test_a_slow_machine_has_another_rank_in_the_next_round() -> None:
    """Once a node before it is gone the same GPU is another rank: that one is right then, and the old number is not."""
    truth = _truth(100, "slow", 19, lasts_s=7200.0)
    truth.ranks[2] = 11

    found = score(
        [truth],
        [
            _incident(200, "straggler", 19, "over"),
            _incident(300, "straggler", 11, "over", 2),
            _incident(400, "straggler", 19, "over", 2),
            _incident(500, "straggler", 19, "over", 3),
        ],
        {},
        86_400.0,
    )

    assert [one.is_right for one in found.incidents] == [True, True, False, False]


def test_a_fault_just_before_the_end_is_not_counted_against_the_controller() -> None:
    """It may still be waited for."""
    found = score([_truth(900, "hang", 1)], [], {}, 1000.0)

    assert found.faults[0].is_pending
    assert (found.precision, found.recall) == (-1.0, -1.0)


def test_picture_and_lines_show_any_text_as_text() -> None:
    """Both can be made of a run in which nothing happened, and of one with words that are markup."""
    run = Report(
        ranks=16, ranks_per_node=8, spares=1, hours=1.0, seed=0, laws=("llama3",), policy={}, state="running",
        wall_s=3600.0, steps=0, ratio=-1.0, effective=-1.0, true_effective=0.0, rows={"train": 0.0, "idle": 3600.0},
        restarts=0, evictions=0, heartbeats=1, refused=("<&>",), timeline=((0.0, "replacing"), (1.0, "<state>")),
        progress=(), precision=-1.0, recall=-1.0, incidents=(),
        faults=score([_truth(9, "hang", 1)], [], {}, 1000.0).faults,
    )  # fmt: skip

    root = ET.fromstring(draw(run))  # noqa: S314  made a line above

    assert root.tag.endswith("svg")
    assert "<state>" in {element.text for element in root.iter() if element.text}
    assert any("llama3: The Llama 3 Herd" in line for line in sentences(Answer(run)))


def test_a_picture_of_many_faults_can_be_read() -> None:
    """What letters mean is whole between both edges; letters of faults that come together lie below each other."""
    many = tuple(_truth(60.0 * number, kind, 1) for number, kind in enumerate(sorted(KINDS)))
    run = Report(
        ranks=16, ranks_per_node=8, spares=1, hours=10.0, seed=0, laws=("llama3",), policy={}, state="running",
        wall_s=36_000.0, steps=0, ratio=-1.0, effective=-1.0, true_effective=0.0, rows={"idle": 36_000.0},
        restarts=0, evictions=0, heartbeats=1, refused=(), timeline=((0.0, "running"),), progress=(), precision=-1.0,
        recall=-1.0, incidents=(), faults=score(many, [], {}, 36_000.0).faults,
    )  # fmt: skip

    root = ET.fromstring(draw(run))  # noqa: S314  made a line above

    texts = [element for element in root.iter() if element.tag.endswith("text")]
    letters = [(float(one.get("x", "")), float(one.get("y", ""))) for one in texts if len(one.text or "") == 1]
    words = [one.text or "" for one in texts]
    assert max(map(len, words)) <= LETTERS
    assert "rightly)" in " ".join(words)
    assert all(kind.replace("_", " ") in " ".join(words) for kind in KINDS)
    crowded = letters[: MOST_BELOW + 1]
    assert all(
        abs(one[0] - other[0]) >= LETTER or one[1] != other[1]
        for number, one in enumerate(crowded)
        for other in crowded[:number]
    )
