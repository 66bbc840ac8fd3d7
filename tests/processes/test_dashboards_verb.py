# SPDX-License-Identifier: Apache-2.0
"""`megascale-ops dashboards` beside real programs: Prometheus, promtool, TLS, a Grafana that does not answer."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fakes.certificates import make_certificate, serving_with
from tests.fakes.grafana import FakeGrafana
from tests.fakes.prometheus import RealPrometheus

pytestmark = pytest.mark.processes

PANEL = {"type": "stat", "gridPos": {"x": 0, "y": 0, "w": 4, "h": 4}}


def dashboards(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the verb as a user would."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE_")} | {"NO_PROXY": "*"}
    command = [sys.executable, "-m", "megascale_ops.cli.main", "dashboards", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=env, check=False)


def tool(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run another program."""
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def write(folder: Path, queries: dict[str, str]) -> Path:
    """Write a dashboard with a panel for each query."""
    panels = [
        {**PANEL, "id": at, "title": title, "targets": [{"refId": "A", "expr": expr}]}
        for at, (title, expr) in enumerate(queries.items(), 1)
    ]
    path = folder / "a.json"
    path.write_text(json.dumps({"uid": "a", "title": "A", "schemaVersion": 42, "panels": panels}), encoding="utf-8")
    return path


def test_a_check_asks_a_real_prometheus(tmp_path: Path) -> None:
    """Queries with data, without, and such that Prometheus refuses are told apart; only the last are wrong."""
    path = write(tmp_path, {"Up": 'up{job=~"$job"}', "Rate": "rate(prometheus_http_requests_total[$__rate_interval])",
                            "None": "megascale_job_step", "Number": "vector($top)", "Bad": "sum(up"})  # fmt: skip
    with RealPrometheus(tmp_path, "- job_name: self\n  static_configs: [{targets: ['127.0.0.1:9']}]") as prometheus:
        prometheus.wait_for("up")

        done = dashboards("check", str(path), "--url", prometheus.url, "--json")

        (report,) = json.loads(done.stdout)["dashboards"]
        assert done.returncode == 1, done.stderr
        # Nothing of Prometheus' own is scraped here, so its rate has no data.
        assert [one["place"] for one in report["without_data"]] == ["panel 'Rate'", "panel 'None'"]
        assert len(report["problems"]) == 1
        assert "panel 'Bad': Prometheus refuses it: " in report["problems"][0]
        people = dashboards("check", str(write(tmp_path, {"Up": "up", "None": "absent(up)"})), "--url", prometheus.url)

    assert people.returncode == 0, people.stderr
    assert people.stdout == "a.json: 2 panels, 2 queries, 1 have data\n  no data: panel 'None': absent(up)\n"


def test_an_export_is_what_prometheus_and_alertmanager_take(tmp_path: Path) -> None:
    """`promtool check config` reads the configuration with its rules, `amtool check-config` Alertmanager's."""
    if shutil.which("promtool") is None or shutil.which("amtool") is None:
        pytest.skip("no promtool or amtool on this machine: apt-get install prometheus prometheus-alertmanager")
    assert dashboards("export", str(tmp_path / "copy")).returncode == 0
    token = tmp_path / "token"
    token.write_text("a long random word", encoding="utf-8")
    config = tmp_path / "copy" / "prometheus.yml"
    # The token is mounted there by compose; promtool needs every file that is named.
    config.write_text(config.read_text().replace("/run/secrets/megascale_token", str(token)), encoding="utf-8")

    checked = tool("promtool", "check", "config", str(config))
    routed = tool("amtool", "check-config", str(tmp_path / "copy" / "alertmanager" / "alertmanager.yml"))

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 rule files found" in checked.stdout
    assert routed.returncode == 0, routed.stdout + routed.stderr


def test_promtool_would_refuse_a_broken_configuration(tmp_path: Path) -> None:
    """The check above can fail."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    config = yaml.safe_load((Path(__file__).parents[2] / "dashboards" / "prometheus.yml").read_text(encoding="utf-8"))
    config["scrape_configs"][0]["honour_labels"] = True
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")

    assert tool("promtool", "check", "config", str(path)).returncode != 0


def test_a_push_gives_up_on_a_grafana_that_does_not_answer(tmp_path: Path) -> None:
    """After the time that it was given, not when the answer comes at last; a dead address is told."""
    path = write(tmp_path, {"Up": "up"})
    with FakeGrafana() as grafana:
        grafana.lag_s = 2.0

        late = dashboards("push", str(path), "--url", grafana.url, "--timeout", "0.5")
    dead = dashboards("push", str(path), "--url", grafana.url)

    assert late.returncode == dead.returncode == 1
    assert "did not answer within 0.5 s when asked to say its version" in late.stderr
    assert dead.stderr.startswith(f"megascale-ops: no Grafana answers at {grafana.url}: ")
    assert dead.stderr.endswith("Connection refused\n")


def test_a_push_trusts_only_certificates_that_it_can_verify(tmp_path: Path) -> None:
    """An unknown authority is refused with the remedy, and the remedy works; http is not mistaken for https."""
    cert = make_certificate(tmp_path)
    context = serving_with(cert)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("editor-token", encoding="utf-8")
    common = (str(write(tmp_path, {"Up": "up"})), "--token-file", str(token))

    with FakeGrafana(context) as grafana:
        refused = dashboards("push", *common, "--url", grafana.url)
        trusted = dashboards("push", *common, "--url", grafana.url, "--ca-file", str(cert))
    with FakeGrafana() as plain:
        mistaken = dashboards("push", *common, "--url", plain.url.replace("http:", "https:"))

    assert refused.returncode == 1
    assert "give --ca-file" in refused.stderr
    assert trusted.returncode == 0, trusted.stderr
    assert "is it http:// instead?" in mistaken.stderr
    assert all(len(done.stderr.strip().splitlines()) == 1 for done in (refused, mistaken))


def test_help_loads_no_client() -> None:
    """The verb's help is as quick as all others: Grafana's client is loaded by a push alone."""
    probe = (
        "import sys; from megascale_ops.cli.main import main; main(['dashboards', 'push', '--help']);"
        "print({'grafana_client', 'niquests', 'urllib3', 'yaml'} & set(sys.modules))"
    )

    done = tool(sys.executable, "-c", probe)

    assert done.stdout.strip().endswith("set()"), done.stdout + done.stderr
