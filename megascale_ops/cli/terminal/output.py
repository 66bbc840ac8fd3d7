# SPDX-License-Identifier: Apache-2.0
"""Where verbs print: a rich console for people, JSON for programs.

rich takes colours away by itself when the output is no terminal or ``NO_COLOR`` is set.
"""

from collections.abc import Iterable
from typing import Any

import click
import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megascale_ops.schema.wording import pictured

# Wide enough for every table when the output is a pipe or a file, where no window sets a width.
PIPE_WIDTH = 120


class SafeConsole(Console):
    """Shows foreign text and obeys none: text of ranks, nodes and jobs may carry a terminal's escape codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments whose text has no control characters; rich's own control codes are apart from text."""
        for segment in super().render(renderable, options):
            is_safe = segment.control or segment.text == "\n" or segment.text.isprintable()
            yield segment if is_safe else Segment(pictured(segment.text), segment.style)


def console() -> Console:
    """Return a console on stdout that reads no markup and invents no highlighting."""
    plain = SafeConsole(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not plain.is_terminal:
        plain.width = PIPE_WIDTH
    return plain


def print_json(value: Any, indent: int = 2) -> None:  # noqa: ANN401  any struct of the schema
    """Print a struct as JSON with every field, also those at their default; ``indent`` 0 keeps it on one line."""
    encoded = msgspec.json.encode(with_defaults(value))
    click.echo((msgspec.json.format(encoded, indent=indent) if indent else encoded).decode())


def with_defaults(value: Any) -> Any:  # noqa: ANN401  any struct of the schema
    """Return a struct as plain containers, keeping the defaults that messages leave out on the wire."""
    if isinstance(value, msgspec.Struct):
        return {name: with_defaults(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (list, tuple)):
        return [with_defaults(item) for item in value]
    if isinstance(value, dict):
        return {key: with_defaults(item) for key, item in value.items()}
    return value
