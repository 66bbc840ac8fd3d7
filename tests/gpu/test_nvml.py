# SPDX-License-Identifier: Apache-2.0
"""The GPU collector over the real library: what it tells of a GPU at rest, at work, and after a fault in a kernel."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from megascale_agents.collectors.gpu_values import Gpu, parse
from megascale_agents.collectors.nvml import Nvml
from megascale_agents.hardware import findings

from megascale_ops.schema.metrics import METRICS

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# So many seconds of matrix products in one process.
WORK = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("begun", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""
IDLE = """
import time, torch
a = torch.zeros(1024, device="cuda")
print("begun", flush=True)
time.sleep(60)
"""
# Reads far behind everything that was allocated: Xid 31.
FAULT = """
import sys, torch
kernel = torch.cuda._compile_kernel(
    'extern "C" __global__ void far(float* x) { x[0] = x[1ull << 40]; }', "far")
x = torch.zeros(1, device="cuda")
kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[x])
try:
    torch.cuda.synchronize()
except RuntimeError:
    sys.exit(3)
"""


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    """The collector."""
    made = Nvml()
    yield made
    made.close()


@contextmanager
def begun(script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that says when it has begun; its process is gone afterwards."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def work() -> Iterator[subprocess.Popen[str]]:
    """A process that keeps the first GPU busy."""
    with begun(WORK) as process:
        yield process


def look(nvml: Nvml, apart_s: float) -> tuple[Gpu, Gpu]:
    """Return two looks at the first GPU, after one that only begins."""
    nvml.read(time.monotonic())
    time.sleep(apart_s)
    before = nvml.read(time.monotonic())
    time.sleep(apart_s)
    now = nvml.read(time.monotonic())
    return parse(before, None, {})[0], parse(now, before, {})[0]


def until(what: Callable[[], bool], deadline_s: float) -> bool:
    """Ask again and again until it is so, or too late."""
    end_s = time.monotonic() + deadline_s
    while not what() and time.monotonic() < end_s:
        time.sleep(0.1)
    return what()


def test_a_gpu_at_work_is_told_in_base_units(nvml: Nvml, work: subprocess.Popen[str]) -> None:
    """All that a Hopper knows, each in a range that only its own unit can have."""
    before, gpu = look(nvml, 1.0)

    properties = torch.cuda.get_device_properties(0)
    assert gpu.identity.uuid.removeprefix("GPU-") == str(properties.uuid)
    assert gpu.identity.model == properties.name
    assert gpu.lost == ""
    ranges = {
        "temperature_celsius": (15, 95),
        "memory_temperature_celsius": (15, 110),
        "power_watts": (150, 1000),
        "sm_clock_hertz": (0.5e9, 2.5e9),
        "memory_clock_hertz": (1e9, 5e9),
        "memory_used_bytes": (128 * 2**20, properties.total_memory * 1.1),
        "memory_size_bytes": (0.9 * properties.total_memory, 1.1 * properties.total_memory),
        "busy_ratio": (0.5, 1.0),
        "sm_active_ratio": (0.5, 1.0),
        "tensor_active_ratio": (0.2, 1.0),
        "memory_active_ratio": (0.001, 1.0),
        "row_remap_pending": (0, 0),
        "row_remap_failed": (0, 0),
    }
    told = {name: gpu.gauges[name] for name in ranges if name in gpu.gauges}
    print(told, sorted(ranges.keys() - told.keys()), gpu)
    assert {name: value for name, value in told.items() if not ranges[name][0] <= value <= ranges[name][1]} == {}
    needed = {"temperature_celsius", "power_watts", "sm_clock_hertz", "memory_used_bytes", "busy_ratio"}
    assert needed <= told.keys()
    assert gpu.energy_j is not None
    assert before.energy_j is not None
    assert 100 < gpu.energy_j - before.energy_j < 2_000  # a second of work
    assert set(gpu.throttled_s) <= {"sw_power_cap", "sync_boost", "sw_thermal", "hw_thermal", "power_brake"}
    assert all(gpu.throttled_s[reason] >= before.throttled_s[reason] for reason in gpu.throttled_s)
    assert gpu.ecc.keys() <= {"corrected", "uncorrected"}
    assert work.poll() is None


def test_who_shares_a_gpu_is_told(nvml: Nvml, work: subprocess.Popen[str]) -> None:
    """Two that compute, with how much of its time each has; one beside them that holds memory alone is none of them."""
    with begun(IDLE), begun(WORK) as other:
        time.sleep(4.0)  # what the idle one did at its start is over
        gpu = look(nvml, 5.0)[1]

    (found,) = [one for one in findings.of_gpus([gpu], {}, 5.0, {}) if one.name == "gpu_shared"]
    print(found.text)
    assert set(found.pids) == {work.pid, other.pid}
    assert 0.7 < sum(gpu.shares.values()) < 1.1


def test_a_look_takes_no_longer_than_it_may_wait(nvml: Nvml) -> None:
    """Ten looks in a row all answer; none is left out because the one before had let go of the library."""
    looks = [nvml.read(time.monotonic()) for _ in range(10)]

    # The library also lists GPUs that this process may not use (CUDA_VISIBLE_DEVICES).
    (seen,) = {len(one.gpus) for one in looks}
    assert seen >= torch.cuda.device_count()
    assert all(not gpu.lost for one in looks for gpu in one.gpus)


def test_an_xid_is_told_by_the_library(nvml: Nvml) -> None:
    """A kernel that reads where nothing is makes Xid 31 within seconds; before it there is none."""
    assert nvml.read(0.0).xids == ()
    if not nvml._events:
        pytest.skip("this driver tells no events here (containers without the right to listen)")
    assert nvml.read(1.0).xids == ()

    fault = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120, check=False)
    told: list[tuple[int, int]] = []

    assert fault.returncode == 3, fault.stderr
    assert until(lambda: bool(told.extend(nvml.read(time.monotonic()).xids) or told), 20.0), "no event came"
    assert (0, 31) in told


def test_the_agent_shows_the_real_gpu(tmp_path: Path) -> None:
    """By its command line, without a controller: every series is in the table, and the GPU's are there."""
    command = [
        sys.executable, "-m", "megascale_ops.cli.main", "agent", "--node", "here",
        "--controller", "http://127.0.0.1:9", "--box-root", str(tmp_path), "--metrics-listen", "127.0.0.1:9477",
    ]  # fmt: skip
    agent = subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.DEVNULL)
    page = ""

    def scrape() -> bool:
        nonlocal page
        try:
            with urllib.request.urlopen("http://127.0.0.1:9477/metrics", timeout=5) as answer:
                page = answer.read().decode()
        except OSError:
            return False
        return "megascale_gpu_sm_active_ratio{" in page

    try:
        assert until(scrape, 40.0), page
    finally:
        agent.terminate()
        agent.wait(timeout=30)

    names = {line.partition("{")[0] for line in page.splitlines() if line.startswith("megascale_gpu_")}
    print(sorted(names))
    assert names <= METRICS.keys()
    assert {"megascale_gpu_power_watts", "megascale_gpu_energy_joules_total", "megascale_gpu_info"} <= names
