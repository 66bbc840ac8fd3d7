# SPDX-License-Identifier: Apache-2.0
"""What a dashboard's query answers on a made cluster, by promtool: several kinds of ports and GPUs, missing scrapes.

The queries are those of the committed files, with Grafana's variables filled in as Grafana would.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.read_dashboards import Query, annotations, queries

pytestmark = pytest.mark.processes

FILLED = {"$__rate_interval": "2m", "$__range": "1h", "${node}": ".*", "$node": ".*", "${job}": "gpt", "$job": "gpt"}
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def filled(query: Query) -> str:
    """Return a query as Grafana sends it."""
    text = query.expr
    for name, value in FILLED.items():
        text = text.replace(name, value)
    return text


def asked(dashboard: str, panel: str) -> str:
    """Return the first query of a panel or an annotation."""
    found = [one for one in (*queries(), *annotations()) if (one.dashboard, one.panel) == (dashboard, panel)]
    assert found, f"{dashboard} has no {panel}"
    return filled(found[0])


def answers(folder: Path, series: dict[str, str], asks: list[tuple[str, str, dict[str, float]]]) -> str:
    """Ask queries at moments; return what promtool says of answers that differ, "" when none does."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    tests = [
        {
            "expr": expr,
            "eval_time": at,
            "exp_samples": [{"labels": name, "value": value} for name, value in right.items()],
        }
        for expr, at, right in asks
    ]
    made: dict[str, Any] = {
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": tests,
            }
        ],
    }
    (folder / "asked.yml").write_text(yaml.safe_dump(made), encoding="utf-8")
    command = ["promtool", "test", "rules", str(folder / "asked.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60.0)
    return done.stdout + done.stderr if done.returncode else ""


def port(device: str, kind: str, gigabits: float, node: str = "n1") -> dict[str, str]:
    """Return the series of a port that is up."""
    at = f'node="{node}", device="{device}", port="1"'
    return {
        f"megascale_ib_port_up{{{at}}}": "1x20",
        f"megascale_ib_rate_bytes_per_second{{{at}}}": f"{gigabits * 1e9 / 8:.0f}x20",
        f'megascale_ib_port_info{{{at}, kind="{kind}"}}': "1x20",
    }


def test_ports_are_compared_with_their_kind(tmp_path: Path) -> None:
    """A bonded management port at 200 Gb/s beside eight at 400 is sound; one of the eight at 100 is not."""
    sound = {}
    for number in range(8):
        sound |= port(f"mlx5_{number}", "InfiniBand MT_0000000838", 400)
    sound |= port("mlx5_bond_0", "Ethernet MT_0000000884 bond", 200) | port("mlx5_9", "Ethernet MT_0000000838", 100)
    slow = sound | port("mlx5_3", "InfiniBand MT_0000000838", 100)
    few = asked("megascale-fabric", "Ports below the common rate")
    table = asked("megascale-fabric", "Ports that are down or slow")
    named = '{device="mlx5_3", node="n1", port="1"}'

    assert answers(tmp_path, sound, [(few, "5m", {"{}": 0}), (table, "5m", {})]) == ""
    assert answers(tmp_path, slow, [(few, "5m", {"{}": 1}), (table, "5m", {named: 12.5e9})]) == ""


def test_nvlinks_are_compared_with_their_model(tmp_path: Path) -> None:
    """Nodes of L4 have none beside nodes with 18; an H100 with 17 lacks one."""
    series = {}
    for node, gpu, model, links in (("a", 0, H100, 18), ("a", 1, H100, 17), ("b", 0, H100, 18), ("c", 0, L4, 0)):
        series[f'megascale_gpu_nvlink_active_links{{node="{node}", gpu="{gpu}"}}'] = f"{links}x20"
        series[f'megascale_gpu_info{{node="{node}", gpu="{gpu}", model="{model}"}}'] = "1x20"
    few = asked("megascale-fabric", "GPUs with NVLinks missing")
    table = asked("megascale-gpu-health", "NVLinks missing")
    named = f'{{gpu="1", model="{H100}", node="a"}}'

    assert answers(tmp_path, series, [(few, "5m", {"{}": 1}), (table, "5m", {named: 17})]) == ""


def test_a_lost_scrape_marks_no_xid(tmp_path: Path) -> None:
    """The purple line stands where the Xid was, and nowhere else: not behind a scrape that was lost."""
    labels = 'node="n1", gpu="5", xid="79", action="restart_node"'
    series = {f"megascale_gpu_xid_age_seconds{{{labels}}}": "_x10 5+30x20 stale 665+30x20"}
    note = asked("megascale-gpu-health", "annotation Xids")
    said = f"{{{labels}}}"

    right = [(note, "5m30s", {said: 5}), (note, "12m", {}), (note, "16m", {}), (note, "17m", {}), (note, "20m", {})]
    assert answers(tmp_path, series, [(note, "4m", {}), *right]) == ""
