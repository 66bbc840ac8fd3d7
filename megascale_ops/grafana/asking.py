# SPDX-License-Identifier: Apache-2.0
"""Ask a Prometheus server each query of a dashboard once: which have data, which none, which it refuses."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.grafana import promql
from megascale_ops.grafana.shape import Model, Query, queries_of
from megascale_ops.link.http_client import HttpClient

# 30 s: a query over a job of 12,288 ranks takes less than one; Prometheus itself gives up after 120.
_ANSWER_S = 30.0
# What Grafana puts in for a chart over the last hour: rates over four scrapes of 15 s.
_TIMES = {
    "__interval": "15s",
    "__interval_ms": "15000",
    "__rate_interval": "1m",
    "__range": "1h",
    "__range_s": "3600",
    "__range_ms": "3600000",
}


class Answer(NamedTuple):
    """What Prometheus said to a query: how many series, or (not "") why it refuses."""

    query: Query
    series: int
    refused: str


class Prometheus:
    """A server's query API.

    Args:
        url: its address, with the path before ``/api`` if there is one.
        token: sent as a bearer token; "" for none.

    Raises:
        UsageError: no such address can be.
    """

    def __init__(self, url: str, token: str = "") -> None:
        wrong = UsageError(f"{url!r} is no address of a Prometheus server: it looks like http://HOST:9090")
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise wrong from error
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise wrong
        self.url = url.rstrip("/")
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = HttpClient(self.url, headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def series(self, expression: str) -> int:
        """Return how many series an expression has now.

        Raises:
            ValueError: Prometheus refuses it; its own words.
            MegascaleError: no answer, or the server is no Prometheus.
        """
        form = urlencode({"query": expression}).encode()
        try:
            status, body, _ = self._client.ask("POST", "/api/v1/query", body=form, patience_s=_ANSWER_S)
        except TimeoutError as error:
            raise MegascaleError(f"no Prometheus answers at {self.url} within {_ANSWER_S:g} s") from error
        except OSError as error:
            raise MegascaleError(f"no Prometheus answers at {self.url}: {error}") from error
        if status in {401, 403}:
            raise MegascaleError(f"{self.url} wants another token (status {status})")
        if status not in {200, 400, 422, 503}:
            raise MegascaleError(f"{self.url} answers with status {status}: is it Prometheus?")
        answer = _decoded(body, self.url)
        if status != 200:
            raise ValueError(str(answer.get("error", f"status {status}")))
        data = answer.get("data")
        result = data.get("result", []) if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(result, list):
            raise MegascaleError(f"what answers at {self.url} is no Prometheus")
        return len(result) if data.get("resultType") in {"vector", "matrix"} else 1


def _decoded(body: bytes, url: str) -> dict[str, Any]:
    answer = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(body)
    if not isinstance(answer, dict) or "status" not in answer:
        raise MegascaleError(f"what answers at {url} is no Prometheus")
    return answer


def values_of(model: Model) -> Mapping[str, str]:
    """Return the values to put in for a dashboard's variables; those that list labels have none and mean everything."""
    found = dict(_TIMES)
    for variable in model.get("templating", {}).get("list", []):
        if variable.get("type") in {"custom", "constant", "interval", "textbox"}:
            current = variable.get("current", {}).get("value") or str(variable.get("query", "")).partition(",")[0]
            if isinstance(current, str) and current and not current.startswith("$__"):
                found[str(variable["name"])] = current
    return found


def ask(model: Model, prometheus: Prometheus) -> Iterator[Answer]:
    """Ask each query of a dashboard, with everything selected that its variables could.

    Raises:
        MegascaleError: Prometheus is not there.
    """
    values = values_of(model)
    for query in queries_of(model):
        try:
            yield Answer(query, prometheus.series(promql.filled(query.expression, values)), "")
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            yield Answer(query, 0, str(error))
