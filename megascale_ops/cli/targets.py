# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops targets``: what Prometheus shall scrape, for its ``file_sd_configs``."""

from pathlib import Path
from urllib.parse import urlsplit

import click

from megascale_ops.cli.terminal.options import job_argument, log_options, where_options
from megascale_ops.errors import UsageError


@click.command
@job_argument
@where_options
@click.option("--out", type=click.Path(dir_okay=False), help="Write FILE instead of printing; changed all at once.")
@click.option("--agents-only", is_flag=True, help="Leave the controller itself out.")
@log_options
def targets(
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    out: str | None,
    agents_only: bool,
) -> None:
    """Print the addresses of all agents' metrics, and the controller's, as Prometheus' file discovery reads them.

    Every agent tells the controller where its metrics are. With --job only agents that run that job are listed. Give
    the scrape job `honor_labels: true`: our series say themselves which training job they belong to.

    Prometheus can also ask the controller by itself: http_sd_configs with the address CONTROLLER/v1/sd/agents.
    """
    import msgspec

    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.link import BlockingLink, addresses
    from megascale_ops.schema.targets import COMPONENT, JOBS, TargetGroup

    place = find_place(Wanted(controller or "", "", run_dir or ""), journal_too=False)
    with BlockingLink(place.url, read_token(token_file, place)) as link:
        groups = list(link.targets())
    if job is not None:
        groups = [group for group in groups if f",{job}," in group.labels.get(JOBS, "")]
    agents = len(groups)
    if not agents_only:
        every = tuple(_address(one) for one in addresses(place.url))
        groups.append(TargetGroup(every, {COMPONENT: "controller"}))
    text = msgspec.json.format(msgspec.json.encode(groups), indent=2).decode() + "\n"
    if not agents:
        click.echo(_why_none(job), err=True)
    if out is None:
        click.echo(text, nl=False)
        return
    _write(Path(out), text)
    click.echo(f"written to {out}; agents: {agents}, targets: {len(groups)}", err=True)


def _why_none(job: str | None) -> str:
    which = f"no agent that runs job {job!r}" if job is not None else "no agent"
    return (
        f"{which} has told where its metrics are: none reports yet, they serve none, or only on loopback of another "
        "machine (megascale-ops agent --metrics-listen HOST:PORT)"
    )


def _address(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


def _write(path: Path, text: str) -> None:
    """Write beside and rename: Prometheus reads the file whenever it changes.

    Raises:
        UsageError: it can't be written.
    """
    from megascale_ops.whole_file import open_beside

    try:
        with open_beside(path, follow=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from error
