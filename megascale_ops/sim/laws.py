# SPDX-License-Identifier: Apache-2.0
"""How often nodes and ranks fail, and of what, by what was published; and how each cause shows.

Counts and rates are the sources'. No source says how each cause showed itself in the job (an error, a silence, a slow
step), nor for how long each machine was away: the columns ``shows`` and ``repair_s`` are assumptions, made here and
nowhere else. A law's faults come at a constant rate and independently of each other, on ranks that are drawn evenly.
"""

from typing import NamedTuple

DAY_S = 86_400.0
# A GPU that failed is replaced by hand; a host that died comes back after a reboot and its checks.
_REPLACED_S, _REBOOT_S = DAY_S, 1200.0


class Cause(NamedTuple):
    """One row of a published table.

    ``weight`` is its count, or its share. ``shows``: kinds of fault (``kinds.KINDS``) and how likely each is.
    ``repair_s``: how long the machine stays bad; 0: it was no machine's fault, or is gone with the process.
    """

    name: str
    weight: float
    shows: tuple[tuple[str, float], ...]
    repair_s: float = 0.0


class Law(NamedTuple):
    """Faults as one source counts them; ``a_day`` is per rank, or per node where ``per_node``."""

    name: str
    source: str
    a_day: float
    causes: tuple[Cause, ...]
    per_node: bool = False

    def events_a_day(self, ranks: int, ranks_per_node: int) -> float:
        """Return how many faults a day a cluster of this size has."""
        return self.a_day * (ranks / ranks_per_node if self.per_node else ranks)

    def machines_a_day(self, ranks: int, ranks_per_node: int) -> float:
        """Return how many of these take a machine away."""
        weight = sum(one.weight for one in self.causes)
        lost = sum(one.weight for one in self.causes if one.repair_s)
        return self.events_a_day(ranks, ranks_per_node) * lost / weight if weight else 0.0


# A GPU that hangs stops in a kernel ("stalled load/store operations within CUDA kernels without returning a clear error
# code", Llama 3, 3.3.4). Of hangs without a reason a third each sleeps, is a GPU's and is the network's.
GSP = "GPU system processor"
_GPU = (("gpu_error", 0.8), ("gpu_hang", 0.15), ("host_lost", 0.05))
_ANY_HANG = (("hang", 1 / 3), ("gpu_hang", 1 / 3), ("network_hang", 1 / 3))
_HOST = (("host_lost", 1.0),)
_SOFTWARE = (("exception", 0.5), ("exception_everywhere", 0.2), ("segfault", 0.15), ("hang", 0.15))
_NETWORK = (("network_error", 0.7), ("network_hang", 0.3))

# Dubey et al., "The Llama 3 Herd of Models" (arXiv 2407.21783), table 5: 419 unexpected interruptions in 54 days of
# training on 16,384 H100. The 47 planned ones are no faults and left out.
_LLAMA3 = Law(
    "llama3",
    "The Llama 3 Herd of Models (arXiv 2407.21783), table 5: 419 unexpected interruptions, 54 days, 16,384 GPUs",
    419 / 54 / 16_384,
    (
        Cause("faulty GPU", 148, _GPU, _REPLACED_S),
        Cause("GPU HBM3 memory", 72, (("gpu_error", 1.0),), _REPLACED_S),
        Cause("software bug", 54, _SOFTWARE),
        Cause("network switch or cable", 35, _NETWORK),
        Cause("host maintenance", 32, _HOST, _REBOOT_S),
        Cause("GPU SRAM memory", 19, (("gpu_error", 1.0),), _REPLACED_S),
        Cause(GSP, 17, (("gpu_error", 0.5), ("gpu_hang", 0.5)), _REPLACED_S),
        Cause("NIC", 7, _NETWORK, _REBOOT_S),
        Cause("NCCL watchdog time-outs", 7, _ANY_HANG),
        Cause("silent data corruption", 6, (("nan", 1.0),)),
        Cause("GPU thermal interface and sensor", 6, (("slow", 0.5), ("gpu_error", 0.5)), _REPLACED_S),
        Cause("SSD", 3, _HOST, _REPLACED_S),
        Cause("power supply", 3, _HOST, _REPLACED_S),
        Cause("server chassis", 2, _HOST, _REPLACED_S),
        Cause("IO expansion board", 2, _HOST, _REPLACED_S),
        Cause("dependency", 2, (("exception_everywhere", 1.0),)),
        Cause("CPU", 2, _HOST, _REPLACED_S),
        Cause("system memory", 2, (("killed", 0.5), ("host_lost", 0.5)), _REPLACED_S),
    ),
)

# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (arXiv 2410.21680): RSC-1
# has 6.50 failures of hardware per 1,000 node days. The paper ranks causes and gives no counts that could be divided:
# the shares here are an assumption in its order (InfiniBand links, file systems, PCIe, GPU memory, GPU errors first).
_META_RSC1 = Law(
    "meta-rsc1",
    "Revisiting Reliability in Large-Scale ML Research Clusters (arXiv 2410.21680): 6.50 failures per 1,000 node days",
    6.5e-3,
    (
        Cause("InfiniBand link", 30, _NETWORK, _REBOOT_S),
        Cause("file system mount", 20, (("exception", 1.0),)),
        Cause("GPU memory", 20, (("gpu_error", 1.0),), _REPLACED_S),
        Cause("PCIe", 15, (("gpu_error", 0.5), ("host_lost", 0.5)), _REPLACED_S),
        Cause("GPU unavailable", 15, _GPU, _REPLACED_S),
    ),
    per_node=True,
)

# Wan et al., "Robust LLM Training Infrastructure at ByteDance" (arXiv 2509.16293): 55,000 incidents of 778,135 jobs by
# symptom. What is left out: restarts by hand (17.3 %), which are no faults. The table gives no rate for one size of
# job; Llama 3's is used.
_BYTEROBUST = Law(
    "byterobust",
    "Robust LLM Training Infrastructure at ByteDance (arXiv 2509.16293): shares by symptom; rate of Llama 3",
    419 / 54 / 16_384,
    (
        Cause("CUDA error", 36.1, (("gpu_error", 1.0),), _REPLACED_S),
        Cause("CPU overload", 11.0, (("slow", 0.5), ("killed", 0.5))),
        Cause("out of memory", 10.1, (("killed", 1.0),)),
        Cause("job hang", 9.9, _ANY_HANG),
        Cause("NaN", 0.3, (("nan", 1.0),)),
        Cause("others", 15.3, (("network_error", 0.4), ("host_lost", 0.4), ("exception", 0.2)), _REBOOT_S),
    ),
)

# Wu et al., "Greyhound" (ATC'25): in 16 of 27 jobs on 512 GPUs or more something was slow, for 72 minutes in the mean,
# and jobs took 34.6 % longer for it. How often a day the paper does not say: once in 4,000 ranks is an assumption.
_FAIL_SLOW = Law(
    "fail-slow",
    "Greyhound (ATC'25): 72 minutes in the mean, up to a third slower; one a day in 4,000 ranks is an assumption",
    1 / 4000,
    (Cause("fail-slow", 1, (("slow", 1.0),)),),
)

LAWS: dict[str, Law] = {law.name: law for law in (_LLAMA3, _META_RSC1, _BYTEROBUST, _FAIL_SLOW)}


def law_names() -> str:
    """Return the laws there are, for people."""
    return ", ".join(sorted(LAWS))
