# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops completion bash|zsh|fish``: the lines that let a shell complete verbs, options and names."""

import click

from megascale_ops.cli.terminal.completion import SHELLS, completion_script
from megascale_ops.cli.terminal.options import log_options


@click.command
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
@log_options
def completion(ctx: click.Context, shell: str) -> None:
    """Print what lets SHELL complete verbs, options, jobs, incidents and faults by Tab.

    \b
        bash, in ~/.bashrc:   eval "$(megascale-ops completion bash)"
        zsh, in ~/.zshrc:     eval "$(megascale-ops completion zsh)"
        fish, once:           megascale-ops completion fish > ~/.config/fish/completions/megascale-ops.fish
    """  # noqa: D301  click's mark for text that is not to be wrapped
    click.echo(completion_script(ctx.find_root().command, shell))
