# SPDX-License-Identifier: Apache-2.0
"""Keep the trace of one rank in a file, and read it back without torch, a GPU or trust.

A file is one line of JSON (which rank recorded what, where the clock stands, what the flags of each launch mean) and
behind it the words of the rings that hold anything, little-endian, as they lay in device memory.
"""

import json
import os
import sys
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megascale_kernels.progress.atomic_file import put
from megascale_kernels.progress.board_format import MAX_CTAS, RING_WORDS, ROLES
from megascale_kernels.progress.view import BoardView, read_board
from megascale_kernels.tracing.clock import Offset
from megascale_kernels.tracing.rings import Ring, decode_ring

if TYPE_CHECKING:
    from megascale_kernels.memory.workspace import Workspace
    from megascale_kernels.planning.config import Config

FORMAT = "megascale-trace-1"
RING_BYTES = RING_WORDS * 4
MOST_UNITS = 1 << 12  # of one shard: a unit is at least a row of tiles
MOST_FLAGS = 1 << 20  # of a mixture of experts: chunks of columns times blocks of tokens
MOST_OFFSET = (1 << 64) - 1  # nanoseconds: clocks have 64 bits
MOST_HEADER_BYTES = 1 << 26  # units of some million tiles


class Chunk(NamedTuple):
    """A copy of the copy engine, timed by the host (see `chunk_of`).

    Attributes:
        launch: number of the launch it belongs to.
        peer: the rank it goes to.
        unit: which unit.
        begin_ns: on the GPU's clock.
        end_ns: likewise.
    """

    launch: int
    peer: int
    unit: int
    begin_ns: int
    end_ns: int


class Shape(NamedTuple):
    """What the flags of a launch mean.

    Attributes:
        operator: its name.
        tiles: number of tiles.
        units: per tile the first and last unit it reads (all-gather + GEMM), of one shard where all shards are walked
            alike; of a mixture of experts per tile or job a rank and a flag (`moe/trace_shapes.py`); () when unknown.
    """

    operator: str
    tiles: int
    units: tuple[tuple[int, int], ...] = ()


class TraceDump(NamedTuple):
    """The trace of one rank.

    Attributes:
        rank: whose.
        world_size: ranks in the group.
        rings: what its CTAs recorded.
        offset: its clock against the reference.
        shapes: by launch number, where known.
        chunks: copies of the copy engine.
    """

    rank: int
    world_size: int
    rings: tuple[Ring, ...]
    offset: Offset = Offset()
    shapes: Mapping[int, Shape] = {}
    chunks: tuple[Chunk, ...] = ()


def chunk_of(launch: int, peer: int, unit: int, anchor_ns: int, begin_ms: float, end_ms: float) -> Chunk:
    """A chunk from CUDA events: `begin_ms` and `end_ms` after an event at which the GPU's clock showed `anchor_ns`."""
    return Chunk(launch, peer, unit, anchor_ns + round(begin_ms * 1e6), anchor_ns + round(end_ms * 1e6))


def save_trace(
    workspace: "Workspace",
    path: str | os.PathLike[str],
    *,
    config: "Config | None" = None,
    offset: Offset | None = None,
    chunks: Iterable[Chunk] = (),
    shapes: Mapping[int, Shape] | None = None,
) -> None:
    """Write the trace of this rank, beside the file and then in its place (`atomic_file.put`).

    Call it when the launches have ended. The last launch's shape is taken from the progress board.

    Args:
        workspace: made with `trace=True`.
        path: the file.
        config: the configuration of the last launch; without it the units of an all-gather are unknown.
        offset: this rank's clock against the reference (`align`).
        chunks: copies of the copy engine.
        shapes: of earlier launches.

    Raises:
        ValueError: the workspace records no trace, or the path names no file.
        OSError: the file cannot be written.
    """
    if not workspace.trace:
        raise ValueError("save_trace: this workspace records nothing; make it with trace=True")
    words = array("i", workspace.trace_words.cpu().numpy().tobytes())
    known = {**last_shape(workspace, config), **(shapes or {})}
    data = render_dump(words, workspace.rank, workspace.world_size, offset or Offset(), known, chunks)
    put(Path(path), data)


def last_shape(workspace: "Workspace", config: "Config | None") -> dict[int, Shape]:
    """The shape of the launch that the progress board shows; empty when it shows none."""
    try:
        view = read_board(workspace.board)
    except ValueError:
        return {}
    units: tuple[tuple[int, int], ...] = ()
    if config is not None and view.operator == "ag_gemm":
        units = units_of_tiles(view.m, view.n, config, workspace.world_size, _lead(view, config, workspace))
    return {view.launch: Shape(view.operator, view.tiles, units)} if view.launch else {}


def _lead(view: BoardView, config: "Config", workspace: "Workspace") -> int | None:
    """The columns that the launch on the board walked shard by shard; None stands for all."""
    if not (config.planned and config.kernel == "hopper"):
        return config.lead
    from megascale_kernels.memory.operands import processors
    from megascale_kernels.planning.stream_k import cut_gather, tiling_of

    tiling, programs = tiling_of(config, is_nk=True), processors(workspace.device)
    return cut_gather(tiling, view.m, view.n, view.k, workspace.world_size, programs, config)[1]


def units_of_tiles(
    m_shard: int, n_size: int, config: "Config", world_size: int = 1, lead: int | None = None
) -> tuple[tuple[int, int], ...]:
    """First and last unit that each tile reads, in the order of tiles (as `ag_gemm` asks for them).

    Of one shard when shards are walked one after the other, for then they are alike; else of all.
    """
    from megascale_kernels.planning import tile_order

    stretch_of, grouped = tile_order.python(tile_order.gather_stretch), tile_order.python(tile_order.grouped)
    blocks_m, blocks_n = -(-m_shard // config.block_m), -(-n_size // config.block_n)
    split_rows = -(-m_shard // config.splits)
    unit_rows = -(-split_rows // config.block_m) * config.block_m
    columns = tile_order.lead_columns(blocks_n, lead)
    rows = []
    for tile in range(blocks_m * blocks_n * (world_size if columns < blocks_n else 1)):
        above, height, _, width, inner = stretch_of(tile, blocks_m, blocks_n, columns, world_size)
        block = above + grouped(inner, height, width, config.group_m)[0]
        rows.append(block % blocks_m * config.block_m)
    return tuple((row // unit_rows, (min(row + config.block_m, m_shard) - 1) // unit_rows) for row in rows)


def render_dump(
    words: "array[int]",
    rank: int,
    world_size: int,
    offset: Offset,
    shapes: Mapping[int, Shape],
    chunks: Iterable[Chunk],
) -> bytes:
    """The bytes of a dump; `words` are those of all rings (`Workspace.trace_words`), 32 bits each."""
    rings = [number for number in range(len(words) // RING_WORDS) if any(_ring_words(words, number))]
    header = {
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "offset": offset,
        "shapes": {str(launch): shape for launch, shape in shapes.items()},
        "chunks": list(chunks),
        "rings": rings,
    }
    body = array("i")
    for number in rings:
        body.extend(_ring_words(words, number))
    return json.dumps(header).encode() + b"\n" + _little_endian(body).tobytes()


def load_trace(path: str | os.PathLike[str]) -> TraceDump:
    """Read a dump.

    Raises:
        ValueError: this is no dump; one sentence with the reason.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    try:
        return parse_dump(data)
    except ValueError as error:
        raise ValueError(f"{path} is no trace: {error}") from error


def parse_dump(data: bytes) -> TraceDump:
    """A dump from its bytes.

    Raises:
        ValueError: the message names what is wrong with them.
    """
    end = data.find(b"\n", 0, MOST_HEADER_BYTES)
    try:
        header = json.loads(data[: max(end, 0)])
        if header["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        numbers = [_number(value, MAX_CTAS * len(ROLES) - 1) for value in header["rings"]]
        found = _facts(header)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"its first line is not that of a dump ({type(error).__name__}: {error})") from error
    body = data[end + 1 :]
    if len(body) != len(numbers) * RING_BYTES:
        raise ValueError(f"it has {len(body)} bytes of rings, and its first line tells of {len(numbers) * RING_BYTES}")
    rings = []
    for at, number in enumerate(numbers):
        words = _little_endian(array("i", body[at * RING_BYTES : (at + 1) * RING_BYTES]))
        rings.append(decode_ring(words, number // len(ROLES), number % len(ROLES)))
    return found._replace(rings=tuple(ring for ring in rings if ring is not None))


def _facts(header: Mapping[str, Any]) -> TraceDump:
    shapes = {
        int(launch): Shape(
            str(operator),
            _number(tiles),
            tuple((_number(first, MOST_UNITS), _number(last, _most_of(operator))) for first, last in units),
        )
        for launch, (operator, tiles, units) in header["shapes"].items()
    }
    return TraceDump(
        rank=_number(header["rank"]),
        world_size=_number(header["world_size"]),
        rings=(),
        offset=Offset(*(_number(int(value), least=-MOST_OFFSET, most=MOST_OFFSET) for value in header["offset"])),
        shapes=shapes,
        chunks=tuple(Chunk(*(_number(value) for value in chunk)) for chunk in header["chunks"]),
    )


def _most_of(operator: object) -> int:
    """The largest number in a shape: what a range is made of stays small."""
    return MOST_FLAGS if str(operator).startswith("moe_") else MOST_UNITS


def _number(value: object, most: int = (1 << 64) - 1, *, least: int = 0) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"its first line has {value!r} where a number from {least} to {most} belongs")
    return value


def _ring_words(words: "array[int]", number: int) -> "array[int]":
    return words[number * RING_WORDS : (number + 1) * RING_WORDS]


def _little_endian(words: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        words.byteswap()
    return words
