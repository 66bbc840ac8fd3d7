# SPDX-License-Identifier: Apache-2.0
"""The figures that checks measure, one row each: unit, which way is better, and from where a difference counts.

``bar`` is the difference from its equals' median below which nothing is said, and ``spread`` the standard deviation
that equals have in health, the guess before any of them is measured; ``equals.py`` says how both are used. Only
figures with a bar are compared. Pure data.
"""

from typing import NamedTuple

from megascale_ops.diagnostics.report import Severity


class Kind(NamedTuple):
    """One kind of figure.

    Attributes:
        name: Of the figure.
        what: What it is, as in a sentence: "<what> of GPU 3".
        unit: Base unit: ``B/s``, ``FLOP/s``, ``s``, ``B``, ``share``, "" for a count.
        bar: Share of the equals' median; 0: it is not compared.
        spread: Healthy equals' standard deviation, as a share.
        lower_is_better: Of a time.
        severity: What it means to be slower than its equals.
    """

    name: str
    what: str
    unit: str
    bar: float = 0.0
    spread: float = 0.0
    lower_is_better: bool = False
    severity: Severity = "bad"


_ROWS = (
    # A GPU 5 % slower than its equals is to be named, so the bar stands below that: what is measured of a GPU that is
    # 5 % slow varies by some tenths of a percent.
    Kind("gemm_bf16", "bf16 matrix products", "FLOP/s", 0.04, 0.008),
    Kind("hbm_copy", "bandwidth of GPU memory", "B/s", 0.04, 0.005),
    Kind("pcie_to_gpu", "copies from host to GPU", "B/s", 0.05, 0.010),
    Kind("pcie_from_gpu", "copies from GPU to host", "B/s", 0.05, 0.010),
    Kind("nvlink_one_way", "copies between GPUs", "B/s", 0.04, 0.005),
    Kind("nvlink_both_ways", "copies between GPUs, both ways at once", "B/s", 0.04, 0.008),
    Kind("all_reduce", "NCCL all-reduce, bus bandwidth", "B/s", 0.05, 0.010),
    Kind("all_gather", "NCCL all-gather, bus bandwidth", "B/s", 0.05, 0.010),
    Kind("all_to_all", "NCCL all-to-all, bus bandwidth", "B/s", 0.05, 0.010),
    # 8 %: cores of one processor differ by their turbo bins; virtual ones by their neighbours as well.
    Kind("cpu_hash", "SHA-256 on one core", "B/s", 0.08, 0.015, severity="warn"),
    Kind("cpu_share", "share of a core that the measurement got", "share"),
    Kind("memory_copy", "bandwidth of host memory", "B/s", 0.10, 0.020, severity="warn"),
    Kind("memory_size", "memory", "B", 0.05, 0.005, severity="warn"),
    # 30 %: disks of one model differ with their age and fill, shared ones with the other nodes' load.
    Kind("disk_write", "sequential writes", "B/s", 0.30, 0.10, severity="warn"),
    Kind("disk_read", "sequential reads", "B/s", 0.30, 0.10, severity="warn"),
    Kind(
        "disk_sync",
        "a write of 4 KiB until it is on the disk, median",
        "s",
        0.50,
        0.15,
        lower_is_better=True,
        severity="warn",
    ),
    Kind("disk_sync_p99", "the same, 99th percentile", "s", lower_is_better=True),
    Kind("disk_damaged", "blocks read back that differ from what was written", ""),
    Kind("space_free", "free space", "B"),
    Kind("space_free_share", "free space", "share"),
    Kind("inodes_free_share", "free inodes", "share"),
    Kind("swap_used", "swap in use", "B"),
    Kind("swap_rate", "pages swapped in and out", "B/s"),
    Kind("clock_offset", "offset of the clock", "s"),
    Kind("clock_error", "bound of the clock's error", "s"),
    Kind("limit_files", "open files of a process", ""),
    Kind("limit_memlock", "memory that may be locked", "B"),
    Kind("shm_size", "size of /dev/shm", "B"),
    Kind("shm_free", "free in /dev/shm", "B"),
    Kind("cgroup_cpus", "processors that the control group may use", ""),
    Kind("cgroup_memory", "memory that the control group may use", "B"),
    Kind("cgroup_memory_free", "memory that the control group has left", "B"),
    Kind("cgroup_throttled", "share of periods in which the control group was throttled", "share"),
    Kind("cpus_allowed", "processors that this process may use", ""),
    Kind("cpus_online", "processors online", ""),
    Kind("cpus_present", "processors present", ""),
    Kind("event_age", "since it was last in the kernel's log", "s"),
    Kind("event_count", "times in the kernel's log", ""),
    Kind("gemm_spread", "spread of matrix products over repetitions", "share"),
    Kind("products_wrong", "products that differ from the majority's", ""),
    Kind("products", "products compared bit by bit", ""),
    Kind("hbm_tested", "GPU memory tested with patterns", "B"),
    Kind("hbm_wrong", "words of GPU memory that differ from what was written", ""),
    Kind("ecc_uncorrected", "uncorrected memory errors since the driver was loaded", ""),
    Kind("ecc_uncorrected_ever", "uncorrected memory errors ever", ""),
    Kind("ecc_corrected", "corrected memory errors since the driver was loaded", ""),
    Kind("rows_remapped_uncorrected", "rows remapped for uncorrected errors", ""),
    Kind("rows_remapped_corrected", "rows remapped for corrected errors", ""),
    Kind("rows_pending", "a row waits for a reset to be remapped", ""),
    Kind("rows_failed", "a row could not be remapped", ""),
    Kind("gpu_temperature", "temperature under load", "degC"),
    Kind("gpu_power", "power under load", "W"),
    Kind("gpu_clock", "clock under load", "Hz"),
    Kind("throttled", "share of the load's time in which the GPU was held back", "share"),
    Kind("gpu_processes", "processes of others on the GPU", ""),
    Kind("nvlinks_active", "NVLinks that are active", ""),
    Kind("nvlinks", "NVLinks", ""),
    Kind("pcie_generation", "PCIe generation of the link", ""),
    Kind("pcie_width", "lanes of the PCIe link", ""),
    Kind("pcie_width_most", "lanes that the PCIe link could have", ""),
    Kind("rdma_loopback", "RDMA writes of an adapter to itself", "B/s", 0.05, 0.010),
    Kind("rdma_next", "RDMA writes of an adapter to the next", "B/s", 0.05, 0.010),
    # 25 %: nodes share uplinks with other jobs while they are measured.
    Kind("pair_rate", "TCP between two nodes, the slower way", "B/s", 0.25, 0.05),
    Kind("pair_round_trip", "a byte there and back between two nodes", "s", lower_is_better=True),
    Kind("port_rate", "rate of the link", "B/s", 0.05, 0.001),
)
KINDS = {row.name: row for row in _ROWS}

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def shown(name: str, value: float) -> str:
    """Return a figure's value as people read it: ``3.02 TB/s``, ``412 us``, ``12 %``."""
    unit = KINDS[name].unit if name in KINDS else ""
    if unit == "share":
        return f"{value * 100:.1f} %"
    if unit == "s":
        return _time(value)
    if unit in ("B", ""):
        return f"{value / (1 << 30):,.1f} GiB" if unit else f"{value:,.0f}"
    for size, letter in _STEPS:
        if abs(value) >= size:
            return f"{_digits(value / size)} {letter}{unit}"
    return f"{_digits(value)} {unit}"


def _time(seconds: float) -> str:
    for size, letter in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size:
            return f"{_digits(seconds / size)} {letter}"
    return f"{seconds * 1e9:.0f} ns"


def _digits(value: float) -> str:
    """Return three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
