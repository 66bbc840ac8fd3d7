# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops dashboards``: what a person types and reads, and one sentence for what can't be."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from tests.fakes.grafana import FakeGrafana

PANEL = {"id": 1, "type": "stat", "title": "Nodes", "gridPos": {"x": 0, "y": 0, "w": 4, "h": 4}}
GOOD = {"uid": "megascale-a", "title": "A", "schemaVersion": 42, "panels": [PANEL]}


@pytest.fixture(autouse=True)
def _leave_the_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    """A Grafana with a data source."""
    with FakeGrafana() as one:
        one.datasources.append({"name": "P", "type": "prometheus", "url": "http://p:9090", "uid": "p"})
        yield one


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with one dashboard, a token and a password."""
    for name, text in (("a.json", json.dumps(GOOD)), ("token", "admin-token\n"), ("password", "secret\n")):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_push_says_what_it_did(grafana: FakeGrafana, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each thing on a line, as it is done; the second time nothing."""
    command = ["dashboards", "push", str(place), "--url", grafana.url, "--token-file", str(place / "token")]

    assert main([*command, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    second = capsys.readouterr().out

    assert "dashboard   A: would be created" in dry
    assert dry.endswith("2 of 3 would change, nothing was written\n")
    assert "data source P: unchanged (http://p:9090)\nfolder      MegaScale Ops: created\n" in first
    assert f"dashboard   A: created ({grafana.url}/d/megascale-a)" in first
    assert second.endswith(": all unchanged\n")
    assert grafana.writes == ["POST /api/folders", "POST /api/dashboards/db"]


def test_a_push_tells_programs_as_json(grafana: FakeGrafana, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, nothing else on stdout."""
    login = ("--user", "admin", "--password-file", str(place / "password"))

    assert main(["dashboards", "push", str(place / "a.json"), "--url", grafana.url, *login, "--json"]) == 0

    said = json.loads(capsys.readouterr().out)
    assert said["dry_run"] is False
    assert [one["outcome"] for one in said["done"]] == ["unchanged", "created", "created"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["psh"], "did you mean 'push'?"),
        (["push"], "'--url'"),
        (["push", "--url", "nonsense"], "looks like http://HOST:3000"),
        (["push", "--url", "http://g", "--user", "a"], "belong together"),
        (["push", "--url", "http://g", "--user", "a", "--password-file", "b", "--token-file", "c"], "not both"),
        (["push", "--url", "http://g", "--token-file", "/no/such"], "token file /no/such can't be read"),
        (["push", "--url", "http://g", "--token-file", "{place}/a.json"], "holds no token"),
        (["push", "--url", "http://g", "--datasource-url", "p:9090"], "looks like http://HOST:9090"),
        (["push", "--url", "http://g", "--folder", "!"], "can't be named"),
        (["push", "{place}/token", "--url", "http://g"], "token is no JSON"),
        (["push", "{place}/nothing", "--url", "http://g"], "there is no file or folder"),
        (["push", "--url", "http://g", "--ca-file", "/no/such"], "/no/such"),
        (["check", "{place}/nothing"], "there is no file or folder"),
        (["check", "--token-file", "{place}/token"], "give that as well"),
        (["check", "--url", "http://h:x"], "no address of a Prometheus"),
        (["export"], "missing argument"),
        (["export", "{place}/token"], "is no folder"),
        (["export", "{place}/x", "--datasource-url", "http://h # b"], "looks like http://HOST:9090"),
        (["export", "{place}/x", "--dashboards-path", "x"], "whole path"),
        (
            ["export", "{place}/x", "--runbook-url", "pages"],
            "--runbook-url 'pages' can't be: it looks like https://git.",
        ),
        (["export", "{place}/x", "--runbook-url", ""], "--runbook-url '' can't be"),
        (["export", "{place}/x", "--controller", "http://h/?a"], "it looks like http://node-0:7070"),
        (["export", "{place}/x", "--grafana-url", "https://g/?orgId=1"], "it looks like https://grafana.example.com"),
        (["export", "{place}/x", "--grafana-url", 'https://g"'], "it looks like https://grafana.example.com"),
    ],
)
def test_a_mistake_gets_one_sentence(
    place: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a line on stderr; nothing is written or sent."""
    assert main(["dashboards", *(word.format(place=place) for word in arguments)]) == 2

    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("megascale-ops: ")
    assert words in lines[0]


def test_an_export_links_alerts_to_where_their_pages_are(place: Path) -> None:
    """The two addresses, as typed, stand in the rules that are written."""
    pages, grafana = "https://git.example.com/ops/runbooks", "https://grafana.example.com"

    assert main(["dashboards", "export", str(place / "x"), "--runbook-url", pages, "--grafana-url", grafana]) == 0

    rules = (place / "x" / "rules" / "alerts.yml").read_text(encoding="utf-8")
    assert f"runbook_url: {pages}/JobNoProgress.md\n" in rules
    assert f'dashboard: "{grafana}/d/megascale-oncall?var-job=' in rules


@pytest.mark.parametrize(
    ("options", "link"),
    [
        (("--controller", "http://node-0:7070"), "http://node-0:7070/runbooks/JobNoProgress"),
        (("--controller", "node-0:7070"), "http://node-0:7070/runbooks/JobNoProgress"),
        (("--runbook-url", "https://d.example/r/{name}.html"), "https://d.example/r/JobNoProgress.html"),
        (("--runbook-url", "https://w.example/r/", "--controller", "c:1"), "https://w.example/r/JobNoProgress.md"),
    ],
)
def test_runbooks_are_the_controller_s_or_elsewhere(place: Path, options: tuple[str, ...], link: str) -> None:
    """Where a controller is named it serves them; another place wins, whatever its names look like."""
    assert main(["dashboards", "export", str(place / "x"), *options]) == 0

    assert f"runbook_url: {link}\n" in (place / "x" / "rules" / "alerts.yml").read_text(encoding="utf-8")


def test_an_export_says_what_its_links_lack(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths do not open on a pager; the controller of the environment is one that people reach."""
    assert main(["dashboards", "export", str(place / "x")]) == 0
    assert "--controller URL makes" in capsys.readouterr().err

    monkeypatch.setenv("MEGASCALE_CONTROLLER", "http://node-0:7070")
    assert main(["dashboards", "export", str(place / "x"), "--force"]) == 0

    assert "--controller URL makes" not in capsys.readouterr().err


def test_a_check_names_the_file_and_what_is_wrong(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 when something is; a uid that two files share is."""
    assert main(["dashboards", "check", str(place)]) == 0
    assert capsys.readouterr().out == "a.json: 1 panels, 0 queries, fine\n"
    (place / "b.json").write_text(json.dumps({**GOOD, "title": ""}), encoding="utf-8")
    (place / "c.json").write_text("{", encoding="utf-8")

    assert main(["dashboards", "check", str(place)]) == 1

    said = capsys.readouterr().out
    assert "b.json: 1 panels, 0 queries, 2 problems\n  has no title\n  has the uid of a.json" in said
    assert "c.json: 0 panels, 0 queries, 1 problem\n  is no JSON" in said


def test_a_check_tells_programs_as_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every count."""
    assert main(["dashboards", "check", str(place / "a.json"), "--json"]) == 0

    (report,) = json.loads(capsys.readouterr().out)["dashboards"]
    assert report["title"] == "A"
    assert report["problems"] == []
