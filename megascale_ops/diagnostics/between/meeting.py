# SPDX-License-Identifier: Apache-2.0
"""Nodes meet in a store, are paired in rounds by node 0, measure the way to their partner, and hear what came of it.

Node 0 serves the store (torch's TCPStore, as the launch of a job does) and drives the search; all others do as they are
told. In the store, of each round r:

    node/RANK           name and switch of a node that has come
    round/r             the pairs by rank, with the round's secret; "end" behind the last
    listen/r/RANK       where the first of a pair listens
    result/r/RANK       what the second of a pair has measured, or why not
    verdict             what is bad

A pair whose result is not there by the deadline has failed. A store that is gone ends a node's part with one sentence.
Rates are judged against the median of all pairs of the search, so that no bar has to be known for the network.
"""

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import msgspec

from megascale_ops.diagnostics import equals
from megascale_ops.diagnostics.between.streams import SECRET_BYTES, Listener, Way, measure
from megascale_ops.diagnostics.pairs.explain import Pair, pair
from megascale_ops.diagnostics.pairs.schedule import Search, begin, next_round, told, verdict
from megascale_ops.diagnostics.report import VERSION, Figure, PairsReport
from megascale_ops.errors import MegascaleError

Store: TypeAlias = Any  # torch's; its stubs leave it out

_COMING_S = 120.0  # a node that starts torch from a cold disk takes a minute
_SLACK_S = 10.0
_LOOK_S = 0.05
_CONFIRMATIONS = 2  # rounds in which ways that seem bad are measured again


class Place(NamedTuple):
    """This node's part.

    Attributes:
        host: Where node 0's store is, and its port.
        rank: Of this node; 0 drives.
        nodes: How many there are.
        name: Of this node.
        switch: Below which it is; "": not known.
        address: By which other nodes reach this one.
        seconds: For how long bytes go each way.
        partners: With how many others each node is measured at least.
    """

    host: tuple[str, int]
    rank: int
    nodes: int
    name: str
    switch: str
    address: str
    seconds: float
    partners: int = 1


class _Come(msgspec.Struct, frozen=True):
    name: str
    switch: str


class _Round(msgspec.Struct, frozen=True):
    pairs: tuple[tuple[int, int], ...]
    secret: bytes


class _Result(msgspec.Struct, frozen=True):
    way: tuple[float, float, float] | None = None
    why: str = ""


Measure: TypeAlias = Callable[[tuple[str, int], bytes, float, float], Way]


def take_part(place: Place, told_round: Callable[[int, int], object], measuring: Measure = measure) -> PairsReport:
    """Take this node's part until the search is over; return what it found.

    Args:
        place: This node's part.
        told_round: Called by node 0 with each round's number and how many pairs it has.
        measuring: Measures the way to a listener.

    Raises:
        MegascaleError: the store can't be reached, nodes have not come, or node 0 is gone.
    """
    # The library prints the stack of each connection that fails; the error that it raises is told.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # torch's stubs leave them out

    patience = timedelta(seconds=_COMING_S)
    try:
        if place.rank:
            _await_host(place.host)
        store: Store = TCPStore(*place.host, is_master=place.rank == 0, wait_for_workers=False, timeout=patience)
        return meet(store, place, told_round, measuring)
    except (DistError, OSError) as error:
        where = f"{place.host[0]}:{place.host[1]}"
        first_line = next(iter(str(error).splitlines()), "")
        raise MegascaleError(
            f"the meeting at {where} failed on {place.name} ({first_line}): is node 0 there?"
        ) from error


def meet(store: Store, place: Place, told_round: Callable[[int, int], object], measuring: Measure) -> PairsReport:
    """Take this node's part by any store that has torch's ``set``, ``get`` and ``check``; see ``take_part``."""
    store.set(f"node/{place.rank}", msgspec.json.encode(_Come(place.name, place.switch)))
    return _drive(store, place, told_round, measuring) if place.rank == 0 else _follow(store, place, measuring)


def _await_host(host: tuple[str, int]) -> None:
    """Wait until node 0 listens; the store's own way to wait takes several times its deadline.

    Raises:
        OSError: it does not.
    """
    end_s = time.monotonic() + _COMING_S
    while True:
        try:
            socket.create_connection(host, timeout=min(_SLACK_S, _COMING_S)).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(4 * _LOOK_S)
        else:
            return


def _follow(store: Store, place: Place, measuring: Measure) -> PairsReport:
    number = 0
    while True:
        number += 1
        # Until node 0 has heard all of the round before: its deadline, and a little more.
        orders = bytes(_awaited(store, f"round/{number}", _COMING_S + _deadline_s(place)))
        if orders == b"end":
            return msgspec.json.decode(bytes(_awaited(store, "verdict", _SLACK_S)), type=PairsReport)
        _do(store, place, number, msgspec.json.decode(orders, type=_Round), measuring)


def _do(store: Store, place: Place, number: int, orders: _Round, measuring: Measure) -> None:
    """Do this node's part of a round: listen, or connect and measure."""
    deadline_s = _deadline_s(place)
    for one, other in orders.pairs:
        if place.rank == one:
            listener = Listener(orders.secret, deadline_s)
            try:
                store.set(f"listen/{number}/{one}", f"{place.address} {listener.port}")
                with contextlib.suppress(TimeoutError):  # node 0 tells of it
                    _awaited(store, f"result/{number}/{other}", deadline_s)
            finally:
                listener.close()
        elif place.rank == other:
            store.set(
                f"result/{number}/{other}", msgspec.json.encode(_measured(store, place, number, one, orders, measuring))
            )


def _measured(store: Store, place: Place, number: int, one: int, orders: _Round, measuring: Measure) -> _Result:
    try:
        host, port = bytes(_awaited(store, f"listen/{number}/{one}", _SLACK_S / 2)).decode().split()
        way = measuring((host, int(port)), orders.secret, place.seconds, _SLACK_S / 2)
        return _Result((way.there_bytes_s, way.back_bytes_s, way.round_trip_s))
    except (OSError, ValueError) as error:
        return _Result(None, str(error) or type(error).__name__)


def _deadline_s(place: Place) -> float:
    return 2 * place.seconds + 2 * _SLACK_S


def _awaited(store: Store, key: str, seconds: float) -> bytes:
    """Return what stands in the store, when it does.

    Raises:
        TimeoutError: it does not come.
    """
    end_s = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end_s:
            raise TimeoutError(f"no {key.partition('/')[0]} came within {seconds:.0f} s")
        time.sleep(_LOOK_S)
    return bytes(store.get(key))


def _drive(store: Store, place: Place, told_round: Callable[[int, int], object], measuring: Measure) -> PairsReport:
    came = _came(store, place)
    ranks = {one.name: rank for rank, one in came.items()}
    switches = {one.name: one.switch for one in came.values() if one.switch}
    began_s = time.monotonic()
    across = len(set(switches.values())) > 1
    search = begin([came[rank].name for rank in sorted(came)], switches, across=across, partners=place.partners)
    ways: dict[Pair, _Result] = {}
    measured: Counter[Pair] = Counter()
    number = confirmed = 0
    while pairs := next_round(search) or (_again(search, measured) if confirmed < _CONFIRMATIONS else ()):
        confirmed += any(both in ways for both in pairs)
        number += 1
        told_round(number, len(pairs))
        orders = _Round(tuple((ranks[one], ranks[other]) for one, other in pairs), os.urandom(SECRET_BYTES))
        store.set(f"round/{number}", msgspec.json.encode(orders))
        _do(store, place, number, orders, measuring)
        for both, result in _results(store, place, number, pairs, ranks).items():
            ways[both] = better(ways.get(both), result)
            measured[both] += 1
        # With more pairs the median is known better: what was said of pairs before is said anew.
        slow = slow_pairs([one for both, result in ways.items() for one in figures_of(both, result.way)])
        outcomes = {both: result.way is not None and both not in slow for both, result in ways.items()}
        search = told(search, {both: outcomes[both] for both in pairs})._replace(outcomes=outcomes)
    report = _report(search, ways, time.monotonic() - began_s)
    store.set("verdict", msgspec.json.encode(report))
    store.set(f"round/{number + 1}", b"end")
    _await_readers(store)
    return report


def _again(search: Search, measured: Mapping[Pair, int]) -> tuple[Pair, ...]:
    """Return ways that are to be measured again at once: what names a node or a link may have been busy for a moment.

    Each bad link, and of each bad node the ways to good ones, those first that were measured least.
    """
    faults = verdict(search)
    bad = set(faults.nodes)
    links = [
        both
        for both, passed in search.outcomes.items()
        if not passed and (both in faults.links or (bad.intersection(both) and faults.good.intersection(both)))
    ]
    busy: set[str] = set()
    chosen = []
    for both in sorted(links, key=lambda one: measured[one]):
        if measured[both] <= _CONFIRMATIONS and not busy.intersection(both):
            busy.update(both)
            chosen.append(both)
    return tuple(chosen)


def better(before: _Result | None, now: _Result) -> _Result:
    """Return the better of two results of one pair: what disturbs for a moment does not disturb twice."""
    if before is None or before.way is None:
        return now
    if now.way is None:
        return before
    return max(before, now, key=lambda one: min(one.way[:2]) if one.way else 0.0)


def _came(store: Store, place: Place) -> dict[int, _Come]:
    """Return the nodes by rank when all have come.

    Raises:
        MegascaleError: some have not, or two have one name.
    """
    end_s = time.monotonic() + _COMING_S
    keys = {rank: f"node/{rank}" for rank in range(place.nodes)}
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        if time.monotonic() > end_s:
            raise MegascaleError(
                f"{len(missing)} of {place.nodes} nodes did not come within {_COMING_S:.0f} s (--node-rank "
                f"{', '.join(map(str, missing[:8]))}): start `diagnose --between` on them, or name fewer --nnodes"
            )
        time.sleep(_LOOK_S)
    found = {rank: msgspec.json.decode(bytes(store.get(key)), type=_Come) for rank, key in keys.items()}
    names = [one.name for one in found.values()]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise MegascaleError(f"two nodes are called {twice}: give each a --name NAME of its own")
    return found


def _results(
    store: Store, place: Place, number: int, pairs: tuple[Pair, ...], ranks: Mapping[str, int]
) -> dict[Pair, _Result]:
    """Return the results of a round; a pair that has none by the deadline did not answer."""
    end_s = time.monotonic() + _deadline_s(place)
    found = {}
    for one, other in pairs:
        try:
            data = _awaited(store, f"result/{number}/{ranks[other]}", max(0.0, end_s - time.monotonic()))
            found[one, other] = msgspec.json.decode(data, type=_Result)
        except TimeoutError as error:
            found[one, other] = _Result(None, str(error))
    return found


def _await_readers(store: Store) -> None:
    """Let the others read the verdict: the store goes with this process."""
    del store
    time.sleep(4 * _LOOK_S + 1.0)


def figures_of(both: Pair, way: tuple[float, float, float] | None) -> list[Figure]:
    """Return the figures of a pair; the way there is the way from its second node to its first."""
    if way is None:
        return []
    of = f"{both[0]} and {both[1]}"
    slower = min(way[0], way[1])
    return [
        Figure("pair_rate", of, slower, (way[0], way[1]), "pairs"),
        Figure("pair_round_trip", of, way[2], (), "pairs"),
    ]


def slow_pairs(figures: list[Figure]) -> set[Pair]:
    """Return the pairs whose rate is below that of the others."""
    found = set()
    for comparison in equals.compare(one for one in figures if one.name == "pair_rate"):
        for one in comparison.slow:
            first, _, second = one.figure.of.partition(" and ")
            found.add(pair(first, second))
    return found


def _report(search: Search, ways: Mapping[Pair, _Result], seconds: float) -> PairsReport:
    faults = verdict(search)
    return PairsReport(
        VERSION,
        search.fleet.nodes,
        faults.nodes,
        faults.links,
        faults.switches,
        faults.unclear,
        {f"{one} and {other}": result.why for (one, other), result in ways.items() if result.way is None},
        search.rounds,
        search.tests,
        round(seconds, 2),
        tuple(one for both, result in ways.items() for one in figures_of(both, result.way)),
    )
