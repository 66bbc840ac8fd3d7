# SPDX-License-Identifier: Apache-2.0
"""A verdict quotes the hardware of the ranks it names, and of no others."""

import msgspec
import pytest

from megascale_ops.diagnosis.hardware import MOST_QUOTED, NodeHardware, RankPlace, explained, quote
from megascale_ops.schema.health import HardwareFinding, Verdict
from megascale_ops.schema.progress import RankError
from tests.fakes.controlled_job import World

XID = HardwareFinding("xid_79", "GPU 3: Xid 79, the GPU has fallen off the bus", "kernel_log", "fail", "GPU-3")
OTHER = HardwareFinding("xid_48", "GPU 4: Xid 48, two wrong bits", "kernel_log", "fail", "GPU-4")
HOT = HardwareFinding("throttled_hw_thermal", "GPU 3: its clocks were lowered for 60% of the time", "gpu", gpu="GPU-3")
OOM = HardwareFinding("oom_kill", "the kernel killed python (process 77) for memory", "kernel_log", pids=(77,))
FULL = HardwareFinding("disk_full_run_bytes", "0.4% of the bytes of /runs are free", "disks", "fail")
NOTE = HardwareFinding("xid_31", "GPU 4: Xid 31", "kernel_log", "note", "GPU-4")
RANK = RankPlace(5, 77, "GPU-3")


def verdict(fault: str, **more: object) -> Verdict:
    """Return a verdict on rank 5 of node a."""
    fields: dict[str, object] = {"reason": "rank 5 failed", "confidence": 0.9, "culprits": [5], "nodes": ["a"]}
    return msgspec.convert({"fault": fault, **fields, **more}, Verdict)


def seen(*findings: HardwareFinding, rank: RankPlace = RANK) -> list[NodeHardware]:
    """Return what node a says."""
    return [NodeHardware("a", findings, (rank,))]


def test_the_own_gpu_is_evidence_and_gets_into_the_sentence() -> None:
    """The verdict shows at once that it is no bug."""
    quoted = quote(verdict("cuda_error"), seen(OTHER, XID))

    assert quoted.reason == "rank 5 failed; GPU 3: Xid 79, the GPU has fallen off the bus"
    assert [(one.name, one.rank, one.node, one.source) for one in quoted.evidence] == [
        ("hardware_xid_79", 5, "a", "hardware"),
    ]


def test_the_other_gpus_speak_only_when_it_is_not_known_which_is_the_ranks() -> None:
    """Then they are evidence about the node, and nothing gets into the sentence."""
    quoted = quote(verdict("cuda_error"), seen(OTHER, XID, NOTE, rank=RankPlace(5, 77, "")))

    assert quoted.reason == "rank 5 failed"
    assert sorted(one.name for one in quoted.evidence) == ["hardware_xid_48", "hardware_xid_79"]
    assert {one.rank for one in quoted.evidence} == {-1}


def test_a_straggler_that_shares_its_gpu_is_told_with_whom() -> None:
    """A process that an earlier job left behind, or two ranks that were given the same one."""
    text = (
        "GPU 3: 2 processes compute on it, which costs each of them time: 77 (60% of the time), 4711 (38% of the time)"
    )
    shared = HardwareFinding("gpu_shared", text, "gpu", gpu="GPU-3", pids=(77, 8))

    quoted = quote(verdict("straggler", cause="compute"), seen(shared))

    assert quoted.cause == "gpu"
    assert quoted.reason == f"rank 5 failed; {text}"


def test_what_concerns_the_whole_node_is_evidence_for_each_of_its_ranks() -> None:
    """A full disk, an adapter that is down."""
    quoted = quote(verdict("exception"), seen(FULL))

    assert [one.text for one in quoted.evidence] == ["a: 0.4% of the bytes of /runs are free"]
    assert quoted.reason == "rank 5 failed"


def test_a_slow_rank_whose_gpu_lowers_its_clocks_is_throttled() -> None:
    """Unless its time goes where no clock matters; a GPU that is broken otherwise is the cause as such."""
    assert quote(verdict("straggler", cause="launch"), seen(HOT)).cause == "throttled"
    assert quote(verdict("straggler", cause="input"), seen(HOT)).cause == "input"
    assert quote(verdict("straggler", cause="compute"), seen(XID)).cause == "gpu"
    assert quote(verdict("straggler", cause="compute"), seen(FULL)).cause == "compute"
    assert quote(verdict("cuda_error"), seen(HOT)).cause == ""
    unknown = RankPlace(1, 4711, "")
    assert quote(verdict("straggler", cause="compute"), seen(HOT, rank=unknown)).cause == "compute"


def test_who_was_killed_for_memory_ran_out_of_memory() -> None:
    """The kernel's own word about this very process; a kill of another process changes nothing."""
    stranger = msgspec.structs.replace(OOM, pids=(78,))

    assert quote(verdict("killed"), seen(OOM)).fault == "out_of_memory"
    assert quote(verdict("killed"), seen(stranger)).fault == "killed"
    assert quote(verdict("frozen"), seen(OOM)).fault == "frozen"


def test_quoting_twice_says_it_once_and_what_is_over_is_taken_back() -> None:
    """A verdict that is given anew has the hardware as it is then."""
    once = quote(verdict("straggler"), seen(HOT))
    twice = quote(once, seen(HOT))
    over = quote(once, [])

    assert twice == once
    assert over.evidence == ()


def test_what_comes_late_adds_evidence_and_changes_nothing_else() -> None:
    """The decision is made; its evidence stays, also when the finding has ended since."""
    judged = quote(verdict("killed"), seen(FULL))

    late = quote(judged, seen(OOM), late=True)

    assert (late.fault, late.reason) == (judged.fault, judged.reason)
    assert [one.name for one in late.evidence] == ["hardware_disk_full_run_bytes", "hardware_oom_kill"]
    assert quote(late, [], late=True) == late


def test_a_node_where_everything_is_wrong_is_quoted_in_part() -> None:
    """The worst first, and no more than a person reads."""
    many = [msgspec.structs.replace(FULL, name=f"disk_{number}", severity="warn") for number in range(40)]

    quoted = quote(verdict("exception"), seen(*many, XID))

    assert len(quoted.evidence) == MOST_QUOTED
    assert quoted.evidence[0].name == "hardware_xid_79"


def test_a_line_that_names_the_process_is_the_ranks_own() -> None:
    """Also when its GPU is unknown."""
    named = msgspec.structs.replace(NOTE, pids=(77,))

    quoted = quote(verdict("cuda_error"), seen(named, rank=RankPlace(5, 77, "")))

    assert [(one.name, one.rank) for one in quoted.evidence] == [("hardware_xid_31", 5)]


def test_a_crash_in_a_library_of_the_rank_gets_into_the_sentence() -> None:
    """The kernel's log names process and library; a crash in a program of its own is evidence alone."""
    nccl = HardwareFinding("segfault", "python (process 77) crashed in libnccl.so.2", "kernel_log", "warn", pids=(77,))
    own = HardwareFinding("segfault", "python (process 77) crashed in zsh", "kernel_log", "note", pids=(77,))

    quoted, plain = quote(verdict("segfault"), seen(nccl)), quote(verdict("segfault"), seen(own))

    assert quoted.reason == "rank 5 failed; python (process 77) crashed in libnccl.so.2"
    assert (plain.reason, [one.rank for one in plain.evidence]) == ("rank 5 failed", [5])


def test_an_nvlink_error_that_was_not_fatal_is_no_cause() -> None:
    """It is quoted as evidence of the own GPU, and a straggler keeps the cause that was measured."""
    nonfatal = HardwareFinding("xid_145_none", "GPU 3: Xid 145, a non-fatal error", "kernel_log", "note", "GPU-3")

    quoted = quote(verdict("straggler", cause="compute"), seen(nonfatal))

    assert (quoted.cause, quoted.reason) == ("compute", "rank 5 failed")
    assert [one.name for one in quoted.evidence] == ["hardware_xid_145_none"]


async def test_a_rank_that_dies_of_its_gpu_is_judged_with_the_gpus_word() -> None:
    """From the agents' heartbeats to the incident that people read."""
    world = World()
    await world.up("a")
    world.rank(0).gpu, world.rank(1).gpu = "GPU-3", "GPU-4"
    world.findings["a"] = (XID,)
    world.beat("a")
    await world.settle()

    error = RankError("RuntimeError", "CUDA error: unspecified launch failure", "step", 20)
    dead = world.exit(0, 1, error=error, step=20)
    world.ask(world.new_join("a", cause="failure", exits=(dead, world.exit(1, -15, by_us=True)), previous_round=1))
    await world.wait(0.5, beating=False)

    found = world.incident(1).verdict
    assert found is not None
    assert (found.fault, found.culprits) == ("cuda_error", (0,))
    assert "Xid 79" in found.reason
    assert "hardware_xid_79" in {one.name for one in found.evidence}


async def test_what_comes_after_the_verdict_is_added_to_the_incident() -> None:
    """The runner's report of a death is sooner than the agent's next look at the kernel's log."""
    world = World()
    await world.up("a")
    world.rank(0).gpu = "GPU-3"
    world.beat("a")
    dead = world.exit(0, 1, error=RankError("RuntimeError", "CUDA error: misaligned address", "step", 20), step=20)
    world.ask(world.new_join("a", cause="failure", exits=(dead, world.exit(1, -15, by_us=True)), previous_round=1))
    await world.settle()
    before = world.incident(1).verdict

    world.findings["a"] = (msgspec.structs.replace(XID, since_wall_s=world.loop.wall() + 0.1),)
    world.beat("a")
    await world.settle()

    after = world.incident(1).verdict
    assert before is not None
    assert after is not None
    assert "hardware_xid_79" not in {one.name for one in before.evidence}
    assert "hardware_xid_79" in {one.name for one in after.evidence}
    assert (after.fault, after.reason) == (before.fault, before.reason)
    # What begins in the next round is no evidence for what ended this one.
    world.findings["a"] += (msgspec.structs.replace(FULL, since_wall_s=world.loop.wall() + 60.0),)
    world.beat("a")
    later = world.incident(1).verdict
    assert later is not None
    assert later.evidence == after.evidence


BEGAN_S = 1_000_000.0


def _failed(ago_s: float, **more: object) -> HardwareFinding:
    """Xid 119 of rank 5's GPU, so long before the silence began."""
    at_s = BEGAN_S - ago_s
    said = HardwareFinding("xid_119", "GPU 3: Xid 119", "kernel_log", "fail", "GPU-3", at_s, at_s, is_bad=True)
    return msgspec.structs.replace(said, **more)


def test_a_silence_that_began_as_the_gpu_failed_is_no_wait() -> None:
    """The driver gave up on the GPU 45 s after its rank fell silent, or wrote the Xid half a minute before."""
    for ago_s in (-45.0, 30.0):
        found = explained(verdict("sleeping", since_wall_s=BEGAN_S, sure_of="place"), seen(_failed(ago_s)))

        assert found is not None
        assert (found.fault, found.culprits, found.sure_of) == ("sleeping", (5,), "")
        assert found.reason == "rank 5 failed; GPU 3: Xid 119"


def test_where_all_wait_the_rank_whose_gpu_failed_is_named() -> None:
    """By the hosts' side no rank is missing; the kernel's log of one node tells why."""
    found = explained(verdict("silent", culprits=[], nodes=[], since_wall_s=BEGAN_S), seen(_failed(-45.0)))

    assert found is not None
    assert (found.fault, found.culprits, found.nodes, found.confidence) == ("gpu_stuck", (5,), ("a",), 0.9)


@pytest.mark.parametrize(
    "said",
    [
        _failed(3600.0),
        _failed(0.0, severity="warn"),
        _failed(0.0, gpu="GPU-4"),
        _failed(0.0, gpu="", name="port_down_mlx5_0_1"),
        _failed(0.0, gpu="", pids=(77,), name="oom_kill"),
    ],
    ids=["long before", "no failure", "another GPU", "a port", "no GPU's"],
)
def test_what_else_is_wrong_with_the_hardware_explains_no_silence(said: HardwareFinding) -> None:
    """The negative controls: an old failure, a warning, another rank's GPU, a port, a kill for memory."""
    assert explained(verdict("sleeping", since_wall_s=BEGAN_S), seen(said)) is None


@pytest.mark.parametrize("fault", ["busy", "slow"])
def test_a_rank_that_is_seen_to_work_is_left_alone_whatever_its_gpu_says(fault: str) -> None:
    """It uploads or goes on; what is wrong with its GPU ends it by itself."""
    assert explained(verdict(fault, since_wall_s=BEGAN_S), seen(_failed(0.0))) is None
