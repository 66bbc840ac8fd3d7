# SPDX-License-Identifier: Apache-2.0
"""Write a trace that Perfetto and chrome://tracing open: one process per rank, one thread per role of each CTA.

The format is "Trace Event Format" (Google, 2016): complete events ("X"), metadata ("M") and flows ("s", "f"). Times are
microseconds with three decimals, that is nanoseconds, after the first event of all ranks; where that lies on the
reference clock stands in `otherData`.

JSON and not Perfetto's protobuf, which its viewer takes as gladly: the standard library writes it, and these kernels
need nothing but torch and Triton.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megascale_kernels.tracing.dump import TraceDump
from megascale_kernels.tracing.flows import Arrow, arrows
from megascale_kernels.tracing.slices import Slice, slices_of

ROLE_ORDER = ("compute", "communicate", "copy engine")
THREADS_PER_ROLE = 1000  # more than there are CTAs
WORDS = {"tile": "tile", "wait": "wait for", "notify": "notify", "push": "push unit", "copy": "copy unit"}


def chrome_trace(dumps: Iterable[TraceDump]) -> dict[str, Any]:
    """The trace of several ranks as one JSON object.

    Raises:
        ValueError: two dumps are of the same rank, or they are of groups of different size.
    """
    by_rank: dict[int, TraceDump] = {}
    for dump in dumps:
        if dump.rank in by_rank:
            raise ValueError(f"two of these traces are of rank {dump.rank}: give one per rank, all of one job")
        by_rank[dump.rank] = dump
    if len(sizes := {dump.world_size for dump in by_rank.values()}) > 1:
        raise ValueError(f"these traces are of groups of {sorted(sizes)} ranks: give those of one job")
    slices = {rank: slices_of_rank(dump) for rank, dump in sorted(by_rank.items())}
    times = [one.begin_ns - by_rank[rank].offset.offset_ns for rank, found in slices.items() for one in found]
    start_ns = min(times, default=0)
    events = [event for rank, dump in sorted(by_rank.items()) for event in _names(rank, dump, slices[rank])]
    spans = [_span(rank, one, by_rank[rank], start_ns) for rank, found in slices.items() for one in found]
    events += sorted(spans, key=lambda span: (span["ts"], -span["dur"]))
    found_arrows = arrows(by_rank, slices)
    forward = [arrow for arrow in found_arrows if _forward(arrow, by_rank)]
    events += [event for number, arrow in enumerate(forward) for event in _flow(number, arrow, by_rank, start_ns)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "begins at ns of the reference clock": start_ns,
            "bound of the clocks' error, ns": max((dump.offset.error_ns for dump in by_rank.values()), default=0),
            "events lost": sum(ring.lost for dump in by_rank.values() for ring in dump.rings),
            "slices with a flaw": sum(bool(one.flaw) for found in slices.values() for one in found),
            "arrows": len(forward),
            "arrows against time, left out": len(found_arrows) - len(forward),
        },
    }


def slices_of_rank(dump: TraceDump) -> list[Slice]:
    """All slices of a rank, those of its copy engine included."""
    last_ns = max((ring.events[-1].time_ns for ring in dump.rings), default=0)
    found = [one for ring in dump.rings for one in slices_of(ring, last_ns)]
    for chunk in dump.chunks:
        operator = dump.shapes[chunk.launch].operator if chunk.launch in dump.shapes else "ag_gemm"
        span = chunk.begin_ns, max(chunk.begin_ns, chunk.end_ns)
        found.append(Slice("copy engine", chunk.peer, "copy", operator, chunk.launch, chunk.unit, chunk.peer, *span))
    return found


def _thread(one: Slice) -> int:
    return ROLE_ORDER.index(one.role) * THREADS_PER_ROLE + one.cta


def _names(rank: int, dump: TraceDump, slices: Iterable[Slice]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    processors = {(ring.role, ring.cta): ring.sm for ring in dump.rings}
    tracks = {_thread(one): one for one in slices}
    for thread, one in sorted(tracks.items()):
        name = f"copy engine to rank {one.cta}"
        if one.role != "copy engine":
            name = f"{one.role} CTA {one.cta} (SM {processors[one.role, one.cta]})"
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _number_of(one: Slice) -> str:
    """What the number of a slice counts."""
    if one.operator == "moe_combine" and one.kind in ("wait", "push"):
        return "job"
    if one.kind in ("push", "copy"):
        return "unit"
    return "flag" if one.operator == "gemm_rs" and one.kind in ("wait", "notify") else "tile"


def _span(rank: int, one: Slice, dump: TraceDump, start_ns: int) -> dict[str, Any]:
    name = f"{WORDS[one.kind]} {f'rank {one.peer}' if one.kind in ('wait', 'notify') else one.tile}"
    begin_ns = one.begin_ns - dump.offset.offset_ns - start_ns
    args: dict[str, Any] = {
        "operator": one.operator,
        "launch": one.launch,
        _number_of(one): one.tile,
        "peer": one.peer,
    }
    if one.flaw:
        args["flaw"] = one.flaw
    return {
        "ph": "X",
        "name": f"{name} ({one.flaw})" if one.flaw else name,
        "cat": one.kind,
        "pid": rank,
        "tid": _thread(one),
        "ts": begin_ns / 1000,
        # One nanosecond at least: an arrow is bound to the slice that is open where it begins.
        "dur": max(one.end_ns - one.begin_ns, 1) / 1000,
        "args": args,
    }


def _forward(arrow: Arrow, dumps: Mapping[int, TraceDump]) -> bool:
    """Whether the notification comes before the end of the wait; the clocks' error may reverse it."""
    noticed_ns = arrow.notice.end_ns - dumps[arrow.source].offset.offset_ns
    return noticed_ns <= arrow.wait.end_ns - dumps[arrow.target].offset.offset_ns


def _flow(number: int, arrow: Arrow, dumps: Mapping[int, TraceDump], start_ns: int) -> Iterator[dict[str, Any]]:
    """Both ends lie a nanosecond inside their slices, at whose very end nothing would be open."""
    ends = (("s", arrow.source, arrow.notice), ("f", arrow.target, arrow.wait))
    for phase, rank, one in ends:
        inside_ns = max(one.begin_ns, one.end_ns - 1) - dumps[rank].offset.offset_ns - start_ns
        event = {
            "ph": phase, "name": "released", "cat": "flag", "id": number, "pid": rank, "tid": _thread(one),
            "ts": inside_ns / 1000,
        }  # fmt: skip
        yield {**event, "bp": "e"} if phase == "f" else event
