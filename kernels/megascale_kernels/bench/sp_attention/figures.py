# SPDX-License-Identifier: Apache-2.0
"""What follows from the times of one case, and how a row of the table reads.

With L our kernel on K and V that are there, C the copies alone (copy engines and their flags), S the best of torch's
backends behind NCCL's all-gather, D that backend alone, and T ours:

    hidden       1 - (T - L) / C       of the gather; may pass 1 where clocks differ
    over local   T / L                 what the gather costs in all
    of torch     D / L                 our kernel against torch's best
    speed-up     S / T
"""

import math
from typing import NamedTuple

from megascale_kernels.attention.problem import AttentionConfig
from megascale_kernels.attention.sharding import chunks_of
from megascale_kernels.bench.sp_attention.heads import Case

DOTS = {False: 2, True: 7}  # products of matrices: forward; forward and backward as the least they take


class Timed(NamedTuple):
    """The measurements of one case; times in seconds, NaN where there is none.

    Attributes:
        case: what was measured.
        config: how our kernels ran.
        backward: forward and backward together.
        ranks: over how many.
        ours_s: ours.
        local_s: our kernel on gathered K and V.
        copies_s: the gather by copy engines alone.
        comm_s: NCCL's all-gather alone.
        serial_s: NCCL and the best backend.
        torch_s: that backend alone.
        backend: which.
        host_us: what a call of ours costs the host.
        serial_host_us: what a serial call costs it.
        distance: ||ours - torch's|| / ||torch's||, the largest over ranks and results.
        note: why there is no number.
    """

    case: Case
    config: AttentionConfig | None
    backward: bool
    ranks: int
    ours_s: float = math.nan
    local_s: float = math.nan
    copies_s: float = math.nan
    comm_s: float = math.nan
    serial_s: float = math.nan
    torch_s: float = math.nan
    backend: str = ""
    host_us: float = math.nan
    serial_host_us: float = math.nan
    distance: float = math.nan
    note: str = ""

    @property
    def hidden(self) -> float:
        """Of the gather."""
        return 1 - (self.ours_s - self.local_s) / self.copies_s

    @property
    def kernel_s(self) -> float:
        """Our kernel alone, or where that was not measured, with the gather."""
        return self.ours_s if math.isnan(self.local_s) else self.local_s

    def tflops(self, seconds: float) -> float:
        """Of one rank."""
        return flops(self.case, self.ranks, backward=self.backward) / seconds / 1e12


def flops(case: Case, ranks: int, *, backward: bool) -> float:
    """Operations of one rank, the mean over ranks: two for each product of elements that the mask lets pass."""
    problem = case.problem(ranks)
    pairs = 0
    for begin, end in zip((0, *case.segments), case.segments or (case.sequence,), strict=False):
        for rank in range(ranks):
            for chunk in chunks_of(rank, ranks, problem.halves):
                first, last = max(begin, chunk * problem.chunk), min(end, (chunk + 1) * problem.chunk)
                if first < last:
                    rows = last - first
                    pairs += rows * (first - begin) + rows * (rows + 1) // 2 if case.causal else rows * (end - begin)
    return 2.0 * DOTS[backward] * pairs / ranks * case.batch * problem.q_heads * problem.head_dim


def config_words(config: AttentionConfig | None) -> str:
    """A configuration in few letters; what differs from the default beyond tile and stages is named."""
    if config is None:
        return "own choice"
    text = f"{config.kernel} {config.block_m}x{config.block_n}/{config.stages} w{config.warps}"
    for name, default in AttentionConfig._field_defaults.items():
        if name not in ("kernel", "block_m", "block_n", "stages", "warps") and getattr(config, name) != default:
            text += f" {name}={getattr(config, name)}"
    return text


HEADING = (
    "model               heads        tokens  B mask    ours  local copies   NCCL serial  torch backend  TF/s torch "
    "hidden T/local D/local speed-up  host (serial) us distance config"
)
LEGEND = (
    "times in ms; ours: K and V travel beside the kernel; local: the kernel on K and V that are there; copies: the\n"
    "gather by copy engines alone; NCCL: its all-gather alone; serial: NCCL, then torch's best backend; torch: that\n"
    "alone; TF/s of local (of ours, where there is no local), and of torch; hidden: 1 - (ours - local) / copies;\n"
    "T/local: ours / local; D/local: torch / local; speed-up: serial / ours; distance: from torch's results"
)
CSV_HEADING = (
    "model", "q_heads", "kv_heads", "head_dim", "tokens", "batch", "mask", "packed", "backward", "ranks", "ours_ms",
    "local_ms", "copies_ms", "nccl_ms", "serial_ms", "torch_ms", "backend", "local_tflops", "torch_tflops", "hidden",
    "over_local", "of_torch", "speedup", "host_us", "serial_host_us", "distance", "config", "note",
)  # fmt: skip


def text_row(row: Timed) -> str:
    """One row of the table."""
    case, heads = row.case, row.case.heads
    mask = ("causal" if case.causal else "full") + (f"/{len(case.segments)}" if case.segments else "")
    start = (
        f"{heads.name:<18} {f'{heads.q_heads}/{heads.kv_heads}x{heads.head_dim}':<10} {case.sequence:>8} "
        f"{case.batch:>2} {mask:<6}"
    )
    if row.note:
        return f"{start} {row.note}  [{config_words(row.config)}]"
    times = (row.ours_s, row.local_s, row.copies_s, row.comm_s, row.serial_s, row.torch_s)
    return (
        f"{start} {' '.join(f'{time_s * 1e3:6.3f}' for time_s in times)} {row.backend:<7} "
        f"{row.tflops(row.kernel_s):5.0f} {row.tflops(row.torch_s):5.0f} {row.hidden:6.2f} "
        f"{row.ours_s / row.local_s:7.3f} {row.torch_s / row.kernel_s:7.3f} {row.serial_s / row.ours_s:8.3f} "
        f"{row.host_us:5.0f} ({row.serial_host_us:.0f}) {row.distance:.1e} {config_words(row.config)}"
    )


def csv_row(row: Timed) -> list[str]:
    """The same figures with more digits."""
    case, heads = row.case, row.case.heads
    times = (row.ours_s, row.local_s, row.copies_s, row.comm_s, row.serial_s, row.torch_s)
    derived = (row.hidden, row.ours_s / row.local_s, row.torch_s / row.kernel_s, row.serial_s / row.ours_s)
    return [
        heads.name, *map(str, heads[1:4]), str(case.sequence), str(case.batch), "causal" if case.causal else "full",
        " ".join(map(str, case.segments)), str(row.backward), str(row.ranks), *(f"{t * 1e3:.5f}" for t in times),
        row.backend, f"{row.tflops(row.local_s):.1f}", f"{row.tflops(row.torch_s):.1f}", *(f"{d:.4f}" for d in derived),
        f"{row.host_us:.1f}", f"{row.serial_host_us:.1f}", f"{row.distance:.3e}", config_words(row.config), row.note,
    ]  # fmt: skip


def summary(rows: list[Timed]) -> list[str]:
    """The lines below the table: geometric means, and the worst of everything."""
    good = [row for row in rows if not row.note and math.isfinite(row.ours_s)]
    if not good:
        return ["nothing was measured"]
    lines = []
    ratios = {
        "serial / ours": [row.serial_s / row.ours_s for row in good],
        "torch / our kernel": [row.torch_s / row.kernel_s for row in good],
        "local / ours": [row.local_s / row.ours_s for row in good],
    }
    for words, values in ratios.items():
        known = [(value, row) for value, row in zip(values, good, strict=True) if math.isfinite(value)]
        if known:
            mean = math.exp(sum(math.log(value) for value, _ in known) / len(known))
            worst, at = min(known, key=lambda pair: pair[0])
            lines.append(f"{words}: {mean:.3f} (geometric mean of {len(known)}), worst {worst:.3f} at {at.case.label}")
    hidden = [row.hidden for row in good if math.isfinite(row.hidden)]
    if hidden:
        lines.append(f"hidden: {sum(hidden) / len(hidden):.2f} of the gather on average, least {min(hidden):.2f}")
    failed = len(rows) - len(good)
    return [*lines, *([f"failed: {failed} of {len(rows)} rows"] if failed else [])]
