# SPDX-License-Identifier: Apache-2.0
"""How one MoE layer runs on a rank: tiles, units of tokens, reducing programs, and how long a lead is."""

from typing import Literal, NamedTuple

from megascale_kernels.errors import Unsupported
from megascale_kernels.moe.tables import MOST_CHUNKS, MOST_UNITS, ROUTE_PROGRAMS, Sizes

# Of an H100 or H200; they set no result, only how much is walked before the peers' tokens are needed.
FLOPS = 620e12  # grouped products, bf16
LINK_BYTES = 370e9  # copy engine, to one peer
LATENCY_S = 20e-6  # copies and announcements begin
UNIT_S = 4e-6  # another copy: a unit of tokens to one more peer, and its flag
LEAD_MARGIN = 1.3
CHUNKS = 2
HOPPER_TILE = (128, 256, 64, 8)


class MoeConfig(NamedTuple):
    """One way to run; every rank must use the same.

    Attributes:
        kernel: "hopper" is warp-specialised (tiles of 128 x 256 of the weight, jobs of 8 tokens); "triton" runs in the
            emulator as well.
        block_n: columns of h in a tile of layer 0, which is twice as many of its weight.
        combine_n: columns of a tile of layer 1.
        block_k: elements summed over in a stage of the pipeline.
        group_m: row tiles of an expert that are walked together.
        stages: depth of the load pipeline.
        warps: warps of a program.
        splits: units into which a rank's tokens are cut, each with a flag of its own.
        chunks: parts into which the columns of layer 1 are cut; None lets the model decide.
        reducers: programs of layer 1 that only add up and send.
        lead_rows: rows of our own tokens alone that are multiplied before others (layer 0) and behind them (layer 1);
            None lets the model decide.
        half_rows: an expert's last row tile with at most so many rows may be moved to the end of layer 0, to fill the
            last wave of tiles; None is half a tile's rows with "hopper", whose kernels skip the others, and none with
            "triton"; 0 moves none.
        route_programs: programs that route.
        keep: where a backward will follow, the forward keeps gate and up of every row, [rows, 2 I] for the most pairs
            that a rank may get; False computes them anew in the backward, two of its then eight products' worth.
        selective: peers are sent the tokens that have an expert there alone, by the programs; False sends all tokens,
            by copy engines; None lets the model decide.
        job_tokens: tokens of a job.
        job_cols: columns that a job adds up at once.
    """

    kernel: Literal["triton", "hopper"] = "hopper"
    block_n: int = 128
    combine_n: int = 256
    block_k: int = 64
    group_m: int = 8
    stages: int = 3
    warps: int = 8
    splits: int = 4
    chunks: int | None = None
    reducers: int = 8
    lead_rows: int | None = None
    half_rows: int | None = None
    route_programs: int = ROUTE_PROGRAMS
    keep: bool = True
    selective: bool | None = None
    job_tokens: int = 8
    job_cols: int = 512

    @property
    def code(self) -> int:
        """A small number that two ranks compare: what flags depend on."""
        ways = self.splits + 17 * (self.chunks or 0) + 104729 * bool(self.selective)
        return ways + 291 * self.job_tokens + 7919 * self.route_programs

    def resolved(self, sizes: Sizes) -> "MoeConfig":
        """The same with what the model decides filled in.

        Two chunks: the first is added up while the second is multiplied. Between two H200 that took 0.97 to 1.02 of the
        time of one (less in 19 of 21 layers); four took up to 1.18 times as long as two where H is 2048.
        """
        most = CHUNKS if sizes.hidden > self.combine_n else 1
        chunks = most if self.chunks is None else self.chunks
        lead = self._lead(sizes) if self.lead_rows is None else self.lead_rows
        selective = self._is_left_waiting(sizes) if self.selective is None else sizes.world_size > 1 and self.selective
        skipped = sizes.tile_rows // 2 if self.kernel == "hopper" else 0
        half = skipped if self.half_rows is None else self.half_rows
        return self._replace(chunks=chunks, lead_rows=lead, half_rows=half, selective=bool(selective))

    def _lead(self, sizes: Sizes) -> int:
        """Rows of our own tokens that take as long as the peers' tokens need to come."""
        transfer_s = LATENCY_S + (sizes.world_size - 1) * sizes.pitch * sizes.hidden * 2 / LINK_BYTES
        row_s = 4 * sizes.hidden * sizes.inner / FLOPS
        return 0 if sizes.world_size == 1 else int(LEAD_MARGIN * transfer_s / row_s)

    def _is_left_waiting(self, sizes: Sizes) -> bool:
        """Whether copies to all peers take longer than the products of our own tokens, behind which they would hide.

        Then threads send what is wanted alone: among four H200 that took 0.81 to 0.97 of the time of copies in 11 such
        layers and 1.02 in one, and where copies hide 1.05 to 1.08 in six and 0.98 in one (moe_4gpu_h200.txt,
        moe_tp2_4gpu_h200.txt). Between two ranks it has not been measured.
        """
        others = sizes.world_size - 1
        copies_s = LATENCY_S + others * (self.splits * UNIT_S + sizes.pitch * sizes.hidden * 2 / LINK_BYTES)
        own_s = sizes.pitch * sizes.top_k / sizes.world_size * 4 * sizes.hidden * sizes.inner / FLOPS
        return others > 1 and copies_s > own_s

    def check(self) -> None:
        """Refuse what no kernel can run with.

        Raises:
            Unsupported: the message names the field.
        """
        if self.kernel == "hopper" and (self.block_n, self.combine_n, self.block_k, self.job_tokens) != HOPPER_TILE:
            raise Unsupported(
                f"MoeConfig(kernel='hopper') has block_n, combine_n, block_k, job_tokens = {HOPPER_TILE}, not {self}"
            )
        if self.kernel not in ("triton", "hopper"):
            raise Unsupported(f"MoeConfig(kernel={self.kernel!r}): 'triton' or 'hopper'")
        if self.chunks is not None and not 1 <= self.chunks <= MOST_CHUNKS:
            raise Unsupported(f"MoeConfig(chunks={self.chunks}): 1 to {MOST_CHUNKS}")
        for name in ("block_n", "combine_n", "block_k", "job_tokens", "job_cols"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise Unsupported(f"MoeConfig({name}={value}): a power of two")
        if self.splits > MOST_UNITS:
            raise Unsupported(f"MoeConfig(splits={self.splits}): at most {MOST_UNITS}")
        for name, least in (("splits", 1), ("reducers", 0), ("route_programs", 1), ("group_m", 1)):
            if getattr(self, name) < least:
                raise Unsupported(f"MoeConfig({name}={getattr(self, name)}): {least} or more")
