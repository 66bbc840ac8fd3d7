# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus server, started by a test on a free loopback port, asked over its HTTP API, and stopped.

    with RealPrometheus(tmp_path, SCRAPE_CONFIGS) as prom:
        prom.wait_for_target("agents")
        prom.query("count(up)")

The server chooses its port itself and says it in its log, so that two tests never want the same one. It ends with the
block; its data stays in the test's folder, which pytest removes. A test is skipped where there is no ``prometheus``.
"""

import contextlib
import json
import math
import textwrap
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.servers import RealServer, opener

# 30 s: a query over 200,000 series takes less than one.
QUERY_S = 30.0


class QueryError(Exception):
    """Prometheus refused a query; the message is its own."""


class RealPrometheus(RealServer):
    """A running server.

    Args:
        folder: for its configuration, data and log; it makes one of its own in there.
        scrape_configs_yaml: the list below ``scrape_configs:``, as text that begins with ``- job_name:``; or "".
        rule_files: recording and alerting rules to load.
        scrape_interval: of all jobs that don't say their own, as Prometheus writes durations.
        extra_yaml: further top-level sections of the configuration, such as ``alerting:``.
    """

    def __init__(
        self,
        folder: Path,
        scrape_configs_yaml: str = "",
        rule_files: Sequence[Path] = (),
        *,
        scrape_interval: str = "1s",
        extra_yaml: str = "",
    ) -> None:
        self._scrapes = textwrap.dedent(scrape_configs_yaml).strip("\n")
        self._rules = [str(path.resolve()) for path in rule_files]
        self._interval = scrape_interval
        self._extra = textwrap.dedent(extra_yaml)
        super().__init__(folder, "prometheus", ("prometheus",), self._config())

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.address}"

    def arguments(self) -> list[str]:
        """Return where its data lie, and that it may be told to read its configuration again."""
        return [f"--storage.tsdb.path={self.folder / 'data'}", "--web.enable-lifecycle"]

    def is_ready(self) -> bool:
        """Say whether it answers queries."""
        try:
            return bool(self._fetch(urllib.request.Request(f"{self.url}/-/ready")))  # noqa: S310  our own address
        except (OSError, QueryError):
            return False

    def query(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """Return an instant query's result: ``[{"metric": {...}, "value": [time, "1"]}, ...]``.

        Raises:
            QueryError: it can't be parsed or evaluated.
        """
        given = {"query": expr, **({"time": f"{at_s:.3f}"} if at_s is not None else {})}
        found = self._ask("/api/v1/query", given)
        if found["resultType"] == "scalar":
            return [{"metric": {}, "value": found["result"]}]
        result: list[dict[str, Any]] = found["result"]
        return result

    def value(self, expr: str) -> float:
        """Return the value of an expression that has exactly one.

        Raises:
            QueryError: it has none or several.
        """
        found = self.query(expr)
        if len(found) != 1:
            raise QueryError(f"{expr!r} has {len(found)} values, not one")
        return float(found[0]["value"][1])

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return a range query's result: ``[{"metric": {...}, "values": [[time, "1"], ...]}, ...]``.

        Raises:
            QueryError: it can't be parsed or evaluated.
        """
        given = {"query": expr, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        result: list[dict[str, Any]] = self._ask("/api/v1/query_range", given)["result"]
        return result

    def drawn(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of a range query that have a number: what is NaN at every moment draws nothing.

        Raises:
            QueryError: it can't be parsed or evaluated.
        """
        found = self.query_range(expr, start, end, step)
        return [one for one in found if any(not math.isnan(float(value)) for _, value in one["values"])]

    def targets(self) -> list[dict[str, Any]]:
        """Return all targets that it scrapes, as its API describes them."""
        active: list[dict[str, Any]] = self._ask("/api/v1/targets", {"state": "active"})["activeTargets"]
        return active

    def rules(self) -> list[dict[str, Any]]:
        """Return all rule groups, as its API describes them."""
        groups: list[dict[str, Any]] = self._ask("/api/v1/rules", {})["groups"]
        return groups

    def wait_for_target(self, job: str, deadline_s: float = 150.0) -> None:
        """Wait until every target of a scrape job has been scraped well at least once.

        Raises:
            AssertionError: one was not, within the deadline; the message has its last error.
        """

        def is_scraped() -> bool:
            found = [target for target in self.targets() if target["labels"].get("job") == job]
            return bool(found) and all(target["health"] == "up" for target in found)

        def errors() -> str:
            found = [target for target in self.targets() if target["labels"].get("job") == job]
            said = sorted({target["lastError"] or target["health"] for target in found if target["health"] != "up"})
            return f"{len(found)} targets, {'; '.join(said) or 'all up'}"

        self.until(is_scraped, f"job {job} is scraped", deadline_s, errors)

    def wait_for(self, expr: str, deadline_s: float = 150.0) -> list[dict[str, Any]]:
        """Wait until an expression has a value, and return it.

        Raises:
            AssertionError: it had none within the deadline.
        """
        return self.until(lambda: self.query(expr), f"{expr!r} has a value", deadline_s)

    def reload(self) -> None:
        """Read configuration and rules again."""
        self._fetch(urllib.request.Request(f"{self.url}/-/reload", method="POST"))  # noqa: S310  our own address

    def _config(self) -> str:
        scrapes = textwrap.indent(self._scrapes, "  ") if self._scrapes else ""
        return "\n".join(
            (
                f"global: {{scrape_interval: {self._interval}, scrape_timeout: {self._interval},",
                f"         evaluation_interval: {self._interval}}}",
                f"rule_files: {json.dumps(self._rules)}",
                "scrape_configs:" + (f"\n{scrapes}" if scrapes else " []"),
                self._extra,
                "",
            )
        )

    def _ask(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        url = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        data: dict[str, Any] = json.loads(self._fetch(urllib.request.Request(url)))["data"]  # noqa: S310  our own
        return data

    def _fetch(self, request: urllib.request.Request) -> bytes:
        try:
            with opener.open(request, timeout=QUERY_S) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as refused:
            with refused:
                said = refused.read().decode("utf-8", "replace")
            with contextlib.suppress(ValueError, KeyError):
                said = json.loads(said)["error"]
            raise QueryError(said.strip()) from None
