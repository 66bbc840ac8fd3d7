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


SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MEGASCALE_OPS_COMPLETE"  # as click derives it from the program's name


class Offers(Protocol):
    """Looks up what there is."""

    def __call__(self, kind: str, given: dict[str, Any]) -> Iterable[tuple[str, str]]:
        """Return names of a kind (job, incident, fault, setting, example), each with a word about it.

        Args:
            kind: what is to be completed.
            given: what stands on the line so far, by parameter.
        """


def completion_script(root: click.Command, shell: str) -> str:
    """Return what a shell of ``SHELLS`` has to read to complete the program's lines."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click has these three
    script = found(root, {}, root.name or "", _VARIABLE)
    return str(script.source_template % script.source_vars())


def print_completion(ctx: click.Context, _param: click.Parameter, shell: str | None) -> None:
    """Print the script and end, where torchrun's option for it is given."""
    if shell is not None and not ctx.resilient_parsing:
        click.echo(completion_script(ctx.find_root().command, shell))
        ctx.exit()


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
