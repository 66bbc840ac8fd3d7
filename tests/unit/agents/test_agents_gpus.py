# SPDX-License-Identifier: Apache-2.0
"""GPUs as NVML tells them: base units, what is not known left out, a lost one told as such."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megascale_agents.collectors.gpu_values import Gpu, Identity, RawGpu, Sample, parse
from megascale_agents.collectors.nvml import NoDriverError, Nvml
from megascale_agents.hardware import findings

from megascale_ops.schema.health import HardwareFinding
from tests.fakes.hardware import FakeMachine, load_pynvml, uuid_of


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """Two GPUs behind the stand-in of the library."""
    made = FakeMachine(tmp_path, gpus=2)
    monkeypatch.setenv("MEGASCALE_FAKE_NVML", str(made.nvml))
    monkeypatch.setitem(sys.modules, "pynvml", load_pynvml())
    return made


@pytest.fixture
def nvml(machine: FakeMachine) -> Iterator[Nvml]:
    """The collector over them."""
    del machine
    made = Nvml()
    yield made
    made.close()


def look(nvml: Nvml) -> tuple[Gpu, ...]:
    """Look three times, so that activity has two samples twice, and return the last look."""
    nvml.read(0.0)
    before = nvml.read(5.0)
    return parse(nvml.read(10.0), before, {})


def test_a_gpu_is_told_in_base_units(machine: FakeMachine, nvml: Nvml) -> None:
    """Watts, hertz, bytes, joules, seconds and ratios; never milliwatts or percents."""
    machine.gpu(0, pids=[4711], fields={"270": 2_500_000_000, "59": 3, "230": 1}, ecc=[7, 0], links=[1] * 16 + [0] * 2)

    gpu, other = look(nvml)

    assert gpu.identity == Identity(0, uuid_of(0), "NVIDIA H200", "570.86.15", "96.00.A5.00.01", "0000:18:00")
    assert gpu.gauges["power_watts"] == pytest.approx(650.0)
    assert gpu.gauges["sm_clock_hertz"] == pytest.approx(1.98e9)
    assert gpu.gauges["memory_clock_hertz"] == pytest.approx(3.201e9)
    assert gpu.gauges["busy_ratio"] == pytest.approx(1.0)
    assert gpu.gauges["memory_used_bytes"] == 100 * 2**30
    assert (gpu.gauges["sm_active_ratio"], gpu.gauges["tensor_active_ratio"]) == (0.8, 0.4)
    assert (gpu.gauges["nvlink_active_links"], gpu.links) == (16, 18)
    assert gpu.energy_j == pytest.approx(5000.0)
    assert gpu.throttled_s["hw_thermal"] == pytest.approx(2.5)
    assert gpu.nvlink_errors == {"crc_flit": 0, "crc_data": 0, "replay": 0, "recovery": 3}
    assert gpu.nvlink_bytes == {"transmitted": 1000 * 1024, "received": 2000 * 1024}
    assert (gpu.ecc, gpu.recovery, gpu.pids) == ({"corrected": 7, "uncorrected": 0}, "reset", (4711,))
    assert other.identity.uuid == uuid_of(1)


def test_what_a_gpu_does_not_know_is_left_out(machine: FakeMachine, nvml: Nvml) -> None:
    """An older GPU without GPM and without memory temperature has no series of them, and all the others."""
    machine.gpu(0, gpm_supported=False, fields={"82": None, "91": None, "142": None})

    gpu, _ = look(nvml)

    assert "sm_active_ratio" not in gpu.gauges
    assert "memory_temperature_celsius" not in gpu.gauges
    assert "nvlink_active_links" not in gpu.gauges
    assert gpu.remapped == {"uncorrected": 0}
    assert gpu.gauges["temperature_celsius"] == 55


def test_the_first_look_has_no_activity_yet(nvml: Nvml) -> None:
    """It needs two samples; everything else is there at once."""
    gpu, _ = parse(nvml.read(0.0), None, {})

    assert "sm_active_ratio" not in gpu.gauges
    assert gpu.gauges["power_watts"] > 0


def test_a_lost_gpu_keeps_its_name_and_the_others_go_on(machine: FakeMachine, nvml: Nvml) -> None:
    """Its UUID is what a person needs now; a GPU that was lost before the agent began is known by its place."""
    look(nvml)
    machine.gpu(1, lost=15)
    machine.gpu(0, lost=16)

    both = look(nvml)
    fresh = Nvml()
    unknown = parse(fresh.read(0.0), None, {})

    assert [(gpu.identity.uuid, gpu.lost) for gpu in both] == [(uuid_of(0), "needs a reset"), (uuid_of(1), "lost")]
    assert [gpu.identity for gpu in unknown] == [Identity(0), Identity(1)]
    fresh.close()


def test_a_library_that_fails_is_opened_anew(machine: FakeMachine, nvml: Nvml) -> None:
    """After an error of the library itself (here: unknown) the next look begins from the start."""
    look(nvml)
    machine.driver(error=999)

    with pytest.raises(Exception, match="999"):
        nvml.read(10.0)

    machine.driver()
    assert len(look(nvml)) == 2


def test_no_driver_is_said_as_such(machine: FakeMachine, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, no driver, no GPU: three ways of having nothing to look at."""
    machine.driver(error=9)
    with pytest.raises(NoDriverError, match="no NVIDIA driver"):
        nvml.read(0.0)

    machine.nvml.write_text('{"gpus": []}')
    with pytest.raises(NoDriverError, match="no NVIDIA GPU"):
        nvml.read(0.0)

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoDriverError, match="not installed"):
        nvml.read(0.0)


def sample(mono_s: float, **values: float) -> Sample:
    """Return a look at one GPU."""
    return Sample(mono_s, (RawGpu(Identity(0, "GPU-x"), values=values),))


def test_time_without_counters_is_added_up_while_a_reason_holds() -> None:
    """An older driver tells only what holds now: what held at both looks is taken to have held in between."""
    thermal = 0x40
    one, two = sample(0.0, reasons=thermal), sample(5.0, reasons=thermal)
    three, four = sample(10.0, reasons=0), sample(15.0, reasons=thermal)

    added: dict[int, dict[str, float]] = {}
    seconds = []
    for now, before in ((one, None), (two, one), (three, two), (four, three)):
        (gpu,) = parse(now, before, added)
        added = {0: gpu.throttled_s}
        seconds.append(gpu.throttled_s["hw_thermal"])

    assert seconds == [0.0, 5.0, 5.0, 5.0]


def gpu_with(**changes: Any) -> Gpu:  # noqa: ANN401  any field of a GPU
    """Return a healthy GPU with changes."""
    fields: dict[str, Any] = {
        "identity": Identity(5, "GPU-five"),
        "gauges": {"nvlink_active_links": 18.0, "temperature_celsius": 60.0, "sm_clock_hertz": 1.98e9},
        "throttled_s": {"hw_thermal": 10.0, "sw_power_cap": 500.0},
        "ecc": {"corrected": 3.0, "uncorrected": 0.0},
        "recovery": "none",
        "links": 18,
    }
    return Gpu(**(fields | changes))


HEALTHY = gpu_with()


def judge(gpu: Gpu, before: Gpu | None = HEALTHY) -> list[HardwareFinding]:
    """Return what is wrong with a GPU five seconds after it was healthy."""
    return findings.of_gpus([gpu], {5: before} if before is not None else {}, 5.0, {5: 18})


def test_a_healthy_gpu_has_nothing_to_say() -> None:
    """Also at full load, under its power cap, with corrected errors, and at the first look."""
    hot = gpu_with(throttled_s={"hw_thermal": 10.0, "sw_power_cap": 505.0}, ecc={"corrected": 9.0, "uncorrected": 0.0})

    assert judge(hot) == []
    assert judge(HEALTHY, None) == []


@pytest.mark.parametrize(
    ("gpu", "name", "severity", "is_bad", "number"),
    [
        (gpu_with(lost="lost"), "gpu_lost", "fail", True, "lost"),
        (gpu_with(gauges=HEALTHY.gauges | {"row_remap_failed": 1.0}), "row_remap_failed", "fail", True, "row"),
        (gpu_with(gauges=HEALTHY.gauges | {"row_remap_pending": 1.0}), "row_remap_pending", "warn", False, "reset"),
        (gpu_with(ecc={"uncorrected": 2.0}), "ecc_uncorrected", "fail", True, "2 errors"),
        (gpu_with(gauges=HEALTHY.gauges | {"nvlink_active_links": 17.0}), "nvlink_inactive", "fail", True, "17 of 18"),
        (gpu_with(recovery="drain_reset"), "recovery_drain_reset", "fail", True, "drain reset"),
        (gpu_with(recovery="drain_p2p"), "recovery_drain_p2p", "warn", False, "drain p2p"),
        (gpu_with(throttled_s={"hw_thermal": 13.0}), "throttled_hw_thermal", "warn", False, "60%"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_gpu_is_one_sentence(
    gpu: Gpu, name: str, severity: str, is_bad: bool, number: str
) -> None:
    """It names the GPU, carries the number, and says whether the GPU is in doubt after a restart too."""
    (found,) = judge(gpu)

    assert (found.name, found.severity, found.is_bad, found.gpu) == (name, severity, is_bad, "GPU-five")
    assert found.text.startswith("GPU 5: ")
    assert number in found.text


def test_who_shares_a_gpu_is_told_from_the_second_look_on(machine: FakeMachine, nvml: Nvml) -> None:
    """The driver keeps whole minutes; ended processes, and a process alone on its GPU, are no finding."""
    machine.gpu(0, pids=[11, 12], shares=[[11, 1_000, 90], [12, 1_000, 10]])
    first = parse(nvml.read(0.0), None, {})[0]
    machine.gpu(0, pids=[11, 12], shares=[[11, 6_000, 60], [12, 6_000, 40], [13, 6_000, 5]])
    second = parse(nvml.read(5.0), None, {})[0]
    quiet = parse(nvml.read(10.0), None, {})[0]
    machine.gpu(0, pids=[11], shares=[[11, 16_000, 99], [12, 14_000, 20]])
    alone = parse(nvml.read(15.0), None, {})[0]

    assert first.shares == {}
    assert second.shares == {11: 0.6, 12: 0.4}
    assert quiet.shares == {}
    assert alone.shares == {}


def test_processes_that_compute_on_one_gpu_are_named() -> None:
    """Most first, with how much of its time each has; one that has memory alone takes no time."""
    (found,) = judge(gpu_with(shares={7: 0.3, 8: 0.55, 9: 0.02}))

    assert (found.name, found.severity, found.is_bad, found.pids) == ("gpu_shared", "warn", False, (8, 7))
    assert found.text == (
        "GPU 5: 2 processes compute on it, which costs each of them time: 8 (55% of the time), 7 (30% of the time)"
    )
    assert judge(gpu_with(shares={7: 0.98, 9: 0.02})) == []
    (many,) = judge(gpu_with(shares=dict.fromkeys(range(6), 0.16)))
    assert many.text.endswith("3 (16% of the time) and 2 more")


def test_old_errors_of_memory_are_told_and_no_new_failure() -> None:
    """What happened before the last look stays a warning until the driver is loaded anew."""
    before = gpu_with(ecc={"uncorrected": 2.0})

    (found,) = judge(before, before)

    assert (found.severity, found.is_bad) == ("warn", False)


def test_links_that_were_never_up_are_missed_by_nobody() -> None:
    """A GPU without a bridge has none of its links up, and nothing is wrong with it."""
    bare = gpu_with(gauges={"nvlink_active_links": 0.0})
    judged: Callable[[dict[int, int]], list[HardwareFinding]] = lambda most: findings.of_gpus([bare], {}, 0.0, most)  # noqa: E731

    assert judged({5: 0}) == []
    assert judged({}) == []


def test_xids_are_told_once_each(machine: FakeMachine, nvml: Nvml) -> None:
    """Events before the registration are not reported; of a storm a look takes 64."""
    machine.gpu(0, xids=[13])
    first = nvml.read(0.0)
    machine.gpu(1, xids=[79, 31])
    machine.gpu(0, xids=[13] + 100 * [94])
    told = [nvml.read(5.0 * look).xids for look in (1, 2, 3)]

    assert first.xids == ()
    assert [len(one) for one in told] == [64, 38, 0]
    assert set(told[0] + told[1]) == {(0, 94), (1, 79), (1, 31)}


def test_a_gpu_that_is_lost_does_not_make_the_others_silent(machine: FakeMachine, nvml: Nvml) -> None:
    """It can't be listened to; what the library does not know is left out, as ever."""
    machine.gpu(0, lost=15)
    nvml.read(0.0)
    machine.gpu(1, xids=[48])

    assert nvml.read(5.0).xids == ((1, 48),)


def test_a_library_that_tells_of_no_events_is_read_all_the_same(machine: FakeMachine, nvml: Nvml) -> None:
    """No Xids, everything else."""
    machine.driver(deaf=True)
    nvml.read(0.0)
    machine.gpu(1, xids=[48])

    sample = nvml.read(5.0)

    assert (sample.xids, len(sample.gpus)) == ((), 2)


def test_a_library_that_was_closed_is_listened_to_anew(machine: FakeMachine, nvml: Nvml) -> None:
    """As after an error: what came in between is not told, what comes then is."""
    nvml.read(0.0)
    nvml.close()
    machine.gpu(1, xids=[48])
    between = nvml.read(5.0).xids
    machine.gpu(1, xids=[48, 79])

    assert (between, nvml.read(10.0).xids) == ((), ((1, 79),))
