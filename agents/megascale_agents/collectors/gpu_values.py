# SPDX-License-Identifier: Apache-2.0
"""What NVML answers of GPUs, and the same in base units: the pure half of ``nvml.py``.

Throttling is counted in seconds. Newer drivers count nanoseconds for each reason; from older ones the reasons that hold
at two looks in a row are taken to have held in between.
"""

from typing import NamedTuple

# Bits of the current clock event reasons, for drivers that count no time.
REASONS = {"sw_power_cap": 0x4, "sync_boost": 0x10, "sw_thermal": 0x20, "hw_thermal": 0x40, "power_brake": 0x80}
RECOVERY_ACTIONS = {
    0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_reset", 5: "recover_imex", 6: "bus_reset",
    7: "reboot",
}  # fmt: skip
NVLINK_ERRORS = {"crc_flit": "crc_flit", "crc_data": "crc_data", "replay": "replay", "nvlink_recovery": "recovery"}
# Name of the raw value -> direction of the traffic.
TRAFFIC = ("transmitted", "received")


class Identity(NamedTuple):
    """What a GPU is; known as long as it was seen once."""

    ordinal: int  # as NVML counts
    uuid: str = ""
    model: str = ""
    driver: str = ""
    vbios: str = ""
    pci: str = ""  # as in ``pci_key``
    serial: str = ""  # of the board, as on its label; "" where the driver does not tell it


class RawGpu(NamedTuple):
    """Answers as the library gave them; what it did not know is not there."""

    identity: Identity
    lost: str = ""  # why no values could be read
    values: dict[str, float] = {}  # noqa: RUF012  never changed
    links: tuple[int, ...] = ()  # state of each NVLink, 1: active
    pids: tuple[int, ...] = ()
    held: dict[int, int] = {}  # noqa: RUF012  bytes of its memory by pid, 0 where the driver does not report it
    shares: dict[int, float] = {}  # noqa: RUF012  per cent of the time since the look before, by pid, where several have it
    gpm: dict[str, float] = {}  # noqa: RUF012  never changed


class Gpu(NamedTuple):
    """One GPU in base units; None where it does not report a value."""

    identity: Identity
    lost: str = ""
    gauges: dict[str, float] = {}  # noqa: RUF012  by the end of the metric's name: "temperature_celsius", ...
    throttled_s: dict[str, float] = {}  # noqa: RUF012  by reason, counters
    ecc: dict[str, float] = {}  # noqa: RUF012  by type, counters
    remapped: dict[str, float] = {}  # noqa: RUF012  by type, counters
    nvlink_errors: dict[str, float] = {}  # noqa: RUF012  by kind, counters
    nvlink_bytes: dict[str, float] = {}  # noqa: RUF012  by direction, counters
    energy_j: float | None = None
    pcie_replays: float | None = None
    recovery: str = ""
    links: int = 0  # how many NVLinks it has
    pids: tuple[int, ...] = ()
    held: dict[int, int] = {}  # noqa: RUF012  bytes of its memory by pid, 0 where the driver does not report it
    shares: dict[int, float] = {}  # noqa: RUF012  of the time since the look before, by pid, where several have it


class Sample(NamedTuple):
    """One look at all GPUs."""

    mono_s: float
    gpus: tuple[RawGpu, ...]
    xids: tuple[tuple[int, int], ...] = ()  # reported since the look before: index of the GPU, number


def parse(now: Sample, before: Sample | None, throttled: dict[int, dict[str, float]]) -> tuple[Gpu, ...]:
    """Return all GPUs in base units.

    Args:
        now: This look.
        before: The look before; None at the first.
        throttled: Seconds by index and reason that were added up so far, where the driver counts none.
    """
    earlier = {raw.identity.ordinal: raw for raw in before.gpus} if before is not None else {}
    passed_s = now.mono_s - before.mono_s if before is not None else 0.0
    return tuple(
        _gpu(raw, earlier.get(raw.identity.ordinal), passed_s, throttled.get(raw.identity.ordinal, {}))
        for raw in now.gpus
    )


# Name of the raw value -> end of the metric's name, and the factor to its base unit.
_GAUGES = {
    "temperature": ("temperature_celsius", 1.0),
    "memory_temperature": ("memory_temperature_celsius", 1.0),
    "power_mw": ("power_watts", 1e-3),
    "sm_mhz": ("sm_clock_hertz", 1e6),
    "memory_mhz": ("memory_clock_hertz", 1e6),
    "memory_used": ("memory_used_bytes", 1.0),
    "memory_size": ("memory_size_bytes", 1.0),
    "busy_percent": ("busy_ratio", 1e-2),
    "remap_pending": ("row_remap_pending", 1.0),
    "remap_failed": ("row_remap_failed", 1.0),
}


def _gpu(raw: RawGpu, before: RawGpu | None, passed_s: float, throttled: dict[str, float]) -> Gpu:
    if raw.lost:
        return Gpu(raw.identity, raw.lost)
    values = raw.values
    gauges = {name: values[key] * factor for key, (name, factor) in _GAUGES.items() if key in values}
    gauges |= {f"{name}_ratio": round(percent / 100, 4) for name, percent in raw.gpm.items()}
    if raw.links:
        gauges["nvlink_active_links"] = float(sum(state == 1 for state in raw.links))
    return Gpu(
        identity=raw.identity,
        gauges=gauges,
        throttled_s=_throttled(raw, before, passed_s, throttled),
        ecc=_picked(values, {"ecc_corrected": "corrected", "ecc_uncorrected": "uncorrected"}),
        remapped=_picked(values, {"remapped_corrected": "corrected", "remapped_uncorrected": "uncorrected"}),
        nvlink_errors=_picked(values, NVLINK_ERRORS),
        nvlink_bytes={name: values[name] * 1024 for name in TRAFFIC if name in values},
        energy_j=values["energy_mj"] * 1e-3 if "energy_mj" in values else None,
        pcie_replays=values.get("pcie_replays"),
        recovery=RECOVERY_ACTIONS.get(int(values["recovery"]), "other") if "recovery" in values else "",
        links=len(raw.links),
        pids=raw.pids,
        held=raw.held,
        shares={pid: percent / 100 for pid, percent in raw.shares.items()},
    )


def _throttled(raw: RawGpu, before: RawGpu | None, passed_s: float, added: dict[str, float]) -> dict[str, float]:
    """Return seconds by reason: counted by the driver, else added up while a reason holds at both ends."""
    reasons = int(raw.values.get("reasons", 0))
    held = reasons & int(before.values.get("reasons", 0)) if before is not None else 0
    found = {}
    for name, bit in REASONS.items():
        if name in raw.values:
            found[name] = raw.values[name] * 1e-9
        elif "reasons" in raw.values:
            found[name] = added.get(name, 0.0) + (passed_s if held & bit else 0.0)
    return found


def _picked(values: dict[str, float], names: dict[str, str]) -> dict[str, float]:
    return {name: values[key] for key, name in names.items() if key in values}
