# SPDX-License-Identifier: Apache-2.0
"""Dashboards and rules as objects of Kubernetes: ConfigMaps for Grafana's sidecar, PrometheusRules for the operator."""

from pathlib import Path

import yaml

from megascale_ops.whole_file import write_whole

ROOM = Path(__file__).parents[1]
_HEAD = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# Made by dashboards/generate.py from dashboards/{source}: not to be changed here.\n"
)
_RULES = ("alerts", "recording")


def rendered(room: Path = ROOM) -> dict[str, str]:
    """Return the text of every object's file by its name, and the list of them all for kustomize.

    Args:
        room: The folder with ``megascale-*.json`` and ``rules/``.
    """
    texts = {f"rules-{name}.yaml": _rule(name, (room / "rules" / f"{name}.yml").read_text("utf-8")) for name in _RULES}
    for path in sorted(room.glob("megascale-*.json")):
        texts[f"dashboard-{path.stem.removeprefix('megascale-')}.yaml"] = _dashboard(path.stem, path.read_text("utf-8"))
    listed = "".join(f"  - {name}\n" for name in ("scrape.yaml", *sorted(texts)))
    texts["kustomization.yaml"] = (
        _HEAD.format(source="generate.py")
        + "# What the Prometheus Operator and Grafana's sidecar read: kubectl apply -k monitoring. Where an operator\n"
        + "# selects by labels (`release: ...`), put them on in an overlay.\n"
        + f"apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n{listed}"
    )
    return texts


def write(folder: Path, room: Path = ROOM) -> list[str]:
    """Write all files, remove those of dashboards that are no more; return the names of those that changed."""
    changed, texts = differing(folder, room), rendered(room)
    for name in changed:
        if name in texts:
            write_whole(folder / name, texts[name].encode())
        else:
            (folder / name).unlink()
    return changed


def differing(folder: Path, room: Path = ROOM) -> list[str]:
    """Return the names of files that are missing, differ, or are of nothing any more."""
    texts = rendered(room)
    made = [*folder.glob("dashboard-*.yaml"), *folder.glob("rules-*.yaml"), *folder.glob("kustomization.yaml")]
    there = {path.name: path.read_text("utf-8") for path in made}
    return sorted(name for name in texts.keys() | there.keys() if texts.get(name) != there.get(name))


def _rule(name: str, text: str) -> str:
    """Return a PrometheusRule. Expressions are literal: kustomize puts empty lines into folded ones."""
    made = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"megascale-ops-{name}", "namespace": "megascale-ops"},
        "spec": yaml.safe_load(text),
    }
    return _HEAD.format(source=f"rules/{name}.yml") + yaml.dump(made, Dumper=_Literal, sort_keys=False, width=10_000)


class _Literal(yaml.SafeDumper):
    """Writes text of several lines as it is."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Literal.add_representer(str, _text)


def _dashboard(stem: str, text: str) -> str:
    """Return a ConfigMap with one dashboard, under the label that Grafana's sidecar looks for."""
    name = f"megascale-ops-dashboard-{stem.removeprefix('megascale-')}"
    return (
        _HEAD.format(source=f"{stem}.json")
        + f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\n  namespace: megascale-ops\n"
        + f'  labels: {{grafana_dashboard: "1"}}\ndata:\n  {stem}.json: |\n'
        + _indented(text, 4)
    )


def _indented(text: str, columns: int) -> str:
    return "".join(" " * columns + line if line.strip() else line for line in text.splitlines(keepends=True))
