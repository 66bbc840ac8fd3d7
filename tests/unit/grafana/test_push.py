# SPDX-License-Identifier: Apache-2.0
"""A push brings a Grafana server to where the files are, once; a fake that follows its HTTP API answers."""

from collections.abc import Iterator
from typing import Any

import pytest

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.grafana import push
from megascale_ops.grafana.push import Done
from megascale_ops.grafana.server import NotAllowedError, Server
from tests.fakes.grafana import FakeGrafana

PROMETHEUS = "http://prometheus:9090"


def model(uid: str = "megascale-a", title: str = "A") -> dict[str, Any]:
    """Return a small dashboard."""
    panel = {"id": 1, "type": "stat", "title": "Nodes", "gridPos": {"x": 0, "y": 0, "w": 4, "h": 4}, "options": {}}
    return {"uid": uid, "title": title, "schemaVersion": 41, "tags": [], "refresh": "", "panels": [panel]}


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    """An empty Grafana."""
    with FakeGrafana() as one:
        yield one


@pytest.fixture
def server(grafana: FakeGrafana) -> Iterator[Server]:
    """Its administrator's view."""
    one = Server(grafana.url, "admin-token")
    yield one
    one.close()


def outcomes(done: list[Done]) -> list[str]:
    """Return what became of each thing."""
    return [one.outcome for one in done]


def test_the_first_push_creates_and_the_second_writes_nothing(grafana: FakeGrafana, server: Server) -> None:
    """Grafana's own ids, versions, defaults, left-out empties and newer schema are no difference."""
    models = [model(), model("megascale-b", "B")]

    first = list(push.push(server, models, datasource_url=PROMETHEUS))
    writes = list(grafana.writes)
    second = list(push.push(server, models, datasource_url=f"{PROMETHEUS}/"))

    assert outcomes(first) == ["created"] * 4
    assert writes == [
        "POST /api/datasources",
        "POST /api/folders",
        "POST /api/dashboards/db",
        "POST /api/dashboards/db",
    ]
    assert outcomes(second) == ["unchanged"] * 4
    assert grafana.writes == writes
    assert grafana.dashboards["megascale-a"]["meta"]["folderUid"] == "megascale-ops"
    assert grafana.datasources[0]["jsonData"]["timeInterval"] == "15s"


def test_a_dry_run_tells_the_same_and_writes_nothing(grafana: FakeGrafana, server: Server) -> None:
    """Also where nothing is there yet."""
    would = list(push.push(server, [model()], datasource_url=PROMETHEUS, dry_run=True))

    assert not grafana.writes
    assert would == list(push.push(server, [model()], datasource_url=PROMETHEUS))


def test_only_what_differs_is_saved(grafana: FakeGrafana, server: Server) -> None:
    """The place of the difference is told; the others stay at their version."""
    list(push.push(server, [model(), model("megascale-b", "B")], datasource_url=PROMETHEUS))
    changed = model()
    changed["panels"][0]["title"] = "Nodes that live"

    done = list(push.push(server, [changed, model("megascale-b", "B")]))

    assert done[2] == Done("dashboard", "A", "updated", "panels[0].title")
    assert grafana.dashboards["megascale-a"]["dashboard"]["version"] == 2
    assert grafana.dashboards["megascale-b"]["dashboard"]["version"] == 1


def test_a_change_by_hand_is_replaced(grafana: FakeGrafana, server: Server) -> None:
    """A panel that a user added in Grafana is a difference; its history there keeps it."""
    list(push.push(server, [model()], datasource_url=PROMETHEUS))
    grafana.dashboards["megascale-a"]["dashboard"]["panels"].append({"id": 9})

    (done,) = [one for one in push.push(server, [model()]) if one.kind == "dashboard"]

    assert done.outcome == "updated"
    assert len(grafana.dashboards["megascale-a"]["dashboard"]["panels"]) == 1


def test_a_moved_dashboard_comes_back(grafana: FakeGrafana, server: Server) -> None:
    """The folder is part of what is pushed."""
    list(push.push(server, [model()], datasource_url=PROMETHEUS))

    done = list(push.push(server, [model()], folder="Ours"))

    assert outcomes(done) == ["unchanged", "created", "updated"]
    assert done[2].note == "moved into 'Ours'"
    assert grafana.dashboards["megascale-a"]["meta"]["folderUid"] == "ours"


def test_a_save_by_somebody_else_in_between_is_not_lost(grafana: FakeGrafana, server: Server) -> None:
    """Grafana compares the version that we read with the newest (412)."""
    list(push.push(server, [model()], datasource_url=PROMETHEUS))
    read = server.dashboard

    def read_then_somebody_saves(uid: str) -> dict[str, Any] | None:
        found = read(uid)
        grafana.dashboards[uid]["dashboard"]["version"] += 1
        return found

    server.dashboard = read_then_somebody_saves  # type: ignore[method-assign]  # what comes between two requests

    with pytest.raises(MegascaleError, match=r"somebody else saved it .*\(412\)"):
        list(push.push(server, [{**model(), "title": "A, renamed"}]))


def test_folders_are_found_by_title_and_ours_by_uid(grafana: FakeGrafana, server: Server) -> None:
    """A folder made by hand is used, and so is a pushed one that was renamed; also behind a thousand others."""
    grafana.datasources.append({"name": "P", "type": "prometheus", "url": PROMETHEUS, "uid": "p"})
    grafana.folders += [{"id": n, "uid": f"u{n}", "title": f"Team {n}"} for n in range(1001)]
    grafana.folders.append({"id": 5000, "uid": "megascale-ops", "title": "Renamed"})

    by_uid = list(push.push(server, [model()]))
    by_title = list(push.push(server, [model()], folder="Team 1000"))

    assert by_uid[1] == Done("folder", "Renamed", "unchanged")
    assert by_title[1] == Done("folder", "Team 1000", "unchanged")
    assert grafana.dashboards["megascale-a"]["meta"]["folderUid"] == "u1000"


def test_a_data_source_is_found_before_one_is_made(grafana: FakeGrafana, server: Server) -> None:
    """By address first; ours follows when Prometheus moves."""
    grafana.datasources.append({"name": "Old", "type": "prometheus", "url": f"{PROMETHEUS}/", "uid": "x"})

    found = next(push.push(server, [], datasource_url=PROMETHEUS))
    made = next(push.push(server, [], datasource_url="http://other:9090"))
    moved = next(push.push(server, [], datasource_url="http://third:9090"))

    assert (found.name, found.outcome) == ("Old", "unchanged")
    assert (made.name, made.outcome) == ("MegaScale Prometheus", "created")
    assert (moved.outcome, moved.note) == ("updated", "http://third:9090, before http://other:9090")
    assert [one["url"] for one in grafana.datasources] == [f"{PROMETHEUS}/", "http://third:9090"]


def test_without_any_data_source_the_remedy_is_named(server: Server) -> None:
    """Dashboards without data would be no help at three in the morning."""
    with pytest.raises(MegascaleError, match="--datasource-url"):
        list(push.push(server, [model()]))


def test_a_provisioned_data_source_is_left_to_its_file(grafana: FakeGrafana, server: Server) -> None:
    """Grafana would undo the change at its next start."""
    grafana.datasources.append(
        {"name": "P", "type": "prometheus", "url": PROMETHEUS, "uid": "megascale-prometheus", "readOnly": True}
    )

    with pytest.raises(MegascaleError, match="provisioned from a file"):
        list(push.push(server, [], datasource_url="http://other:9090"))


def test_a_provisioned_dashboard_is_left_to_its_file(grafana: FakeGrafana, server: Server) -> None:
    """The same one unchanged is fine, another one is refused before anything is sent."""
    list(push.push(server, [model()], datasource_url=PROMETHEUS))
    grafana.dashboards["megascale-a"]["meta"]["provisioned"] = True

    assert outcomes(list(push.push(server, [model()])))[2] == "unchanged"
    with pytest.raises(MegascaleError, match="provisioned from files"):
        list(push.push(server, [{**model(), "title": "B"}]))


def test_an_editor_may_push_dashboards_and_no_data_source(grafana: FakeGrafana) -> None:
    """What an editor may not see is told as unknown; what is asked for and refused (403) is an error."""
    editor = Server(grafana.url, "editor-token")

    done = list(push.push(editor, [model()]))

    assert outcomes(done) == ["unknown", "created", "created"]
    with pytest.raises(NotAllowedError, match="role Admin"):
        list(push.push(editor, [model()], datasource_url=PROMETHEUS))
    editor.close()


@pytest.mark.parametrize(
    ("credential", "words"),
    [
        ("viewer-token", r"does not let us create the folder 'MegaScale Ops' \(403\)"),
        ("wrong", r"refuses the token or password \(401\)"),
        (("admin", "wrong"), r"refuses the token or password \(401\): Invalid username"),
        (None, r"refuses the token or password \(401\)"),
    ],
)
def test_who_may_not_is_told_so(grafana: FakeGrafana, credential: str | tuple[str, str] | None, words: str) -> None:
    """One sentence with the status and what was wanted; nothing was written."""
    one = Server(grafana.url, credential)

    with pytest.raises(MegascaleError, match=words):
        list(push.push(one, [model()]))
    one.close()
    assert not grafana.writes


def test_a_password_does_as_well(grafana: FakeGrafana) -> None:
    """Basic authentication."""
    one = Server(grafana.url, ("admin", "secret"))

    assert outcomes(list(push.push(one, [model()], datasource_url=PROMETHEUS))) == ["created"] * 3
    one.close()


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/api/health", (200, "<html>hello</html>"), "is no Grafana"),
        ("/api/health", (200, [1]), "is no Grafana"),
        ("/api/health", (200, {"database": "failing"}), "is not well: its database is 'failing'"),
        ("/api/health", (502, "<html>bad gateway</html>"), "status 502"),
        ("/api/datasources", (200, "<html>log in</html>"), "is no Grafana"),
        ("/api/folders", (500, {"message": "database is locked"}), "status 500.*database is locked"),
        ("/api/dashboards/uid/megascale-a", (200, {}), "is no Grafana"),
        ("/api/dashboards/db", (412, {"message": "no", "status": "plugin-dashboard"}), "412, plugin-dashboard"),
        ("/api/dashboards/db", (400, {"message": "Cannot save provisioned dashboard"}), "provisioned from files"),
        ("/api/dashboards/db", (400, {"message": "bad uid"}), "status 400.*bad uid"),
    ],
)
def test_each_other_refusal_becomes_one_sentence(
    grafana: FakeGrafana, server: Server, path: str, answer: tuple[int, Any], words: str
) -> None:
    """Whatever stands between us and Grafana, or ails it."""
    grafana.broken[path] = answer

    with pytest.raises(MegascaleError, match=words):
        list(push.push(server, [model()], datasource_url=PROMETHEUS))


def test_grafana_may_be_served_below_a_path() -> None:
    """As behind a reverse proxy; a slash at the end of the address does no harm."""
    with FakeGrafana(prefix="/grafana") as grafana:
        one = Server(f"{grafana.url}/", "admin-token")

        assert outcomes(list(push.push(one, [model()], datasource_url=PROMETHEUS))) == ["created"] * 3
        one.close()
        wrong = Server(grafana.url.removesuffix("/grafana"), "admin-token")
        with pytest.raises(MegascaleError, match="is a path missing"):
            wrong.version()
        wrong.close()


@pytest.mark.parametrize(
    "url", ["grafana", "ftp://grafana", "http://", "http://h:port", "http://[x", "http://h/?a=b", "http://u:p@h"]
)
def test_an_address_that_can_be_none_is_refused(url: str) -> None:
    """Before anything is sent; a password in it would stand in a process list that every user can read."""
    with pytest.raises(UsageError, match="address"):
        Server(url, None)


def test_a_folder_needs_a_name() -> None:
    """Its uid is made of letters and digits."""
    assert push.folder_uid("Training / Ops, 2!") == "training-ops-2"
    with pytest.raises(UsageError, match="letter or digit"):
        push.folder_uid("!!")


@pytest.mark.parametrize(
    ("ours", "theirs", "where"),
    [
        ({"a": 1, "id": 1, "version": 3}, {"a": 1, "id": 7, "version": 9}, ""),
        ({"a": []}, {}, ""),
        ({"a": 0}, {"a": False}, "a"),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}, "a.b[1].c"),
        ({"a": [1, 2]}, {"a": [1]}, "a: 2 of them, 1 there"),
        ({"a": "x"}, {}, "a"),
        ({"a": {"id": 1}}, {"a": {"id": 2}}, "a.id"),
    ],
)
def test_differences_are_found_where_they_are(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Only Grafana's own keys, at the top, are passed over."""
    assert push.differs(ours, theirs) == where
