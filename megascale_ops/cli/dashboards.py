# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops dashboards``: write the Grafana dashboards into a folder, push them to a server, check them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops import foreign
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, json_option, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megascale_ops.grafana.asking import Answer, Prometheus
    from megascale_ops.grafana.push import Done
    from megascale_ops.grafana.shape import Checked, Model

# Ours have 60 kB; Grafana's own limit for what is sent to it is below this.
_MOST_BYTES = 16 << 20


@click.group(cls=NamingGroup)
def dashboards() -> None:
    """Grafana dashboards, alert rules and provisioning files: export, push, check."""


@dashboards.command()
@argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--datasource-url", metavar="URL", help="Where Grafana reaches Prometheus.  [http://prometheus:9090]")
@click.option(
    "--dashboards-path",
    metavar="PATH",
    help="Where Grafana will find DIR/dashboards.  [/etc/megascale-ops/dashboards]",
)
@click.option(
    "--controller",
    metavar="URL",
    envvar="MEGASCALE_CONTROLLER",
    help="The controller as people reach it: alerts link to the runbooks that it serves.",
)
@click.option(
    "--runbook-url",
    metavar="URL",
    help="Where the alerts' pages are instead: a folder, or an address with {name} for the alert's name.",
)
@click.option("--grafana-url", metavar="URL", help="Address of Grafana, put before the rules' links to dashboards.")
@click.option("--force", is_flag=True, help="Replace files that are there and differ.")
@json_option
@log_options
def export(
    folder: Path,
    datasource_url: str | None,
    dashboards_path: str | None,
    controller: str | None,
    runbook_url: str | None,
    grafana_url: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write dashboards, rules, Alertmanager's configuration, provisioning and a compose file into DIR.

    Without options the copy fits its own compose.yml. For a Grafana that is installed on this machine:

    \b
        megascale-ops dashboards export /etc/megascale-ops --datasource-url http://localhost:9090
        ln -s /etc/megascale-ops/provisioning/datasources/* /etc/grafana/provisioning/datasources/
        ln -s /etc/megascale-ops/provisioning/dashboards/* /etc/grafana/provisioning/dashboards/
    """  # noqa: D301  click's mark for text that is not to be wrapped
    from megascale_ops.grafana import files

    url = datasource_url or files.DATASOURCE_URL
    if not re.fullmatch(r"https?://[^\s\"'#{}]+", url):
        raise UsageError(f"--datasource-url {url!r} can't be: it looks like http://HOST:9090")
    path = dashboards_path or files.DASHBOARDS_PATH
    if not re.fullmatch(r"/[\w./@+-]*", path):
        raise UsageError(f"--dashboards-path {path!r} can't be: it is a whole path of letters, digits, . _ @ + and -")
    served = f"http://{controller}" if controller and "//" not in controller else controller
    served = _link("--controller", served or None, "http://node-0:7070")
    pages = _link("--runbook-url", runbook_url, "https://git.example.com/ops/dashboards/runbooks", files.NAME)
    pages = pages or (f"{served.rstrip('/')}/runbooks/{files.NAME}" if served else "")
    grafana = _link("--grafana-url", grafana_url, "https://grafana.example.com")
    written = files.export(folder, files.Addresses(url, path, pages, grafana), force=force)
    if as_json:
        _print_json([{"path": str(one.path), "outcome": one.outcome} for one in written])
        return
    for one in written:
        if one.outcome != "unchanged":
            click.echo(f"{one.outcome:9} {one.path}")
    new = sum(one.outcome != "unchanged" for one in written)
    click.echo(f"{folder}: {len(written)} files, {new} of them new or replaced")
    if not pages:
        click.echo(
            "alerts link to runbooks by paths: --controller URL makes them addresses that open on a pager", err=True
        )
    if not any(one.path.suffix == ".whl" for one in written):
        click.echo(f"for an image, in the checkout: pip wheel --no-deps --wheel-dir {folder / 'image'} .", err=True)


def _link(option: str, url: str | None, example: str, place: str = "") -> str:
    """Return an address that links may begin with, ``place`` in it being theirs to fill; "" where none was given.

    Raises:
        UsageError: it is none, or has what can't stand there: a query, or what YAML and Prometheus' templates read.
    """
    plain = url.replace(place, "") if url and place else url
    if plain is not None and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./~%@:+,=-]*)?", plain, re.ASCII):
        raise UsageError(f"{option} {url!r} can't be: it looks like {example}")
    return url or ""


@dashboards.command("push")
@argument("place", type=click.Path(path_type=Path), metavar="[DIR|FILE]", required=False)
@click.option("--url", required=True, metavar="URL", help="Address of the Grafana server.")
@click.option("--token-file", metavar="FILE", help="File with the token of a service account (role Editor or Admin).")
@click.option("--user", metavar="NAME", help="Log in by name instead of by token.")
@click.option("--password-file", metavar="FILE", help="File with the user's password.")
@click.option("--folder", metavar="NAME", help="Folder for the dashboards, made if missing.  [MegaScale Ops]")
@click.option("--datasource-url", metavar="URL", help="Where Grafana reaches Prometheus; a data source is made for it.")
@click.option("--ca-file", type=click.Path(exists=True, dir_okay=False), help="Certificates to trust, as PEM.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.1, 600), default=20.0, show_default=True, metavar="S")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and write nothing.")
@json_option
@log_options
def push(
    place: Path | None,
    url: str,
    token_file: str | None,
    user: str | None,
    password_file: str | None,
    folder: str | None,
    datasource_url: str | None,
    ca_file: str | None,
    timeout_s: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Bring a Grafana server up to date: data source, folder and dashboards; what is the same is left alone.

    Pushes the dashboards of this installation, or those of DIR or FILE. A dashboard that was changed in Grafana is
    replaced; its version history there keeps the change.
    """
    from megascale_ops.grafana import push as pushing
    from megascale_ops.grafana.server import Server

    if datasource_url and not re.fullmatch(r"https?://\S+", datasource_url):
        raise UsageError(f"--datasource-url {datasource_url!r} can't be: it looks like http://HOST:9090")
    pushing.folder_uid(folder or pushing.FOLDER)  # what can't be a name is reported before anything is sent
    models = _sound(place)
    credential = _credential(token_file, user, password_file)
    server = Server(url, credential, ca_file or "", timeout_s)
    done = []
    try:
        for one in pushing.push(server, models, folder or pushing.FOLDER, datasource_url or "", dry_run=dry_run):
            done.append(one)
            if not as_json:
                click.echo(_told(one, dry_run=dry_run))
    finally:
        server.close()
    if as_json:
        _print_json({"dry_run": dry_run, "done": [one._asdict() for one in done]})
        return
    changed = sum(one.outcome in {"created", "updated"} for one in done)
    would = "would change, nothing was written" if dry_run else "changed"
    click.echo(f"{server.url}: {changed} of {len(done)} {would}" if changed else f"{server.url}: all unchanged")


@dashboards.command("check")
@argument("place", type=click.Path(path_type=Path), metavar="[DIR|FILE]", required=False)
@click.option("--url", metavar="URL", help="A Prometheus server: run every query there, and list those without data.")
@click.option("--token-file", metavar="FILE", help="File with a bearer token for that server.")
@json_option
@log_options
def check(place: Path | None, url: str | None, token_file: str | None, as_json: bool) -> int:
    """Check dashboards: valid models, unique ids, queries for series that exist; with --url, for data.

    Exits with 1 when something is wrong. A query without data is listed and is not wrong: on a healthy cluster there
    are no Xids.
    """
    from megascale_ops.grafana import files, shape

    prometheus = _prometheus(url, token_file)
    recording = {
        name for path in files.rule_files(place) for name in shape.recorded(_bytes(path).decode(errors="replace"))
    }
    reports = []
    seen: dict[str, Path] = {}
    for path in files.dashboard_files(place):
        try:
            model = shape.read(_bytes(path))
        except shape.NotADashboardError as error:
            reports.append(_report(path, None, [str(error)], []))
            continue
        found = shape.check(model, recording)
        problems = list(found.problems)
        uid = str(model.get("uid", ""))
        if uid and seen.setdefault(uid, path) is not path:
            problems.append(f"has the uid of {seen[uid].name}: Grafana would keep one of them")
        reports.append(_report(path, found, problems, _asked(model, prometheus)))
    if as_json:
        _print_json({"dashboards": reports})
    else:
        click.echo("\n".join(line for report in reports for line in _lines(report, asked=prometheus is not None)))
    return int(any(report["problems"] for report in reports))


def _sound(place: Path | None) -> "list[Model]":
    """Return the dashboards to push.

    Raises:
        UsageError: one of them is none, or Grafana would refuse it.
    """
    from megascale_ops.grafana import files, shape

    models = []
    for path in files.dashboard_files(place):
        try:
            model = shape.read(_bytes(path))
        except shape.NotADashboardError as error:
            raise UsageError(f"{path} {error}") from error
        head = shape.head(model)
        if head:
            raise UsageError(f"{path} {head[0]}")
        models.append(model)
    return models


def _bytes(path: Path) -> bytes:
    try:
        return foreign.read(path, _MOST_BYTES, follow=True)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from error


def _credential(token_file: str | None, user: str | None, password_file: str | None) -> str | tuple[str, str] | None:
    """Return the credentials for Grafana; None where none were given: it may let every user in.

    Raises:
        UsageError: both ways at once, or one of them by half.
    """
    from megascale_ops.link.token_files import read_secret_file

    if token_file and (user or password_file):
        raise UsageError("give --token-file, or --user with --password-file, not both")
    if bool(user) != bool(password_file):
        raise UsageError("--user and --password-file belong together: give both")
    if token_file:
        return read_secret_file(token_file, "token")
    return (user, read_secret_file(password_file, "password")) if user and password_file else None


def _prometheus(url: str | None, token_file: str | None) -> "Prometheus | None":
    from megascale_ops.grafana.asking import Prometheus
    from megascale_ops.link.token_files import read_secret_file

    if url is None:
        if token_file:
            raise UsageError("--token-file is for the server of --url: give that as well")
        return None
    found = Prometheus(url, read_secret_file(token_file, "token") if token_file else "")
    click.get_current_context().call_on_close(found.close)
    return found


def _asked(model: "Model", prometheus: "Prometheus | None") -> "list[Answer]":
    from megascale_ops.grafana.asking import ask

    return [] if prometheus is None else list(ask(model, prometheus))


def _report(path: Path, found: "Checked | None", problems: list[str], answers: "Sequence[Answer]") -> "Model":
    refused = [f"{one.query.place}: Prometheus refuses it: {one.refused}" for one in answers if one.refused]
    empty = [one.query._asdict() for one in answers if not one.refused and not one.series]
    return {
        "file": str(path),
        "title": found.title if found else "",
        "panels": found.panels if found else 0,
        "queries": len(found.queries) if found else 0,
        "problems": [*problems, *refused],
        "without_data": empty,
    }


def _lines(report: "Model", *, asked: bool) -> list[str]:
    name = Path(report["file"]).name
    if report["problems"]:
        number = len(report["problems"])
        verdict = f"{number} problem{'s' if number > 1 else ''}"
    elif asked:
        verdict = f"{report['queries'] - len(report['without_data'])} have data"
    else:
        verdict = "fine"
    head = f"{name}: {report['panels']} panels, {report['queries']} queries, {verdict}"
    lines = [head, *(f"  {problem}" for problem in report["problems"])]
    lines += [f"  no data: {one['place']}: {' '.join(one['expression'].split())}" for one in report["without_data"]]
    return lines


def _told(one: "Done", *, dry_run: bool) -> str:
    outcome = f"would be {one.outcome}" if dry_run and one.outcome in {"created", "updated"} else one.outcome
    return f"{one.kind:11} {one.name}: {outcome}" + (f" ({one.note})" if one.note else "")


def _print_json(value: object) -> None:
    from megascale_ops.cli.terminal.output import print_json

    print_json(value)
