# SPDX-License-Identifier: Apache-2.0
"""How long a schedule takes: what is multiplied, what travels, and which of the two waits for the other.

Numbers of one H100 or H200; they set no result, only how many groups of experts are in flight and which of Parm's
schedules runs. A host between whose GPUs there are slower links passes its own `Links`.
"""

from typing import Literal, NamedTuple

from megascale_kernels.errors import Unsupported

FLOPS = 620e12  # grouped products, bf16, measured between two H100
PROCESSORS = 132
TILE_ROWS, TILE_COLS = 128, 256  # of a grouped product: an expert's last rows cost a whole tile
# What a group costs the device beside its share of the products: 0.4 to 0.75 ms with 16,384 tokens of Mixtral and Phi
# on two H200, where the host is ahead.
GROUP_S = 0.4e-3
MEMORY_BYTES = 3.3e12  # a second
ADDED_BYTES = 20  # of an element of a pair that is added up: read, turned into fp32, weighted, added by atomics
# The host queues a layer, and what each group adds: behind it the device waits where groups are short. On two H200,
# 8,192 tokens of DeepSeek-MoE and Qwen3-30B: 3.9 and 3.5 ms with one group, 1.1 and 0.65 ms more for each (less since
# parts are sorted together, not measured).
HOST_S, HOST_GROUP_S = 2.8e-3, 0.7e-3
MOST_GROUPS = 8  # beyond it pieces are latency alone
Schedule = Literal["S1", "S2", "plain"]


class Links(NamedTuple):
    """What collectives cost: `latency_s + bytes / bytes_per_s` (Parm, 2407.00599, its alpha-beta model).

    Attributes:
        latency_s: of one collective.
        bytes_per_s: that leave a rank; NCCL between two H100 by default.
    """

    latency_s: float = 25e-6
    bytes_per_s: float = 330e9

    def seconds(self, sent: float) -> float:
        """One collective in which a rank sends so many bytes."""
        return self.latency_s + sent / self.bytes_per_s


class Layer(NamedTuple):
    """A layer as the model sees it.

    Attributes:
        ranks: that share the experts.
        tokens: of one rank.
        top_k: experts of a token.
        experts: of one rank.
        hidden: H.
        inner: I.
        itemsize: bytes of an element.
    """

    ranks: int
    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    itemsize: int = 2

    @property
    def rows(self) -> float:
        """Rows that a rank's experts multiply when the load is even."""
        return self.tokens * self.top_k

    @property
    def travelling(self) -> float:
        """Bytes that leave a rank in one all-to-all."""
        return self.rows * self.hidden * self.itemsize * (self.ranks - 1) / self.ranks


def products_s(layer: Layer, experts: int, rows: float) -> float:
    """Seconds of both grouped products of some experts with so many rows in all; at least a wave of tiles."""
    tiles_high = experts * -(-int(rows / experts) // TILE_ROWS) if rows else 0
    seconds = 0.0
    for columns, depth in ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)):
        waves = -(-tiles_high * -(-columns // TILE_COLS) // PROCESSORS)
        seconds += waves * PROCESSORS * 2 * TILE_ROWS * TILE_COLS * depth / FLOPS
    return seconds


def pipeline_s(layer: Layer, groups: int, links: Links) -> float:
    """Seconds of the expert pipeline: dispatches one after another, a result once it is there and links are free."""
    part_s = links.seconds(layer.travelling / groups) if layer.ranks > 1 else 0.0
    arrived = [part_s * (group + 1) for group in range(groups)]
    links_free, computed = arrived[-1], 0.0
    for group in range(groups):
        experts = layer.experts * (group + 1) // groups - layer.experts * group // groups
        rows = layer.rows * experts / layer.experts
        computed = max(computed, arrived[group]) + GROUP_S + products_s(layer, experts, rows)
        links_free = max(links_free, computed) + part_s
    return max(links_free, HOST_S + groups * HOST_GROUP_S)


def expert_groups(layer: Layer, links: Links | None = None) -> int:
    """The number of groups of experts with which the pipeline ends first; the smallest of equals.

    Args:
        layer: its sizes.
        links: between the ranks.
    """
    known = links or Links()
    return min(range(1, min(layer.experts, MOST_GROUPS) + 1), key=lambda groups: pipeline_s(layer, groups, known))


def parm_s(layer: Layer, schedule: Schedule, mp: int, esp: int, links: Links) -> float:
    """Seconds of what Parm's schedules differ by: communication, adding up (2407.00599, its performance models).

    Args:
        layer: `tokens` are those of a model-parallel group, which all its ranks hold.
        schedule: "S1", "S2", or "plain", in which every rank of a model-parallel group sends all tokens.
        mp: ranks that hold the same tokens.
        esp: ranks that share the same experts.
        links: between the ranks.
    """
    split = 1 if schedule == "plain" else mp
    shuffled_s = links.seconds(layer.travelling * esp / split)
    row_bytes = layer.tokens * layer.hidden * layer.itemsize * (mp - 1) / mp
    if schedule == "plain" or mp == 1:
        return 2 * shuffled_s
    if schedule == "S1":
        return 2 * shuffled_s + links.seconds(row_bytes)
    # The all-gather has top_k rows a token, and hides behind the way back but for its last half.
    gathered_s = links.seconds(row_bytes * layer.top_k)
    # And every rank of a model-parallel group adds up all pairs, where S1 adds a share, and launches two pieces.
    added_s = layer.rows * layer.hidden * ADDED_BYTES / MEMORY_BYTES * (mp - 1) / mp
    return shuffled_s + max(shuffled_s, gathered_s) + gathered_s / 2 + added_s + max(GROUP_S, HOST_GROUP_S)


def parm_schedule(layer: Layer, mp: int, esp: int, links: Links | None = None) -> Schedule:
    """The faster of Parm's two schedules; S1 of equals.

    Args:
        layer: `tokens` are those of a model-parallel group.
        mp: ranks that hold the same tokens.
        esp: ranks that share the same experts.
        links: between the ranks.
    """
    if mp < 1 or esp < 1:
        raise Unsupported(f"parm_schedule(mp={mp}, esp={esp}): positive numbers of ranks")
    known = links or Links()
    return "S1" if parm_s(layer, "S1", mp, esp, known) <= parm_s(layer, "S2", mp, esp, known) else "S2"
