# SPDX-License-Identifier: Apache-2.0
"""A routing's pairs, sorted for their way to the experts and back, in parts that travel one after the other.

A *pair* is one of the experts of one token. *Parts* are groups of consecutive experts of every rank. *Shards* are ranks
that hold a slice each of the same experts' inner features (expert sharding, ESP): a pair goes to all of them, and what
they send back is added up. With expert parallelism alone there is one shard.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.moe.all_to_all import experts_of
from megascale_kernels.moe.schedules.in_flight import Crew, InFlight, finish_exchange, start_exchange

Begun = tuple[Tensor, InFlight]


class Shuffle:
    """Where the pairs of this rank's tokens go. Collective; the host waits for the device once.

    Args:
        ids: experts of each token, [T, top_k]; outside of the experts there are, a pair is dropped.
        experts: of one rank.
        crew: ranks that share the experts: rank r has slice r % shards of the experts of place r // shards.
        parts: groups of experts; no more than `experts`.
        shards: ranks that share the same experts.

    Attributes:
        pairs: by part, the places of its pairs in the flattened ids, sorted by expert.
    """

    def __init__(self, ids: Tensor, experts: int, crew: Crew, *, parts: int = 1, shards: int = 1) -> None:
        self.crew, self.experts, self.shards, self.top_k = crew, experts, shards, ids.shape[1]
        self.bounds = [experts * part // parts for part in range(parts + 1)]
        places = crew.ranks // shards
        flat = ids.reshape(-1).long()
        kept = (flat >= 0) & (flat < experts * places)
        expert = torch.where(kept, flat, 0)
        part_of = torch.bucketize(expert % experts, torch.tensor(self.bounds[1:-1], device=ids.device), right=True)
        key = torch.where(kept, part_of * (experts * places) + expert, parts * experts * places)
        order = key.argsort(stable=True)
        counts = torch.bincount(torch.where(kept, flat, experts * places), minlength=experts * places + 1)[:-1]
        to_all = counts.view(places, experts).repeat_interleave(shards, dim=0)
        theirs = torch.empty_like(to_all)
        if crew.ranks > 1:
            dist.all_to_all_single(theirs, to_all.contiguous(), group=crew.group)
        else:
            theirs = to_all
        both: list[list[list[int]]] = torch.stack([to_all, theirs]).tolist()
        self.sent, self.received = both
        going = [sum(sum(row[self.columns(part)]) for row in self.sent[::shards]) for part in range(parts)]
        kept_pairs = order[: sum(going)]
        self.pairs = list(torch.split(kept_pairs, going))
        self._tokens = list(torch.split(kept_pairs // self.top_k, going))
        self._by_expert, self._back = self._sorted_arrivals(theirs)

    def _sorted_arrivals(self, theirs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """By part, the rows that come in the order of experts, and the inverse; all parts are sorted at once.

        Launches are what a group of experts costs most: with a sort for each, two H200 took 0.6 to 1.1 ms a group.
        """
        parts = range(len(self.bounds) - 1)
        counts = torch.cat([theirs[:, self.columns(part)].reshape(-1) for part in parts])
        here = torch.cat(
            [torch.arange(self.bounds[part], self.bounds[part + 1]).repeat(self.crew.ranks) for part in parts]
        )
        coming = [sum(self._splits(part)[1]) for part in parts]
        expert = here.to(counts.device).repeat_interleave(counts, output_size=sum(coming))
        order = expert.argsort(stable=True)  # experts of a part follow those of the one before
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        starts = [0, *accumulate(coming)]
        cut = zip(torch.split(order, coming), torch.split(back, coming), starts[:-1], strict=True)
        both = [(rows - start, places - start) if start else (rows, places) for rows, places, start in cut]
        return [rows for rows, _ in both], [places for _, places in both]

    def columns(self, part: int) -> slice:
        """The experts of a part, of each rank."""
        return slice(self.bounds[part], self.bounds[part + 1])

    def _splits(self, part: int) -> tuple[list[int], list[int]]:
        columns = self.columns(part)
        return [sum(row[columns]) for row in self.sent], [sum(row[columns]) for row in self.received]

    def _copies(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Each place's rows once for every shard of it."""
        if self.shards == 1:
            return rows
        return torch.cat([piece for piece in torch.split(rows, sent[:: self.shards]) for _ in range(self.shards)])

    def dispatch(self, x: Tensor, part: int) -> Begun:
        """Send the tokens of a part's pairs, of x [T, H], on their way."""
        sent, received = self._splits(part)
        rows = x.index_select(0, self._tokens[part])
        return start_exchange(self._copies(rows, sent), sent, received, self.crew)

    def by_part(self, weight: Tensor) -> tuple[Tensor, ...]:
        """A weight of all experts, [E, ...], cut into those of each part; their gradients are put together once."""
        sizes = [end - begin for begin, end in pairwise(self.bounds)]
        return torch.split(weight, sizes) if len(sizes) > 1 else (weight,)

    def multiply(
        self, begun: Begun, part: int, w_in: Tensor, w_out: Tensor, *, dense_rows: int | None = None
    ) -> Tensor:
        """Wait for a part's tokens and run its experts: a row for each that came, in the order of arrival.

        Args:
            begun: what `dispatch` returned.
            part: which.
            w_in: gate and up of the part's experts, [E, 2, I, H].
            w_out: [E, H, I].
            dense_rows: a part whose experts have so many rows each on average multiplies them one by one; None never.
        """
        rows = finish_exchange(begun)
        columns, by_expert = self.columns(part), self._by_expert[part]
        counts = [sum(column) for column in zip(*(row[columns] for row in self.received), strict=True)]
        dense = dense_rows is not None and sum(counts) >= dense_rows * len(counts)
        run = _dense_experts if dense else experts_of
        return run(rows[by_expert], w_in, w_out, counts)[self._back[part]]

    def combine(self, y: Tensor, part: int) -> Begun:
        """Send a part's results back on their way."""
        sent, received = self._splits(part)
        return start_exchange(y, received, sent, self.crew)

    def finish(self, begun: Begun, part: int) -> Tensor:
        """Wait for a part's results: [pairs, H] in fp32 (fp64 of fp64), in the order of `pairs`, shards added up."""
        y = finish_exchange(begun)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        if self.shards == 1:
            return y
        sent = self._splits(part)[0]
        pieces = torch.split(y, sent)
        places = [torch.stack(pieces[at : at + self.shards]).sum(0) for at in range(0, len(pieces), self.shards)]
        return torch.cat(places)

    def add(self, x: Tensor, results: Sequence[Tensor], gates: Tensor) -> Tensor:
        """The sums of all parts' results, weighted by gates [T, top_k]: [T, H] of x's type.

        Args:
            x: tokens, for shape and type.
            results: by part, what `finish` gave.
            gates: weights of the pairs.
        """
        y, pairs, tokens = (
            one[0] if len(one) == 1 else torch.cat(list(one)) for one in (results, self.pairs, self._tokens)
        )
        weighted = y * gates.reshape(-1)[pairs].to(y.dtype)[:, None]
        return sums_like(x).index_add(0, tokens, weighted).to(x.dtype)


def sums_like(x: Tensor) -> Tensor:
    """Zeros of x's shape, in which results are added up: fp32, or fp64 of fp64."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _dense_experts(rows: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
    """Each expert by products of its own: with many rows they fill the device, and cuBLAS picks for each size."""
    outs = []
    for piece, gate_up, down in zip(torch.split(rows, counts), w_in, w_out, strict=True):
        gate, up = (piece @ matrix.T for matrix in gate_up)
        outs.append((torch.nn.functional.silu(gate) * up) @ down.T)
    return torch.cat(outs)
