# SPDX-License-Identifier: Apache-2.0
"""Grafana's own published schema of dashboards, as a judge: TypeScript's compiler with the package ``@grafana/schema``.

Each dashboard becomes a typed constant of a TypeScript file, and so do each panel's options and the settings of its
fields, whose types belong to the kind of panel. A literal may have no property that its type lacks, so what Grafana
would pass over in silence is an error here.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# The newest of November 2026, and a compiler that it is written for. Its types are of Grafana 13; dashboards of this
# form are read by older servers too.
PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
INSTALL_S = 120.0  # 26 MB; 4 s where a cache has them
COMPILE_S = 120.0  # 5 s on a quiet machine

_RAW = "@grafana/schema/dist/esm/raw"
# Kind of panel -> its file of types, and whether it has settings of fields.
KINDS = {
    "stat": ("stat", "StatPanelCfg", False),
    "timeseries": ("timeseries", "TimeSeriesPanelCfg", True),
    "table": ("table", "TablePanelCfg", True),
    "heatmap": ("heatmap", "HeatmapPanelCfg", True),
    "bargauge": ("bargauge", "BarGaugePanelCfg", False),
    "state-timeline": ("statetimeline", "StateTimelinePanelCfg", True),
    "status-history": ("statushistory", "StatusHistoryPanelCfg", True),
}
# JSON has no enumerations: where a type has one, its values will do. And the published type of an annotation's target
# is that of annotations which Grafana keeps itself; a data source's own has a query, and so has the annotation.
HEAD = f"""\
import type {{ AnnotationQuery, Dashboard }} from '{_RAW}/dashboard/x/Dashboard_types.gen';
type Json<T> = unknown extends T ? T
  : T extends string ? `${{T}}`
  : T extends number ? (`${{T}}` extends `${{infer N extends number}}` ? N : T)
  : T extends boolean | null | undefined ? T
  : T extends Array<infer U> ? Array<Json<U>>
  : T extends object ? {{ [K in keyof T]: Json<T[K]> }}
  : T;
type Query = {{ expr: string; refId: string; range?: boolean; instant?: boolean; legendFormat?: string; format?:
  'time_series' | 'table' | 'heatmap'; interval?: string; datasource?: {{ type: 'prometheus'; uid: string }} }};
type Note = Omit<AnnotationQuery, 'target'> & {{ target: Query; expr: string; step: string; titleFormat: string;
  textFormat: string }};
type Board = Omit<Json<Dashboard>, 'annotations'> & {{ annotations?: {{ list?: Array<Json<Note>> }} }};
"""


class GrafanaSchema:
    """The compiler and the types, installed in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("no npm or node on this machine: Grafana's schema can't be had")
        (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline", *PACKAGES]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm's registry does not answer within {INSTALL_S:g} s")
        if done.returncode:
            pytest.skip(f"npm can't install {' '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")

    def errors(self, dashboards: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return what the compiler has against some dashboards, a line for each complaint."""
        for name, dashboard in dashboards.items():
            (self._folder / f"{name}.ts").write_text("\n".join(_program(dashboard)), encoding="utf-8")
        options = {
            "strict": True,
            "noEmit": True,
            "module": "esnext",
            "moduleResolution": "bundler",
            "skipLibCheck": True,
            "types": [],
        }
        config = {"compilerOptions": options, "files": [f"{name}.ts" for name in dashboards]}
        (self._folder / "tsconfig.json").write_text(json.dumps(config), encoding="utf-8")
        compiler = self._folder / "node_modules" / "typescript" / "bin" / "tsc"
        done = subprocess.run(
            ["node", str(compiler), "--pretty", "false"],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
            check=False,
            env={**os.environ, "NO_COLOR": "1"},
        )
        assert done.returncode in {0, 1, 2}, done.stderr
        return [line for line in done.stdout.splitlines() if "error TS" in line]


def _program(dashboard: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a TypeScript file that is right when the dashboard is."""
    yield HEAD
    kinds = sorted({panel["type"] for panel in dashboard["panels"]} - {"row"})
    for kind in kinds:
        folder, file, has_fields = KINDS[kind]
        name = file.removesuffix("PanelCfg")
        names = f"Options as {name}Options" + (f", FieldConfig as {name}Field" if has_fields else "")
        yield f"import type {{ {names} }} from '{_RAW}/composable/{folder}/panelcfg/x/{file}_types.gen';"
    yield f"export const dashboard: Board = {json.dumps(dashboard)};"
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        _, file, has_fields = KINDS[panel["type"]]
        name, number = file.removesuffix("PanelCfg"), panel["id"]
        yield f"export const options{number}: Json<{name}Options> = {json.dumps(panel['options'])};"
        fields = panel["fieldConfig"]["defaults"].get("custom", {})
        if has_fields:
            yield f"export const fields{number}: Json<{name}Field> = {json.dumps(fields)};"
        yield f"export const queries{number}: Array<Query> = {json.dumps(panel['targets'])};"
