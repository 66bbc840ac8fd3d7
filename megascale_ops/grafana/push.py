# SPDX-License-Identifier: Apache-2.0
"""Bring a Grafana server to where the files are: data source, folder, dashboards; nothing is written twice.

A dashboard is saved only when it differs. What Grafana adds by itself (ids, versions, defaults, migrations to a newer
schema) is no difference: ours are compared with theirs by the keys that ours have. It is saved with the version that
was read, so that another user's save in between is refused by Grafana instead of lost.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.grafana.server import NotAllowedError, Server
from megascale_ops.grafana.shape import Model

FOLDER = "MegaScale Ops"
DATASOURCE = "MegaScale Prometheus"
DATASOURCE_UID = "megascale-prometheus"
# Grafana's own: its number of the row, its count of saves, the schema it has migrated to.
_THEIRS = frozenset({"id", "version", "schemaVersion", "iteration"})


class Done(NamedTuple):
    """One thing on the server; ``outcome`` is created, updated, unchanged or unknown, ``note`` is why or where."""

    kind: str
    name: str
    outcome: str
    note: str = ""


def push(
    server: Server,
    dashboards: Sequence[Model],
    folder: str = FOLDER,
    datasource_url: str = "",
    *,
    dry_run: bool = False,
) -> Iterator[Done]:
    """Write what is missing or differs, and yield each thing as soon as it is done.

    Args:
        server: where.
        dashboards: classic models, each with uid and title.
        folder: title of the folder at the top that they go into.
        datasource_url: where Grafana reaches Prometheus; "" takes a data source that is there.
        dry_run: look, yield, and write nothing.

    Raises:
        MegascaleError: Grafana refuses; what was yielded before that is done.
    """
    server.version()
    yield _datasource(server, datasource_url, dry_run=dry_run)
    uid, done = _folder(server, folder, dry_run=dry_run)
    yield done
    for model in dashboards:
        yield _dashboard(server, model, uid, folder, dry_run=dry_run)


def _datasource(server: Server, url: str, *, dry_run: bool) -> Done:
    try:
        known = [one for one in server.datasources() if one.get("type") == "prometheus"]
    except NotAllowedError:
        if url:
            raise
        # An editor may save dashboards and not see data sources; the dashboards' variable finds what there is.
        return Done("data source", "Prometheus", "unknown", "this token may not list data sources")
    if not url:
        if not known:
            raise MegascaleError(
                f"Grafana at {server.url} has no Prometheus data source: --datasource-url http://HOST:9090 makes one"
            )
        chosen = next((one for one in known if one.get("isDefault")), known[0])
        return Done("data source", str(chosen.get("name")), "unchanged", str(chosen.get("url", "")))
    same = next((one for one in known if _same_address(str(one.get("url", "")), url)), None)
    if same is not None:
        return Done("data source", str(same.get("name")), "unchanged", url)
    ours = next((one for one in known if one.get("uid") == DATASOURCE_UID), None)
    if ours is None:
        model = {
            "name": DATASOURCE,
            "uid": DATASOURCE_UID,
            "type": "prometheus",
            "access": "proxy",
            "url": url,
            "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
        }
        if not dry_run:
            server.create_datasource(model)
        return Done("data source", DATASOURCE, "created", url)
    if ours.get("readOnly"):
        raise MegascaleError(
            f"the data source {ours.get('name')!r} is provisioned from a file with the address {ours.get('url')}: "
            "change the file, or leave --datasource-url out"
        )
    if not dry_run:
        server.update_datasource({**ours, "url": url})
    return Done("data source", str(ours.get("name")), "updated", f"{url}, before {ours.get('url')}")


def _same_address(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def folder_uid(title: str) -> str:
    """Return the uid by which a folder of this title is made: the same one as in the provisioning files.

    Raises:
        UsageError: the title has no letter or digit.
    """
    uid = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
    if not uid:
        raise UsageError(f"a folder can't be named {title!r}: give it a letter or digit")
    return uid


def _folder(server: Server, title: str, *, dry_run: bool) -> tuple[str, Done]:
    uid = folder_uid(title)
    known = server.folders()
    # By title first: a folder made by hand with this name is meant. By uid: a pushed folder may have been renamed.
    found = next((one for one in known if one.get("title") == title), None)
    found = found or next((one for one in known if one.get("uid") == uid), None)
    if found is not None:
        return str(found["uid"]), Done("folder", str(found.get("title")), "unchanged")
    if not dry_run:
        server.create_folder(title, uid)
    return uid, Done("folder", title, "created")


def _dashboard(server: Server, model: Model, folder: str, folder_title: str, *, dry_run: bool) -> Done:
    there = server.dashboard(str(model["uid"]))
    title = str(model["title"])
    body: Model = {"dashboard": {**model, "id": None}, "folderUid": folder, "message": "megascale-ops dashboards push"}
    if there is None:
        if not dry_run:
            server.save({**body, "overwrite": False})
        return Done("dashboard", title, "created", f"{server.url}/d/{model['uid']}")
    meta = there.get("meta") or {}
    difference = differs(model, there["dashboard"])
    moved = meta.get("folderUid", "") != folder
    if not difference and not moved:
        return Done("dashboard", title, "unchanged")
    if meta.get("provisioned"):
        raise MegascaleError(
            f"the dashboard {title!r} is provisioned from files on {server.url} and can't be pushed: "
            "export new files into Grafana's folder instead"
        )
    theirs = there["dashboard"]
    body["dashboard"] = {**model, "id": theirs.get("id"), "version": theirs.get("version")}
    if not dry_run:
        server.save({**body, "overwrite": False})
    return Done("dashboard", title, "updated", difference or f"moved into {folder_title!r}")


def differs(ours: Model, theirs: Model) -> str:
    """Return where the first difference is ("panels[3].title"), "" where theirs has all that ours has."""
    wanted = {key: value for key, value in ours.items() if key not in _THEIRS}
    return _difference(wanted, theirs, "")


def _difference(ours: Any, theirs: Any, where: str) -> str:  # noqa: ANN401  any JSON
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            # An empty value may have been left out: {}, [], "", 0, null and false are what a missing key means.
            if key not in theirs and not value:
                continue
            found = _difference(value, theirs.get(key), f"{where}.{key}" if where else key)
            if found:
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} of them, {len(theirs)} there"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for at, (a, b) in pairs if (found := _difference(a, b, f"{where}[{at}]"))), "")
    return "" if ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool) else where
