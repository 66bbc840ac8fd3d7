# SPDX-License-Identifier: Apache-2.0
"""Where the dashboards and what belongs to them lie, and how a copy is written for the servers that read them.

They come with the wheel; in a checkout they are the repository's own ``dashboards/``.
"""

import re
from pathlib import Path
from typing import NamedTuple

import megascale_ops
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.whole_file import write_whole

# What is written, and into which folder of the copy. The dashboards get one of their own: it is mounted into Grafana,
# and what lies beside it (the token of compose.yml, rules) is not Grafana's to see.
_PARTS = (
    ("*.json", "dashboards"),
    ("rules/*.yml", "rules"),
    ("alertmanager/*.yml", "alertmanager"),
    ("runbooks/*.md", "runbooks"),
    ("provisioning/datasources/*.yaml", "provisioning/datasources"),
    ("provisioning/dashboards/*.yaml", "provisioning/dashboards"),
    ("compose.yml", ""),
    ("prometheus.yml", ""),
)
DATASOURCE_URL = "http://prometheus:9090"  # as compose.yml names it
DASHBOARDS_PATH = "/etc/megascale-ops/dashboards"  # where compose.yml mounts them


class Addresses(NamedTuple):
    """The addresses that a copy contains.

    ``datasource_url`` is where Grafana reaches Prometheus, ``dashboards_path`` where it will find the copy's
    dashboards. Before the links of alerts come ``runbook_url`` (the pages' folder) and ``grafana_url``; "" leaves them
    relative.
    """

    datasource_url: str = DATASOURCE_URL
    dashboards_path: str = DASHBOARDS_PATH
    runbook_url: str = ""
    grafana_url: str = ""


class Written(NamedTuple):
    """One file of a copy; ``outcome`` is written, replaced or unchanged."""

    path: Path
    outcome: str


def source() -> Path:
    """Return the folder ``dashboards`` of this installation.

    Raises:
        MegascaleError: it is missing.
    """
    package = Path(megascale_ops.__file__).parent
    for folder in (package / "dashboards", package.parent / "dashboards"):
        if folder.is_dir():
            return folder
    raise MegascaleError("the dashboards are missing from this installation: install megascale-ops again")


def dashboard_files(place: Path | None) -> list[Path]:
    """Return the dashboards at ``place``: a file, a folder of them, or (None) this installation's.

    Raises:
        UsageError: there is no such place, or no dashboard in it.
    """
    folder = place if place is not None else source()
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UsageError(f"there is no file or folder {folder}")
    found = sorted(folder.glob("*.json")) or sorted((folder / "dashboards").glob("*.json"))
    if not found:
        raise UsageError(f"there is no dashboard in {folder}: files that end with .json are looked for")
    return found


def rule_files(place: Path | None) -> list[Path]:
    """Return the files with recording rules that belong to the dashboards at ``place``: beside them, else ours."""
    folder = place if place is None or place.is_dir() else place.parent
    beside = [] if folder is None else [folder / "rules", folder.parent / "rules"]
    for rules in (*beside, source() / "rules"):
        if rules.is_dir():
            return sorted(rules.glob("*.yml"))
    return []


def export(target: Path, addresses: Addresses, *, force: bool) -> list[Written]:
    """Copy dashboards, rules, Alertmanager's and Prometheus' configuration, provisioning and compose file.

    Args:
        target: the folder; it is made if missing.
        addresses: what is written into provisioning files and into the links of alerts.
        force: replace files that are there already and differ; they may have been changed by hand.

    Raises:
        UsageError: it can't be written, or would replace files.
    """
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is no folder: name another one")
    root = source()
    plan = {
        target / folder / path.name: _text(path, addresses)
        for pattern, folder in _PARTS
        for path in sorted(root.glob(pattern))
    }
    try:
        before = {path: path.read_bytes() if path.exists() else None for path in plan}
        changed = [path for path, text in plan.items() if before[path] not in {None, text}]
        if changed and not force:
            names = ", ".join(str(path.relative_to(target)) for path in changed)
            raise UsageError(
                f"{target} has files that differ from those of this version: {names}; give --force to replace them"
            )
        return [Written(path, _write(path, text, before[path])) for path, text in plan.items()]
    except OSError as error:
        raise UsageError(f"{error.filename or target} can't be written: {error.strerror or error}") from error


def _text(path: Path, addresses: Addresses) -> bytes:
    text = path.read_bytes()
    if path.parent.name == "rules":
        return _linked(text, addresses)
    if path.parent.parent.name != "provisioning":
        return text
    return text.replace(DATASOURCE_URL.encode(), addresses.datasource_url.encode()).replace(
        DASHBOARDS_PATH.encode(), addresses.dashboards_path.encode()
    )


def _linked(rules: bytes, addresses: Addresses) -> bytes:
    """Put addresses before the links of alerts: in the repository they are paths in it and in Grafana."""
    if addresses.runbook_url:
        base = addresses.runbook_url.rstrip("/").encode()
        rules = re.sub(rb"(?<=runbook_url: )dashboards/runbooks(?=/)", lambda _: base, rules)
    if addresses.grafana_url:
        base = addresses.grafana_url.rstrip("/").encode()
        rules = re.sub(rb'(?<=dashboard: ")(?=/d/)', lambda _: base, rules)
    return rules


def _write(path: Path, text: bytes, before: bytes | None) -> str:
    """Write a file beside and rename it: Grafana reads the folder while we write."""
    if before == text:
        return "unchanged"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return "written" if before is None else "replaced"
