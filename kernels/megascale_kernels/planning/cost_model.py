# SPDX-License-Identifier: Apache-2.0
"""How long an operator will take, in arithmetic: enough to throw bad configurations away and to know when not to start.

A persistent kernel runs its tiles in *waves* of one tile per CTA, so the multiplication takes ceil(tiles / CTAs)
times one tile, and one tile takes its multiplications at the rate of one multiprocessor plus a fixed prologue and
epilogue. A long kernel is slower per tile, because the power limit lowers the clock. Communication is a line: a
latency plus bytes over a rate. Overlap is a timeline of the W shards in the order in which the kernel visits them:

    ag_gemm   shard s may begin when its rows have arrived; the own shard is there at once
    gemm_rs   shard s may leave when its tiles are done; the own shard, last, ends after the peers' partials came in
    gemm_ar   every tile leaves for every peer when it is done; the sum needs the last of them

An operator that is taken apart (`Config(kernel="cublas")`) is a timeline of whole products and copies likewise.

`predict` gives our kernel, `predict_serial` NCCL and cuBLAS one after the other. Everything here is a pure function of
integers and constants: every rank that asks gets the same answer. The constants of a known GPU were fitted to
measurements on four of them; those of an unknown GPU promise nothing (`Machine.known`).

M counts the rows of the whole input, N and K are as one rank sees them, W ranks; elements have two bytes.
"""

from typing import NamedTuple

from megascale_kernels.planning import gather_schedule
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.pieces import pieces_of

ELEMENT_BYTES = 2  # bf16 and fp16, the two types that the kernels take
FP32_BYTES = 4
WIDE_BYTES = 16  # what cuBLAS's fast kernels read at a time
OPERATORS = ("ag_gemm", "gemm_rs", "gemm_ar")
# cuBLAS chooses among tiles, and its epilogue hides behind the next tile: waves of the best of these, no fixed cost. It
# also cuts K, whose parts then meet in memory. The sizes with 192, and the cut, took the error from 15 to 10 %: root
# mean squares, fitted to 376 shapes on two H200, and the same on 210 others on two and four.
CUBLAS_TILES = ((128, 256), (256, 128), (128, 128), (192, 128), (128, 192), (64, 256), (64, 128))
CUBLAS_CUT_S = 2e-6
CUBLAS_LAUNCH_S = 5e-6
# Rows of N or K elements that are no multiple of sixteen bytes: 38 of those shapes took 1.3 to 7 times as long, 4 on
# average.
CUBLAS_UNALIGNED = 4.0


class Wire(NamedTuple):
    """A collective's time over its bytes: `latency_s + bytes / bytes_per_s`.

    Attributes:
        latency_s: what no message is shorter than.
        bytes_per_s: bus bandwidth, bytes that leave one rank per second.
    """

    latency_s: float
    bytes_per_s: float

    def time_s(self, bytes_moved: float) -> float:
        """Time of one message or collective."""
        return self.latency_s + bytes_moved / self.bytes_per_s


class Machine(NamedTuple):
    """What the model needs to know of a GPU and its links.

    Attributes:
        name: as CUDA names it.
        processors: streaming multiprocessors.
        processor_flops: multiply and add per second that one multiprocessor sustains in a 128 x 256 tile.
        tile_s: prologue and epilogue of one 128 x 256 tile of the plain Triton kernel that nothing hides.
        hot: how much slower a long kernel runs per tile, at most.
        hot_from_s: a kernel shorter than this stays cool.
        hot_full_s: this much longer, and it runs at the full `hot`.
        memory_bytes_per_s: device memory, bytes read plus bytes written.
        launch_s: from the start of a launch to the first tile, and from the last tile to the end.
        meet_s: what peers cost each other even when nothing is exposed: flags over the link, and not starting together.
        copy: one copy by the copy engine with its announcement.
        store_bytes_per_s: what all multiprocessors together can store into peers.
        cta_bytes_per_s: what one communication CTA can copy into a peer.
        gather, scatter, reduce: NCCL's all-gather, reduce-scatter and all-reduce.
        small: NCCL's protocol for small messages, used when it is faster.
        known: the figures come from measurements of this GPU; else nothing is promised.
    """

    name: str
    processors: int = 132
    processor_flops: float = 6.07e12
    tile_s: float = 2.6e-6
    hot: float = 0.09
    hot_from_s: float = 1.0e-3
    hot_full_s: float = 2.0e-3
    memory_bytes_per_s: float = 4.0e12
    launch_s: float = 6e-6
    meet_s: float = 8e-6
    copy: Wire = Wire(9e-6, 370e9)
    store_bytes_per_s: float = 340e9
    cta_bytes_per_s: float = 12e9
    gather: Wire = Wire(27e-6, 299e9)
    scatter: Wire = Wire(27e-6, 299e9)
    reduce: Wire = Wire(55e-6, 354e9)
    small: Wire = Wire(14e-6, 150e9)
    known: bool = True


# Fitted to 4 x H200 SXM (NV18 between every pair), torch 2.11, NCCL 2.28.9, Triton 3.6, bf16. Tiles: 90.9 us for
# 128 x 256 x 8192 and 46.8 us for K 4096 give rate and fixed cost; 99.8 us per K 8192 after 3.6 ms give `hot`. NCCL:
# all-gathers of 25 to 403 MB lie on one line within 2 %; so do its reduce-scatters. Copy engine: 370 GB/s at 256 MB.
# The figures of one CTA and of small messages are assumptions between published ones (ParallelKittens, table 1).
H200 = Machine("NVIDIA H200")
# The same chip, power limit and links as the H200, with 3.35 instead of 4.8 TB/s of memory (NVIDIA's data sheets; the
# ratio of reachable to nominal is the H200's).
H100 = Machine("NVIDIA H100 80GB HBM3", memory_bytes_per_s=2.8e12)
MACHINES = (H200, H100)

# Relative to a 128 x 256 tile: operand bytes per multiplication decide. 128 x 256 was measured; the others are
# guesses that err low, so that without tuning they are chosen only where waves gain more than that.
RATE = {
    (128, 256): 1.0, (256, 128): 0.97, (128, 128): 0.86, (64, 256): 0.80, (256, 64): 0.78, (64, 128): 0.66,
    (128, 64): 0.66, (64, 64): 0.50,
}  # fmt: skip
# The warp-specialised kernel hides epilogues behind the next tile and cuts the last wave. Its 128 x 128 tiles were 4 %
# slower than 128 x 256 on long launches (70B and GPT-3 at M 4096).
HOPPER_RATE = {(128, 256): 1.01, (128, 128): 0.97}
HOPPER_TILE = 0.4  # what is left of `tile_s`
# cuBLAS loses little with smaller tiles: at M 2048, N 7168 it runs as fast as full waves of 128 x 128 would.
CUBLAS_RATE = {
    (128, 256): 1.02, (256, 128): 1.02, (128, 128): 0.98, (192, 128): 1.0, (128, 192): 1.0, (64, 256): 0.90,
    (64, 128): 0.80,
}  # fmt: skip


class Estimate(NamedTuple):
    """The model's prediction for one launch, in seconds.

    Attributes:
        total_s: from start to end.
        gemm_s: the multiplication of this configuration alone.
        comm_s: the communication of this configuration alone.
        exposed_s: what of the communication the multiplication does not hide; total_s - gemm_s.
    """

    total_s: float
    gemm_s: float
    comm_s: float
    exposed_s: float


def machine_of(name: str, processors: int) -> Machine:
    """The constants of a GPU; one that was never measured gets a guess that is marked as such."""
    for machine in MACHINES:
        if (machine.name, machine.processors) == (name, processors):
            return machine
    return Machine(name, processors, known=False)


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size`."""
    return -(-size // block)


def heat(time_s: float, machine: Machine) -> float:
    """How much longer a kernel takes because it is long."""
    return 1 + machine.hot * min(1.0, max(0.0, (time_s - machine.hot_from_s) / machine.hot_full_s))


def tile_time(config: Config, k: int, machine: Machine) -> float:
    """Seconds of one tile of our kernel on one multiprocessor."""
    tile = config.block_m, config.block_n
    flops = 2 * tile[0] * tile[1] * blocks(k, config.block_k) * config.block_k
    fixed = machine.tile_s * tile[0] * tile[1] / (128 * 256)
    if config.kernel == "hopper":
        return flops / (machine.processor_flops * HOPPER_RATE.get(tile, 0.5)) + HOPPER_TILE * fixed
    return flops / (machine.processor_flops * RATE.get(tile, 0.5)) + fixed


def gather_launch(
    m_shard: int, n: int, k: int, world_size: int, config: Config, machine: Machine
) -> gather_schedule.Launch:
    """A warp-specialised all-gather + GEMM, as `gather_schedule` wants it described: in whole row blocks.

    So a server whose M takes every value has a timetable played for each row block more, not for each row.
    """
    tile = config.block_m, config.block_n
    rate = machine.processor_flops * HOPPER_RATE.get(tile, 0.5)
    return gather_schedule.Launch(
        m_shard=blocks(m_shard, tile[0]) * tile[0], blocks_n=blocks(n, tile[1]), blocks_k=blocks(k, config.block_k),
        world_size=world_size, programs=machine.processors, block_m=tile[0], block_n=tile[1], group_m=config.group_m,
        splits=config.splits, k_block_s=2 * tile[0] * tile[1] * config.block_k / rate,
        fixed_s=gather_schedule.FIXED_S * tile[0] * tile[1] / (128 * 256), row_bytes=ELEMENT_BYTES * k,
    )  # fmt: skip


def wave_count(config: Config, tiles: int, k: int, ctas: int, height: int = 16, peers: int = 0) -> float:
    """Waves of tiles: whole ones, and the last as it is or cut along K."""
    if config.kernel != "hopper":
        return blocks(tiles, ctas)
    from megascale_kernels.planning.tiling import LastWave, cut_last_wave

    k_blocks = blocks(k, config.block_k)
    more = {"columns": config.block_n, "height": height, "peers": peers}
    whole, split = cut_last_wave(tiles, ctas, k_blocks, config.tail_split, **more)
    return blocks(whole, ctas) + LastWave(tiles - whole, ctas, k_blocks, **more).cost(split)


def bytes_bound(m: int, n: int, k: int, machine: Machine) -> float:
    """Seconds to read both inputs and write the output once."""
    return ELEMENT_BYTES * (m * k + k * n + m * n) / machine.memory_bytes_per_s


def cublas_time(m: int, n: int, k: int, machine: Machine) -> float:
    """Seconds of torch.matmul: the best of its tiles, never faster than memory."""
    time_s = min(
        blocks(parts * blocks(m, rows) * blocks(n, cols), machine.processors)
        * (2 * rows * cols * k / parts)
        / (machine.processor_flops * CUBLAS_RATE[rows, cols])
        + (CUBLAS_CUT_S + FP32_BYTES * 2 * parts * m * n / machine.memory_bytes_per_s if parts > 1 else 0.0)
        for rows, cols in CUBLAS_TILES
        for parts in (1, 2)
    )
    if n * ELEMENT_BYTES % WIDE_BYTES or k * ELEMENT_BYTES % WIDE_BYTES:
        time_s *= CUBLAS_UNALIGNED
    return max(time_s * heat(time_s, machine), bytes_bound(m, n, k, machine)) + CUBLAS_LAUNCH_S


def nccl_time(wire: Wire, bytes_moved: float, machine: Machine) -> float:
    """Seconds of one collective of NCCL: the line of large messages, or of small ones."""
    return min(wire.time_s(bytes_moved), machine.small.time_s(bytes_moved)) if bytes_moved else 0.0


def sent_bytes(operator: str, m: int, n: int, k: int, world_size: int) -> float:
    """Bytes that must leave one rank: what a collective without reduction in the network cannot avoid."""
    if operator == "ag_gemm":
        return ELEMENT_BYTES * m * k * (world_size - 1) / world_size
    scattered = ELEMENT_BYTES * m * n * (world_size - 1) / world_size
    return scattered if operator == "gemm_rs" else 2 * scattered


def predict_serial(operator: str, m: int, n: int, k: int, world_size: int, machine: Machine) -> Estimate:
    """NCCL and cuBLAS one after the other."""
    wire = {"ag_gemm": machine.gather, "gemm_rs": machine.scatter, "gemm_ar": machine.reduce}[operator]
    gemm_s = cublas_time(m, n, k, machine)
    comm_s = nccl_time(wire, sent_bytes(operator, m, n, k, world_size), machine)
    return Estimate(gemm_s + comm_s, gemm_s, comm_s, comm_s)


def predict(operator: str, m: int, n: int, k: int, world_size: int, config: Config, machine: Machine) -> Estimate:
    """Our kernel with one configuration.

    Args:
        operator: one of `OPERATORS`.
        m: rows of the whole input (ag_gemm: of the gathered one).
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        world_size: ranks, each of which has m / world_size rows of the gathered or scattered matrix.
        config: tiles and carriers.
        machine: the GPU.

    Raises:
        ValueError: an operator that the model does not know.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}: the cost model knows {', '.join(OPERATORS)}")
    if config.kernel == "cublas":
        return _taken_apart(operator, m, n, k, world_size, config, machine)
    shard_m = m if operator == "gemm_ar" else blocks(m, world_size)
    shards = 1 if operator == "gemm_ar" else world_size
    carriers = config.comm_ctas if operator == "ag_gemm" and config.carrier == "sm" and world_size > 1 else 0
    ctas = max(1, machine.processors - carriers)
    tiles = blocks(shard_m, config.block_m) * blocks(n, config.block_n) * shards
    tile_s = tile_time(config, k, machine)
    height = min(config.group_m, blocks(shard_m, config.block_m))
    if operator == "gemm_rs" and config.kernel == "hopper":
        from megascale_kernels.planning.tile_order import scatter_height

        height = scatter_height(blocks(shard_m, config.block_m), world_size, config.group_m, config.mixed)
    waves = wave_count(config, tiles, k, ctas, height, world_size - 1 if operator == "gemm_rs" else 0)
    hot = heat(waves * tile_s, machine)
    gemm_s = max(waves * tile_s * hot, bytes_bound(m, n, k, machine)) + machine.launch_s
    shard_s = (gemm_s - machine.launch_s) * (tiles / ctas / waves) / shards
    tail_s = gemm_s - machine.launch_s - shard_s * shards
    if world_size == 1:
        return Estimate(gemm_s, gemm_s, 0.0, 0.0)
    if operator == "ag_gemm":
        comm_s, ready_s = _gather(shard_m, k, world_size, config, machine, shard_s)
        if config.kernel == "hopper" and config.planned:
            played = gather_schedule.plan(
                gather_launch(shard_m, n, k, world_size, config, machine), config.tail_split, config.lead
            )
            if played.time_s > 0:
                total_s = max(played.time_s * heat(played.time_s, machine), bytes_bound(m, n, k, machine))
                return Estimate(total_s, min(gemm_s, total_s), comm_s, max(0.0, total_s - gemm_s))
        # The rows that come last still need whole tiles, however many multiprocessors are idle by then.
        last_tiles = blocks(blocks(shard_m, config.block_m), max(1, config.splits)) * blocks(n, config.block_n)
        ready_s = max(ready_s, comm_s + blocks(last_tiles, ctas) * tile_s * hot - tail_s)
    elif operator == "gemm_rs":
        comm_s, ready_s = _scatter(shard_m, n, world_size, machine, shard_s)
    else:
        comm_s, ready_s = _exchange(m, n, world_size, machine, shard_s)
    total_s = max(gemm_s, ready_s + tail_s + machine.launch_s) + machine.meet_s
    return Estimate(total_s, gemm_s, comm_s, total_s - gemm_s)


def _taken_apart(operator: str, m: int, n: int, k: int, world_size: int, config: Config, machine: Machine) -> Estimate:
    """Products of whole shards by cuBLAS, with copies between them: `ag_gemm/decomposed`, `gemm_rs/decomposed`."""
    shard_m = blocks(m, world_size)
    step = WIDE_BYTES // ELEMENT_BYTES
    k = blocks(k, step) * step  # operands are widened (`dispatch`), what cuBLAS writes is not
    pieces = pieces_of(0, world_size, config.pieces)
    products = [[cublas_time((end - begin) * shard_m, n, k, machine) for begin, end in one.runs] for one in pieces]
    gemm_s = sum(map(sum, products))
    copy_s = machine.copy.time_s(ELEMENT_BYTES * shard_m * (k if operator == "ag_gemm" else n))
    comm_s = copy_s * (world_size - 1)
    clock = 0.0
    if operator == "ag_gemm":
        for piece, times in zip(pieces, products, strict=True):
            clock = max(clock, copy_s * (piece.last - 1)) + sum(times)
        total_s = clock + machine.meet_s
        return Estimate(total_s, gemm_s, comm_s, total_s - gemm_s)
    sent_s = 0.0
    own_last = zip((*pieces[1:], pieces[0]), (*products[1:], products[0]), strict=True)
    for piece, times in own_last:
        clock += sum(times)
        sent_s = max(sent_s, clock) + copy_s * (piece.last - max(1, piece.first))
    add_s = ELEMENT_BYTES * (world_size + 1) * shard_m * n / machine.memory_bytes_per_s + machine.launch_s
    total_s = max(clock, sent_s) + add_s + machine.meet_s
    return Estimate(total_s, gemm_s, comm_s, total_s - gemm_s)


def _gather(
    shard_m: int, k: int, world_size: int, config: Config, machine: Machine, shard_s: float
) -> tuple[float, float]:
    """All-gather + GEMM: when the copies end, and when the last full wave of tiles does."""
    shard_bytes = ELEMENT_BYTES * shard_m * k
    units = max(1, min(config.splits, blocks(shard_m, config.block_m)))
    if config.carrier == "sm":
        # One CTA carries a unit, so more CTAs than units are idle. It stores, fences and raises a flag: about 2 us.
        busy = max(1, min(config.comm_ctas, units))
        copy_s = shard_bytes / min(machine.store_bytes_per_s, busy * machine.cta_bytes_per_s) + 2e-6 * units / busy
    else:
        copy_s = shard_bytes / machine.copy.bytes_per_s + machine.copy.latency_s * units
    clock = shard_s
    for step in range(1, world_size):
        first_s = copy_s * (step - 1) + copy_s / units
        last_s = copy_s * step
        # The shard may begin with its first unit and cannot end before the tiles of its last unit.
        clock = max(max(clock, first_s) + shard_s, last_s + shard_s / units)
    return copy_s * (world_size - 1), clock


def _scatter(shard_m: int, n: int, world_size: int, machine: Machine, shard_s: float) -> tuple[float, float]:
    """GEMM + reduce-scatter: when the last partial has arrived, and when the own rows are summed."""
    shard_bytes = ELEMENT_BYTES * shard_m * n
    leave_s = shard_bytes / machine.store_bytes_per_s
    sent = 0.0
    for step in range(1, world_size):
        # Tiles leave as they are done, so a shard has left with its last tile unless the link is slower.
        sent = max(max(sent, shard_s * (step - 1)) + leave_s, shard_s * step)
    # The sum reads every peer's partial from memory while the tensor cores wait.
    reduce_s = shard_bytes * (world_size - 1) / machine.memory_bytes_per_s
    ready_s = max(shard_s * world_size, sent + machine.launch_s) + reduce_s
    return leave_s * (world_size - 1), ready_s


def _exchange(m: int, n: int, world_size: int, machine: Machine, gemm_s: float) -> tuple[float, float]:
    """GEMM + all-reduce in one shot: every tile to every peer, then the sum of all on every rank."""
    partial_bytes = ELEMENT_BYTES * m * n
    leave_s = partial_bytes * (world_size - 1) / machine.store_bytes_per_s
    reduce_s = partial_bytes * world_size / machine.memory_bytes_per_s
    return leave_s, max(gemm_s, leave_s) + machine.launch_s + reduce_s
