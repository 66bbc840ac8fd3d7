# SPDX-License-Identifier: Apache-2.0
"""How much of a rank a MoE layer gives to communication: a model of a layer's time, and the ways worth trying.

COMET (2502.19811, section 3.3) gives each shape its own number of communication thread blocks, found by a profile. Here
that share is set by several fields of `MoeConfig`: `reducers`, programs of layer 1 that only add up and send (plain
Triton; the warp-specialised kernel has two warps for it in every program); `chunks` of layer 1's columns, of which the
last one's sums are what nothing hides; `lead_rows` of own tokens, behind which the peers' arrive; `splits` of these.

The model knows tiles in waves, bytes and their rates, and looks at the rank that has most to do under each of COMET's
three skews: the way that is best on average of them is tried first. It need not be right: where calls can be measured,
the first ones of a shape find the fastest of a few (`dispatch/moe_path.py`), or a tuning has found it before.
"""

import math
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist, mean

from megascale_kernels.moe.moe_config import (
    CHUNKS,
    FLOPS,
    HIDDEN_UNITS,
    LATENCY_S,
    LINK_BYTES,
    SEND_BYTES,
    UNIT_S,
    MoeConfig,
    wanted_share,
)
from megascale_kernels.moe.skewed import SKEWS
from megascale_kernels.moe.tables import Sizes

PROCESSORS = 132
MEMORY_BYTES = 3.3e12  # a second, read or written, H200
# What one of the programs that only add up moves: it waits for memory nearly all the time (two H200: all 132 add up at
# 0.6 of the memory's rate).
REDUCER_BYTES = 0.6 * MEMORY_BYTES / PROCESSORS
# Another chunk of columns: its tiles fill no last wave, and jobs look for work once more. Four took up to 1.18 times as
# long as two in layers of 0.55 ms, two as long as one.
CHUNK_S = 8e-6
# Half a tile's rows, in whole tiles' times: half the work, but the whole weight. Of layer 0, which gathers its rows as
# well, and of layer 1: medians of four layers (moe_half_tile_cost_2gpu_h200.txt: 0.49 to 1.14, 0.53 to 0.72).
HALF_TILE_UP, HALF_TILE_DOWN = 0.95, 0.59
SHARED_WARPS = 12  # programs' worth of adding up that two warps in every program do beside the products
MOST_WAYS = 6  # that are tried: a contest's
# What a way must promise over the default to be taken unmeasured. On 19 layers of two H200 (moe_2gpu_h200.txt) times
# were 0.93 to 1.62 times the model's, 1.15 in the geometric mean, but another number of chunks or another lead changed
# them by what the model says to 4 % (four chunks of 2,048 columns: up to 16 % more than it says).
PROMISE = 1.05
# What the serial path (`sync_free`) takes beside its products, to 10 % in most of 89 layers on two and four H200
# (moe_*gpu_h200*.txt): latencies, launches and a sort, and NCCL between two cards.
SERIAL_S, NCCL_BYTES = 110e-6, 300e9
# A layer is tried in series as well where the model gives our kernels no more of a lead than this. By it the layers
# that were behind (0.92 and 0.94) are at 0.97 and 1.04, and nine of the ten whose lead was at most 5 % are tried.
SURE = 1.25
# Of the model's lead. None at all took 1.06 to 1.13 times as long on two H200 (moe_tuned_2gpu_h200.txt): it is no way.
LEADS = (1.0, 2.0, math.inf)
REDUCERS = (4, 8, 16, 32)


def flags_of(sizes: Sizes, config: MoeConfig) -> int:
    """Flags that a layer needs of each rank; a workspace has so many (`layout.channels`)."""
    jobs = (config.chunks or 1) * -(-sizes.pitch // config.job_tokens)
    return 1 + max(config.route_programs, config.units, jobs)


@cache
def even_shares(experts: int, std: float) -> tuple[float, ...]:
    """Shares of the load with about this standard deviation, the same everywhere: quantiles of a normal, softmax."""
    steps = [NormalDist().inv_cdf((index + 0.5) / experts) for index in range(experts)]

    def softmax(scale: float) -> list[float]:
        weights = [math.exp(scale * step) for step in steps]
        return [weight / sum(weights) for weight in weights]

    def deviation(found: list[float]) -> float:
        return math.sqrt(mean((share - 1 / experts) ** 2 for share in found))

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if deviation(softmax(middle)) < std else (low, middle)
    # The largest go to different ranks, as far as they reach: a deal, and not a sort, is what training sees.
    found, stride = (
        softmax(low),
        next(step for step in range(experts // 2 + 1, 2 * experts) if math.gcd(step, experts) == 1),
    )
    return tuple(found[index * stride % experts] for index in range(experts))


def busiest_rows(sizes: Sizes, std: float) -> list[float]:
    """Rows of each expert of the rank that has most, under a skew."""
    share = even_shares(sizes.experts * sizes.world_size, std)
    ranks = [share[rank * sizes.experts : (rank + 1) * sizes.experts] for rank in range(sizes.world_size)]
    pairs = sizes.world_size * sizes.pitch * sizes.top_k
    return [one * pairs for one in max(ranks, key=sum)]


def product_s(
    rows: list[float], columns: int, depth: int, programs: int, tile: tuple[int, int], last_tile: float
) -> float:  # fmt: skip
    """A grouped product: waves of whole tiles, or the reading of its weights where experts have few rows.

    Args:
        rows: of each expert.
        columns: of the product.
        depth: that is summed over.
        programs: that multiply.
        tile: rows and columns of a tile.
        last_tile: what the last wave takes where there are two programs for each of its tiles, in tiles' times.
    """
    tile_rows, tile_columns = tile
    tiles = sum(math.ceil(count / tile_rows) for count in rows) * math.ceil(columns / tile_columns)
    waves, last = divmod(tiles, programs)
    waves_s = waves + (0.0 if not last else last_tile if 2 * last <= programs else 1.0)
    tile_s = 2 * tile_rows * tile_columns * depth * PROCESSORS / FLOPS
    weights_s = sum(count > 0 for count in rows) * columns * depth * 2 / MEMORY_BYTES
    return max(waves_s * tile_s, weights_s)


def layer_s(sizes: Sizes, config: MoeConfig, std: float) -> float:
    """Seconds of both products with what they do not hide, on the busiest rank.

    Args:
        sizes: of the layer.
        config: `MoeConfig.resolved`.
        std: standard deviation of the experts' shares of the load.
    """
    rows = busiest_rows(sizes, std)
    own = sum(rows) / sizes.world_size
    last_up, last_down = (HALF_TILE_UP, HALF_TILE_DOWN) if config.cut else (1.0, 1.0)
    tile = (sizes.tile_rows, 2 * config.block_n)
    up_s = product_s(rows, 2 * sizes.inner, sizes.hidden, PROCESSORS, tile, last_up)
    remote_bytes = (sizes.world_size - 1) * sizes.pitch * sizes.hidden * 2
    # A tile waits for the units of its rows: the last of them have come when all have.
    copies = (sizes.world_size - 1) * config.units
    arrived_s = LATENCY_S + remote_bytes / LINK_BYTES + copies * UNIT_S if sizes.world_size > 1 else 0.0
    lead = min(float(config.lead_rows or 0), own)
    # With a unit's tokens a share of the tiles behind the lead can begin, the fewer the more ranks' units they mix.
    early = (1 - lead / max(1.0, sum(rows))) * (1 - 1 / config.units) / (2 * max(1, sizes.world_size - 1))
    covered_s = up_s * (lead / max(1.0, sum(rows)) + early)
    weight_bytes = 4 * sizes.inner * sizes.hidden
    twice_s = sizes.experts * lead / max(1.0, own) * weight_bytes / MEMORY_BYTES / 8  # most of it from L2, or hidden
    waited_s = max(0.0, arrived_s - covered_s)
    if config.selective:
        waited_s = wanted_share(sizes) * remote_bytes / SEND_BYTES
    dispatch_s = up_s + waited_s + twice_s

    chunks = config.chunks or 1
    added_bytes = sum(rows) * sizes.hidden * 2 + sizes.world_size * sizes.pitch * sizes.hidden * 2
    sent_s = remote_bytes / LINK_BYTES
    programs = PROCESSORS - config.reducers if config.kernel == "triton" else PROCESSORS
    helpers = config.reducers if config.kernel == "triton" else SHARED_WARPS
    down_s = product_s(rows, sizes.hidden, sizes.inner, programs, (sizes.tile_rows, config.combine_n), last_down)
    beside_s = down_s * (chunks - 1) / chunks
    beside_bytes = min(added_bytes * (chunks - 1) / chunks, beside_s * helpers * REDUCER_BYTES)
    left_s = (added_bytes - beside_bytes) / (PROCESSORS * REDUCER_BYTES)
    return dispatch_s + down_s + max(left_s, sent_s / chunks) + chunks * CHUNK_S


def serial_s(sizes: Sizes) -> float:
    """Seconds of the serial path on the busiest rank, experts drawn evenly: products without padding, then bytes."""
    rows, hidden, inner = sum(busiest_rows(sizes, 0.0)), sizes.hidden, sizes.inner
    products = 6 * rows * hidden * inner / FLOPS
    weights = 6 * sizes.experts * inner * hidden / MEMORY_BYTES
    tokens = sizes.world_size * sizes.pitch
    # Rows are read, written, multiplied, and read again for their sums; gate, up and h are read and written once.
    moved = 2 * (5 * rows * hidden + 3 * rows * inner + tokens * hidden)
    sent = 2 * 2 * (sizes.world_size - 1) * sizes.pitch * hidden  # there and back
    return max(products, weights) + moved / MEMORY_BYTES + sent / NCCL_BYTES + SERIAL_S


def may_be_serial(sizes: Sizes, base: MoeConfig | None = None) -> bool:
    """Whether the serial path may be as fast as our kernels: their tiles of 128 rows hold more padding than they hide.

    Args:
        sizes: of the layer.
        base: how our kernels would run.
    """
    return serial_s(sizes) < SURE * layer_s(sizes, (base or MoeConfig()).resolved(sizes), 0.0)


def mean_s(sizes: Sizes, config: MoeConfig) -> float:
    """Seconds on average of COMET's three skews."""
    return mean(layer_s(sizes, config.resolved(sizes), std) for std in SKEWS)


def ways(sizes: Sizes, base: MoeConfig | None = None) -> Iterator[MoeConfig]:
    """All ways that are weighed: the default one, with another number of chunks, another lead, units, programs.

    Among more than two ranks the second sends what the default one does not: all tokens, or those that are wanted.
    None deals tiles in turn: in 23 of 24 layers that was slower (moe_dealt_2gpu_h200_*.txt), in one 1 % faster.

    Args:
        sizes: of the layer.
        base: what every way has in common.
    """
    default = (base or MoeConfig()).resolved(sizes)
    yield default
    if sizes.world_size > 2:
        yield default._replace(selective=not default.selective)
    lead = default.lead_rows or 0
    most = max(1, sizes.hidden // default.combine_n)
    for chunks in dict.fromkeys(min(count, most) for count in (1, CHUNKS, 2 * CHUNKS)):
        for share in LEADS:
            rows = sizes.pairs if math.isinf(share) else min(sizes.pairs, int(lead * share))
            yield default._replace(chunks=chunks, lead_rows=rows)
    for splits in (1, HIDDEN_UNITS, 8):
        yield default._replace(splits=splits)
    if default.kernel == "triton":
        for reducers in REDUCERS:
            yield default._replace(reducers=reducers)
    yield default._replace(group_m=2 * default.group_m)


def likely_ways(sizes: Sizes, base: MoeConfig | None = None) -> list[MoeConfig]:
    """The ways worth trying, `MOST_WAYS` at most; the same on every rank.

    The default first, among more than two ranks what sends the other tokens, and then by the model.

    Args:
        sizes: of the layer.
        base: what every way has in common.
    """
    found = list(dict.fromkeys(ways(sizes, base)))
    # sorted() is stable: equals stay in the order written above, so every rank makes the same list.
    firm = 1 if sizes.world_size <= 2 else 2
    return [*found[:firm], *sorted(found[firm:], key=lambda way: mean_s(sizes, way))][:MOST_WAYS]


def by_model(sizes: Sizes, base: MoeConfig | None = None) -> MoeConfig:
    """The way that the model likes best where it promises a gain, the default elsewhere.

    Args:
        sizes: of the layer.
        base: what every way has in common.
    """
    first, *others = likely_ways(sizes, base)
    best = min((first, *others), key=lambda way: mean_s(sizes, way))
    return best if mean_s(sizes, best) * PROMISE < mean_s(sizes, first) else first
