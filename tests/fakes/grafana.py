# SPDX-License-Identifier: Apache-2.0
"""A small Grafana: the part of its HTTP API that a push uses, with its state, its roles and its refusals.

What it answers follows https://grafana.com/docs/grafana/latest/developers/http_api/ (folder, dashboard, data source,
authentication; status codes 400, 401, 403, 404, 409, 412 with their bodies). Like the real one it keeps a dashboard
otherwise than it was sent: with numbers of its own, a newer schema, defaults added and empty values left out.
"""

import base64
import copy
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit

Json = dict[str, Any]
Answer = tuple[int, Any]

ADMIN, EDITOR, VIEWER = "Admin", "Editor", "Viewer"
_SCHEMA = 42


class FakeGrafana:
    """A server on a free loopback port, from ``with`` to its end.

    Args:
        tls: serve https with this context.
        prefix: path below which it is served, such as "/grafana".

    Attributes:
        roles: of tokens ("admin-token") and of "user:password".
        writes: what changed the state, as "POST /api/folders", in order.
        lag_s: pause before each answer.
        broken: answers by path, instead of its own: status and body (text is sent as HTML).
    """

    def __init__(self, tls: ssl.SSLContext | None = None, prefix: str = "") -> None:
        self.roles = {"admin-token": ADMIN, "editor-token": EDITOR, "viewer-token": VIEWER, "admin:secret": ADMIN}
        self.folders: list[Json] = []
        self.datasources: list[Json] = []
        self.dashboards: dict[str, Json] = {}
        self.writes: list[str] = []
        self.lag_s = 0.0
        self.broken: dict[str, tuple[int, Any]] = {}
        self._tls = tls
        self._prefix = prefix
        self._server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"grafana": self}))
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="grafana")

    @property
    def url(self) -> str:
        """Where it is."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.server_port}{self._prefix}"

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._server.shutdown()
        self._thread.join(10.0)
        self._server.server_close()

    def answer(self, method: str, target: str, authorization: str, body: Json) -> Answer:
        """Return status and body for one request."""
        time.sleep(self.lag_s)
        parts = urlsplit(target)
        if not parts.path.startswith(f"{self._prefix}/api/"):
            return 404, "<html>nothing here</html>"
        path = parts.path.removeprefix(self._prefix)
        if path in self.broken:
            return self.broken[path]
        if path == "/api/health":
            return 200, {"database": "ok", "version": "13.0.0", "commit": "abc"}
        role = self._role(authorization)
        if role is None:
            return 401, {"message": "Invalid username or password" if "Basic" in authorization else "Unauthorized"}
        before = len(self.writes)
        status, reply = self._route(method, path, parse_qs(parts.query), role, body)
        if method != "GET" and status == 200 and len(self.writes) == before:
            self.writes.append(f"{method} {path}")
        return status, reply

    def _role(self, authorization: str) -> str | None:
        kind, _, value = authorization.partition(" ")
        return self.roles.get(base64.b64decode(value).decode() if kind == "Basic" else value)

    def _route(  # noqa: PLR0911  a table of routes
        self, method: str, path: str, query: dict[str, list[str]], role: str, body: Json
    ) -> Answer:
        match method, path.split("/")[2:]:
            case "GET", ["folders"]:
                limit, page = int(query.get("limit", ["1000"])[0]), int(query.get("page", ["1"])[0])
                return 200, self.folders[(page - 1) * limit : page * limit]
            case "POST", ["folders"]:
                return _denied("folders:create") if role == VIEWER else self._create_folder(body)
            case "GET", ["datasources"]:
                return _denied("datasources:read") if role != ADMIN else (200, self.datasources)
            case "POST", ["datasources"]:
                return _denied("datasources:create") if role != ADMIN else self._create_datasource(body)
            case "PUT", ["datasources", "uid", uid]:
                return _denied("datasources:write") if role != ADMIN else self._update_datasource(unquote(uid), body)
            case "GET", ["dashboards", "uid", uid]:
                found = self.dashboards.get(unquote(uid))
                return (200, copy.deepcopy(found)) if found else (404, {"message": "Dashboard not found"})
            case "POST", ["dashboards", "db"]:
                return _denied("dashboards:write") if role == VIEWER else self._save(body)
        return 404, {"message": "Not found"}

    def _create_folder(self, body: Json) -> Answer:
        if not body.get("title"):
            return 400, {"message": "folder title cannot be empty"}
        if any(body.get("uid") == one["uid"] for one in self.folders):
            return 409, {"message": "a folder with the same UID already exists"}
        self.folders.append({"id": len(self.folders) + 1, "uid": body["uid"], "title": body["title"]})
        return 200, {**self.folders[-1], "url": f"/dashboards/f/{body['uid']}", "version": 1}

    def _create_datasource(self, body: Json) -> Answer:
        if any(body["name"] == one["name"] for one in self.datasources):
            return 409, {"message": "data source with the same name already exists"}
        self.datasources.append({"id": len(self.datasources) + 1, "readOnly": False, "isDefault": False, **body})
        return 200, {"datasource": self.datasources[-1], "message": "Datasource added", "name": body["name"]}

    def _update_datasource(self, uid: str, body: Json) -> Answer:
        for one in self.datasources:
            if one["uid"] == uid:
                if one["readOnly"]:
                    return 403, {"message": "Cannot update read-only data source"}
                one.update(body)
                return 200, {"datasource": one, "message": "Datasource updated", "name": one["name"]}
        return 404, {"message": "Data source not found"}

    def _save(self, body: Json) -> Answer:
        sent = body["dashboard"]
        known = self.dashboards.get(sent.get("uid") or "")
        if not sent.get("title"):
            return 400, {"message": "Dashboard title cannot be empty"}
        if not any(one["uid"] == body.get("folderUid") for one in self.folders) and body.get("folderUid"):
            return 404, {"message": "folder not found"}
        if known is not None and known["meta"].get("provisioned"):
            return 400, {"message": "Cannot save provisioned dashboard"}
        if known is not None and not body.get("overwrite"):
            if sent.get("id") != known["dashboard"]["id"]:
                return 412, {"message": "A dashboard with the same uid already exists", "status": "name-exists"}
            if sent.get("version") != known["dashboard"]["version"]:
                return 412, {
                    "message": "The dashboard has been changed by someone else",
                    "status": "version-mismatch",
                }
        number = known["dashboard"]["id"] if known else len(self.dashboards) + 1
        version = known["dashboard"]["version"] + 1 if known else 1
        kept = _as_kept(sent)
        kept.update(id=number, version=version, schemaVersion=max(_SCHEMA, sent.get("schemaVersion", 0)))
        meta = {"folderUid": body.get("folderUid", ""), "provisioned": False, "url": f"/d/{sent['uid']}"}
        self.dashboards[sent["uid"]] = {"dashboard": kept, "meta": meta}
        return 200, {"id": number, "uid": sent["uid"], "status": "success", "version": version}


def _as_kept(sent: Json) -> Json:
    """Return a dashboard as Grafana keeps it: nothing empty at its top, defaults in its panels."""
    kept = {key: copy.deepcopy(value) for key, value in sent.items() if value not in (None, "", [], {})}
    kept.setdefault("panels", [])
    kept.setdefault("timezone", "browser")
    for panel in kept["panels"]:
        panel.setdefault("transparent", False)
        panel.setdefault("options", {}).setdefault("tooltip", {"mode": "single"})
    return kept


def _denied(action: str) -> Answer:
    return 403, {"title": "Access denied", "message": f"You'll need additional permissions. Permissions: {action}"}


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that gave up is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    grafana: ClassVar[FakeGrafana]
    protocol_version = "HTTP/1.1"
    timeout = 10.0
    # Head and body of an answer are two writes: the second one would wait 40 ms for the client's receipt of the first.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        text = self.rfile.read(length)
        try:
            body = json.loads(text) if text else {}
        except ValueError:
            status, reply = 400, {"message": "bad request data"}
        else:
            status, reply = self.grafana.answer(method, self.path, self.headers.get("Authorization", ""), body)
        is_text = isinstance(reply, str)
        data = reply.encode() if is_text else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if is_text else "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the one it replaces
        """Say nothing."""
