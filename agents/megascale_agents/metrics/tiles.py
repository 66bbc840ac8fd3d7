# SPDX-License-Identifier: Apache-2.0
"""Progress of overlapped kernels and the ranks that wait for tiles, as samples for a scrape.

Each rank and kernel is a series, and each of the two peers that it waits for most another one: in a hang the culprit
is among them, and all seven would be 10 KB of a node's page. A job of 12,288 ranks would still have 73,000 of them;
there a node shows each kernel's rank that is furthest behind, which in a hang is the one to look at and stays.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_agents.ranks.tile_boards import Board, Boards, start_of

Sample = tuple[str, tuple[str, ...], float]
PROGRESS, WAITING = "megascale_tile_progress_ratio", "megascale_tile_waiting"
# Two: the second shows whether all thread blocks wait for the same.
MOST_PEERS = 2


class _Kernel(NamedTuple):
    """One kernel of one rank: ``done`` is the share of tiles, -1 where it is not known."""

    rank: int
    done: float
    waiting: dict[int, int]  # CTAs by peer


def samples_of(
    ranks: Iterable[tuple[RoundWatch, RankWatch]], boards: Boards, large: Iterable[str], node: str
) -> Iterator[Sample]:
    """Yield what the boards of a node's ranks show.

    Args:
        ranks: of the rounds that run.
        boards: where boards are found.
        large: jobs with fewer series for each rank.
        node: this node's name.
    """
    here = [(round_watch, watch) for round_watch, watch in ranks if not watch.is_gone]
    found = boards.poll_boards({round_watch.folder for round_watch, _ in here}) if here else {}
    kernels: dict[tuple[str, str], list[_Kernel]] = {}
    for round_watch, watch in here:
        boards_of = found.get((watch.process.pid, start_of(watch.process.start_ticks)), ())
        of_rank = [board for board in boards_of if board.uid in (0, watch.bounds.uid)]
        for name in dict.fromkeys(board.kernel for board in of_rank):
            one = _together(watch.rank, [board for board in of_rank if board.kernel == name])
            kernels.setdefault((round_watch.job, name), []).append(one)
    for (job, name), of_ranks in kernels.items():
        for one in [_furthest_behind(of_ranks)] if job in large else of_ranks:
            at = (job, node, str(one.rank), name)
            if one.done >= 0:
                yield PROGRESS, at, one.done
            for peer, ctas in sorted(one.waiting.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_PEERS]:
                yield WAITING, (*at, str(peer)), float(ctas)


def _together(rank: int, boards: Iterable[Board]) -> _Kernel:
    """Return of a kernel with several boards the least progress, and all that wait."""
    done, waiting = -1.0, dict[int, int]()
    for board in boards:
        if board.done is not None:
            done = board.done if done < 0 else min(done, board.done)
        for peer, ctas in board.waiting.items():
            waiting[peer] = waiting.get(peer, 0) + ctas
    return _Kernel(rank, done, waiting)


def _furthest_behind(kernels: Iterable[_Kernel]) -> _Kernel:
    """Return the rank that has done least; of several the one of which most waits, then the first."""
    return min(kernels, key=lambda one: (one.done if one.done >= 0 else 2.0, -sum(one.waiting.values()), one.rank))
