# SPDX-License-Identifier: Apache-2.0
"""A widget of styled lines: only lines that changed are drawn, and what is longer than the window scrolls.

A frame comes once a second and changes a few lines of a screen, so a terminal far away gets a few hundred bytes.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from megascale_ops.schema.wording import pictured


class Lines(ScrollView):
    """Shows lines; none is wrapped."""

    DEFAULT_CSS = """
    Lines { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    Lines.fixed { overflow-y: hidden; }
    """

    def __init__(self, *, id: str | None = None, scrolls: bool = True) -> None:  # noqa: A002  Textual's own name
        super().__init__(id=id, classes="" if scrolls else "fixed", can_focus=scrolls)
        self._shown: tuple[Text, ...] = ()
        self._strips: dict[int, Strip] = {}

    def show(self, lines: Sequence[Text]) -> None:
        """Show these lines from now on."""
        before, self._shown = self._shown, tuple(lines)
        for at in range(max(len(before), len(lines))):
            if at >= len(before) or at >= len(lines) or before[at] != lines[at]:
                self._strips.pop(at, None)
                self.refresh_line(at)
        self.virtual_size = Size(1, len(lines))

    def render_line(self, y: int) -> Strip:
        """Return one line of the window; Textual asks for those that have to be drawn."""
        at = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        if at >= len(self._shown):
            return Strip.blank(width, self.rich_style)
        strip = self._strips.get(at)
        if strip is None:
            strip = self._strips[at] = rendered(self._shown[at], self.app.console)
        return strip.crop_extend(0, width, self.rich_style).apply_style(self.rich_style)


def rendered(line: Text, console: Console) -> Strip:
    """Return a line as it is drawn; a control character that slipped through is shown, never obeyed."""
    segments = Segment.apply_style(line.render(console), console.get_style(line.style))
    return Strip(one if one.text.isprintable() else Segment(pictured(one.text), one.style) for one in segments)
