# SPDX-License-Identifier: Apache-2.0
"""The middle part of Node and GPU health: heat, clocks, throttling, load and links of the GPUs."""

from megascale_dashboards.asking import LINES, LINKS_MISSING, NODE, Ask, per_second, worst_of
from megascale_dashboards.panels import Card, limits, line_card
from megascale_dashboards.tables import table_card

GPU = "{{node}} GPU {{gpu}}"
# A power cap under full load is how the GPU is meant to run, and sync boost follows another GPU.
BADLY = 'reason!~"sw_power_cap|sync_boost"'


def _slow() -> tuple[Card, ...]:
    def outliers(metric: str, *, low: bool = False) -> tuple[Ask, ...]:
        found = f"{metric}{{{NODE}}}"
        choose, over = ("bottomk", "min_over_time") if low else ("topk", "max_over_time")
        return (
            Ask(f"{found} and {choose}({LINES}, {over}({found}[$__range] @ end()))", GPU),
            Ask(f"quantile(0.5, {found})", "median"),
        )

    return (
        line_card(
            f"Temperature, the {LINES} hottest",
            "GPUs throttle from about 85 degrees. One hot GPU: its cooling; all of a node: the node's fans; many "
            "nodes: the room.",
            outliers("megascale_gpu_temperature_celsius"),
            unit="celsius",
            colours=limits((80, "yellow"), (85, "red")),
            least=None,
        ),
        line_card(
            f"SM clock, the {LINES} slowest",
            "A GPU far below the median makes its rank a straggler. Why: throttling below, or a clock limit that "
            "was left on.",
            outliers("megascale_gpu_sm_clock_hertz", low=True),
            unit="hertz",
        ),
    )


def _throttled() -> tuple[Card, ...]:
    throttled = per_second(f"megascale_gpu_throttle_seconds_total{{{NODE}}}")
    badly = per_second(f"megascale_gpu_throttle_seconds_total{{{NODE}, {BADLY}}}")
    return (
        line_card(
            "Throttled time by reason",
            "GPU-seconds per second, over all GPUs. sw_power_cap under full load is normal; hw_thermal, sw_thermal "
            "and power_brake are not: cooling or power supply.",
            (Ask(f"sum by (reason) ({throttled})", "{{reason}}"),),
            unit="none",
            stacked=True,
        ),
        line_card(
            f"Throttled by heat or by the power supply, the {LINES} worst",
            "Share of the time. Above 0.01 it costs step time.",
            (Ask(worst_of(f"sum by (node, gpu) ({badly})", LINES), GPU),),
            unit="percentunit",
            colours=limits((0.01, "orange")),
        ),
    )


def _load() -> tuple[Card, ...]:
    def spread(metric: str) -> tuple[Ask, ...]:
        found = f"{metric}{{{NODE}}}"
        return (
            Ask(f"min({found})", "lowest"),
            Ask(f"quantile(0.5, {found})", "median"),
            Ask(f"max({found})", "highest"),
        )

    return (
        line_card(
            "Power",
            "Of single GPUs. High utilisation with low power is the sign of a stuck collective: the GPU spins and "
            "computes nothing.",
            spread("megascale_gpu_power_watts"),
            width=8,
            unit="watt",
        ),
        line_card(
            "Busy, and really computing",
            "busy: any kernel runs. SM and tensor activity say whether it computes (where the GPU can tell).",
            (
                Ask(f"avg(megascale_gpu_busy_ratio{{{NODE}}})", "busy"),
                Ask(f"avg(megascale_gpu_sm_active_ratio{{{NODE}}})", "SM active"),
                Ask(f"avg(megascale_gpu_tensor_active_ratio{{{NODE}}})", "tensor active"),
                Ask(f"avg(megascale_gpu_memory_active_ratio{{{NODE}}})", "memory active"),
            ),
            width=8,
            unit="percentunit",
            most=1.0,
        ),
        line_card(
            "Memory in use",
            "Share of each GPU's memory.",
            (
                Ask(
                    f"max(megascale_gpu_memory_used_bytes{{{NODE}}} / megascale_gpu_memory_size_bytes{{{NODE}}})",
                    "highest",
                ),
                Ask(
                    "quantile(0.5, "
                    f"megascale_gpu_memory_used_bytes{{{NODE}}} / megascale_gpu_memory_size_bytes{{{NODE}}})",
                    "median",
                ),
            ),
            width=8,
            unit="percentunit",
            most=1.0,
        ),
    )


def _links() -> tuple[Card, ...]:
    errors = per_second(f"megascale_gpu_nvlink_errors_total{{{NODE}}}")
    replays = per_second(f"megascale_gpu_pcie_replays_total{{{NODE}}}")
    return (
        table_card(
            "NVLinks missing",
            "GPUs with fewer active links than any GPU of their model has here. All collectives of its node run "
            "at its rate: drain the node and reset the GPU.",
            (Ask(f"bottomk(100, {LINKS_MISSING})", "active links"),),
            ("node", "gpu", "model"),
            width=8,
            empty="none",
            rising=True,
        ),
        line_card(
            f"NVLink errors, the {LINES} worst",
            "Per second and kind. More under Fabric.",
            (
                Ask(
                    worst_of(f"sum by (node, gpu, kind) ({errors})", LINES),
                    GPU + " {{kind}}",
                ),
            ),
            width=8,
        ),
        line_card(
            f"PCIe replays, the {LINES} worst",
            "Per second. A steady rate is a bad riser or slot: the GPU's transfers to and from the host are slow.",
            (
                Ask(
                    worst_of(f"sum by (node, gpu) ({replays})", LINES),
                    GPU,
                ),
            ),
            width=8,
        ),
    )


def gpus() -> tuple[tuple[Card, ...], ...]:
    """Return the lines of panels."""
    return (_slow(), _throttled(), _load(), _links())
