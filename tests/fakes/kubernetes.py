# SPDX-License-Identifier: Apache-2.0
"""Kubernetes for tests: nodes in memory, and the real API server, started by hand with etcd, surely stopped.

    with ApiServer() as server:
        server.ask("POST", "/api/v1/nodes", {...})      as an administrator
        server.client("controller")                     the official client as an account without any right yet

The server is Debian's 1.20.2, which `.ci/kubernetes-server.sh` builds; RBAC is enforced, and there is no kubelet.
"""

import copy
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from megascale_ops.engines.kubernetes.client import ConflictError, MissingError
from tests.fakes.servers import free_ports, until

Json = dict[str, Any]
_KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megascale-ops-tests" / "kubernetes-1.20.2"
SERVER = Path(os.environ.get("MEGASCALE_TEST_KUBERNETES") or _KEPT) / "kube-apiserver"
# The account of rbac.yaml, by the name under which the server knows it.
ACCOUNT = "system:serviceaccount:megascale-ops:megascale-ops-controller"
PATIENCE_S = 90.0
ADMIN = "admin-of-this-test"


def node(name: str, **spec: Any) -> Json:  # noqa: ANN401  fields of any type
    """Return a node that is Ready."""
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": spec,
        "status": {"conditions": [ready]},
    }


class MemoryNodes:
    """The calls of an actuator, on nodes in memory: merged as the API server merges, versions refused as there."""

    def __init__(self, *nodes: Json) -> None:
        self.nodes = {one["metadata"]["name"]: one for one in nodes}
        self.patched: list[tuple[str, bool]] = []
        self.between: list[str] = []  # nodes that somebody changes just before our next patch of them

    def get(self, name: str) -> Json:
        """Return one."""
        if name not in self.nodes:
            raise MissingError(f"the cluster has no node {name}")
        return copy.deepcopy(self.nodes[name])

    def list(self) -> list[Json]:
        """Return all."""
        return [self.get(name) for name in self.nodes]

    def patch(self, name: str, body: Json, *, is_status: bool = False) -> Json:
        """Change one."""
        found = self.nodes[name]
        if name in self.between:
            self.between.remove(name)
            found["metadata"]["resourceVersion"] += "1"
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, found["metadata"]["resourceVersion"]):
            raise ConflictError("the node has changed")
        self.patched.append((name, is_status))
        if is_status:
            kept = {one["type"]: one for one in found["status"]["conditions"]}
            found["status"]["conditions"] = [*(kept | {c["type"]: c for c in body["status"]["conditions"]}).values()]
        else:
            _merge(found, body)
        return self.get(name)


def _merge(whole: Json, patch: Json) -> None:
    for key, value in patch.items():
        if value is None:
            whole.pop(key, None)
        elif isinstance(value, dict):
            _merge(whole.setdefault(key, {}), value)
        else:
            whole[key] = value


class ApiServer:
    """A real API server with its etcd; skips the test where the binaries are not."""

    def __init__(self) -> None:
        if not SERVER.exists():
            pytest.skip(f"no {SERVER}: .ci/kubernetes-server.sh builds it (7 minutes of CPU time, once)")
        if shutil.which("etcd") is None:
            pytest.skip("no etcd on this machine: apt-get install etcd-server")
        self.folder = Path(tempfile.mkdtemp(prefix="kubernetes-"))
        self.port, self._etcd, self._peer = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        (self.folder / "tokens.csv").write_text(
            f'{ADMIN},admin,1,"system:masters"\ncontroller,{ACCOUNT},2,"system:authenticated"\n'
        )
        subprocess.run(
            ["openssl", "genrsa", "-out", str(self.folder / "key"), "2048"], check=True, capture_output=True, timeout=60
        )
        try:
            self._start(
                "etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync",
                "--listen-client-urls", f"http://127.0.0.1:{self._etcd}",
                "--advertise-client-urls", f"http://127.0.0.1:{self._etcd}",
                "--listen-peer-urls", f"http://127.0.0.1:{self._peer}",
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{self._peer}",
                "--initial-cluster", f"default=http://127.0.0.1:{self._peer}",
            )  # fmt: skip
            self.start_server()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        key = str(self.folder / "key")
        self._start(
            str(SERVER), f"--etcd-servers=http://127.0.0.1:{self._etcd}", "--bind-address=127.0.0.1",
            f"--secure-port={self.port}", f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}", "--authorization-mode=RBAC",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://test", "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip
        until(self._is_ready, "the API server is ready", PATIENCE_S, self.logs)

    def stop_server(self) -> None:
        """Let the API server be away; etcd stays."""
        server = self._running.pop()
        server.kill()
        server.wait(timeout=30)

    def close(self) -> None:
        """Stop both, remove the folder."""
        for process in reversed(self._running):
            process.kill()
            process.wait(timeout=30)
        self._running.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Json:
        """Return the answer to an administrator's call.

        Raises:
            HTTPError: it was refused.
        """
        sent = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": kind}
        request = urllib.request.Request(self.url + path, sent, headers, method=method)  # noqa: S310  our own server
        with urllib.request.urlopen(request, timeout=30, context=_trusting()) as answer:  # noqa: S310
            return dict(json.loads(answer.read()))

    def kubeconfig(self, token: str = ADMIN) -> Path:
        """Return a kubeconfig file of an administrator, or of who has a token."""
        path = self.folder / f"kubeconfig-{token}"
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "certificates" / "apiserver.crt")}
        path.write_text(
            json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "test",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            })
        )  # fmt: skip
        return path

    def client(self, token: str) -> object:
        """Return the official client of who has a token; ``controller``: the account of rbac.yaml."""
        from kubernetes import client, config

        settings = client.Configuration()
        settings.retries = False
        config.load_kube_config(str(self.kubeconfig(token)), client_configuration=settings)
        return client.ApiClient(settings)

    def logs(self) -> str:
        """Return the ends of both logs."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log")
        )

    def _is_ready(self) -> bool:
        assert all(process.poll() is None for process in self._running), self.logs()
        try:
            self.ask("GET", "/api/v1/namespaces/default")
        except (OSError, urllib.error.HTTPError, ValueError):
            return False
        return True

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{Path(program).name}.log").open("ab") as log:
            self._running.append(
                subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
