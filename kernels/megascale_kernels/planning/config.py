# SPDX-License-Identifier: Apache-2.0
"""How one launch is cut up: tiles, pipeline, and what carries the data."""

from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

Carrier = Literal["copy_engine", "sm"]
Kernel = Literal["triton", "hopper", "cublas"]


class Config(NamedTuple):
    """One way to run an operator; every rank must use the same.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: elements of K per pipeline stage.
        group_m: row blocks walked together, for L2.
        stages: depth of the load pipeline. An all-gather's ring ("hopper") has one slot less for each below four; a
            reduce-scatter's has the depth that fits.
        warps: warps per CTA.
        carrier: what copies rows in an all-gather, the copy engine or `comm_ctas` CTAs of the kernel itself.
        comm_ctas: CTAs set apart for copying (carrier "sm").
        splits: units into which a shard is cut, each with a flag of its own.
        push_tma: partial tiles travel by TMA rather than by the threads' stores (reduce-scatter).
        kernel: "hopper" is warp-specialised (128 x 256 or 128 x 128 tiles), "triton" runs everywhere and in the
            emulator. "cublas" is no kernel of ours: cuBLAS multiplies shard by shard, and copy engines carry rows
            between its products (`pieces`; nothing else above or below matters to it).
        tail_split: split-K factor of each tile of the last, partial wave; None decides, 1 splits nothing, 0 selects
            stream-K,
            which deals its K blocks out evenly to all programs ("hopper" only).
        planned: order and cuts of an all-gather come from a timetable of arrivals (`gather_schedule`; "hopper" only).
        lead: column blocks that an all-gather walks shard by shard before it walks all shards as one matrix; None is
            all of them, or the timetable's choice.
        mixed: a reduce-scatter walks our own rows among the peers', column by column, so that the weight is read once,
            and not after them; None decides.
        pieces: into how many products "cublas" takes an operator apart, one of them of our own rows; 1 multiplies all
            rows at once, None each shard by itself.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    stages: int = 4
    warps: int = 8
    carrier: Carrier = "copy_engine"
    comm_ctas: int = 0
    splits: int = 1
    push_tma: bool = True
    kernel: Kernel = "triton"
    tail_split: int | None = None
    planned: bool = False
    lead: int | None = None
    mixed: bool | None = None
    pieces: int | None = None

    @property
    def code(self) -> int:
        """A small number that two ranks compare: not the whole configuration, but what flags depend on."""
        return (
            self.block_m
            + 3 * self.block_n
            + 7 * self.splits
            + 11 * self.comm_ctas
            + (self.carrier == "sm")
            + 13 * (self.kernel == "hopper")
            + (17 + 19 * (self.pieces or 0)) * (self.kernel == "cublas")
        )


def read_config(raw: dict[str, Any]) -> Config:
    """A configuration from what `Config._asdict` gave.

    Raises:
        ValueError: a field is missing, unknown, of another type, or not positive where it must be.
    """
    defaults = Config()._asdict()
    if raw.keys() != defaults.keys():
        raise ValueError(f"fields {sorted(raw)} instead of {sorted(defaults)}")
    for name, kind in get_type_hints(Config).items():
        takes_truth = kind is bool or bool in get_args(kind)
        is_truth = isinstance(raw[name], bool) and not takes_truth  # to Python it is a number, here it is a slip
        if is_truth or (
            raw[name] not in get_args(kind) if get_origin(kind) is Literal else not isinstance(raw[name], kind)
        ):
            raise ValueError(f"{name} is {raw[name]!r}")
    if min(raw[name] for name in ("block_m", "block_n", "block_k", "group_m", "stages", "warps", "splits")) < 1:
        raise ValueError("a size below one")
    return Config(**raw)
