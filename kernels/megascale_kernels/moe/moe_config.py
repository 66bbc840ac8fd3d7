# SPDX-License-Identifier: Apache-2.0
"""How one MoE layer runs on a rank: tiles, units of tokens, reducing programs, and how long a lead is."""

import math
from typing import Literal, NamedTuple

from megascale_kernels.errors import Unsupported
from megascale_kernels.moe.tables import MOST_CHUNKS, MOST_UNITS, ROUTE_PROGRAMS, Sizes

# Of an H100 or H200; they set no result, only how much is walked before the peers' tokens are needed.
FLOPS = 620e12  # grouped products, bf16
LINK_BYTES = 370e9  # copy engine, to one peer
LATENCY_S = 20e-6  # copies and announcements begin
# Fitted to what 31 layers took on four H200 with one, two and four units and with what is wanted alone: what a way
# changes they foretell to 3 % of a layer's time, root mean square
# (moe_4gpu_h200.txt, moe_tp2_4gpu_h200.txt, moe_ways_4gpu_h200.txt).
UNIT_S = 7e-6  # another copy: a unit of tokens to one more peer, and its flag
SEND_BYTES = 300e9  # what threads send to peers while nothing is multiplied, of all programs together
HIDDEN_UNITS = 4  # of a rank's tokens, where their copies hide
LEAD_MARGIN = 1.3
# Between two H200 early copies are done so much sooner than by their time alone, counted from the products' begin: six
# layers with a lead and without (moe_ways_small_2gpu_h200.txt).
EARLY_S = 15e-6
LONG_SENDS = 0.4  # of layer 1's product
CHUNKS = 2
LEAST_CHUNK_COLUMNS = 1024  # a narrower chunk reads rows of h too often
HEIGHTS = 2 * 3 * 5 * 7  # every height of a stretch up to ten has one of these factors
HOPPER_TILE = (128, 256, 64, 8)


def wanted_share(sizes: Sizes) -> float:
    """The share of a rank's tokens that another one wants, where experts are drawn evenly."""
    return 1 - (1 - sizes.shards / sizes.world_size) ** sizes.most_here


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
        splits: units into which a rank's tokens are cut, each with a copy to every peer and a flag of its own; None
            lets the model decide.
        chunks: parts into which the columns of layer 1 are cut; None lets the model decide.
        reducers: programs of layer 1 that only add up and send.
        lead_rows: rows of our own tokens alone that are multiplied before others (layer 0) and behind them (layer 1);
            None lets the model decide.
        half_rows: an expert's last row tile with at most so many rows may be moved to the end of layer 0, to fill the
            last wave of tiles; None is half a tile's rows with "hopper", whose kernels skip the others, and none with
            "triton"; 0 moves none.
        shifted: each wave of tiles is dealt some programs further on than the wave before (`walk.unit_at`); False deals
            all alike. None is True.
        cut: the tiles of the last wave are cut into halves of their rows where there is a program for each; "hopper"
            alone can. None cuts them there.
        staggered: in layer 1 the two consumers of a program count a tile at different times within the next product,
            not both behind it; "hopper" alone can. None staggers them there.
        mixes: half of what adds up in layer 1 takes what is left of our own tokens' earlier chunks before what peers
            wait for of the next one: the first reads memory while the second fills the link. False takes what peers
            wait for first; None lets the model decide.
        follows: a launch's programs come to their multiprocessors when those of the launch before have left them, and
            wait there for its end (programmatic dependent launch, `signals.follow_launch`); it takes a Hopper GPU, also
            with "triton". False launches each when the one before has ended. Captured graphs do that in any case.
        early: tokens begin to travel while the routing kernel runs, as soon as all ranks have begun it; False lets them
            begin behind it. Captured graphs do that in any case.
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
    splits: int | None = None
    chunks: int | None = None
    reducers: int = 8
    lead_rows: int | None = None
    half_rows: int | None = None
    shifted: bool | None = None
    cut: bool | None = None
    staggered: bool | None = None
    mixes: bool | None = None
    follows: bool | None = None
    early: bool | None = None
    route_programs: int = ROUTE_PROGRAMS
    keep: bool = True
    selective: bool | None = None
    job_tokens: int = 8
    job_cols: int = 512

    @property
    def units(self) -> int:
        """`splits`; `HIDDEN_UNITS` where nothing is said and the model has not been asked."""
        return self.splits or HIDDEN_UNITS

    @property
    def code(self) -> int:
        """A small number that two ranks compare: what flags depend on."""
        ways = self.units + 17 * (self.chunks or 0) + 104729 * bool(self.selective)
        return ways + 291 * self.job_tokens + 7919 * self.route_programs

    def resolved(self, sizes: Sizes) -> "MoeConfig":
        """The same with what the model decides filled in.

        Two chunks: the first is added up while the second is multiplied. Between two H200 that took 0.97 to 1.02 of the
        time of one (less in 19 of 21 layers); four took up to 1.18 times as long as two where H is 2048, and two up to
        1.08 times as long as one in five of five layers with H from 1184 to 1600 (moe_ways_small_2gpu_h200.txt).
        """
        most = CHUNKS if sizes.hidden > self._least_hidden() else 1
        chunks = most if self.chunks is None else self.chunks
        splits = self._fewest_waits(sizes) if self.splits is None else self.splits
        special = self.kernel == "hopper"
        early = special if self.early is None else bool(self.early)
        lead = self._lead(sizes, splits, early=early) if self.lead_rows is None else self.lead_rows
        selective = sizes.world_size > 1 and self.selective
        if self.selective is None:
            selective = self._pays_to_choose(sizes, splits)
        skipped = sizes.tile_rows // 2 if self.kernel == "hopper" else 0
        half = skipped if self.half_rows is None else self.half_rows
        return self._replace(
            chunks=chunks, lead_rows=lead, half_rows=half, splits=splits, selective=bool(selective),
            shifted=self.shifted is None or bool(self.shifted),
            cut=special and (self.cut is None or bool(self.cut)),
            staggered=special and (self.staggered is None or bool(self.staggered)),
            mixes=self._sends_long(sizes) if self.mixes is None else bool(self.mixes),
            follows=special if self.follows is None else bool(self.follows), early=early,
        )  # fmt: skip

    def shift(self, programs: int) -> int:
        """How many programs further on a wave of tiles is dealt than the one before.

        So many that from wave to wave a program comes to another row of stretches of any height up to `group_m` of the
        default, 8: `programs` + shift has no factor in common with 2, 3, 5 and 7.
        """
        steps = (step for step in range(1, HEIGHTS + 1) if math.gcd(programs + step, HEIGHTS) == 1)
        return next(steps) if self.shifted else 0

    def _least_hidden(self) -> int:
        """H up to which one chunk is better than two; plain Triton's have not been measured, and need two blocks."""
        return 2 * LEAST_CHUNK_COLUMNS - self.combine_n if self.kernel == "hopper" else self.combine_n

    def _lead(self, sizes: Sizes, splits: int, *, early: bool) -> int:
        """Rows of our own tokens that take as long as the peers' tokens need to come, once products have begun."""
        transfer_s = LATENCY_S + (sizes.world_size - 1) * sizes.pitch * sizes.hidden * 2 / LINK_BYTES
        if early and sizes.world_size == 2:  # among more it has not been measured
            transfer_s = max(0.0, transfer_s - LATENCY_S + splits * UNIT_S - EARLY_S)
        row_s = 4 * sizes.hidden * sizes.inner / FLOPS
        return 0 if sizes.world_size == 1 else int(LEAD_MARGIN * transfer_s / row_s)

    def _copies_s(self, sizes: Sizes, splits: int) -> float:
        """Seconds that copies of all our tokens to every peer take."""
        others = sizes.world_size - 1
        bytes_s = sizes.pitch * sizes.hidden * 2 / LINK_BYTES
        return LATENCY_S + others * (splits * UNIT_S + bytes_s) if others else 0.0

    def _own_s(self, sizes: Sizes) -> float:
        """Seconds of our own tokens' products in layer 0, behind which copies hide."""
        return sizes.pitch * sizes.top_k / sizes.world_size * 4 * sizes.hidden * sizes.inner / FLOPS

    def _fewest_waits(self, sizes: Sizes) -> int:
        """Units of a rank's tokens: several, so that products begin early, but one where their copies would not hide.

        Among four H200 one took 0.86 to 0.997 of the time of four in the ten such layers of twelve, and 1.000 and 1.006
        in the other two (moe_ways_4gpu_h200.txt). Between two H200 0.88 to 0.99 in five such layers, and 0.998 in one
        whose copies hide (moe_ways_small_2gpu_h200.txt); in larger layers one took as long as four to 2 %
        (moe_tuned_2gpu_h200.txt).
        """
        hidden = LEAD_MARGIN * self._copies_s(sizes, HIDDEN_UNITS) <= self._own_s(sizes)
        return HIDDEN_UNITS if hidden else 1

    def _sends_long(self, sizes: Sizes) -> bool:
        """Whether sums are on their way for a good part of the time that their products take.

        Between two H200 mixing took 0.976, 0.985 and 0.994 of the time in three such layers, 0.992 to 1.006 in seven
        others below 2 ms, and up to 1.024 in larger ones (moe_columns_2gpu_h200.txt).
        Among more it has not been measured.
        """
        sent_s = wanted_share(sizes) * sizes.pitch * sizes.hidden * 2 / LINK_BYTES
        product_s = sizes.pitch * sizes.top_k * 2 * sizes.hidden * sizes.inner / FLOPS
        return sizes.world_size == 2 and self.kernel == "hopper" and sent_s > LONG_SENDS * product_s

    def _pays_to_choose(self, sizes: Sizes, splits: int) -> bool:
        """Whether threads send what is wanted alone in less time than copies of all tokens are waited for.

        By the times of six ways in twelve layers on four H200, to which its constants are fitted, no way is faster than
        the default so found (moe_ways_4gpu_h200.txt; other layers have not been measured since). Between two ranks it
        has not been measured, so all are sent.
        """
        others = sizes.world_size - 1
        wanted_s = wanted_share(sizes) * others * sizes.pitch * sizes.hidden * 2 / SEND_BYTES
        return others > 1 and wanted_s < self._copies_s(sizes, splits) - self._own_s(sizes)

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
        asked = "cut" if self.cut else "staggered"
        if self.kernel == "triton" and (self.cut or self.staggered):
            raise Unsupported(f"MoeConfig(kernel='triton', {asked}=True): kernels in plain Triton cannot")
        if self.chunks is not None and not 1 <= self.chunks <= MOST_CHUNKS:
            raise Unsupported(f"MoeConfig(chunks={self.chunks}): 1 to {MOST_CHUNKS}")
        for name in ("block_n", "combine_n", "block_k", "job_tokens", "job_cols"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise Unsupported(f"MoeConfig({name}={value}): a power of two")
        if self.units > MOST_UNITS:
            raise Unsupported(f"MoeConfig(splits={self.splits}): at most {MOST_UNITS}")
        for name, least in (("splits", 1), ("reducers", 0), ("route_programs", 1), ("group_m", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise Unsupported(f"MoeConfig({name}={getattr(self, name)}): {least} or more")
