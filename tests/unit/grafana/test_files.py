# SPDX-License-Identifier: Apache-2.0
"""What an export writes, and that the files fit each other: compose, Prometheus, Grafana's provisioning."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import megascale_ops
from megascale_ops.errors import UsageError
from megascale_ops.grafana import files, push, shape

ROOT = Path(__file__).parents[3]
COMPOSE = "compose.yml"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A fresh export."""
    files.export(tmp_path / "copy", files.Addresses(), force=False)
    return tmp_path / "copy"


def read(path: Path) -> Any:  # noqa: ANN401  YAML
    """Return what a YAML file says."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_an_export_holds_everything_and_nothing_else(copy: Path) -> None:
    """Dashboards, rules, Alertmanager, runbooks, provisioning, compose file; no generator, no tests of rules."""
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}

    ours = ROOT / "dashboards"
    assert {f"dashboards/{path.name}" for path in ours.glob("*.json")} <= names
    for folder, pattern in (("rules", "*.yml"), ("runbooks", "*.md"), ("alertmanager", "*.yml")):
        assert {f"{folder}/{path.name}" for path in (ours / folder).glob(pattern)} <= names
    assert {COMPOSE, "prometheus.yml", "provisioning/dashboards/megascale-ops.yaml"} <= names
    assert not [name for name in names if name.endswith(".py") or "/tests/" in name or "/." in name]


def test_a_second_export_changes_nothing(copy: Path) -> None:
    """Not even a file's time: Grafana reads changed files anew."""
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}

    written = files.export(copy, files.Addresses(), force=False)

    assert {one.outcome for one in written} == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_what_was_changed_by_hand_is_kept_unless_forced(copy: Path) -> None:
    """Receivers are written into Alertmanager's file by hand; nothing at all is written when one file would be lost."""
    (copy / "prometheus.yml").write_text("mine", encoding="utf-8")
    (copy / COMPOSE).unlink()

    with pytest.raises(UsageError, match=r"differ .*: prometheus\.yml; give --force"):
        files.export(copy, files.Addresses(), force=False)
    assert not (copy / COMPOSE).exists()
    forced = files.export(copy, files.Addresses(), force=True)

    assert {one.path.name: one.outcome for one in forced if one.outcome != "unchanged"} == {
        COMPOSE: "written",
        "prometheus.yml": "replaced",
    }


def test_addresses_are_put_into_the_provisioning_files(tmp_path: Path) -> None:
    """For a Grafana that is not compose.yml's."""
    files.export(tmp_path, files.Addresses("http://localhost:9090", "/srv/dashboards"), force=False)

    (source,) = read(tmp_path / "provisioning/datasources/megascale-ops.yaml")["datasources"]
    (provider,) = read(tmp_path / "provisioning/dashboards/megascale-ops.yaml")["providers"]
    assert source["url"] == "http://localhost:9090"
    assert provider["options"]["path"] == "/srv/dashboards"


def links(folder: Path) -> dict[str, tuple[str, str]]:
    """Return page and dashboard of every alert of a copy."""
    rules = [rule for group in read(folder / "rules/alerts.yml")["groups"] for rule in group["rules"]]
    said = {rule["alert"]: rule["annotations"] for rule in rules}
    return {name: (one["runbook_url"], one["dashboard"]) for name, one in said.items()}


def test_links_of_alerts_lead_to_the_given_addresses(tmp_path: Path) -> None:
    """Each page and each dashboard, with or without a slash at the end of the address; nothing else is changed."""
    pages, grafana = "https://git.example.com/ops/runbooks", "https://grafana.example.com/g"
    files.export(tmp_path / "plain", files.Addresses(), force=False)
    given = files.Addresses(runbook_url=f"{pages}/", grafana_url=grafana)

    files.export(tmp_path / "linked", given, force=False)

    before, after = links(tmp_path / "plain"), links(tmp_path / "linked")
    assert before.keys() == after.keys()
    for name, (_, dashboard) in before.items():
        assert after[name] == (f"{pages}/{name}.md", f"{grafana}{dashboard}")
    text = (tmp_path / "linked/rules/alerts.yml").read_text(encoding="utf-8")
    assert text.replace(pages, "dashboards/runbooks").replace(grafana, "") == (
        tmp_path / "plain/rules/alerts.yml"
    ).read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """A file where the folder should be, or a file in the way of a folder."""
    (tmp_path / "rules").write_text("", encoding="utf-8")

    with pytest.raises(UsageError, match="can't be written"):
        files.export(tmp_path, files.Addresses(), force=False)
    with pytest.raises(UsageError, match="is no folder"):
        files.export(tmp_path / "rules", files.Addresses(), force=False)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]  # noqa: PTH208  names only


def test_provisioning_and_push_mean_the_same(copy: Path) -> None:
    """Who pushes into a provisioned Grafana finds data source and folder by the same uids, and makes no second ones."""
    (source,) = read(copy / "provisioning/datasources/megascale-ops.yaml")["datasources"]
    (provider,) = read(copy / "provisioning/dashboards/megascale-ops.yaml")["providers"]

    assert (source["uid"], source["name"], source["type"]) == (push.DATASOURCE_UID, push.DATASOURCE, "prometheus")
    assert provider["folder"] == push.FOLDER
    assert provider["folderUid"] == push.folder_uid(push.FOLDER)
    assert provider["type"] == "file"


def test_compose_mounts_what_the_servers_are_told_to_read(copy: Path) -> None:
    """Every mounted file is in the export, every path that a configuration names is mounted there."""
    services = read(copy / COMPOSE)["services"]
    mounts = {
        name: dict(reversed(volume.removesuffix(":ro").split(":")) for volume in service.get("volumes", ()))
        for name, service in services.items()
    }
    (provider,) = read(copy / "provisioning/dashboards/megascale-ops.yaml")["providers"]
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    for where in mounts.values():
        assert all((copy / source).exists() for source in where.values() if source.startswith("."))
    assert (copy / mounts["grafana"][provider["options"]["path"]] / home.name).is_file()
    assert mounts["grafana"]["/etc/grafana/provisioning"] == "./provisioning"
    for rules in read(copy / "prometheus.yml")["rule_files"]:
        assert (copy / rules).is_file()
    volumes = {source for where in mounts.values() for source in where.values() if not source.startswith(".")}
    assert volumes == set(read(copy / COMPOSE)["volumes"])


def test_compose_services_reach_each_other_by_name(copy: Path) -> None:
    """Names and ports in prometheus.yml and the data source are services of compose.yml and the ports they serve."""
    services = read(copy / COMPOSE)["services"]
    prometheus = read(copy / "prometheus.yml")
    named = [
        target
        for job in prometheus["scrape_configs"]
        for one in job.get("static_configs", ())
        for target in one["targets"]
    ]
    named += [
        url["url"].removeprefix("http://")
        for job in prometheus["scrape_configs"]
        for url in job.get("http_sd_configs", ())
    ]
    named += prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    named.append(files.DATASOURCE_URL.removeprefix("http://"))

    for one in named:
        host, _, port = one.partition("/")[0].partition(":")
        if host != "localhost":
            assert f":{port}" in services[host]["ports"][0]


def test_every_image_is_pinned_and_ours_is_this_version(copy: Path) -> None:
    """`latest` would be another program on every machine."""
    images = {name: service["image"] for name, service in read(copy / COMPOSE)["services"].items()}

    assert all(image.rpartition(":")[2][-1].isdigit() for image in images.values())
    assert images["controller"] == f"megascale-ops:{megascale_ops.__version__}"


def test_our_image_is_built_from_the_export_alone(copy: Path) -> None:
    """Its folder has all that its Dockerfile takes; base and version are those of the image that a checkout builds."""
    text = (copy / "image" / "Dockerfile").read_text(encoding="utf-8")
    of_checkout = (ROOT / "agents" / "deploy" / "Dockerfile").read_text(encoding="utf-8")

    assert read(copy / COMPOSE)["services"]["controller"]["build"] == "./image"
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == re.findall(r"^FROM (\S+)", of_checkout, re.MULTILINE)
    assert f"=={megascale_ops.__version__}" in text
    assert [line for line in text.splitlines() if line.startswith("COPY") and "--from" not in line] == ["COPY . /image"]
    assert text.partition("WORKDIR")[2] == of_checkout.partition("WORKDIR")[2]


def test_the_token_is_given_to_those_who_need_it_and_to_nobody_else(copy: Path) -> None:
    """The controller refuses a token that others can read; Prometheus runs as nobody; Grafana never sees it."""
    compose = read(copy / COMPOSE)
    given = {name: service.get("secrets", []) for name, service in compose["services"].items()}
    prometheus = read(copy / "prometheus.yml")

    assert {name for name, secrets in given.items() if secrets} == {"controller", "prometheus"}
    for secrets in given.values():
        assert all(secret["mode"] in {0o400, "0o400"} for secret in secrets)  # YAML 1.1 has no 0o
    assert compose["secrets"] == {"megascale_token": {"environment": "MEGASCALE_TOKEN"}}
    for job in prometheus["scrape_configs"]:
        if job["job_name"] != "prometheus":
            assert job["authorization"]["credentials_file"] == "/run/secrets/megascale_token"
            # Without it a training job would be called `exported_job` in every query.
            assert job["honor_labels"] is True


def test_nothing_but_the_controller_can_be_opened_to_others(copy: Path) -> None:
    """Grafana, Prometheus and Alertmanager serve this machine; the controller too, unless it is told otherwise."""
    for name, service in read(copy / COMPOSE)["services"].items():
        for port in service["ports"]:
            assert port.startswith("${MEGASCALE_LISTEN:-127.0.0.1}:" if name == "controller" else "127.0.0.1:")


def test_rates_are_taken_over_as_many_scrapes_as_there_are(copy: Path) -> None:
    """Grafana derives `$__rate_interval` from the data source's interval: it must be the one of the scrapes."""
    (source,) = read(copy / "provisioning/datasources/megascale-ops.yaml")["datasources"]

    prometheus = read(copy / "prometheus.yml")
    intervals = {
        job.get("scrape_interval", prometheus["global"]["scrape_interval"]) for job in prometheus["scrape_configs"]
    }

    assert intervals == {source["jsonData"]["timeInterval"]}


def test_every_dashboard_of_ours_is_sound() -> None:
    """What is installed passes the check that users have, against the rules that come with it."""
    rules = {name for path in files.rule_files(None) for name in shape.recorded(path.read_text(encoding="utf-8"))}

    for path in files.dashboard_files(None):
        assert shape.check(shape.read(path.read_bytes()), rules).problems == (), path.name


def test_places_without_dashboards_are_refused(tmp_path: Path) -> None:
    """An empty folder and no folder."""
    with pytest.raises(UsageError, match="no dashboard in"):
        files.dashboard_files(tmp_path)
    with pytest.raises(UsageError, match="no file or folder"):
        files.dashboard_files(tmp_path / "x")
