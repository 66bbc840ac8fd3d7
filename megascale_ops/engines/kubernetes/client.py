# SPDX-License-Identifier: Apache-2.0
"""The API server, by the official client: one call with a deadline; what goes wrong is one sentence.

The client is for what is hard to do right: kubeconfig files with their plug-ins, a pod's account and its token that is
renewed, certificates. Answers are read as they are, not as its models, which refuse what newer servers add.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from megascale_ops.engines.actuator import EngineError, RightsError
from megascale_ops.engines.kubernetes.objects import MANAGER, Json, refusal

# 10 s: an API server answers within 1 s by Kubernetes' own objective, and a controller asks once a minute.
DEADLINE_S = 10.0
_PAGE = 500  # nodes an answer; 65,000 are the most that a cluster has been run with
_PIECE = 1 << 16


class ConflictError(EngineError):
    """The node has changed since it was read."""


class MissingError(EngineError):
    """There is no such node."""


class NodeApi(Protocol):
    """The three calls that an actuator needs."""

    def get(self, name: str) -> Json:
        """Return one node."""

    def list(self) -> list[Json]:
        """Return all nodes."""

    def patch(self, name: str, body: Json, *, is_status: bool = False) -> Json:
        """Change a node, or its status; return it."""


Refused = Callable[[int, str], EngineError]


class ApiCalls:
    """Calls by the official client.

    Args:
        client: An ``ApiClient`` of the package kubernetes; None: that of the pod, or else of the user's kubeconfig.
        deadline_s: For each call, all pages of a list together.
    """

    def __init__(self, client: object | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._client: Any = client
        self._deadline_s = deadline_s
        self._finding = threading.Lock()

    def _until_s(self) -> float:
        return time.monotonic() + self._deadline_s

    def _call(self, api: str, call: str, until_s: float, refused: Refused, *names: object, **options: Any) -> Json:  # noqa: ANN401  as the client takes them
        """Return the answer to one call.

        Args:
            api: The client's class.
            call: Its method.
            until_s: The deadline, monotonic.
            refused: Returns what a status and a body mean.
            names: The method's own arguments.
            options: Its options.

        Raises:
            EngineError: there was no answer, or ``refused`` has made it of one.
        """
        found_api = self._api(api)
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            left_s = max(0.1, until_s - time.monotonic())
            # Two numbers, for connecting and for each read: up to 35 the client passes over a single fraction.
            waits = (left_s, left_s)
            answer = getattr(found_api, call)(*names, _preload_content=False, _request_timeout=waits, **options)
            try:
                body = _read(answer, until_s)
            finally:
                answer.release_conn()
        except ApiException as error:
            said = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
            raise refused(int(error.status or 0), said) from None
        except (HTTPError, OSError) as error:
            raise EngineError(
                f"the API server gave no answer within {self._deadline_s:g} s ({_cause(error)}); "
                f"`kubectl get --raw /readyz` tells more"
            ) from None
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise EngineError("what answers at the API server's address is none: no JSON") from None
        if not isinstance(found, dict):
            raise EngineError("what answers at the API server's address is none: no object")
        return found

    def _api(self, name: str) -> Any:  # noqa: ANN401  the client ships no types
        try:
            from kubernetes import client
        except ImportError as error:
            raise EngineError(f"the package {error.name} is missing: pip install 'megascale-ops[kubernetes]'") from None
        with self._finding:
            if self._client is None:
                self._client = _found_client()
        return getattr(client, name)(self._client)


class ClusterApi(ApiCalls, NodeApi):
    """The calls about nodes."""

    def get(self, name: str) -> Json:
        """Return one node."""
        return self._ask("get", "nodes", "read_node", self._until_s(), name)

    def list(self) -> list[Json]:
        """Return all nodes, asked for page by page."""
        until_s = self._until_s()
        nodes: list[Json] = []
        more = ""
        while True:
            page = self._ask(
                "list", "nodes", "list_node", until_s, limit=_PAGE, **({"_continue": more} if more else {})
            )
            nodes += page.get("items") or []
            more = str((page.get("metadata") or {}).get("continue") or "")
            if not more:
                return nodes

    def patch(self, name: str, body: Json, *, is_status: bool = False) -> Json:
        """Change a node, or its status; return it."""
        resource, call = ("nodes/status", "patch_node_status") if is_status else ("nodes", "patch_node")
        # An object is sent as a strategic merge patch: conditions are merged by type, the list of taints is replaced.
        return self._ask("patch", resource, call, self._until_s(), name, body=body, field_manager=MANAGER)

    def _ask(self, verb: str, resource: str, call: str, until_s: float, *names: str, **options: Any) -> Json:  # noqa: ANN401  as the client takes them
        def refused(status: int, said: str) -> EngineError:
            return _refused(status, said, verb, resource, names)

        return self._call("CoreV1Api", call, until_s, refused, *names, **options)


def _found_client() -> object:
    """Return a client of this pod's account, or else of the user's kubeconfig.

    Raises:
        EngineError: there is neither.
    """
    from kubernetes import client, config

    settings = client.Configuration()
    # One try: a client's own three would wait three times as long, and the controller asks again anyway.
    settings.retries = False
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(client_configuration=settings)
    except (config.ConfigException, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise EngineError(
            f"no way to the API server: neither a pod's service account (automountServiceAccountToken) nor a "
            f"kubeconfig file can be used: {said}"
        ) from None
    return client.ApiClient(settings)


def _read(answer: Any, until_s: float) -> bytes:  # noqa: ANN401  urllib3's response, as the client hands it over
    """Return the body; what is sent byte by byte ends at the deadline too."""
    pieces = []
    while piece := answer.read1(_PIECE):
        pieces.append(piece)
        if time.monotonic() > until_s:
            raise TimeoutError("the answer was not whole by then")
    return b"".join(pieces)


def _refused(status: int, body: str, verb: str, resource: str, names: tuple[str, ...]) -> EngineError:
    if status == 404 and names:
        return MissingError(f"the cluster has no node {names[0]}: `kubectl get nodes` lists its nodes")
    kind = {401: RightsError, 403: RightsError, 409: ConflictError}.get(status, EngineError)
    return kind(refusal(status, body, verb, resource))


def _cause(error: BaseException) -> str:
    """Return why, short: urllib3's text repeats pool, address and all that it wraps."""
    inner = getattr(error, "reason", None) or error
    text = str(getattr(inner, "strerror", None) or inner).rpartition("): ")[2] if str(inner) else ""
    return text or type(inner).__name__
