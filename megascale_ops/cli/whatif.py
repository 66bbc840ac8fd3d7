# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops whatif JOB``: what a step would take if one rank, stage or link were as fast as its peers."""

from typing import TYPE_CHECKING

import click
import msgspec

from megascale_ops.cli.sources.boxes import find_meant, open_meant, read_ask
from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.options import job_argument, job_option, json_option, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from megascale_ops.cli.sources.told_costs import Told
    from megascale_ops.diagnosis.skew.whatif import Graph, Prediction
    from megascale_ops.trace.operations import Rows

# 10 rows: what saves less than the tenth is not where to begin.
MOST_ROWS = 10
# 0.5 %: half of what a prediction may be wrong by.
WORTH = 0.005
# Every rank by itself up to 64; of more, the 64 that worked longest, since no other can save anything.
MOST_RANKS = 64


class Line(msgspec.Struct, frozen=True):
    """One change and what it would do; times are seconds a step."""

    change: str  # "rank 3", "stage 1", "communicator 0", requested ranks
    predicted_s: float
    saved: float  # share of every step
    gpu_hours_a_day: float  # what it would save


class Found(msgspec.Struct, frozen=True):
    """The whole answer."""

    job: str
    ranks: int
    first_step: int
    last_step: int
    measured_s: float
    replayed_s: float
    error: float | None
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


@click.command
@job_argument
@job_option
@click.option(
    "--incident",
    metavar="ID",
    shell_complete=offers("incident"),
    help="Read the black boxes that were kept of this incident.",
)
@click.option("--boxes", type=click.Path(), metavar="DIR", help="Read the black boxes below this folder.")
@click.option("--ranks", metavar="0,3-5", help="Ask about these ranks together, instead of each by itself.")
@click.option("--last", type=click.IntRange(3), default=64, show_default=True, help="So many steps, the newest.")
@click.option("--box-root", type=click.Path(), envvar="MEGASCALE_BOX_ROOT", help="Where ranks keep their black boxes.")
@click.option("--run-dir", type=click.Path(), help="Folder of a run started with `run --run-dir`.")
@click.option("--controller", metavar="URL", help="Address of the controller; default: the job's own.")
@click.option("--token-file", type=click.Path(), help="File that holds the controller's token.")
@json_option
@log_options
def whatif(
    job: str | None,
    incident: str | None,
    boxes: str | None,
    ranks: str | None,
    last: int,
    box_root: str | None,
    run_dir: str | None,
    controller: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Print what a step of JOB would take if a slow rank, stage or link were as fast as its peers' median.

    Replays the collectives that the ranks have recorded in their black boxes, with nothing changed first, and says by
    how much that misses the measured step. Which boxes are read is chosen as for `trace`. Where a verdict says another
    figure of a rank, a note says of which steps each of them is.
    """
    from importlib import import_module

    import_module("numpy")  # what is missing is reported before anything is read
    from megascale_ops.cli.sources.told_costs import told_costs
    from megascale_ops.trace.choosing import listed
    from megascale_ops.trace.operations import rows_of

    ask = read_ask(
        job=job,
        incident=incident,
        boxes=boxes,
        box_root=box_root,
        run_dir=run_dir,
        controller=controller,
        token_file=token_file,
    )
    meant = find_meant(ask) if ask.incident else None
    opened = open_meant(ask, meant)
    rows = rows_of(list(opened.records_of(opened.ranks)), last)
    asked = listed(ranks, opened.ranks) if ranks is not None else None
    found = predict(rows, opened.job, asked)
    found = msgspec.structs.replace(found, notes=(*opened.notes, *opened.unreadable, *found.notes))
    found = msgspec.structs.replace(found, notes=(*found.notes, *others(found, told_costs(ask, meant))))
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    click.echo("\n".join(sentences(found, were_asked=asked is not None)))


def predict(rows: "Rows", job: str, asked: "Collection[int] | None") -> Found:
    """Return what each change would do, the largest saving first.

    Args:
        rows: the recorded collectives.
        job: the job's name.
        asked: ranks to ask about together; None: each rank, each pipeline stage and each communicator by itself.

    Raises:
        UsageError: the records can't be replayed, or all ranks are asked about and none is left to compare with.
    """
    import numpy as np

    from megascale_ops.diagnosis.skew.whatif import Operations, build, if_links_were_as_fast, if_ranks_were_as_fast

    columns = np.array(rows.rows, np.int64).T
    narrow = [columns[place].astype(np.int32) for place in (0, 1, 2, 6)]
    graph = build(Operations(narrow[0], narrow[1], narrow[2], columns[3], columns[4], columns[5], narrow[3]))
    present = sorted({row.rank for row in rows.rows})
    if asked is not None and not set(present) - set(asked):
        raise UsageError("these are all the ranks: nobody is left whose speed they could have")
    classes = np.zeros(max(present) + 1, np.int32)
    for rank, stage in rows.stages.items():
        if rank < len(classes):
            classes[rank] = stage
    base = if_ranks_were_as_fast(graph, present[:1], classes)
    told: list[Line] = []
    for change, members in _changes(rows, graph, present, asked).items():
        told.append(_line(change, if_ranks_were_as_fast(graph, members, classes), len(present)))
    if asked is None and len(rows.communicators) > 1:
        for number in np.unique(graph.communicator).tolist():
            change = f"communicator {rows.communicators[number]}"
            told.append(_line(change, if_links_were_as_fast(graph, [number]), len(present)))
    told.sort(key=lambda line: -line.saved)
    return Found(
        job=job,
        ranks=len(present),
        first_step=rows.first_step,
        last_step=rows.last_step,
        measured_s=base.measured_s,
        replayed_s=base.replayed_s,
        error=None if rows.sends > rows.last_step - rows.first_step else base.error,
        lines=tuple(told),
        notes=rows.notes,
    )


def _changes(
    rows: "Rows", graph: "Graph", present: list[int], asked: "Collection[int] | None"
) -> dict[str, "Collection[int]"]:
    """Return which ranks to ask about together, by what that is called."""
    from megascale_ops.schema.folding import named

    if asked is not None:
        return {named(sorted(asked)): asked}
    changes: dict[str, Collection[int]] = {f"rank {rank}": (rank,) for rank in _longest(graph, present)}
    stages: dict[str, list[int]] = {}
    for rank, stage in rows.stages.items():
        if rank in present:
            stages.setdefault(f"stage {stage}", []).append(rank)
    return changes | (stages if len(stages) > 1 else {})


def sentences(found: Found, *, were_asked: bool = False) -> list[str]:
    """Return the lines for people; ranks that were asked about are answered also when they save nothing."""
    from megascale_ops.schema.wording import duration, percent, printable

    if found.error is None:
        missed = "which proves nothing: ranks also wait for each other in sends and receives, and that is not replayed"
    else:
        missed = f"off by {found.error:.1%}"
    head = (
        f"job {printable(found.job)}: {found.ranks} ranks, steps {found.first_step} to {found.last_step}, "
        f"{duration(found.measured_s)} a step; replayed from the records {duration(found.replayed_s)} "
        f"({missed})"
    )
    worth = [line for line in found.lines if line.saved >= max(WORTH, found.error or 0.0)]
    lines = [
        head,
        *(
            f"  {printable(line.change)} as fast as its peers: {duration(line.predicted_s)} a step, "
            f"{percent(line.saved)} less ({line.gpu_hours_a_day:,.1f} rank hours a day)"
            for line in worth[:MOST_ROWS]
        ),
    ]
    if not worth and were_asked:
        lines += [
            f"  {printable(line.change)} as fast as its peers: no step would be shorter by more than the replay is off"
            for line in found.lines
        ]
    elif not worth:
        lines.append("  no rank, stage or link by itself would make a step shorter by more than the replay is off")
    elif len(worth) > MOST_ROWS:
        lines.append(f"  and {len(worth) - MOST_ROWS} more: --json lists them")
    return lines + [f"note: {printable(note)}" for note in found.notes]


def others(found: Found, told: "Mapping[int, Told]") -> "Iterator[str]":
    """Yield a sentence for each rank of which a verdict says another figure: why they differ."""
    from megascale_ops.schema.wording import percent

    saved = {line.change: line.saved for line in found.lines}
    for rank, one in told.items():
        mine = saved.get(f"rank {rank}")
        if mine is None or percent(mine) == percent(one.cost):
            continue
        yield (
            f"incident {one.incident} says that rank {rank} costs {percent(one.cost)} of every step, which is of steps "
            f"that ranks reported since step {one.since_step:,}; the {percent(mine)} here are of the collectives of "
            f"steps {found.first_step:,} to {found.last_step:,}, replayed"
        )


def _line(change: str, prediction: "Prediction", ranks: int) -> Line:
    saved = max(0.0, prediction.saved)
    return Line(change, prediction.predicted_s, saved, saved * ranks * 24.0)


def _longest(graph: "Graph", present: list[int]) -> list[int]:
    """Return the ranks that worked longest, at most MOST_RANKS."""
    import numpy as np

    total = np.bincount(graph.rows.rank, graph.own_s, minlength=max(present) + 1)
    return sorted(present, key=lambda rank: -float(total[rank]))[:MOST_RANKS]
