# SPDX-License-Identifier: Apache-2.0
"""Copies between every two GPUs of the node, each way, and both ways at once.

A link that is down, or retries, takes its share from every pair over it; in a collective it is the slowest link that
counts. Pairs are measured one after the other. A figure of both ways is the sum of both.
"""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import Device, clock_mark, devices
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

if TYPE_CHECKING:
    import torch

CHECK = Check(
    "nvlink", "copies between GPUs", ("gpus", "torch"), quick_s=20.0, full_s=120.0, alone=True, process="cuda"
)

_BYTES = 256 << 20
_REPETITIONS = 10
_QUICK_COPIES, _FULL_COPIES = 4, 40


def measure(task: Task) -> Reading:
    """Copy between all pairs."""
    import torch

    found, missing = devices(2 * _BYTES)
    copies = _FULL_COPIES if task.thorough else _QUICK_COPIES
    buffers = {
        one.place: [torch.ones(_BYTES, dtype=torch.uint8, device=f"cuda:{one.place}") for _ in range(2)]
        for one in found
    }
    figures, facts = [], []
    for one, other in combinations(found, 2):
        doing(f"copying between {one.label} and {other.label}")
        direct = torch.cuda.can_device_access_peer(one.place, other.place)
        how = "peer access" if direct else "through the host"
        pair = f"{one.label} and {other.label}"
        facts.append(Fact("pair_path", pair, how, peers="pairs"))
        peers = f"{one.model}, {how}"
        for source, target in ((one, other), (other, one)):
            rates = _rates(buffers, [(source, target)], copies)
            of = f"{source.label} to {target.label}"
            figures.append(Figure("nvlink_one_way", of, median(rates), tuple(rates), peers))
        rates = _rates(buffers, [(one, other), (other, one)], copies)
        figures.append(Figure("nvlink_both_ways", pair, median(rates), tuple(rates), peers))
    return Reading(tuple(figures), tuple(facts), tuple(missing))


def _rates(buffers: dict[int, list[torch.Tensor]], ways: list[tuple[Device, Device]], copies: int) -> list[float]:
    """Return bytes a second, all ways together, of each repetition; the ways run at once."""
    import torch

    streams = [
        torch.cuda.Stream(device=source.place)  # type: ignore[no-untyped-call]  # torch has no types for it
        for source, _ in ways
    ]
    found = []
    for repetition in range(_REPETITIONS + 1):
        marks = []
        for stream, (source, target) in zip(streams, ways, strict=True):
            with torch.cuda.device(source.place), torch.cuda.stream(stream):
                marks.append([clock_mark() for _ in range(2)])
                marks[-1][0].record(stream)
                for _ in range(copies):
                    buffers[target.place][1].copy_(buffers[source.place][0], non_blocking=True)
                marks[-1][1].record(stream)
        for source, _ in ways:
            torch.cuda.synchronize(source.place)
        if repetition:  # the first one maps the memory
            found.append(sum(_BYTES * copies / (first.elapsed_time(last) * 1e-3) for first, last in marks))
    return found


def judge(reading: Reading) -> list[CheckFinding]:
    """Find pairs that go through the host where others of this node do not."""
    paths = reading.texts("pair_path")
    through = [pair for pair, how in paths.items() if how != "peer access"]
    if not through or len(through) == len(paths):
        return []
    text = f"{', '.join(through[:4])}: no peer access, where {len(paths) - len(through)} other pairs have it"
    return [
        CheckFinding("bad", through[0], text, "nvidia-smi topo -p2p r; nvidia-smi nvlink -s; the fabric manager's log")
    ]
