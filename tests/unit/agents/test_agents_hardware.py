# SPDX-License-Identifier: Apache-2.0
"""All checks of a node together: what is found, what is told, what is shown; a sick one never silences the others."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from megascale_agents.collectors import pressure
from megascale_agents.collectors.collector import Collector
from megascale_agents.collectors.table import COLLECTORS, collector, declared
from megascale_agents.config import AgentConfig
from megascale_agents.hardware.checks import Status
from megascale_agents.hardware.hardware import Hardware
from megascale_agents.metrics.hardware import samples_of
from megascale_agents.uplink.heartbeat import Composer

from megascale_ops.schema.messages import MAX_BODY_BYTES, MOST_FINDINGS, Heartbeat
from megascale_ops.schema.metrics import METRICS
from tests.fakes.hardware import NVML_TREE, FakeMachine, load_pynvml, uuid_of

# What the agent may export: the table of metrics, and what collectors declare themselves.
KNOWN = METRICS | {metric.name: metric for metric in declared()}


class Node:
    """A node's hardware with a clock that is wound; its checks answer before the next look."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, has_log: bool = True) -> None:
        self.machine = FakeMachine(folder)
        monkeypatch.setenv("MEGASCALE_FAKE_NVML", str(self.machine.nvml))
        monkeypatch.setitem(sys.modules, "pynvml", load_pynvml())
        config = AgentConfig(
            box_root=str(folder),
            sys_root=str(self.machine.sys),
            proc_root=str(self.machine.proc),
            kernel_log=str(self.machine.kernel_log if has_log else folder / "no such log"),
        )
        self.now_s = 100.0
        self.failed: list[str] = []
        self.hardware = Hardware(
            config,
            "node-a",
            lambda name, _: self.failed.append(name),
            clock=lambda: self.now_s,
            wall=lambda: self.now_s + 1e9,
        )

    def look(self, seconds: float = 0.0) -> str:
        """Wind the clock, let every check that is due answer, and return what is urgent."""
        self.now_s += seconds
        urgent = self.hardware.poll_checks(self.now_s)
        self.answers()
        return urgent or self.hardware.poll_checks(self.now_s)

    def answers(self, but: str = "") -> None:
        """Wait until all checks that are asked have answered, but one."""
        for _, check in self.hardware._checks:
            if check._asked_s is not None and check.hung_since_s is None and check.name != but:
                check._answers.put(check._answers.get(timeout=60.0))

    def names(self) -> dict[str, str]:
        """Return what is wrong now, with its severity."""
        return {one.name: one.severity for one in self.hardware.findings}

    def statuses(self) -> dict[str, Status]:
        """Return what each check says."""
        return {check.name: check.status for check in self.hardware.checks()}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A healthy node, looked at once."""
    made = Node(tmp_path, monkeypatch)
    made.look()
    made.look(1.5)
    yield made
    made.hardware.close()


def test_a_healthy_node_has_nothing_to_say(node: Node) -> None:
    """Every check has looked, every status is ok, and the GPUs are known by their UUIDs."""
    assert node.names() == {}
    looked_at = {"gpu", "fabric", *COLLECTORS, "kernel_log"} & node.statuses().keys()
    assert looked_at >= {"gpu", "fabric", "pressure", "blocked", "disks", "kernel_log"}
    assert node.statuses() == dict.fromkeys(looked_at, Status.OK)
    assert node.hardware.uuids() == tuple(uuid_of(index) for index in range(8))


def test_a_failure_is_urgent_once_and_stands_until_it_is_over(node: Node) -> None:
    """An Xid goes out at once; what it leaves behind is told with the GPU's next look."""
    node.machine.xid(3, 79, "GPU has fallen off the bus.")
    first = node.look(0.1)
    again = node.look(0.1)
    node.machine.gpu(3, lost=15)
    lost = node.look(5.0)

    assert first.startswith("GPU 3: Xid 79")
    assert again == ""
    assert lost == "GPU 3: does not answer any more: it is lost"
    assert node.names() == {"gpu_lost": "fail", "xid_79": "fail"}
    assert node.statuses()["gpu"] is Status.FAIL
    assert {one.since_wall_s > 1e9 for one in node.hardware.findings} == {True}
    node.machine.gpu(3, lost=0)
    node.look(5.0)
    assert node.names() == {"xid_79": "fail"}


def test_where_the_log_may_not_be_read_nvml_tells_of_xids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most containers: the same finding and counter, with the GPU's next look; gone after ten minutes."""
    node = Node(tmp_path, monkeypatch, has_log=False)
    node.look()
    node.look(1.5)
    node.machine.gpu(3, xids=[79])

    urgent = node.look(5.0)
    (found,) = node.hardware.findings
    node.machine.gpu(3, xids=[79, 79])
    node.look(5.0)
    (again,) = node.hardware.findings
    node.look(700.0)
    node.hardware.close()

    assert urgent.startswith("GPU 3: Xid 79")
    assert (found.gpu, found.severity, found.is_bad, found.count, again.count) == (uuid_of(3), "fail", True, 1, 2)
    assert node.hardware.kernel.xids == {("3", 79, "restart_node"): 2}
    assert node.hardware.findings == ()


def test_an_xid_that_both_tell_is_counted_once(node: Node) -> None:
    """The log is quicker and knows the process; so NVML's word counts only where there is none."""
    node.machine.xid(3, 79)
    node.machine.gpu(3, xids=[79])
    node.look(5.0)

    assert node.hardware.kernel.xids == {("3", 79, "restart_node"): 1}


def test_since_when_something_is_wrong_is_kept(node: Node) -> None:
    """Its number may change with every look; the finding is the same one."""
    node.machine.gpu(2, fields={"270": 3_000_000_000})
    node.look(5.0)
    (first,) = node.hardware.findings
    node.machine.gpu(2, fields={"270": 5_000_000_000})
    node.look(5.0)
    (second,) = node.hardware.findings

    assert first.text != second.text
    assert first.since_wall_s == second.since_wall_s


def test_a_driver_that_hangs_is_a_finding_and_the_others_go_on(node: Node) -> None:
    """Unknown, counted, told once; adapters and disks are looked at as before, and the driver may come back."""
    gate = node.hardware._checks[0][1]
    hung = gate._look
    gate._look = lambda: gate._questions.get(timeout=30.0)  # stands still until the next request
    node.now_s += 5.0
    node.hardware.poll_checks(node.now_s)
    node.answers(but="gpu")
    node.machine.port("mlx5_0", state="1: DOWN")
    node.now_s += 11.0
    node.hardware.poll_checks(node.now_s)
    node.look(0.1)

    assert node.names() == {"no_answer_gpu": "warn", "port_down_mlx5_0_1": "fail"}
    assert node.statuses()["gpu"] is Status.UNKNOWN
    assert next(check.timeouts for check in node.hardware.checks() if check.name == "gpu") == 1
    gate._look = hung
    gate._questions.put("look")
    gate._answers.put(gate._answers.get(timeout=60.0))
    node.look(0.1)
    node.look(0.1)
    assert node.statuses()["gpu"] is Status.OK


def test_a_check_that_raises_is_counted_and_unknown(node: Node) -> None:
    """The daemon counts it; the check says why."""
    node.machine.driver(error=999)
    node.look(5.0)

    assert node.failed == ["gpu"]
    assert node.names() == {"no_answer_gpu": "warn"}
    assert node.statuses()["gpu"] is Status.UNKNOWN


def test_a_collector_that_reads_nonsense_silences_no_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it can't parse is its own failure, told as every other; what the others found in that look goes out."""
    node.machine.gpu(3, lost=15)
    node.machine.xid(3, 79)
    monkeypatch.setattr(pressure, "parse", lambda *_: int("some avg10=nonsense"))

    node.look(5.0)
    node.look(0.1)

    assert node.failed == ["pressure"]
    assert node.names() == {"gpu_lost": "fail", "xid_79": "fail", "no_answer_pressure": "warn"}
    assert node.statuses()["pressure"] is Status.UNKNOWN
    told = {name for name, _, _ in samples_of(node.hardware, "node-a")}
    assert "megascale_host_memory_pressure_ratio" not in told
    monkeypatch.undo()
    node.look(5.0)
    assert node.statuses()["pressure"] is Status.OK


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_collector_of_the_table_is_whole(name: str) -> None:
    """It has its functions, a share of a core that is small, and metrics with names of its own."""
    found = collector(name)
    own = getattr(found, "METRICS", ())

    assert isinstance(found, Collector)
    assert 0.0 < found.PACE.share <= 0.002
    assert all(metric.component == "agent" and metric.labels[:1] == ("node",) for metric in own)
    assert not {metric.name for metric in own} & METRICS.keys()
    assert len({metric.name for metric in declared()}) == len(declared())


def test_a_scrape_has_names_and_labels_of_the_table_only(node: Node) -> None:
    """Each sample fits its row; a lost GPU keeps its info and nothing that is not known any more."""
    node.machine.gpu(7, lost=15)
    node.machine.xid(7, 79)
    node.machine.log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20001, Fatal, Link 3")
    node.machine.log("nvme nvme2: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10")
    node.look(5.0)
    node.look(5.0)

    samples = list(samples_of(node.hardware, "node-a"))

    for name, labels, _ in samples:
        assert KNOWN[name].component == "agent"
        assert len(labels) == len(KNOWN[name].labels)
    assert len({(name, labels) for name, labels, _ in samples}) == len(samples)
    of_lost = {name for name, labels, _ in samples if "gpu" in KNOWN[name].labels and labels[1] == "7"}
    assert of_lost == {"megascale_gpu_info", "megascale_gpu_xid_events_total", "megascale_gpu_xid_age_seconds"}
    named = {name for name, _, _ in samples}
    hardware = {
        name for name in METRICS if name.startswith(("megascale_gpu_", "megascale_ib_", "megascale_health_"))
    } - {"megascale_gpu_bad_info", "megascale_ib_counters_full", "megascale_ib_counters_refused"}
    assert hardware <= named
    assert ("megascale_kernel_log_events_total", ("node-a", "nvme_reset", "warn"), 1.0) in samples


def test_an_xid_grows_old_and_young_again(node: Node) -> None:
    """What an alert asks: seconds since the newest of its kind, by the clock of its line and not of the look."""
    xid, sxid = "NVRM: Xid (PCI:0000:1a:00): 95, pid=7, x", "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20001, Fatal"
    node.machine.log(xid, node.now_s - 2.0)
    node.machine.log(sxid, node.now_s)
    node.look(1.0)

    def ages() -> list[float]:
        told = {name: value for name, _, value in samples_of(node.hardware, "node-a")}
        return [told["megascale_gpu_xid_age_seconds"], told["megascale_nvswitch_sxid_age_seconds"]]

    young = ages()
    node.look(600.0)
    old = ages()
    node.machine.log(xid, node.now_s)
    node.look(0.5)

    assert (young, old, ages()) == ([3.0, 1.0], [603.0, 601.0], [0.5, 601.5])


def test_a_node_stays_within_its_series(node: Node) -> None:
    """33 for each GPU and 18 for each port of InfiniBand; nothing that grows with time."""
    node.look(5.0)
    samples = list(samples_of(node.hardware, "node-a"))

    assert sum("gpu" in KNOWN[name].labels for name, _, _ in samples) <= 8 * 33
    assert sum("port" in KNOWN[name].labels for name, _, _ in samples) <= 2 * 18


def test_the_heartbeat_tells_findings_when_they_change(node: Node) -> None:
    """Nothing while all is well, everything in a full one; an older controller passes the fields over."""
    composer = Composer("node-a", "agent")

    def beat(now_s: float) -> Heartbeat:
        told = (node.hardware.findings, node.hardware.uuids())
        return composer.compose([], None, (now_s, now_s), hardware=told)

    full, quiet = beat(1.0), beat(2.0)
    node.machine.xid(1, 95)
    node.look(0.1)
    news, after = beat(3.0), beat(4.0)

    assert (full.findings, full.gpus[0]) == ((), uuid_of(0))
    assert (quiet.findings, quiet.gpus, after.findings) == (None, (), None)
    assert [one.name for one in news.findings or ()] == ["xid_95"]
    assert b"findings" not in msgspec.json.encode(quiet)


def test_a_node_where_everything_breaks_stays_below_the_bound(node: Node) -> None:
    """The worst are told first, and no heartbeat grows beyond what a controller takes."""
    for index in range(8):
        for number in (31, 48, 63, 74, 79, 95, 119):
            node.machine.xid(index, number, "x" * 900)
    node.look(0.1)

    findings = node.hardware.findings
    assert len(findings) == MOST_FINDINGS
    assert {one.severity for one in findings} == {"fail"}
    assert len(msgspec.json.encode(findings)) < MAX_BODY_BYTES / 8


def test_a_rank_is_known_by_the_gpu_that_its_process_computes_on(node: Node) -> None:
    """By NVML's list of processes; a process that uses none has none."""
    node.machine.gpu(6, pids=[4711])
    node.look(5.0)

    assert node.hardware.gpu.of(4711) == uuid_of(6)
    assert node.hardware.gpu.of(4712) == ""


def test_a_stray_context_on_the_first_gpu_is_not_where_a_rank_computes(node: Node) -> None:
    """A rank that allocates before it has chosen its GPU has one there; where memory is not told, the first counts."""
    node.machine.gpu(0, pids=[4711, 4712, 4713], held={"4711": 60 << 30, "4712": 500 << 20})
    node.machine.gpu(1, pids=[4712], held={"4712": 60 << 30})
    node.machine.gpu(2, pids=[4713])
    node.look(5.0)

    assert [node.hardware.gpu.of(pid) for pid in (4711, 4712, 4713)] == [uuid_of(0), uuid_of(1), uuid_of(0)]


def test_the_made_up_machine_keeps_the_path_of_who_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that is tested in another place than where it is installed stays the one that is tested."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/a:/elsewhere/b")

    machine = FakeMachine(tmp_path)

    path = machine.environment()["PYTHONPATH"].split(":")

    assert path == [str(NVML_TREE), "/elsewhere/a", "/elsewhere/b"]
    monkeypatch.delenv("PYTHONPATH")
    assert machine.environment()["PYTHONPATH"] == str(NVML_TREE)
