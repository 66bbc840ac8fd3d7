# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops examples``: the training scripts and the deployment files that come with an installation."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, json_option, log_options
from megascale_ops.errors import UsageError
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPLOY = "deploy"
_SCRIPTS = "examples"
# Proposed where all were copied: it needs no GPU.
_FIRST = "train_gpt"


@click.group(cls=NamingGroup)
def examples() -> None:
    """Copy the example scripts, or what puts an agent on every node, out of the installation."""


@examples.command("list")
@json_option
@log_options
def list_(as_json: bool) -> None:
    """List what can be copied."""
    from megascale_ops.shipped import shipped

    found = {path.name: _first_line(path) for path in sorted(shipped("examples").glob("*.py"))}
    found[_DEPLOY] = "systemd, Slurm, Kubernetes, Prometheus, Dockerfile: an agent on every node"
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    width = max(map(len, found))
    click.echo("\n".join(f"{name.ljust(width)}  {text}" for name, text in found.items()))


@examples.command
@argument("name", required=False, metavar="[NAME]", shell_complete=offers("example"))
@argument("folder", type=click.Path(path_type=Path), required=False, metavar="[DIR]")
@click.option("--force", is_flag=True, help="Replace files that are there and differ.")
@log_options
def copy(name: str | None, folder: Path | None, force: bool) -> None:
    """Copy NAME into DIR: one script, or `deploy`; without NAME all scripts.

    DIR is ./examples unless it is given, for `deploy` ./deploy. Files of yours that differ are not replaced.
    """
    target = folder or Path(_DEPLOY if name == _DEPLOY else _SCRIPTS)
    plan = {target / place: path for place, path in _wanted(name)}
    try:
        _refuse_losses(plan, force=force)
        for place, path in plan.items():
            _write(place, path)
    except OSError as error:
        raise UsageError(f"{error.filename or target} can't be written: {error.strerror or error}") from error
    click.echo("\n".join(map(str, plan)))
    scripts = [place for place in plan if place.suffix == ".py"]
    if scripts:
        script = next((place for place in scripts if place.stem == _FIRST), scripts[0])
        click.echo(f"try: megascale-ops run --nproc-per-node 2 -- {script} --steps 60")


def _wanted(name: str | None) -> "Iterator[tuple[Path, Path]]":
    """Yield the files to copy, each with its place below the target.

    Raises:
        UsageError: there is nothing of that name; the nearest is named.
    """
    from megascale_ops.shipped import shipped

    if name == _DEPLOY:
        root = shipped("deploy")
        yield from ((path.relative_to(root), path) for path in sorted(root.rglob("*")) if path.is_file())
        return
    scripts = {path.name: path for path in sorted(shipped("examples").glob("*.py"))}
    if name is not None and name not in scripts and f"{name}.py" not in scripts:
        sentence = unknown("example", name, [*scripts, _DEPLOY])
        all_of_them = f": there are {', '.join(scripts)} and {_DEPLOY}; a folder comes behind the name"
        raise UsageError(sentence if sentence.endswith("?") else sentence + all_of_them)
    for script, path in scripts.items():
        if name is None or name in {script, path.stem}:
            yield Path(script), path


def _refuse_losses(plan: dict[Path, Path], *, force: bool) -> None:
    """Refuse to write over what is there and differs, before anything is written."""
    differ = [place for place, path in plan.items() if place.exists() and place.read_bytes() != path.read_bytes()]
    if differ and not force:
        names = ", ".join(map(str, differ))
        raise UsageError(f"files there differ from those of this version: {names}; give --force to replace them")


def _write(place: Path, path: Path) -> None:
    """Write a copy beside its place; what can be executed stays so."""
    from megascale_ops.whole_file import SHARED, write_whole

    place.parent.mkdir(parents=True, exist_ok=True)
    executable = path.suffix == ".sh"  # a wheel does not keep modes everywhere
    write_whole(place, path.read_bytes(), mode=0o777 if executable else SHARED)


def _first_line(path: Path) -> str:
    import ast

    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
