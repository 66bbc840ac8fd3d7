# SPDX-License-Identifier: Apache-2.0
"""What Tab offers for a job, an incident or a fault, by the lookup that the program was started with (click's ``obj``).

This room knows no runs; ``main`` hands in the lookup that does. Without one, or where asking fails, nothing is offered:
a shell has no place for an error there.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Offers(Protocol):
    """Looks up what there is."""

    def __call__(self, kind: str, given: dict[str, Any]) -> Iterable[tuple[str, str]]:
        """Return names of a kind (job, incident, fault, setting, example), each with a word about it.

        Args:
            kind: what is to be completed.
            given: what stands on the line so far, by parameter.
        """


def offers(kind: str) -> "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]":
    """Return what a parameter takes as ``shell_complete`` so that names of a kind are offered."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        ask: Offers | None = ctx.find_root().obj
        if ask is None:
            return []
        try:
            found = list(ask(kind, ctx.params))
        except Exception:  # noqa: BLE001  a shell waits for names: an error would be written into the line that is typed
            return []
        return [CompletionItem(name, help=about) for name, about in found if name.startswith(incomplete)]

    return complete
