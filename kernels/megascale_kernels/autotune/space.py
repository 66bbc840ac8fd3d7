# SPDX-License-Identifier: Apache-2.0
"""The configurations worth measuring: all that fit the chip, thinned out by the cost model.

The model knows tiles, waves and carriers; it does not know what the depth of the pipeline or the order of the tiles in
L2 are worth. So the list holds the best few combinations of tile and carrier, and around the very best of them the
variants that the model rates as equal.
"""

from collections.abc import Iterator

from megascale_kernels.planning.config import Carrier, Config, Kernel
from megascale_kernels.planning.cost_model import ELEMENT_BYTES, H200, OPERATORS, Machine, blocks, predict

MOST = 14  # candidates; at 1 to 2 s each, most of it compilation, they fit a budget of 20 s
COMBINATIONS = 6  # of tile and carrier; the rest of the list are variants of the best
VARIANTS = 3  # of each kernel's best combination
WORST = 1.3  # a combination that is predicted to take this much longer than the best is not measured
SHARED_BYTES = 227 * 1024  # what one CTA may own on compute capability 9.0

# Tile, stages and warps that go together: as many stages as fit beside the epilogue; an accumulator of 64 x 256 or less
# is one warpgroup's.
TILES = (
    Config(128, 256, 64, stages=4, warps=8),
    Config(256, 128, 64, stages=4, warps=8),
    Config(128, 128, 64, stages=4, warps=8),
    Config(64, 256, 64, stages=4, warps=4),
    Config(64, 128, 64, stages=6, warps=4),
    Config(128, 64, 64, stages=6, warps=4),
)
# The warp-specialised kernel lays out its own pipeline and warps, and copies by the copy engine alone. Sixteen row
# blocks together gained up to 1 % over eight on 4 x H200, and never lost.
HOPPER_TILES = (
    Config(128, 256, 64, group_m=16, kernel="hopper"),
    Config(128, 128, 64, group_m=16, kernel="hopper"),
)
# A ring of three slots instead of four, tiles of 128 x 256, no communication, in turn: 0.6 % faster in 5.5 waves or
# more, 0.6 % slower in fewer. Back to back 2 % faster on one H200 (1,500 MHz for 1,410 at 690 W) and 5 % slower on
# another, and up to 4 % slower while much is written to memory (ag_gemm_ring_1gpu.txt): so tuning decides.
POWER_LIMITED_WAVES = 5.5
SHALLOW_STAGES = 3
# The copy engine wants large pieces; CTAs of the kernel are quicker off the mark, but take multiprocessors away.
ENGINE_SPLITS = (1, 2, 4)
COMM_CTAS = (8, 16)


def shared_bytes(config: Config) -> int:
    """Shared memory of a CTA: the load pipeline, and a quarter of the tile on its way out."""
    stage = (config.block_m + config.block_n) * config.block_k * ELEMENT_BYTES
    return config.stages * stage + config.block_m * config.block_n // 4 * ELEMENT_BYTES


def carriers(config: Config, operator: str, shard_m: int) -> Iterator[Config]:
    """The ways to carry the data of one tile: only the all-gather has a choice."""
    if operator != "ag_gemm":
        yield config
        return
    units = blocks(shard_m, config.block_m)
    for splits in ENGINE_SPLITS:
        if splits <= units:
            yield config._replace(splits=splits)
    for ctas in COMM_CTAS if config.kernel == "triton" else ():
        yield config._replace(carrier="sm", comm_ctas=ctas, splits=min(64, units))


def variants(config: Config, operator: str) -> Iterator[Config]:
    """The variants of one configuration that the cost model rates as equal."""
    if config.kernel == "hopper":
        yield config._replace(tail_split=1)
        yield config._replace(tail_split=0)
        yield config._replace(group_m=8)
        return
    yield config._replace(stages=config.stages - 1)
    yield config._replace(group_m=4)
    yield config._replace(group_m=16)
    if operator == "gemm_rs":
        yield config._replace(push_tma=False)
    yield config._replace(stages=config.stages - 1, group_m=4)
    yield config._replace(stages=config.stages + 1)


def shallower(config: Config, m: int, n: int, world_size: int, machine: Machine) -> Iterator[Config]:
    """The same with a shallower ring, where power limits an all-gather's product."""
    tiles = blocks(blocks(m, world_size), config.block_m) * blocks(n, config.block_n) * world_size
    if config.block_n == 256 and tiles >= POWER_LIMITED_WAVES * machine.processors:
        yield config._replace(stages=SHALLOW_STAGES)


def differently_mixed(operator: str, config: Config, m: int, world_size: int) -> Iterator[Config]:
    """A reduce-scatter of few rows with the other order of its own and the peers' rows."""
    from megascale_kernels.planning.tile_order import MOST_MIXED

    rows = world_size * blocks(blocks(m, world_size), config.block_m)
    if operator == "gemm_rs" and world_size > 1 and rows <= 2 * MOST_MIXED:
        yield config._replace(mixed=rows > MOST_MIXED)


def planned(operator: str, m: int, n: int, k: int, world_size: int, machine: Machine) -> Iterator[Config]:
    """Of each tile of the warp-specialised all-gather the best by the timetable of arrivals.

    A shard that is copied in parts is walked in groups of half or a quarter the size: what comes first is done first.
    (7B and 8B at TP8's size, M 4096 and 8192 on 2 x H200: 1.04 to 1.10 times as fast, in turn.)
    """
    if operator != "ag_gemm" or world_size == 1:
        return
    for tile in HOPPER_TILES:
        ways = carriers(tile, operator, blocks(m, world_size))
        yield min(
            (config._replace(planned=True, group_m=tile.group_m // config.splits) for config in ways),
            key=lambda config: predict(operator, m, n, k, world_size, config, machine).total_s,
        )


def taken_apart(operator: str, world_size: int) -> list[Config]:
    """Products of cuBLAS's with copies between them: of each shard, of our own and all others, of all at once."""
    if operator == "gemm_ar" or world_size == 1:
        return []
    return [Config(kernel="cublas", pieces=pieces) for pieces in dict.fromkeys((world_size, 2, 1))]


def candidates(operator: str, m: int, n: int, k: int, world_size: int, machine: Machine = H200) -> list[Config]:
    """At most `MOST` configurations, the one that the model likes best first.

    Args:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        world_size: ranks.
        machine: the GPU; it decides only the order and what is left out.

    Raises:
        ValueError: an unknown operator, or a size below one.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}: choose one of {', '.join(OPERATORS)}")
    if min(m, n, k, world_size) < 1:
        raise ValueError(f"{operator} of M {m}, N {n}, K {k} on {world_size} ranks: sizes must be positive")
    shard_m = m if operator == "gemm_ar" else blocks(m, world_size)
    tiles = TILES if operator == "gemm_ar" else HOPPER_TILES + TILES
    combinations = [config for tile in tiles for config in carriers(tile, operator, shard_m)]
    times = {config: predict(operator, m, n, k, world_size, config, machine).total_s for config in combinations}
    # sorted() is stable: equals stay in the order written above, so every rank makes the same list.
    ranking = sorted(combinations, key=times.__getitem__)
    likely = [config for config in ranking if times[config] <= WORST * times[ranking[0]]]
    # The best of each kind stays in the list, whatever the model thinks of the kind: it was fitted to one of them.
    leaders: dict[tuple[Kernel, Carrier], Config] = {}
    for config in likely:
        leaders.setdefault((config.kernel, config.carrier), config)
    chosen = dict.fromkeys(list(dict.fromkeys([*leaders.values(), *likely]))[:COMBINATIONS])
    for config in planned(operator, m, n, k, world_size, machine):
        chosen.update(dict.fromkeys([config, *shallower(config, m, n, world_size, machine)]))
    chosen.update(dict.fromkeys(taken_apart(operator, world_size)))
    for base in (config for (_, carrier), config in leaders.items() if carrier == "copy_engine"):
        more = [config for config in variants(base, operator) if shared_bytes(config) <= SHARED_BYTES]
        if operator == "ag_gemm" and base.kernel == "hopper":
            more = [*shallower(base, m, n, world_size, machine), *more]
        more = [*differently_mixed(operator, base, m, world_size), *more]
        chosen.update(dict.fromkeys(more[:VARIANTS]))
    return list(chosen)[:MOST]
