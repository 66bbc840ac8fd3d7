# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops completion bash|zsh|fish``: the lines that let a shell complete verbs, options and names."""

import click
from click.shell_completion import get_completion_class

from megascale_ops.cli.terminal.options import PROGRAM, log_options

VARIABLE = "_MEGASCALE_OPS_COMPLETE"  # as click derives it from the program's name


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
@log_options
def completion(ctx: click.Context, shell: str) -> None:
    """Print what lets SHELL complete verbs, options, jobs, incidents and faults by Tab.

    \b
        bash, in ~/.bashrc:   eval "$(megascale-ops completion bash)"
        zsh, in ~/.zshrc:     eval "$(megascale-ops completion zsh)"
        fish, once:           megascale-ops completion fish > ~/.config/fish/completions/megascale-ops.fish
    """  # noqa: D301  click's mark for text that is not to be wrapped
    found = get_completion_class(shell)
    assert found is not None  # click has these three
    root = ctx.find_root()
    script = found(root.command, {}, PROGRAM, VARIABLE)
    click.echo(script.source_template % script.source_vars())
