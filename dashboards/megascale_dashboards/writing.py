# SPDX-License-Identifier: Apache-2.0
"""All dashboards as files: written, compared with what is there, or sketched for a reader without a Grafana."""

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from megascale_dashboards import (
    collectives,
    fabric,
    goodput,
    gpu_health,
    kernels,
    oncall,
    selfcheck,
    stragglers,
)
from megascale_dashboards.frame import Page, put_together
from megascale_ops.whole_file import write_whole

ROOM = Path(__file__).parents[1]
# 5 characters for one of 24 columns: most titles of the smallest panels can be read.
ACROSS = 5


def pages() -> tuple[Page, ...]:
    """Return all dashboards, in the order in which they are looked at."""
    rooms = (oncall, stragglers, collectives, kernels, gpu_health, fabric, goodput, selfcheck)
    return tuple(room.page() for room in rooms)


def rendered() -> dict[str, str]:
    """Return the text of every file by its name."""
    return {f"{page.uid}.json": _text(page) for page in pages()}


def write(folder: Path = ROOM) -> list[str]:
    """Write all files; return the names of those that changed."""
    changed = differing(folder)
    for name, text in rendered().items():
        if name in changed:
            write_whole(folder / name, text.encode())
    return changed


def differing(folder: Path = ROOM) -> list[str]:
    """Return the names of files that are missing, differ, or are of no dashboard any more."""
    texts = rendered()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("megascale-*.json")}
    return sorted(name for name in texts.keys() | there.keys() if texts.get(name) != there.get(name))


def sketch(dashboard: dict[str, Any]) -> str:
    """Return a dashboard's panels as boxes of characters, each with its title, kind and number."""
    panels: list[dict[str, Any]] = dashboard["panels"]
    down = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    canvas = [[" "] * (24 * ACROSS + 1) for _ in range(down + 1)]
    for panel in panels:
        _draw(canvas, panel)
    lines = "\n".join("".join(line).rstrip() for line in canvas)
    return f"{dashboard['title']}: {dashboard['description']}\n{lines}"


def _draw(canvas: list[list[str]], panel: dict[str, Any]) -> None:
    place = panel["gridPos"]
    left, right = place["x"] * ACROSS, (place["x"] + place["w"]) * ACROSS
    top, bottom = place["y"], place["y"] + place["h"]
    words = [f"{panel['id']} {panel['title']}", *([panel["type"]] if panel["type"] != "row" else [])]
    if panel["type"] == "row":
        _put(canvas, top, left, f"== {words[0]} ".ljust(right - left, "="))
        return
    for column in range(left, right + 1):
        canvas[top][column] = "-"
        canvas[bottom][column] = "-"
    for line in range(top + 1, bottom):
        canvas[line][left] = canvas[line][right] = "|"
    for line, text in enumerate(words, top + 1):
        _put(canvas, line, left + 2, text[: right - left - 2])


def _put(canvas: list[list[str]], line: int, column: int, text: str) -> None:
    canvas[line][column : column + len(text)] = text


def _text(page: Page) -> str:
    whole = json.loads(JSONEncoder().encode(put_together(page)))
    return json.dumps(_tidy(whole), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _tidy(value: Any) -> Any:  # noqa: ANN401  a JSON value is anything
    """Drop what the builders write that means nothing: settings of other kinds, and numbers like 8.0 for 8."""
    if isinstance(value, dict):
        # A threshold's value is the one null that means something: from the lowest number on.
        kept = {name: _tidy(inner) for name, inner in value.items() if inner is not None or name == "value"}
        # A table's footer went elsewhere with Grafana 12; ours have none.
        if "cellHeight" in kept:
            kept.pop("footer", None)
        if "repeat" not in kept:
            kept.pop("repeatDirection", None)
        if kept.get("type") in {"datasource", "query", "textbox", "custom"} and "name" in kept:
            for name in ("auto", "auto_count", "auto_min"):
                kept.pop(name, None)
        return kept
    if isinstance(value, list):
        return [_tidy(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
