# SPDX-License-Identifier: Apache-2.0
"""What people read of checkpoints: the list, one with its files, differences, what goes, when to save."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.cli.terminal.tables import MOST_ROWS, data_size, plain_table
from megascale_ops.schema.wording import duration, percent, printable

if TYPE_CHECKING:
    from megascale_ops.checkpoint.deletion import Glance
    from megascale_ops.checkpoint.differences import Change, Differences, TensorChange
    from megascale_ops.cli.checkpoint.places import Place
    from megascale_ops.cli.checkpoint.planning import Planned
    from megascale_ops.cli.checkpoint.pruning import Row

# 8 digits of a digest: enough to compare by eye, and the list fits 80 columns; --json has all.
_DIGITS = 8


def digest_of(seen: "Glance") -> str:
    """Return the digest of a whole checkpoint: of its manifest, which has those of all its files."""
    return manifests.seal_of(seen.manifest) if seen.manifest is not None else ""


def list_view(found: Sequence["Glance"], reading: Mapping[int, tuple[str, ...]], place: "Place") -> RenderableType:
    """Return one row for each checkpoint."""
    has_metric = any(one.manifest is not None and manifests.metric_of(one.manifest) is not None for one in found)
    has_mesh = any(one.manifest is not None and manifests.mesh_of(one.manifest) for one in found)
    more = [*(["mesh"] if has_mesh else []), *(["metric"] if has_metric else [])]
    table = plain_table("step", "saved", "size", "ranks", *more, "digest", "state")
    for one in found[:MOST_ROWS]:
        manifest = one.manifest
        metric = manifests.metric_of(manifest) if manifest is not None else None
        table.add_row(
            f"{one.step}",
            _moment(manifest.written_wall_s) if manifest is not None else "",
            data_size(one.size_bytes),
            str(manifest.world_size) if manifest is not None else "",
            *([manifests.mesh_of(manifest) if manifest is not None else ""] if has_mesh else []),
            *([f"{metric:.6g}" if metric is not None else ""] if has_metric else []),
            digest_of(one)[:_DIGITS],
            _state(one, reading, place),
        )
    for column in table.columns[:-1]:
        column.no_wrap = True
    return _with_rest(table, len(found), "checkpoints")


def files_view(seen: "Glance", place: "Place") -> RenderableType:
    """Return one row for each file of a checkpoint."""
    table = plain_table("file", "size", "digest", "state")
    faults = {fault.file: fault for fault in seen.faults}
    elsewhere = frozenset(place.elsewhere(seen))
    entries = seen.manifest.files if seen.manifest is not None else ()
    for entry in sorted(entries, key=lambda one: one.name not in faults)[:MOST_ROWS]:
        fault = faults.get(entry.name)
        state = (
            Text(fault.sentence().removeprefix(f"{entry.name} "), "red")
            if fault is not None
            else Text("on another node" if entry.name in elsewhere else "there")
        )
        table.add_row(entry.name, data_size(entry.size_bytes), _short(entry.digest), state)
    return _with_rest(table, len(entries), "files")


def differences_view(found: "Differences") -> RenderableType:
    """Return what differs: a table of tensors by their change, then what came, went or is of another shape."""
    parts: list[RenderableType] = []
    if found.changed:
        table = plain_table("tensor", "shape", "change", "largest", "elements")
        for one in found.changed[:MOST_ROWS]:
            table.add_row(
                printable(one.name),
                f"{one.dtype}{list(one.shape)}",
                _relative(one),
                f"{one.largest:.3g}",
                percent(one.changed) + (f", {one.not_finite:,} not finite" if one.not_finite else ""),
            )
        parts.append(_with_rest(table, len(found.changed), "tensors that changed"))
    for title, changes in (
        ("of another shape or type", found.unlike),
        ("only in the later one", found.appeared),
        ("only in the former one", found.gone),
        ("values", found.values),
    ):
        if changes:
            parts += [Text(""), Text(f"{title}:", style="dim"), *map(_change_line, changes[:MOST_ROWS])]
            parts += [_rest(len(changes) - MOST_ROWS, "more")] if len(changes) > MOST_ROWS else []
    return Group(*parts)


def differences_line(found: "Differences") -> str:
    """Return the outcome in one line."""
    before, after = found.saved_by.before, found.saved_by.after
    saved_by = f"both saved by {after}" if before == after else f"saved by {before}, then by {after}"
    tensors = f"{len(found.changed)} of {len(found.changed) + found.same_tensors} tensors changed"
    counts = {"of another shape or type": found.unlike, "came": found.appeared, "went": found.gone}
    more = "".join(f", {len(changes)} {word}" for word, changes in counts.items() if changes)
    return f"{tensors}{more}; {len(found.values)} of {len(found.values) + found.same_values} values differ; {saved_by}"


def prune_view(rows: Sequence["Row"], *, is_done: bool) -> RenderableType:
    """Return what becomes of each checkpoint, and why it stays."""
    table = plain_table("step", "size", "", "why")
    for row in rows:
        why = "; ".join(row.reasons) or ("damaged" if row.is_damaged else "nothing keeps it")
        word = "stays" if row.reasons else "deleted" if row.deleted else "left" if is_done else "would go"
        table.add_row(str(row.step), data_size(row.size_bytes), Text(word, "" if row.reasons else "yellow"), why)
    return table


def plan_view(planned: "Planned", elsewhere: Mapping[str, float]) -> RenderableType:
    """Return the inputs, the interval that follows from them, and what is lost at others."""
    inputs = plain_table("input", "", "from")
    for name, one in planned.inputs.items():
        value = "" if one.seconds is None else ("at least " if one.is_bound else "") + duration(one.seconds)
        inputs.add_row(name.replace("-", " "), value, printable(one.source))
    plan = planned.plan
    steps = "" if not plan.steps else " (every step)" if plan.steps == 1 else f" (every {plan.steps:,} steps)"
    bound = {"daly": "", "write": ", as long as a write takes", "step": ", one step: the shortest there is"}
    outcome = plain_table("save every", "interval", "lost")
    at_most = "at most " if any(one.is_bound for one in planned.inputs.values()) else ""
    best = f"{duration(plan.interval_s)}{steps}{bound[plan.bound_by]}"
    outcome.add_row("best", best, at_most + percent(plan.lost_share))
    others = {"half of it": plan.interval_s / 2, "twice": plan.interval_s * 2, "as it saves now": planned.now.seconds}
    for name, share in elsewhere.items():
        outcome.add_row(name, duration(others[name] or 0.0), at_most + percent(share))
    formulas = f"Young {duration(plan.young_s)}, Daly {duration(plan.daly_s)}: from the end of a save to the next one"
    notes = [Text(formulas, style="dim")]
    if at_most:
        notes.append(Text("no failure was seen: if it fails less often than that, a longer interval is better"))
    return Group(inputs, Text(""), outcome, *notes)


def _state(one: "Glance", reading: Mapping[int, tuple[str, ...]], place: "Place") -> Text:
    if not one.ok:
        return Text("damaged: " + "; ".join(fault.sentence() for fault in one.faults[:2]), "red")
    words = "replaced" if Path(one.path).name.startswith(".") else "sealed"
    words += ", being read" if one.step in reading else ""
    if elsewhere := place.elsewhere(one):
        words += f", {len(elsewhere)} files on other nodes"
    found = place.findings(one.path)
    if found is not None and found.alarms:
        faults = ", ".join(dict.fromkeys(printable(alarm.fault).replace("_", " ") for alarm in found.alarms))
        return Text(f"{words}; told at its save: {faults}", "yellow")
    return Text(words)


def _moment(wall_s: float) -> str:
    try:
        return datetime.fromtimestamp(wall_s).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # a manifest that others wrote
        return ""


def _short(digest: str) -> str:
    algorithm, _, digits = digest.partition(":")
    return f"{algorithm}:{digits[:_DIGITS]}"


def _relative(one: "TensorChange") -> str:
    return "from zero" if one.relative is None else f"{one.relative:.3g}"


def _change_line(change: "Change") -> Text:
    if change.before and change.after:
        return Text(f"  {printable(change.name)}: {printable(change.before)} -> {printable(change.after)}")
    return Text(f"  {printable(change.name)}: {printable(change.before or change.after)}")


def _with_rest(table: RenderableType, rows: int, of_what: str) -> RenderableType:
    return Group(table, _rest(rows - MOST_ROWS, f"more {of_what}")) if rows > MOST_ROWS else table


def _rest(count: int, words: str) -> Text:
    return Text(f"and {count:,} {words}: --json lists them all", style="dim")
